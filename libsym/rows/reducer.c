/* Reducers: each reduces rows of logits to the numbers that one call asks for. abi.h defines a reduced row. */
#include "rows.h"

#include <stdlib.h>
#include <string.h>

struct sym_reducer {
    int64_t vocab_size;
    uint32_t top_k, num_named;
    sym_sampler *sampler; /* null: no token is drawn */
    int is_its_sampler;
    int32_t named[];
};

/* Makes a reducer. The caller owns `sampler` (may be null), and keeps it alive. Each reduction checks that top_k and
 * the tokens are within the vocabulary. NULL: no memory. */
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

void sym_reducer_free(sym_reducer *reducer) {
    if (reducer->is_its_sampler)
        sym_sampler_free(reducer->sampler);
    free(reducer);
}

static int are_tokens(const int32_t *tokens, uint32_t num, uint32_t vocab_size) {
    uint32_t at = 0;
    while (at < num && tokens[at] >= 0 && (uint32_t)tokens[at] < vocab_size)
        at++;
    return at == num;
}

/* Makes a reducer from the block of a client, which is not trusted. The block's address is a multiple of 4. NULL: the
 * block is malformed, its sampler needs the texts of tokens, or there is no memory. After NULL, the Python code finds
 * out which of the three it was. */
sym_reducer *sym_reducer_read(const char *block, uint32_t bytes, uint32_t vocab_size) {
    struct sym_reduction asked;
    struct sym_sampling settings = {0};
    if (bytes < sizeof asked)
        return NULL;
    memcpy(&asked, block, sizeof asked);
    const int32_t *named = (const int32_t *)(const void *)(block + sizeof asked);
    const uint64_t end = sizeof asked + sizeof *named * (uint64_t)asked.num_named;
    const uint64_t least = end + (asked.has_sampling ? sizeof settings : 0);
    if (asked.reserved || asked.has_sampling > 1 || asked.top_k > vocab_size || least > bytes ||
        (!asked.has_sampling && end != bytes) || !are_tokens(named, asked.num_named, vocab_size))
        return NULL;
    sym_sampler *sampler = NULL;
    if (asked.has_sampling) {
        memcpy(&settings, block + end, sizeof settings);
        if (!(settings.flags & SYM_SAMPLING_MORE))
            sampler = sym_sampler_new(block + end, bytes - end, vocab_size, NULL);
        if (sampler == NULL)
            return NULL;
    }
    sym_reducer *reducer = sym_reducer_new(vocab_size, asked.top_k, named, asked.num_named, sampler);
    if (reducer == NULL)
        sym_sampler_free(sampler);
    else
        reducer->is_its_sampler = sampler != NULL;
    return reducer;
}

/* The size of a reduced row in bytes, a multiple of 4. */
int64_t sym_reducer_bytes(const sym_reducer *reducer) {
    return (int64_t)sizeof(struct sym_reduced) + reducer->top_k * (int64_t)sizeof(struct sym_scored) +
           reducer->num_named * (int64_t)sizeof(float);
}

/* Reduces the `index`-th row of a call into `answer`, whose address is a multiple of 4. Returns 0, or an error of
 * sym_row_reduce or sym_sampler_draw; after an error the answer is not valid. Several threads may use different
 * reducers. */
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
