/* The division of attention into units, which plan.h describes. */

#include "plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"

/* ---- one chunk ---- */

static int add_seat(struct plan *p, const sym_batch *b, long chunk, long row, long out_row) {
    int error = grow(&p->seats, p->num_seats, &p->room_seats, sizeof *p->seats);
    if (error)
        return error;
    long limit = row_limit(b, chunk, row), begin = p->window && limit > p->window ? limit - p->window : 0;
    p->seats[p->num_seats++] = (struct seat){(int32_t)row,
                                             (int32_t)chunk,
                                             (int32_t)out_row,
                                             (int32_t)(begin / SPLIT),
                                             (int32_t)divide_up(limit, SPLIT),
                                             -1,
                                             1};
    return 0;
}

static int add_unit(struct plan *p, long first_split, long end_split) {
    int error = grow(&p->units, p->num_units, &p->room_units, sizeof *p->units);
    if (!error)
        p->units[p->num_units++] = (struct unit){(int32_t)p->num_members, 0, (int32_t)first_split, (int32_t)end_split};
    return error;
}

static int add_member(struct plan *p, long seat) {
    int error = grow(&p->members, p->num_members, &p->room_members, sizeof *p->members);
    if (error)
        return error;
    p->members[p->num_members++] = (int32_t)seat;
    p->units[p->num_units - 1].rows++;
    return 0;
}

/* Add units of `height` rows for the seats [first, end). Each unit covers all splits of its rows. */
static int plan_whole(struct plan *p, long first, long end, long height) {
    int error = 0;
    for (; first < end && !error; first += height) {
        long past = at_most(first + height, end);
        error = add_unit(p, p->seats[first].first_split, p->seats[past - 1].end_split);
        for (long seat = first; seat < past && !error; seat++)
            error = add_member(p, seat);
    }
    return error;
}

/* ---- decodes, which may share splits ---- */

/* A chunk of few rows. */
struct few {
    int32_t chunk, first_seat, rows, first_split, end_split;
    int32_t last_first_split; /* first split of the chunk's last row */
    int32_t shareable; /* every row sees all entries of all splits before this split */
    int32_t alone;     /* the chunk shares no split with another chunk */
    int32_t folded;    /* number of first splits that one unit covers; all are shared by the same chunks */
};

static const int32_t *split_pages(const sym_batch *b, const struct few *few, long split) {
    return b->pages + b->first_page[few->chunk] + split * SPLIT_PAGES;
}

/* Key of the sort. The key points to the pages, because qsort has no argument for a context. */
struct split_key {
    const int32_t *pages;
    int32_t few;
};

static int compare_keys(const void *left, const void *right) {
    const struct split_key *a = left, *b = right;
    int order = memcmp(a->pages, b->pages, SPLIT_PAGES * sizeof *a->pages);
    return order ? order : a->few - b->few;
}

/* Collect the chunks that could share a split, and sort them so that equal pages are adjacent. Chunks whose unit has
 * folded this split into earlier splits are left out. */
static long sort_by_pages(const sym_batch *b, const struct few *all, long count, long split, struct split_key *keys) {
    long found = 0;
    for (long i = 0; i < count; i++)
        if (all[i].first_split <= split && split < all[i].shareable && (split == 0 || split >= all[i].folded))
            keys[found++] = (struct split_key){split_pages(b, &all[i], split), (int32_t)i};
    qsort(keys, (size_t)found, sizeof *keys, compare_keys);
    return found;
}

static long equal_run(const struct split_key *keys, long first, long count) {
    long end = first + 1;
    while (end < count && !memcmp(keys[first].pages, keys[end].pages, SPLIT_PAGES * sizeof *keys->pages))
        end++;
    return end;
}

/* Return the number of first splits for which the chunks of keys [first, end) have the same pages. */
static long common_splits(const sym_batch *b, const struct few *all, const struct split_key *keys, long first,
                          long end) {
    for (long split = 0;; split++)
        for (long i = first; i < end; i++) {
            const struct few *few = &all[keys[i].few];
            if (split >= few->shareable || few->last_first_split > 0)
                return split;
            if (memcmp(split_pages(b, &all[keys[first].few], split), split_pages(b, few, split),
                       SPLIT_PAGES * sizeof *b->pages))
                return split;
        }
}

/* Add units of up to `height` rows for the chunks of keys [first, end), over splits [split, end_split). */
static int plan_run(struct plan *p, const struct few *all, const struct split_key *keys, long first, long end,
                    long split, long end_split, long height) {
    int error = 0;
    long open = 0; /* rows in the unit that is being filled */
    for (long i = first; i < end && !error; i++) {
        const struct few *few = &all[keys[i].few];
        for (long seat = few->first_seat; seat < few->first_seat + few->rows && !error; seat++) {
            if (split < p->seats[seat].first_split || split >= p->seats[seat].end_split)
                continue;
            if (!open)
                error = add_unit(p, split, end_split);
            if (!error)
                error = add_member(p, seat);
            open = (open + 1) % height;
        }
    }
    return error;
}

/* Plan the chunks of few rows; `keys` has room for `count`. Chunks that share no split get units of their own, which
 * cover all their splits if there are enough chunks. */
