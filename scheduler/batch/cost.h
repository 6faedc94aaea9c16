/* What a step takes: see cost_model.py, which fits it while steps run. cffi reads this file: declarations only. */
#ifndef SYM_COST_H
#define SYM_COST_H

#include <stdint.h>

/* Of the curve over rows: at 1, 2, 4, ... 1024 of them. */
#define SYM_COST_KNOTS 11

/* What a step computes, as far as its time depends on it. */
typedef struct sym_work {
    int64_t num_rows;    /* entries that it computes */
    int64_t num_wanted;  /* of them, those whose logits are wanted */
    int64_t num_entries; /* distinct ones that its decodes read */
    int64_t num_seen;    /* for each decode, the entries that it sees */
    int64_t num_pairs;   /* for each row of a prefill, the entries that it sees */
} sym_work;

/* Nanoseconds. */
typedef struct sym_cost {
    double rows_ns[SYM_COST_KNOTS]; /* of so many rows, without logits; linear between knots and beyond the last one */
    double head_ns; /* of logits at all */
    double wanted_ns, entry_ns, seen_ns, pair_ns; /* for each of what sym_work counts */
} sym_cost;

double sym_cost_of(const sym_cost *cost, const sym_work *work);

#endif
