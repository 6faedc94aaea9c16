/* The interface of the kernels, which every instruction set implements. */

#ifndef SYMPHONY_WORK_H
#define SYMPHONY_WORK_H

#include <stdint.h>

#include "step.h"

#define PANEL 32 /* output features that a packed panel holds side by side */
#define STEP 128 /* bytes of a panel that one step of a product reads: four bytes for each feature */

/* Entries of a split. Each split has a softmax of its own, and log-sum-exp merges the softmaxes. The boundaries are
 * part of the arithmetic: they depend only on the entry's index. So a row's bits do not depend on the number of threads
 * that shared its work, or on the files that share its pages. */
#define SPLIT 256
#define BLOCK 128 /* entries whose scores become weights together; a split is a whole number of blocks */
#define SPLIT_PAGES (SPLIT / SYM_PAGE_ENTRIES)
#define BLOCK_PAGES (BLOCK / SYM_PAGE_ENTRIES)

#define CODE_UNIT 0.00390625f /* unit of scales and mins */

enum epilogue {
    PUT,   /* out = product (+ bias) */
    ADD,   /* out += product */
    GATED, /* out = activation(gate) * up; a panel is 16 gate features and their 16 up features */
};

enum activation { SILU, GELU_TANH };

enum scale_form { HALVES, FACTORS, FLOATS }; /* of scales and mins of codes: FLOATS in widened panels alone */

/* Record behind the codes of a row of 8-bit activations: one for each block of inputs, or (rotated) one for the row. */
struct block_info {
    float scale, scaled_sum; /* the value of code 1; the sum of the block's values */
    int32_t less, less_low; /* -1 times the sum of the codes, and of the first 16 codes alone: weights without mins */
    /* have sums that start with the zero times this number */
};

/* out[rows, n] (epilogue) a[rows, k] . w[n, k]^T */
struct product {
    const char *a; /* rows in the form that prepare() makes for w's format, a_stride bytes apart */
    long a_stride;
    const sym_matrix *w;
    void *out; /* rows that are out_stride bytes apart; null: out_rows points to each row */
    long out_stride;
    float *const *out_rows;
    const float *bias;
    float softcap; /* 0: none */
    const char *ahead; /* weights that the thread reads next: a panel's kernel prefetches them */
    enum epilogue epilogue;
    enum activation activation;
    int narrow_out; /* out is bfloat16 */
};

/* Query heads of one KV head, for some rows, over entries of one page table. */
struct attention {
    int format; /* format of pages: FLOAT32 or BFLOAT16 */
    long rows, heads, head_dim;
    const char *q; /* [rows * heads][head_dim] in the pages' format */
    const long *limits; /* [rows]: a row sees entries below its limit */
    long window; /* a row sees only the last `window` entries below its limit; 0: all */
    const uint32_t *const
        *masks; /* [rows]: a row sees only entries whose bit is set, a word for each page; null: all */
    float scale, softcap;
    const int32_t *pages;
    const char *k, *v; /* the block of this layer and head in page 0 */
    long page_bytes, block_bytes;
};

/* The partial softmaxes of rows * heads query vectors. A vector that has not seen an entry has a max of -infinity. */
struct softmax {
    float *max, *sum; /* [vectors] */
    float *value; /* [vectors][head_dim], not yet divided by sum */
};

#define ROOM(vectors) ((vectors) * (BLOCK + 16 + 1)) /* floats of scratch memory for attend() */

struct kernels {
    const char *name;
    /* Compute one panel's columns for rows [first, last). */
    void (*product)(const struct product *p, long panel, long first, long last);
    void (*rms_norm)(const float *x, const float *weight, float eps, long n, float *out);
    /* Convert a row of n floats to the form that a product with these weights (not float32) reads. `scratch` holds n
     * floats, and may be x itself. */
    void (*prepare)(const sym_matrix *m, const float *x, long n, void *to, float *scratch);
    void (*to_bfloat16)(const float *x, long n, uint16_t *to);
    /* Rotate pairs (i, i + half) by the angles whose cosines, and behind them sines, are given: the rotate-half
     * convention. `out` may be x. */
    void (*rotate)(const float *x, const float *cosines, long half, float *out);
    /* Compute the softmaxes of one split. */
    void (*attend)(const struct attention *a, long split, struct softmax *into, float *room);
    /* Merge the softmaxes of later entries into those of earlier entries. */
    void (*merge)(struct softmax *into, const struct softmax *from, long vectors, long head_dim);
    /* Divide the values of one row's heads by their sums. The results are floats or (narrow) bfloat16. */
    void (*finish)(const struct softmax *from, long first, long heads, long head_dim, void *out, int narrow);
    /* Find each vector's highest score (as an exponent of 2), and 1 / its sum of weights, over all entries that the
     * vector sees. */
    void (*measure)(const struct attention *a, float *max, float *share, float *room);
    /* Add the weights of all vectors, one after the other, to the mass of `entries` entries from `first` on. The
     * entries lie in one block, and `first` is its first entry. */
    void (*spread)(const struct attention *a, long first, long entries, const float *max, const float *share,
                   float *mass, float *room);
};

#endif
