#include "cost.h"

static double of_rows(const double *knots, int64_t count) {
    if (count <= 0)
        return 0;
    int below = 0;
    while (below < SYM_COST_KNOTS - 2 && count >= (int64_t)2 << below)
        below++;
    double past = (double)(count - ((int64_t)1 << below)) / (double)((int64_t)1 << below);
    return knots[below] + past * (knots[below + 1] - knots[below]);
}

double sym_cost_of(const sym_cost *cost, const sym_work *work) {
    return of_rows(cost->rows_ns, work->num_rows) + (work->num_wanted > 0 ? cost->head_ns : 0) +
           cost->wanted_ns * (double)work->num_wanted + cost->entry_ns * (double)work->num_entries +
           cost->seen_ns * (double)work->num_seen + cost->pair_ns * (double)work->num_pairs;
}
