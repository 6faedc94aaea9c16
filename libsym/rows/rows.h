/* Arithmetic over rows of logits and the sampler: what Python calls, and what each call means is told in rows.c, rank.c
 * and sampler.c. cffi reads this file: declarations only. */
#ifndef SYM_ROWS_H
#define SYM_ROWS_H

#include "abi.h"
#include "steps.h"

int sym_rows_use(int vector_bits);
int64_t sym_row_argmax(const float *row, int64_t n, const void *allowed);
int sym_row_logsumexp(const float *row, int64_t n, const void *allowed, double *result);
int sym_row_entropy(const float *row, int64_t n, const void *allowed, double *result);
int sym_row_softmax(const float *row, int64_t n, const void *allowed, float *out);
int sym_row_topk(const float *row, int64_t n, const void *allowed, int64_t k, int32_t *indices, double *logprobs);
int sym_row_reduce(const float *row, int64_t n, uint32_t top_k, const int32_t *named, uint32_t num_named,
                   struct sym_reduced *head, struct sym_scored *top, float *named_logprobs);
int64_t sym_row_sample(const float *row, int64_t n, const void *allowed, double temperature, int64_t top_k,
                       double top_p, double min_p, double u);

int64_t sym_sampling_bytes(const char *block, uint64_t bytes, uint32_t vocab_size);
sym_sampler *sym_sampler_new(const char *block, uint64_t bytes, uint32_t vocab_size);
void sym_sampler_free(sym_sampler *sampler);
int sym_sampler_note(sym_sampler *sampler, int32_t token);
int64_t sym_sampler_draw(sym_sampler *sampler, const float *row, const void *allowed, uint64_t index);
double sym_uniform(uint64_t seed);

#endif
