/* Arithmetic over rows of logits, samplers, reducers and stop texts: the functions that Python calls. rows.c, mix.c,
 * rank.c, sampler.c, passes.c, reducer.c and stops.c describe them. cffi reads this file: declarations only. */
#ifndef SYM_ROWS_H
#define SYM_ROWS_H

#include "abi.h"
#include "steps.h"

int sym_rows_use(int vector_bits);
int64_t sym_row_argmax(const float *row, int64_t n, const void *allowed);
int sym_row_logsumexp(const float *row, int64_t n, const void *allowed, double *result);
int sym_row_entropy(const float *row, int64_t n, const void *allowed, double *result);
int sym_row_softmax(const float *row, int64_t n, const void *allowed, float *out);
int sym_rows_mix(const float *const *rows, const double *weights, int64_t num_rows, int64_t n, float *out);
int sym_row_topk(const float *row, int64_t n, const void *allowed, int64_t k, int32_t *indices, double *logprobs);
int sym_row_reduce(const float *row, int64_t n, uint32_t top_k, const int32_t *named, uint32_t num_named,
                   struct sym_reduced *head, struct sym_scored *top, float *named_logprobs);
int64_t sym_row_sample(const float *row, int64_t n, const void *allowed, double temperature, int64_t top_k,
                       double top_p, double min_p, double u);

int64_t sym_sampling_bytes(const char *block, uint64_t bytes, uint32_t vocab_size);
sym_sampler *sym_sampler_new(const char *block, uint64_t bytes, uint32_t vocab_size, const void *breakers);
void sym_sampler_free(sym_sampler *sampler);
int sym_sampler_note(sym_sampler *sampler, int32_t token);
int64_t sym_sampler_draw(sym_sampler *sampler, const float *row, const void *allowed, uint64_t index);
uint64_t sym_stream(uint64_t seed, uint64_t draw);
double sym_uniform(uint64_t stream);

sym_reducer *sym_reducer_new(uint32_t vocab_size, uint32_t top_k, const int32_t *named, uint32_t num_named,
                             sym_sampler *sampler);
sym_reducer *sym_reducer_read(const char *block, uint32_t bytes, uint32_t vocab_size);
void sym_reducer_free(sym_reducer *reducer);
int64_t sym_reducer_bytes(const sym_reducer *reducer);
int sym_reducer_reduce(sym_reducer *reducer, const float *row, uint64_t index, char *answer);

/* The bytes of every token of a model, for searches of texts. */
typedef struct sym_token_texts {
    const char *bytes;
    const uint64_t *begins; /* [num_tokens + 1] offset of each token in `bytes`, then the end of the last token */
    int32_t num_tokens;
} sym_token_texts;

sym_stops *sym_stops_new(const sym_token_texts *tokens, const char *texts, const uint32_t *lengths, uint32_t num_texts);
void sym_stops_free(sym_stops *stops);
int sym_stops_add(sym_stops *stops, int32_t token);
int sym_stops_found(const sym_stops *stops);

int32_t sym_tokens_with(const sym_token_texts *tokens, const char *text, uint64_t bytes, char *bits);

#endif
