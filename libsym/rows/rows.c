/* Arithmetic over rows of float32 logits, for the methods of a Dist. `rank.c` orders a row, `sampler.c` draws from it.
 *
 * `lanes.h` fixes the order of every sum. So a row and a random number give the same token in every build and on every
 * machine. Exponentials are of x - max, so they are never above 1. For -inf, and for values far below max, exponentials
 * are 0. A row with NaN or +inf is an error: such a row is no distribution, and an argmax would hide the fault.
 */
#include "rows_state.h"

#include <errno.h>
#include <math.h>
#include <string.h>

int row_only_allowed(const float **row, int64_t n, const void *allowed) {
    if (allowed == NULL)
        return 0;
    struct scratch *scratch = scratch_for(n);
    if (scratch == NULL)
        return -ENOMEM;
    const int rc = passes->mask(*row, n, allowed, NULL, scratch->row);
    *row = scratch->row;
    return rc;
}

/* ---- facts of a row, over the allowed tokens (NULL: over all) ------------------------------------------ */

int row_look(const float **row, int64_t n, const void *allowed, float *groups, float *max) {
    int rc = row_only_allowed(row, n, allowed);
    if (rc == 0)
        rc = passes->scan(*row, n, groups, max);
    return rc != 0 ? rc : *max == -INFINITY ? -ERANGE : 0;
}

/* Returns the index of the largest logit, the lowest index among equals. */
int64_t sym_row_argmax(const float *row, int64_t n, const void *allowed) {
    float max;
    const int rc = row_look(&row, n, allowed, NULL, &max);
    return rc != 0 ? rc : passes->find(row, n, max);
}

int sym_row_logsumexp(const float *row, int64_t n, const void *allowed, double *result) {
    float max;
    const int rc = row_look(&row, n, allowed, NULL, &max);
    if (rc == 0)
        *result = (double)max + log(passes->mass(row, n, max, 1.0f, 0.0f, NULL));
    return rc;
}

/* Returns the entropy in nats. */
int sym_row_entropy(const float *row, int64_t n, const void *allowed, double *result) {
    float max;
    double total, weighted;
    const int rc = row_look(&row, n, allowed, NULL, &max);
    if (rc != 0)
        return rc;
    passes->moments(row, n, max, 1.0f, &total, &weighted);
    *result = log(total) - weighted / total;
    return 0;
}

int sym_row_softmax(const float *row, int64_t n, const void *allowed, float *out) {
    float max;
    const int rc = row_look(&row, n, allowed, NULL, &max);
    if (rc != 0)
        return rc;
    const int64_t whole = n / LANES * LANES;
    float last[LANES]; /* whole vectors would write past the end of `out` */
    double total = passes->weigh(row, whole, max, 1.0f, out);
    total += passes->weigh(row + whole, n - whole, max, 1.0f, last);
    memcpy(out + whole, last, (size_t)(n - whole) * sizeof *out);
    passes->scale(out, n, (float)(1.0 / total));
    return 0;
}
