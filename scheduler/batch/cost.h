/* What a step takes: see cost_model.py, which fits it while steps run. cffi reads this file: declarations only. */
#ifndef SYM_COST_H
#define SYM_COST_H

#include <stdint.h>

/* Of curves over a number of rows: 1, 2, 4, ... 1024. */
#define SYM_COST_KNOTS 11

/* What a step computes, as far as its time depends on it. */
typedef struct sym_work {
    int64_t num_rows;    /* entries that it computes */
    int64_t num_wanted;  /* of them, those whose logits are wanted */
    int64_t num_entries; /* distinct ones that its decodes read */
    int64_t num_seen;    /* for each decode, the entries that it sees */
    int64_t num_pairs;   /* for each row of a prefill, the entries that it sees */
} sym_work;

/* Nanoseconds. Between knots the time is linear, and beyond the last one it goes on as before it. */
typedef struct sym_cost {
    double rows_ns[SYM_COST_KNOTS];   /* of a step of so many rows over no entries, without logits */
    double wanted_ns[SYM_COST_KNOTS]; /* of the logits of so many rows */
    double entry_ns;                  /* for each of num_entries */
    double seen_ns;
    double pair_ns;
} sym_cost;

double sym_cost_of(const sym_cost *cost, const sym_work *work);

#endif
