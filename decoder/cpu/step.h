/* The CPU step's interface to Python. cffi reads this file, so it has declarations only. */
#ifndef SYMPHONY_STEP_H
#define SYMPHONY_STEP_H

#include "steps.h"

/* Layout of a matrix in memory. A panel has 32 output features side by side. A product reads a panel in steps of 128
 * bytes, four for each feature: one float32, two bfloat16, or codes.
 *
 * Codes of `bits` bits (4, 5, 6 or 8) come in blocks of 32 inputs. `group` inputs (16 or 32) share a scale and, if
 * `has_mins`, a min. With mins, a weight is scale * code + min. Without mins, a weight is scale * (code - zero), and the
 * zero is the middle code, 2^(bits - 1). A block has the scales of each of its groups for 32 features, then the mins in
 * the same way, then the codes. Scales and mins are float16 in units of 2^-8. With `has_supers` they are int8 instead,
 * factors of a super-scale and a super-min: these are such float16 numbers, which stand before each eighth block. With
 * `levels` (1 or 2) a code of 4 bits stands for a level of `code_levels` in panels.h, and a weight is scale * level.
 *
 * Codes of 8 bits fill eight steps, four inputs in each. Other codes fill four steps with their low 4 bits, eight inputs
 * in each, the first four of them in the low nibbles. One or two steps follow with the high bits: the bits of input i
 * are in byte i % 4 of a feature's word, at bit i / 4 (5 bits), or at bit i / 4 % 4 * 2 of word i / 16 (6 bits).
 *
 * Rotated codes are 8-bit codes of whole rows. Behind the codes of a panel are 32 float32 scales and 32 int32 zeros. A
 * weight is scale * (code - zero), and the 256 codes cover the range of the row's weights. A row w is stored as the
 * codes of R w, and activations x are coded as R x. R is symmetric and its own inverse, so w . x = R w . R x. The
 * rotation spreads the few large activations of a row over the whole row. Without the rotation, one scale for each row
 * costs 4 % of perplexity. R is the Kronecker product of two matrices: the Hadamard matrix of the largest power of two
 * that divides k, and the discrete Hartley matrix `mix` of the odd factor. */

/* Revision of this layout and of what sym_pack writes. Files with panels of another revision are packed anew. */
#define SYM_PANELS_REVISION 2
#define SYM_FLOAT32 0
#define SYM_BFLOAT16 1
#define SYM_CODES 2
#define SYM_ROTATED8 3
#define SYM_BLOCK 32
#define SYM_SUPER 256
#define SYM_MAX_MIX 256
#define SYM_MAX_INPUTS 32768

typedef struct {
    int32_t format, n, k; /* k includes padding with zeros: to whole steps, or to whole tiles of AMX */
    int32_t bits, group, has_mins, has_supers, levels; /* of SYM_CODES; codes of 8 bits have no supers */
    const float *mix; /* [odd][odd] for the odd factor of the inputs; null: the factor is 1, or more than SYM_MAX_MIX */
    char *data;
} sym_matrix;

typedef struct {
    int32_t vocab, hidden, layers, heads, kv_heads, head_dim, ffn;
    int32_t activation; /* 0: SiLU, 1: GELU by tanh */
    int32_t window; /* entries that a row of a sliding layer sees, including its own */
    int32_t kv_format; /* format of pages: SYM_FLOAT32 or SYM_BFLOAT16 */
    float rms_eps, embed_scale, attn_scale, attn_softcap, final_softcap;
} sym_shape;

/* Tensors of a layer. A pointer is null if the model has no such tensor. */
typedef struct {
    const float *attn_norm, *post_attn_norm, *ffn_norm, *post_ffn_norm; /* [hidden] */
    const float *q_norm, *k_norm; /* [head_dim] */
    const float *qkv_bias;
    sym_matrix qkv[3]; /* one matrix, or one for each format among Q, K and V; unused matrices have no features */
    sym_matrix o, gate_up, down;
    int32_t sliding;
} sym_layer;

