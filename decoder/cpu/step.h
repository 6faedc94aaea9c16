/* What Python sees of the CPU step. cffi reads this file: declarations only. */
#ifndef SYMPHONY_STEP_H
#define SYMPHONY_STEP_H

#include "steps.h"

/* How a matrix lies in memory. Its output features stand in panels of 32, side by side; a step of a panel is 128
 * bytes, four for each feature: one float32, two bfloat16, four 8-bit codes or eight 4-bit ones (the first four in
 * the low halves). Codes come in groups of 32 inputs, each group led by 32 float16 scales and, if `has_mins`,
 * 32 float16 mins, both in units of 2^-8: a weight is scale * code + min; without mins, scale * (code - 8 or 128).
 *
 * Rotated codes are 8-bit codes of whole rows; behind a panel's codes stand 32 float32 scales and 32 int32 zeros: a weight
 * is scale * (code - zero), and the 256 codes reach from the row's smallest to its largest one. What is coded is
 * R w, and activations are coded as R x, so that w . x = R w . R x: R is symmetric and its own inverse. It spreads the few
 * large activations that every row has over all of it: without that, one scale a row costs 4 % of perplexity. R is the
 * Hadamard matrix of the largest power of two in k times, across the rest, the discrete Hartley matrix `mix`. */
#define SYM_FLOAT32 0
#define SYM_BFLOAT16 1
#define SYM_CODES8 2
#define SYM_CODES4 3
#define SYM_ROTATED8 4
#define SYM_GROUP 32
#define SYM_MAX_MIX 256
#define SYM_MAX_INPUTS 32768

typedef struct {
    int32_t format, n, k; /* k as padded with zeros to whole steps, for AMX to whole tiles */
    int32_t has_mins;
    const float *mix; /* [odd][odd] for the odd part of the inputs, or null: 1, or more than SYM_MAX_MIX */
    char *data;
} sym_matrix;

typedef struct {
    int32_t vocab, hidden, layers, heads, kv_heads, head_dim, ffn;
    int32_t activation;  /* 0: SiLU, 1: GELU by tanh */
    int32_t window;      /* what a sliding layer's row sees, itself included */
    int32_t kv_format;   /* of pages: SYM_FLOAT32 or SYM_BFLOAT16 */
    float rms_eps, embed_scale, attn_scale, attn_softcap, final_softcap;
} sym_shape;

/* What a model has not is null. */
typedef struct {
    const float *attn_norm, *post_attn_norm, *ffn_norm, *post_ffn_norm; /* [hidden] */
    const float *q_norm, *k_norm;                                       /* [head_dim] */
    const float *qkv_bias;
    sym_matrix qkv, o, gate_up, down;
    int32_t sliding;
} sym_layer;

typedef struct {
    sym_shape shape;
    const sym_layer *layers;
    sym_matrix embed, head;            /* the same one where they are tied */
    const float *final_norm;
    const double *frequencies[2];      /* [head_dim / 2] of full and of sliding layers */
    float rotation_factors[2];         /* multiply cosines and sines */
    char *arena;                       /* [pages][layers][2][kv_heads][32 * head_dim] */
} sym_model;

/* The name of the instruction set that a name, or null for the best one here, selects; null if it cannot run. */
const char *sym_isa(const char *wanted);

/* What is not in the model by value must outlive the decoder. Steps of fewer than solo_work multiply-adds run on
 * the caller's thread alone: waking others takes longer. Null and errno on failure. */
sym_decoder *sym_decoder_new(const sym_model *model, int threads, const char *isa, int64_t solo_work);
void sym_decoder_free(sym_decoder *decoder);
/* Threads for sym_parallel alone, without a model: it can't step. */
sym_decoder *sym_crew_new(int threads);

/* A sym_step_function. The batch was checked by the caller: every index is in range. */
int sym_step(sym_decoder *decoder, const sym_batch *batch);

/* A sym_parallel_function, for the thread that steps, between two steps: soon after one the others are still awake. */
void sym_parallel(sym_decoder *decoder, void (*work)(void *context, int32_t index), void *context, int32_t count);

/* How many rows of the last step read pages together with another file's. */
int64_t sym_shared_rows(const sym_decoder *decoder);

/* Nanoseconds that thread 0 spent in each phase since the decoder was made, barriers included. */
int sym_num_phases(void);
const char *sym_phase_name(int phase);
int64_t sym_phase_ns(const sym_decoder *decoder, int phase);

/* Bytes that a matrix of these sizes takes. */
int64_t sym_packed_bytes(const sym_matrix *m);
/* Packs w [n][k] into strips of 16 features: its i-th strip becomes the (first + i * every)-th of the matrix.
 * Floats are rounded to the matrix' format; codes are chosen symmetrically by the largest weight of a group. */
void sym_pack(const sym_matrix *m, const float *w, int64_t n, int64_t k, int64_t first, int64_t every);
/* The same from codes [n][k] as a file has them, with the scales and mins (or null) of their groups [n][k / 32]. */
void sym_pack_codes(const sym_matrix *m, const uint8_t *codes, const float *scales, const float *mins, int64_t n,
                    int64_t k, int64_t first, int64_t every);
/* Output feature `row` of a matrix as k floats. */
void sym_unpack_row(const sym_matrix *m, int64_t row, int64_t k, float *out);

#endif
