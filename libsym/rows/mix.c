/* The weighted sum of rows of logits, for guidance and contrastive decoding. */
#include "rows.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>

/* Writes the weighted sum of the rows to `out`. A token that is impossible (-inf) in any row is impossible in the sum.
 * -EDOM: a row has NaN or +inf, or a sum is too large. */
int sym_rows_mix(const float *const *rows, const double *weights, int64_t num_rows, int64_t n, float *out) {
    for (int64_t token = 0; token < n; token++) {
        double sum = 0.0;
        bool is_impossible = false;
        for (int64_t row = 0; row < num_rows; row++) {
            const float logit = rows[row][token];
            if (isnan(logit) || logit == INFINITY)
                return -EDOM;
            is_impossible |= logit == -INFINITY;
            sum += weights[row] * (double)logit;
        }
        out[token] = is_impossible ? -INFINITY : (float)sum;
        if (!is_impossible && !isfinite(out[token]))
            return -EDOM;
    }
    return 0;
}
