/* Arithmetic over rows of float32 logits: what a Dist offers, and the one sampler that everybody uses.
 *
 * Written with the compiler's vector types, without fast-math and without contraction into fused multiply-adds:
 * the order of every sum is fixed here, so a row and a uniform number give the same token in every build.
 * Exponentials are of x - max, so never above 1; e = 0 stands for a probability of nothing (-inf, or far below).
 * A row with NaN or +inf is refused: such a distribution has no meaning, and an argmax of it would hide a fault.
 */
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 4
#define BLOCK 512        /* entries whose mass is summed as one piece: the draw walks blocks, then one block */
#define HEAP_MAX 1024    /* up to here k best are picked with a heap; beyond, a radix sort of all is faster */
#define NUCLEUS_GUESS 64 /* a nucleus is looked for among so many first */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef float vf_loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef double vd __attribute__((vector_size(8 * LANES)));

typedef struct sym_ranked {
    float value; /* a logit, then its exponential */
    int32_t index;
} sym_ranked;

static inline vf load(const float *at) { return *(const vf_loose *)at; }

static inline vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

static inline vf splat(float x) { return (vf){x, x, x, x}; }

/* exp(x) for x <= 0, to 2 ulp (Cephes' polynomial); below -87 it is 0. */
static inline vf exp_lanes(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    const vi in_range = x > splat(-87.0f);
    const vf safe = choose(in_range, x, splat(0.0f));
    const vf shifted = safe * splat(1.44269504088896341f) + magic;
    const vf n = shifted - magic;
    const vf r = safe - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const vi scale = (vi)p + ((vi)shifted << 23); /* the bits of 12582912.0f vanish in the shift */
    return choose(in_range, (vf)scale, splat(0.0f));
}

/* One entry, by the very arithmetic of the lanes. */
static float exp_one(float x) { return exp_lanes(splat(x))[0]; }

static double sum_lanes(vd v) { return (v[0] + v[1]) + (v[2] + v[3]); }

/* 0; -EDOM: a NaN or +inf. `*max` is -INFINITY when nothing is possible. */
static int scan_max(const float *row, int64_t n, float *max) {
    vf best = splat(-INFINITY);
    vi fine = ~(vi){0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf x = load(row + i);
        fine &= x < splat(INFINITY);
        best = choose(x > best, x, best);
    }
    float result = -INFINITY;
    int all_fine = 1;
    for (int lane = 0; lane < LANES; lane++) {
        result = best[lane] > result ? best[lane] : result;
        all_fine &= fine[lane] != 0;
    }
    for (; i < n; i++) {
        result = row[i] > result ? row[i] : result;
        all_fine &= row[i] < INFINITY;
    }
    *max = result;
    return all_fine ? 0 : -EDOM;
}

/* The sum of exp((x - max) * inverse_temperature) over those that reach `floor`. */
static double mass(const float *row, int64_t n, float max, float inverse_temperature, float floor) {
    vd sum = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf e = exp_lanes((load(row + i) - splat(max)) * splat(inverse_temperature));
        sum += __builtin_convertvector(choose(e >= splat(floor), e, splat(0.0f)), vd);
    }
    double total = sum_lanes(sum);
    for (; i < n; i++) {
        const float e = exp_one((row[i] - max) * inverse_temperature);
        total += e >= floor ? e : 0.0f;
    }
    return total;
}

/* The largest logit's index, the lowest of equals; -EDOM: NaN or +inf; -ERANGE: all are -inf. */
int64_t sym_row_argmax(const float *row, int64_t n) {
    float max;
    if (scan_max(row, n, &max) != 0)
        return -EDOM;
    if (max == -INFINITY)
        return -ERANGE;
    int64_t index = 0;
    while (row[index] != max)
        index++;
    return index;
}

int sym_row_logsumexp(const float *row, int64_t n, double *result) {
    float max;
    if (scan_max(row, n, &max) != 0)
        return -EDOM;
    if (max == -INFINITY)
        return -ERANGE;
    *result = (double)max + log(mass(row, n, max, 1.0f, 0.0f));
    return 0;
}

/* In nats. */
int sym_row_entropy(const float *row, int64_t n, double *result) {
    float max;
    if (scan_max(row, n, &max) != 0)
        return -EDOM;
    if (max == -INFINITY)
        return -ERANGE;
    vd sum = {0}, weighted = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf below = load(row + i) - splat(max);
        const vf e = exp_lanes(below);
        sum += __builtin_convertvector(e, vd);
        weighted += __builtin_convertvector(choose(e > splat(0.0f), e * below, splat(0.0f)), vd);
    }
    double total = sum_lanes(sum), total_weighted = sum_lanes(weighted);
    for (; i < n; i++) {
        const float e = exp_one(row[i] - max);
        total += e;
        total_weighted += e > 0.0f ? e * (row[i] - max) : 0.0f;
    }
    *result = log(total) - total_weighted / total;
    return 0;
}

