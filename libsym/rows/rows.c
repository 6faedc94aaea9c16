/* Arithmetic over rows of float32 logits: what a Dist offers. `rank.c` orders, `sampler.c` draws.
 *
 * The order of every sum is fixed in `lanes.h`, so a row and a uniform number give the same token in every build and on
 * every machine. Exponentials are of x - max, so never above 1; 0 stands for a probability of
 * nothing (-inf, or far below). A row with NaN or +inf is refused: such a distribution has no meaning, and an argmax of
 * it would hide a fault.
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

/* ---- what a row says, of the allowed tokens alone (NULL: of all) -------------------------------------- */

int row_look(const float **row, int64_t n, const void *allowed, float *groups, float *max) {
    int rc = row_only_allowed(row, n, allowed);
    if (rc == 0)
        rc = passes->scan(*row, n, groups, max);
    return rc != 0 ? rc : *max == -INFINITY ? -ERANGE : 0;
}

/* The largest logit's index, the lowest of equals. */
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

/* In nats. */
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
    float last[LANES]; /* `out` ends with the row */
    double total = passes->weigh(row, whole, max, 1.0f, out);
    total += passes->weigh(row + whole, n - whole, max, 1.0f, last);
    memcpy(out + whole, last, (size_t)(n - whole) * sizeof *out);
    passes->scale(out, n, (float)(1.0 / total));
    return 0;
}
