/* Plan of attention: the rows of a batch in units of work. A unit covers some entries of one page table.
 *
 * A chunk of many rows is cut into units of some rows each, over all entries that these rows see. Chunks of few rows
 * (decodes) are cut where splits begin instead. So several threads can work on a long file. If the tables of several
 * chunks have the same pages in a split, the chunks' rows go through these pages together, as one matrix product. The
 * first splits that several chunks share are one unit, if there is still work for all threads. A row's softmax of a
 * split is the same in every case, and the splits of a row are merged in order. */

#ifndef SYMPHONY_PLAN_H
#define SYMPHONY_PLAN_H

#include <stdatomic.h>

#include "work.h"

/* A row of the batch that computes attention. */
struct seat {
    int32_t row, chunk, out_row;
    int32_t first_split, end_split; /* splits with entries that the row sees */
    int32_t partial; /* index of the row's first unmerged softmax; -1: one unit computes all splits */
    int32_t folded;  /* number of first splits that one unit merges into one softmax; later splits have one each */
};

struct unit {
    int32_t first_member, rows; /* in members */
    int32_t first_split, end_split;
};

struct plan {
    struct seat *seats;
    struct unit *units;
    int32_t *members; /* seats of each unit, one unit after the other */
    long num_seats, num_units, num_members, num_partials;
    long room_seats, room_units, room_members;
    atomic_int *unfinished; /* [seats][kv_heads] softmaxes that are still to be computed */
    long room_unfinished;
    long window;
    long shared_rows;
};

/* Memory in which plans are made. Each step reuses it. */
struct planner {
    struct few *few;
    struct split_key *keys;
    long room;
};

/* Return the number of entries that a row of a chunk sees, without window and mask. */
static inline long row_limit(const sym_batch *b, long chunk, long row) {
    return b->start[chunk] + row - b->first_row[chunk] + 1;
}

/* The next two functions return the number of softmaxes of a row, and the index of a split's softmax. */
static inline long num_softmaxes(const struct seat *s) { return s->end_split - s->first_split - s->folded + 1; }
static inline long softmax_of(const struct seat *s, long split) {
    long number = split - s->first_split;
    return number < s->folded ? 0 : number - s->folded + 1;
}

/* Plan all rows of every chunk, or only the rows whose logits are wanted. Units have up to `height` rows, and the
 * number of units is enough for `threads` threads. Return 0, or an errno. */
int make_plan(struct planner *planner, struct plan *p, const sym_batch *b, int wanted_only, long height, long kv_heads,
              long threads);
void free_plan(struct plan *p);

#endif