int sym_row_softmax(const float *row, int64_t n, float *out) {
    float max;
    if (scan_max(row, n, &max) != 0)
        return -EDOM;
    if (max == -INFINITY)
        return -ERANGE;
    const float scale = (float)(1.0 / mass(row, n, max, 1.0f, 0.0f));
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        *(vf_loose *)(out + i) = exp_lanes(load(row + i) - splat(max)) * splat(scale);
    for (; i < n; i++)
        out[i] = exp_one(row[i] - max) * scale;
    return 0;
}

/* ---- order: by logit, the lower index first among equals --------------------------------------------- */

static int precedes(sym_ranked a, sym_ranked b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
}

/* Puts `item` into the heap from its root downwards; the root is the worst of the best. */
static void sink(sym_ranked *heap, int64_t size, sym_ranked item) {
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= size)
            break;
        if (child + 1 < size && precedes(heap[child], heap[child + 1]))
            child++;
        if (!precedes(item, heap[child]))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

static void best_by_heap(const float *row, int64_t n, int64_t k, sym_ranked *best) {
    /* Filled with less than anything: an index beyond the row, so that even -inf displaces it. */
    for (int64_t i = 0; i < k; i++)
        best[i] = (sym_ranked){-INFINITY, INT32_MAX};
    for (int64_t i = 0; i < n; i++) {
        const sym_ranked item = {row[i], (int32_t)i};
        if (item.value >= best[0].value && precedes(item, best[0]))
            sink(best, k, item);
    }
    for (int64_t last = k - 1; last > 0; last--) {
        const sym_ranked worst = best[0];
        const sym_ranked moved = best[last];
        sink(best, last, moved);
        best[last] = worst;
    }
}

