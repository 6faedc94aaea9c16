/* The time that a step takes. cost_model.py fits the coefficients while steps run. cffi reads this file: declarations
 * only. */
#ifndef SYM_COST_H
#define SYM_COST_H

#include <stdint.h>

/* Knots of the curve over rows: 1, 2, 4, ... 1024 rows. */
#define SYM_COST_KNOTS 11

/* Amounts of work in a step. The step's time depends on them. */
typedef struct sym_work {
    int64_t num_rows;    /* entries that the step computes */
    int64_t num_wanted;  /* entries among them whose logits are wanted */
    int64_t num_entries; /* distinct entries that the decodes read */
    int64_t num_seen;    /* entries that each decode sees, summed over the decodes */
    int64_t num_pairs;   /* entries that each row of a prefill sees, summed over the rows */
} sym_work;

/* Coefficients of the cost model, in nanoseconds. */
typedef struct sym_cost {
    double rows_ns[SYM_COST_KNOTS]; /* time at each knot, without logits; linear elsewhere */
    double head_ns; /* extra time of a step with logits, whatever the number of rows */
    double wanted_ns, entry_ns, seen_ns, pair_ns; /* time of one unit of each count in sym_work */
} sym_cost;

/* Return the expected time of a step, in nanoseconds. */

double sym_cost_of(const sym_cost *cost, const sym_work *work);

#endif