typedef struct {
    sym_shape shape;
    const sym_layer *layers;
    sym_matrix embed, head; /* one matrix for both if they are tied */
    const float *final_norm;
    const double *frequencies[2]; /* [head_dim / 2] for full and for sliding layers */
    float rotation_factors[2]; /* factors of cosines and sines */
    char *arena; /* [pages][layers][2][kv_heads][32 * head_dim] */
} sym_model;

/* Return the name of the instruction set `wanted`, or of the best one on this machine if `wanted` is null. Return null
 * if this machine cannot run that set. */
const char *sym_isa(const char *wanted);

/* Make a decoder. All memory that the model points to must outlive the decoder. Steps of fewer than `solo_work`
 * multiply-adds run on the caller's thread alone: waking other threads would take longer. Return null and set errno on
 * failure. */
sym_decoder *sym_decoder_new(const sym_model *model, int threads, const char *isa, int64_t solo_work);
void sym_decoder_free(sym_decoder *decoder);
/* Make a decoder without a model. Such a decoder serves sym_parallel, and cannot compute steps. */
sym_decoder *sym_crew_new(int threads);

/* Compute a batch. The function's type is sym_step_function. The caller has checked that every index of the batch is in
 * range. */
int sym_step(sym_decoder *decoder, const sym_batch *batch);

/* Run work on all threads. The function's type is sym_parallel_function. The thread that computes steps calls the
 * function between two steps. Soon after a step, the other threads are still awake. */
void sym_parallel(sym_decoder *decoder, void (*work)(void *context, int32_t index), void *context, int32_t count);

/* Return the number of rows of the last step that read pages together with rows of another file. */
int64_t sym_shared_rows(const sym_decoder *decoder);

/* Nanoseconds that thread 0 has spent in each phase in all steps of the decoder, barriers included. */
int sym_num_phases(void);
const char *sym_phase_name(int phase);
int64_t sym_phase_ns(const sym_decoder *decoder, int phase);

/* Return the bytes of a matrix with this format, n and k. */
int64_t sym_packed_bytes(const sym_matrix *m);
/* Pack w [n][k] into strips of 16 features: strip i of w becomes strip first + i * every of the matrix. Floats are
 * rounded to the matrix's format. Codes of 8 bits lie around zero, and the largest weight of a group determines its
 * scale. Codes of 4 bits need a matrix with mins; the scale and min of a group have nearly the least squared error. */
void sym_pack(const sym_matrix *m, const float *w, int64_t n, int64_t k, int64_t first, int64_t every);
/* Codes of a file. */
typedef struct {
    const uint8_t *codes; /* [n][k] */
    const float *scales, *mins; /* [n][k / group], or the supers [n][k / 256]; mins are null if the matrix has none */
    const int8_t *scale_codes, *min_codes; /* [n][k / group]; null without supers */
} sym_codes;

/* Pack codes of a file in the same way. */
void sym_pack_codes(const sym_matrix *m, const sym_codes *codes, int64_t n, int64_t k, int64_t first, int64_t every);
/* Pack the blocks of Q4_0 as a file has them: a float16 scale, and 16 bytes with the codes of the first 16 inputs in
 * their low nibbles and of the last 16 in their high nibbles. The result equals that of sym_pack_codes. Return
 * the largest magnitude of the scales; infinity or NaN if there is one. */
float sym_pack_q4_0(const sym_matrix *m, const uint8_t *blocks, int64_t n, int64_t k, int64_t first, int64_t every);
/* Unpack output feature `row` of a matrix to k floats. */
void sym_unpack_row(const sym_matrix *m, int64_t row, int64_t k, float *out);

/* Fill a page of an arena: copy entry slots[i] of page sources[i] to entry i. All later entries become zeros. The target
 * is no source. Of the shape, the function reads what describes pages. */
void sym_gather(const sym_shape *shape, char *arena, int64_t target, const int32_t *sources, const int32_t *slots,
                int64_t count);

#endif