/* Descending floats as ascending integers; -0 and 0 are equal. */
static uint32_t descending_key(float value) {
    const float positive_zero = value + 0.0f;
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

/* A stable radix sort of the whole row, so that equals stay in the order of their indices. -ENOMEM. */
static int sort_all(const float *row, int64_t n, sym_ranked *sorted) {
    enum { DIGIT_BITS = 11, DIGITS = 3, RADIX = 1 << DIGIT_BITS };
    uint32_t(*counts)[RADIX] = calloc(DIGITS, sizeof *counts);
    sym_ranked *other = malloc((size_t)n * sizeof *other);
    if (counts == NULL || other == NULL) {
        free(counts);
        free(other);
        return -ENOMEM;
    }
    for (int64_t i = 0; i < n; i++) {
        const uint32_t key = descending_key(row[i]);
        for (int digit = 0; digit < DIGITS; digit++)
            counts[digit][key >> digit * DIGIT_BITS & (RADIX - 1)]++;
        other[i] = (sym_ranked){row[i], (int32_t)i};
    }
    sym_ranked *from = other, *to = sorted; /* an odd number of passes ends in `sorted` */
    for (int digit = 0; digit < DIGITS; digit++) {
        uint32_t start = 0;
        for (int value = 0; value < RADIX; value++) {
            const uint32_t count = counts[digit][value];
            counts[digit][value] = start;
            start += count;
        }
        for (int64_t i = 0; i < n; i++)
            to[counts[digit][descending_key(from[i].value) >> digit * DIGIT_BITS & (RADIX - 1)]++] = from[i];
        sym_ranked *swap = from;
        from = to;
        to = swap;
    }
    free(counts);
    free(other);
    return 0;
}

/* The k first of the order into `best`, which has room for n. */
static int rank(const float *row, int64_t n, int64_t k, sym_ranked *best) {
    if (k > HEAP_MAX)
        return sort_all(row, n, best);
    best_by_heap(row, n, k, best);
    return 0;
}

/* The k likeliest with their log-probabilities, likeliest first. */
int sym_row_topk(const float *row, int64_t n, int64_t k, int32_t *indices, double *logprobs) {
    double total;
    int rc = sym_row_logsumexp(row, n, &total);
    if (rc != 0)
        return rc;
    if (k < 1 || k > n)
        return -EINVAL;
    sym_ranked *best = malloc((size_t)n * sizeof *best);
    if (best == NULL)
        return -ENOMEM;
    rc = rank(row, n, k, best);
    for (int64_t i = 0; rc == 0 && i < k; i++) {
        indices[i] = best[i].index;
        logprobs[i] = (double)best[i].value - total;
    }
    free(best);
    return rc;
}

/* ---- sampling ---------------------------------------------------------------------------------------- */

/* A number in [0, 1) from a seed: splitmix64, which mixes even neighbouring seeds well. */
double sym_uniform(uint64_t seed) {
    uint64_t z = seed + 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

/* Nothing to sort: the draw runs through the row in the order of its indices. */
static int64_t draw_unsorted(const float *row, int64_t n, float max, float inverse_temperature, float floor,
                             double u) {
    double left = u * mass(row, n, max, inverse_temperature, floor);
    int64_t block = 0, token = 0;
    int inside = 0;
    for (int64_t start = 0; start < n && !inside; start += BLOCK) {
        const double here = mass(row + start, n - start < BLOCK ? n - start : BLOCK, max, inverse_temperature, floor);
        if (here == 0.0)
            continue;
        block = start;
        inside = left < here;
        left -= inside ? 0.0 : here;
    }
    if (!inside)
        left = INFINITY; /* u is all but 1, and the blocks were rounded down: the last possible token */
    for (int64_t i = block; i < n && i < block + BLOCK && left >= 0.0; i++) {
        const float e = exp_one((row[i] - max) * inverse_temperature);
        if (e == 0.0f || e < floor)
            continue;
        token = i;
        left -= e;
    }
    return token;
}

/* Keeps of `best[0..k)`, sorted and turned into exponentials, what reaches the nucleus and the floor. Gives how many;
 * 0: the nucleus goes on beyond k. `total` is the mass that top_p is a part of. */
static int64_t keep(const sym_ranked *best, int64_t k, double total, double top_p, float floor, int complete) {
    double cumulative = 0.0;
    for (int64_t i = 0; i < k; i++) {
        if (i > 0 && (best[i].value == 0.0f || best[i].value < floor))
            return i;
        cumulative += best[i].value;
        if (cumulative >= top_p * total)
            return i + 1;
    }
    return complete ? k : 0;
}

static int64_t draw_sorted(const sym_ranked *best, int64_t kept, double u) {
    double total = 0.0;
    for (int64_t i = 0; i < kept; i++)
        total += best[i].value;
    double left = u * total;
    for (int64_t i = 0; i < kept - 1; i++) {
        left -= best[i].value;
        if (left < 0.0)
            return best[i].index;
    }
    return best[kept - 1].index;
}

static int rank_exponentials(const float *row, int64_t n, int64_t k, float max, float inverse_temperature,
                             sym_ranked *best) {
    const int rc = rank(row, n, k, best);
    for (int64_t i = 0; rc == 0 && i < k; i++)
        best[i].value = exp_one((best[i].value - max) * inverse_temperature);
    return rc;
}

static int64_t draw_truncated(const float *row, int64_t n, float max, float inverse_temperature, int64_t top_k,
                              double top_p, float floor, double u, sym_ranked *best) {
    const int limited = top_k > 0 && top_k < n;
    int64_t k = limited ? top_k : n < NUCLEUS_GUESS ? n : NUCLEUS_GUESS;
    double total = limited ? 0.0 : mass(row, n, max, inverse_temperature, 0.0f);
    for (;;) {
        const int rc = rank_exponentials(row, n, k, max, inverse_temperature, best);
        if (rc != 0)
            return rc;
        for (int64_t i = 0; limited && i < k; i++)
            total += best[i].value;
        const int64_t kept = keep(best, k, total, top_p, floor, limited || k == n);
        if (kept > 0)
            return draw_sorted(best, kept, u);
        k = k < HEAP_MAX && HEAP_MAX < n ? HEAP_MAX : n;
    }
}

/* A token drawn with the uniform number u of [0, 1).
 *
 * In this order: divide by temperature (0: the argmax); top_k (0: off) keeps the k likeliest; top_p (1: off) the fewest
 * likeliest that hold this part of what is left; min_p (0: off) those at least this part as likely as the
 * likeliest. -EDOM: NaN or +inf; -ERANGE: all are -inf. */
int64_t sym_row_sample(const float *row, int64_t n, double temperature, int64_t top_k, double top_p, double min_p,
                       double u) {
    float max;
    if (scan_max(row, n, &max) != 0)
        return -EDOM;
    if (max == -INFINITY)
        return -ERANGE;
    if (temperature <= 0.0 || top_k == 1)
        return sym_row_argmax(row, n);
    const float inverse_temperature = 1.0 / temperature < 1e30 ? (float)(1.0 / temperature) : 1e30f;
    const float floor = (float)min_p;
    if ((top_k <= 0 || top_k >= n) && top_p >= 1.0)
        return draw_unsorted(row, n, max, inverse_temperature, floor, u);
    sym_ranked *best = malloc((size_t)n * sizeof *best);
    if (best == NULL)
        return -ENOMEM;
    const int64_t token = draw_truncated(row, n, max, inverse_temperature, top_k, top_p, floor, u, best);
    free(best);
    return token;
}
