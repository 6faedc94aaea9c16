/* Rows answered by numbers, as one call wants them: what abi.h says that a reduced row is. */
#include "rows.h"

#include <stdlib.h>
#include <string.h>

struct sym_reducer {
    int64_t vocab_size;
    uint32_t top_k, num_named;
    sym_sampler *sampler; /* null: nothing is drawn */
    int32_t named[];
};

/* `sampler` (or null) stays the caller's, and where it is. That top_k and the tokens are within the vocabulary is
 * checked with each row. NULL: no memory. */
sym_reducer *sym_reducer_new(uint32_t vocab_size, uint32_t top_k, const int32_t *named, uint32_t num_named,
                             sym_sampler *sampler) {
    sym_reducer *reducer = malloc(sizeof *reducer + num_named * sizeof *reducer->named);
    if (reducer == NULL)
        return NULL;
    *reducer = (sym_reducer){.vocab_size = vocab_size, .top_k = top_k, .num_named = num_named, .sampler = sampler};
    if (num_named > 0)
        memcpy(reducer->named, named, num_named * sizeof *named);
    return reducer;
}

void sym_reducer_free(sym_reducer *reducer) { free(reducer); }

/* The size of an answer, a multiple of 4. */
int64_t sym_reducer_bytes(const sym_reducer *reducer) {
    return (int64_t)sizeof(struct sym_reduced) + reducer->top_k * (int64_t)sizeof(struct sym_scored) +
           reducer->num_named * (int64_t)sizeof(float);
}

/* The answer for a row, the `index`-th of its call, at an address that is a multiple of 4. 0, or as sym_row_reduce and
 * sym_sampler_draw; then the answer holds nothing. Different reducers work at the same time. */
int sym_reducer_reduce(sym_reducer *reducer, const float *row, uint64_t index, char *answer) {
    struct sym_reduced *head = (struct sym_reduced *)(void *)answer;
    struct sym_scored *top = (struct sym_scored *)(void *)(head + 1);
    float *named_logprobs = (float *)(void *)(top + reducer->top_k);
    const int rc = sym_row_reduce(row, reducer->vocab_size, reducer->top_k, reducer->named, reducer->num_named, head,
                                  top, named_logprobs);
    if (rc != 0 || reducer->sampler == NULL)
        return rc;
    const int64_t token = sym_sampler_draw(reducer->sampler, row, NULL, index);
    if (token < 0)
        return (int)token;
    head->sampled = (int32_t)token;
    head->sampled_logprob = (float)((double)row[token] - (double)head->logsumexp);
    return 0;
}