static int plan_few(struct plan *p, const sym_batch *b, struct few *all, long count, struct split_key *keys,
                    long height, long kv_heads, long threads) {
    int spread = count * kv_heads < 4 * threads;
    long last_split = 0, most_shared = 0, splits = 0;
    for (long i = 0; i < count; i++) {
        splits += all[i].end_split - all[i].first_split;
        if (all[i].end_split > last_split)
            last_split = all[i].end_split;
        if (all[i].shareable > most_shared)
            most_shared = all[i].shareable;
    }
    for (long split = 0; count > 1 && split < most_shared; split++) {
        long found = sort_by_pages(b, all, count, split, keys);
        for (long first = 0, end; first < found; first = end) {
            end = equal_run(keys, first, found);
            if (end - first == 1)
                continue;
            long rows = 0, folded = 1;
            for (long i = first; i < end; i++) {
                all[keys[i].few].alone = 0;
                rows += all[keys[i].few].rows;
            }
            /* A unit may cover several splits if every thread still has work. */
            if (split == 0 && divide_up(rows, height) * kv_heads >= 2 * threads)
                folded = at_least(1, common_splits(b, all, keys, first, end));
            for (long i = first; split == 0 && i < end; i++)
                all[keys[i].few].folded = (int32_t)folded;
        }
    }
    int error = 0;
    for (long i = 0; i < count && !error; i++) {
        struct few *few = &all[i];
        long own = few->end_split - few->first_split;
        /* A chunk that is much longer than the average is always cut. */
        int whole = few->alone && (own == 1 || (!spread && own * count <= 2 * splits));
        if (whole) {
            error = plan_whole(p, few->first_seat, few->first_seat + few->rows, height);
            few->first_split = few->end_split = few->shareable = 0; /* done */
            continue;
        }
        if (!few->alone)
            p->shared_rows += few->rows;
        for (long seat = few->first_seat; seat < few->first_seat + few->rows; seat++) {
            p->seats[seat].partial = (int32_t)p->num_partials;
            p->seats[seat].folded = few->folded;
            p->num_partials += num_softmaxes(&p->seats[seat]);
        }
    }
    for (long split = 0; split < last_split && !error; split++) {
        long found = sort_by_pages(b, all, count, split, keys);
        for (long first = 0, end; first < found && !error; first = end) {
            end = equal_run(keys, first, found);
            long past = split == 0 ? all[keys[first].few].folded : split + 1;
            error = plan_run(p, all, keys, first, end, split, past, height);
        }
        for (long i = 0; i < count && !error; i++) {
            if (split < all[i].shareable || split < all[i].first_split || split >= all[i].end_split)
                continue;
            struct split_key key = {NULL, (int32_t)i};
            error = plan_run(p, all, &key, 0, 1, split, split + 1, height);
        }
    }
    return error;
}

/* ---- the batch ---- */

int make_plan(struct planner *planner, struct plan *p, const sym_batch *b, int wanted_only, long height, long kv_heads,
              long threads) {
    int error = 0;
    p->num_seats = p->num_units = p->num_members = p->num_partials = p->shared_rows = 0;
    if (b->num_chunks > planner->room) {
        planner->room = 0;
        error = regrow(&planner->few, (size_t)b->num_chunks * sizeof *planner->few);
        if (!error)
            error = regrow(&planner->keys, (size_t)b->num_chunks * sizeof *planner->keys);
        if (error)
            return error;
        planner->room = b->num_chunks;
    }
    long count = 0, out_row = 0;
    for (long c = 0; c < b->num_chunks && !error; c++) {
        long row = wanted_only ? b->first_row[c + 1] - b->wanted[c] : b->first_row[c];
        long first = p->num_seats, end_row = b->first_row[c + 1];
        for (long r = row; r < end_row && !error; r++)
            error = add_seat(p, b, c, r, out_row++);
        if (error || row == end_row)
            continue;
        if (end_row - row > height) {
            error = plan_whole(p, first, p->num_seats, height);
            continue;
        }
        planner->few[count++] = (struct few){
            .chunk = (int32_t)c,
            .first_seat = (int32_t)first,
            .rows = (int32_t)(end_row - row),
            .first_split = p->seats[first].first_split,
            .end_split = p->seats[p->num_seats - 1].end_split,
            .last_first_split = p->seats[p->num_seats - 1].first_split,
            .shareable = b->start[c] / SPLIT,
            .alone = 1,
            .folded = 1,
        };
    }
    if (!error)
        error = plan_few(p, b, planner->few, count, planner->keys, height, kv_heads, threads);
    if (!error && p->num_seats * kv_heads > p->room_unfinished) {
        p->room_unfinished = 0;
        error = regrow(&p->unfinished, (size_t)(p->num_seats * kv_heads) * sizeof *p->unfinished);
        if (!error)
            p->room_unfinished = p->num_seats * kv_heads;
    }
    for (long i = 0; i < p->num_seats && !error; i++)
        for (long h = 0; p->seats[i].partial >= 0 && h < kv_heads; h++)
            atomic_store(&p->unfinished[i * kv_heads + h], (int)num_softmaxes(&p->seats[i]));
    return error;
}

void free_plan(struct plan *p) {
    free(p->seats);
    free(p->units);
    free(p->members);
    free(p->unfinished);
}
