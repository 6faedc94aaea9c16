/* The order of a row: by logit, with the lower index first among equals. And the places in this order that sampling
 * needs.
 *
 * Sorting 49,152 entries takes a millisecond, and sampling does not need the whole order. top_k needs the place after
 * the k likeliest entries, top_p the place after a fraction of the mass. A draw needs the place at which its random
 * number falls. So passes narrow a list down around the wanted place. Each pass compares with two values that are
 * guessed from a sample, until the list is short enough to sort. Most rows need no pass: the largest logit of each
 * group of 32 entries gives a lower bound for the k-th, and few entries reach that bound.
 *
 * A bad guess costs time, but never changes the result.
 */
#include "rows_state.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define SHORT 128     /* a list up to this length is sorted, a longer list is narrowed down */
#define SAMPLE 128    /* entries in a sample; the place is expected within MARGIN of these entries to either side */
#define MARGIN 10     /* with this margin nine guesses of ten are right, and a sixth of the list is left */
#define MAX_ROUNDS 16 /* after this many passes the rest is sorted */

const sym_mark rank_everything = {-INFINITY, INT32_MAX};

/* Maps descending floats to ascending integers. -0 and 0 are equal. */
static uint32_t descending_key(float value) {
    const float positive_zero = value + 0.0f;
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

/* Merge sort. Returns the sorted array: `keys`, or the array of the same length behind it. */
static uint64_t *sort_keys(uint64_t *keys, int64_t count) {
    enum { RUN = 8 };
    for (int64_t start = 0; start < count; start += RUN) {
        const int64_t end = count - start < RUN ? count : start + RUN;
        for (int64_t i = start + 1; i < end; i++) {
            const uint64_t key = keys[i];
            int64_t at = i;
            for (; at > start && keys[at - 1] > key; at--)
                keys[at] = keys[at - 1];
            keys[at] = key;
        }
    }
    uint64_t *from = keys, *to = keys + count;
    for (int64_t run = RUN; run < count; run *= 2) {
        for (int64_t start = 0; start < count; start += 2 * run) {
            const int64_t middle = count - start < run ? count : start + run;
            const int64_t end = count - start < 2 * run ? count : start + 2 * run;
            int64_t left = start, right = middle, at = start;
            while (left < middle && right < end) {
                const uint64_t a = from[left], b = from[right];
                const int is_left = a < b;
                to[at++] = is_left ? a : b; /* branch-free, since a branch here would be unpredictable */
                left += is_left;
                right += !is_left;
            }
            memcpy(to + at, from + left, (size_t)(middle - left) * sizeof *to);
            memcpy(to + at + (middle - left), from + right, (size_t)(end - right) * sizeof *to);
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    return from;
}

/* Returns a list's entries as keys, best first. The low half of a key is the entry's place in the list. */
static const uint64_t *ranks(const sym_list *list, uint64_t *room) {
    for (int64_t i = 0; i < list->count; i++)
        room[i] = (uint64_t)descending_key(list->values[i]) << 32 | (uint64_t)i;
    return sort_keys(room, list->count);
}

/* Sorts a list into `to`. */
static void sort_list(const sym_list *from, sym_list *to, uint64_t *room) {
    const uint64_t *keys = ranks(from, room);
    for (int64_t i = 0; i < from->count; i++) {
        const uint32_t at = (uint32_t)keys[i];
        to->values[i] = from->values[at];
        to->weights[i] = from->weights[at];
        to->indices[i] = from->indices[at];
    }
    to->count = from->count;
    to->sorted = 1;
}

/* Guesses two values around one entry: the entry at which the running sum of the weights reaches `part` of the total.
 * Entries with larger values come first in the sum. */
static void guess(const sym_list *list, double part, float *low, float *high) {
    uint64_t room[2 * SAMPLE];
    for (int64_t i = 0; i < SAMPLE; i++) {
        const int64_t at = i * list->count / SAMPLE;
        room[i] = (uint64_t)descending_key(list->values[at]) << 32 | (uint64_t)at;
    }
    const uint64_t *keys = sort_keys(room, SAMPLE);
    double total = 0.0, sum = 0.0;
    for (int i = 0; i < SAMPLE; i++)
        total += list->weights[(uint32_t)keys[i]];
    int place = 0;
    while (place < SAMPLE - 1 && (sum += list->weights[(uint32_t)keys[place]]) < part * total)
        place++;
    *high = place < MARGIN ? INFINITY : list->values[(uint32_t)keys[place - MARGIN]];
    *low = place + MARGIN >= SAMPLE ? -INFINITY : list->values[(uint32_t)keys[place + MARGIN]];
}

static int reaches(double sum, double target, int beyond) { return beyond ? sum > target : sum >= target; }

/* Returns the place of the target in a list whose values are all equal. */
static sym_mark mark_of_equals(const sym_list *list, double target, int beyond) {
    const double number = target / list->weights[0];
    int64_t place = (int64_t)(beyond ? floor(number) : ceil(number) - 1.0);
    place = place < 0 ? 0 : place >= list->count ? list->count - 1 : place;
    return (sym_mark){list->values[place], list->indices[place]};
}

sym_mark rank_mark(const sym_list *list, double mass, double target, int beyond, sym_list *work, uint64_t *room) {
    for (int round = 0; !list->sorted && list->count > SHORT && round < MAX_ROUNDS; round++) {
        float low, high;
        double above, within;
        guess(list, target / mass, &low, &high);
        passes->split(list->values, list->weights, list->count, low, high, &above, &within);
        const sym_list *from = list;
        list = work;
        work->sorted = 0;
        if (reaches(above, target, beyond)) {
            work->count = passes->keep_between(from, nextafterf(high, INFINITY), INFINITY, work);
            mass = above;
            continue;
        }
        if (!reaches(above + within, target, beyond)) {
            work->count = passes->keep_between(from, -INFINITY, nextafterf(low, -INFINITY), work);
            if (work->count > 0) {
                target -= above + within;
                mass -= above + within;
                continue;
            } /* else rounding keeps the sums below the target: take the last entry between low and high */
        }
        work->count = passes->keep_between(from, low, high, work);
        target -= above;
        mass = within;
        if (low == high)
            return mark_of_equals(work, target, beyond);
    }
    if (list->count == 0)
        return rank_everything;
    const uint64_t *keys = list->sorted ? NULL : ranks(list, room);
    int64_t at = 0;
    for (int64_t i = 0; i < list->count; i++) {
        at = keys == NULL ? i : (uint32_t)keys[i];
        target -= list->weights[at];
        if (reaches(0.0, target, beyond))
            break;
    }
    return (sym_mark){list->values[at], list->indices[at]};
}

/* Sets all weights of a list to 1, so that sums count entries. */
static void count_alike(sym_list *list) {
    for (int64_t i = 0; i < list->count; i++)
        list->weights[i] = 1.0f;
}

static int64_t num_groups(int64_t n) { return (n + BLOCK - 1) / BLOCK * LANES; }

sym_list rank_groups(struct scratch *scratch, int64_t n) {
    sym_list groups = scratch->other;
    groups.values = scratch->groups;
    groups.count = num_groups(n);
    groups.sorted = 0;
    for (int64_t i = 0; i < groups.count; i++)
        groups.indices[i] = (int32_t)i;
    return groups;
}

/* Returns a lower bound for the k-th largest entry: the k-th largest of the groups' maxima. Few more than k entries
 * reach the bound. */
static float least_of_k(struct scratch *scratch, int64_t n, int64_t k) {
    sym_list groups = rank_groups(scratch, n);
    if (k > groups.count / 2)
        return -INFINITY;
    count_alike(&groups);
    return rank_mark(&groups, (double)groups.count, (double)k, 0, &scratch->list, scratch->keys).value;
}

void rank_keep(struct scratch *scratch, sym_mark mark, float lightest) {
    sym_list *list = &scratch->list;
    list->count = passes->keep_best(list, mark, lightest);
    if (list->count > SHORT || list->sorted)
        return;
    sort_list(list, &scratch->other, scratch->keys);
    const sym_list swap = *list;
    *list = scratch->other;
    scratch->other = swap;
}

void rank_best_in_order(struct scratch *scratch, const float *row, int64_t n, int64_t k) {
    sym_list *list = &scratch->list;
    const float least = least_of_k(scratch, n, k);
    list->count = passes->collect(row, n, least, list->values, list->indices);
    list->sorted = 0;
    count_alike(list);
    sym_mark last = rank_everything;
    if (list->count > k)
        last = rank_mark(list, (double)list->count, (double)k, 0, &scratch->other, scratch->keys);
    list->count = passes->keep_best(list, last, 0.0f);
}

void rank_best(struct scratch *scratch, const float *row, int64_t n, int64_t k) {
    rank_best_in_order(scratch, row, n, k);
    rank_keep(scratch, rank_everything, 0.0f);
}

sym_mark rank_place(struct scratch *scratch, int64_t k) {
    sym_list alike = scratch->list;
    if (k >= alike.count)
        return rank_everything;
    alike.weights = scratch->groups;
    count_alike(&alike);
    return rank_mark(&alike, (double)alike.count, (double)k, 0, &scratch->other, scratch->keys);
}

int64_t rank_weights(struct scratch *scratch, int64_t k, float *weights) {
    const sym_mark last = rank_place(scratch, k);
    const sym_list *list = &scratch->list;
    sym_list *best = &scratch->other;
    best->count = passes->keep_between(list, last.value, INFINITY, best);
    best->count = passes->keep_best(best, last, 0.0f);
    const uint64_t *keys = ranks(best, scratch->keys);
    for (int64_t i = 0; i < best->count; i++)
        weights[i] = best->weights[(uint32_t)keys[i]];
    return best->count;
}

/* Returns the k best entries of a row, sorted. */
static const sym_list *rank_row(struct scratch *scratch, const float *row, int64_t n, int64_t k) {
    rank_best(scratch, row, n, k);
    if (scratch->list.sorted)
        return &scratch->list;
    sort_list(&scratch->list, &scratch->other, scratch->keys);
    return &scratch->other;
}

/* Finds the k likeliest tokens and their log-probabilities, likeliest first. */
int sym_row_topk(const float *row, int64_t n, const void *allowed, int64_t k, int32_t *indices, double *logprobs) {
    if (k < 1 || k > n)
        return -EINVAL;
    struct scratch *scratch = scratch_for(n);
    if (scratch == NULL)
        return -ENOMEM;
    float max;
    const int rc = row_look(&row, n, allowed, scratch->groups, &max);
    if (rc != 0)
        return rc;
    const double total = (double)max + log(passes->mass(row, n, max, 1.0f, 0.0f, NULL));
    const sym_list *best = rank_row(scratch, row, n, k);
    for (int64_t i = 0; i < k; i++) {
        indices[i] = best->indices[i];
        logprobs[i] = (double)best->values[i] - total;
    }
    return 0;
}

/* Reduces a row: writes `*head` without a sampled token, the `top_k` likeliest, and the log-probabilities of the named
 * tokens. -EINVAL: top_k is larger than the vocabulary, or a token is not in the vocabulary. */
int sym_row_reduce(const float *row, int64_t n, uint32_t top_k, const int32_t *named, uint32_t num_named,
                   struct sym_reduced *head, struct sym_scored *top, float *named_logprobs) {
    if (top_k > n)
        return -EINVAL;
    for (uint32_t i = 0; i < num_named; i++)
        if (named[i] < 0 || named[i] >= n)
            return -EINVAL;
    struct scratch *scratch = scratch_for(n);
    if (scratch == NULL)
        return -ENOMEM;
    float max;
    const int rc = row_look(&row, n, NULL, scratch->groups, &max);
    if (rc != 0)
        return rc;
    double sum, weighted;
    passes->moments(row, n, max, 1.0f, &sum, &weighted);
    const double total = (double)max + log(sum);
    *head = (struct sym_reduced){
        .sampled = -1,
        .sampled_logprob = -INFINITY,
        .entropy = (float)(log(sum) - weighted / sum),
        .logsumexp = (float)total,
    };
    if (top_k > 0) {
        const sym_list *best = rank_row(scratch, row, n, top_k);
        for (uint32_t i = 0; i < top_k; i++)
            top[i] = (struct sym_scored){best->indices[i], (float)((double)best->values[i] - total)};
    }
    for (uint32_t i = 0; i < num_named; i++)
        named_logprobs[i] = (float)((double)row[named[i]] - total);
    return 0;
}
