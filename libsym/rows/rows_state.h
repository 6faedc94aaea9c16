/* What the arithmetic over rows shares: a row's look, its order, and marks in it. */
#ifndef SYM_ROWS_STATE_H
#define SYM_ROWS_STATE_H

#include "passes.h"
#include "rows.h"

/* -- rows.c -- */

/* The row with -inf for what is not allowed (`allowed`: bits, NULL for all), in the thread's room. 0, -EDOM, -ENOMEM */
int row_only_allowed(const float **row, int64_t n, const void *allowed);
/* `*max` of a row that is a distribution; else -EDOM: NaN or +inf; -ERANGE: all are -inf. */
int row_look(const float **row, int64_t n, const void *allowed, float *groups, float *max);

/* -- rank.c -- */

extern const sym_mark rank_everything;
/* The first place in the order where the weights so far reach `target` (`beyond`: are more than it). If all of them are
 * less (they may be rounded so), the last. `mass` is about the sum of all; `work` is overwritten. */
sym_mark rank_mark(const sym_list *list, double mass, double target, int beyond, sym_list *work, uint64_t *room);
/* The groups' largest as a list whose memory is the scratch's `other`. */
sym_list rank_groups(struct scratch *scratch, int64_t n);
/* Keeps what is best up to the mark; short lists are sorted, and stay so. */
void rank_keep(struct scratch *scratch, sym_mark mark, float lightest);
/* The k best of a row that was scanned into the scratch's groups, as its list. */
void rank_best(struct scratch *scratch, const float *row, int64_t n, int64_t k);

#endif
