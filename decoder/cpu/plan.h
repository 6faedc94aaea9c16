/* Who attends what: the rows of a batch in units of work, each over some entries of one page table.
 *
 * A chunk of many rows is cut into units of some rows each, over all entries they see. Chunks of few rows (decodes)
 * are cut along the entries instead, at the splits: threads share a long file, and where the tables of several
 * chunks hold the same pages in a split, their rows go through those pages together, as one matrix product; splits that
 * several chunks share from the beginning on are one unit's where that leaves work for all. What a row gets from a split is the same in every case; its splits are added up in order. */

#ifndef SYMPHONY_PLAN_H
#define SYMPHONY_PLAN_H

#include <stdatomic.h>

#include "work.h"

/* A row of the batch that attends. */
struct seat {
    int32_t row, chunk, out_row;
    int32_t first_split, end_split; /* that it sees something of */
    int32_t partial; /* where its unmerged softmaxes begin; -1: one unit does it all */
    int32_t folded;  /* so many of its first splits make one softmax, merged already; each later one makes its own */
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
    atomic_int *unfinished; /* [seats][kv_heads] splits to come */
    long room_unfinished;
    long window;
    long shared_rows;
};

/* What making plans needs, kept from step to step. */
struct planner {
    struct few *few;
    struct split_key *keys;
    long room;
};

/* How many entries a row of a chunk sees, before window and mask. */
static inline long row_limit(const sym_batch *b, long chunk, long row) {
    return b->start[chunk] + row - b->first_row[chunk] + 1;
}

/* Softmaxes that a row's splits make, and the one that a split belongs to. */
static inline long num_softmaxes(const struct seat *s) { return s->end_split - s->first_split - s->folded + 1; }
static inline long softmax_of(const struct seat *s, long split) {
    long number = split - s->first_split;
    return number < s->folded ? 0 : number - s->folded + 1;
}

/* All rows of every chunk, or those whose logits are wanted. `height` rows a unit; enough units for `threads` threads.
 * 0, or an errno. */
int make_plan(struct planner *planner, struct plan *p, const sym_batch *b, int wanted_only, long height, long kv_heads,
              long threads);
void free_plan(struct plan *p);

#endif
