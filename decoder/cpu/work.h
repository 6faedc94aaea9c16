/* What the kernels of every instruction set are asked to do. */

#ifndef SYMPHONY_WORK_H
#define SYMPHONY_WORK_H

#include <stdint.h>

#include "step.h"

#define PANEL 32 /* output features that a packed panel holds side by side */
#define STEP 128 /* bytes of a panel that one step of a product reads: four bytes for each feature */

/* Entries after which a running softmax starts afresh, to be merged by log-sum-exp. The boundaries are
 * part of the arithmetic: they depend on nothing but the entry's index, so that a row's bits do not
 * depend on how many threads shared its work, or on who shares its pages. */
#define SPLIT 256
#define BLOCK 128 /* entries whose scores are weighed together; a split is a whole number of them */
#define SPLIT_PAGES (SPLIT / SYM_PAGE_ENTRIES)
#define BLOCK_PAGES (BLOCK / SYM_PAGE_ENTRIES)

#define CODE_UNIT 0.00390625f /* of scales and mins */

enum epilogue {
    PUT,   /* out = product (+ bias) */
    ADD,   /* out += product */
    GATED, /* out = activation(gate) * up; a panel is 16 gate features and their 16 up features */
};

enum activation { SILU, GELU_TANH };

/* What a row of 8-bit activations carries behind its codes: for each group of inputs, or (rotated) once. */
struct group_info {
    float scale, scaled_sum;  /* a code's value; the sum of the group's values */
    int32_t offset4, offset8; /* -8 and -128 times the sum of the codes: what weights around zero start from; */
                              /* rotated: offset4 is -1 times the sum */
};

/* out[rows, n] (epilogue) a[rows, k] . w[n, k]^T */
struct product {
    const char *a; /* rows as prepare() makes them for w's format, a_stride bytes apart */
    long a_stride;
    const sym_matrix *w;
    void *out; /* rows out_stride bytes apart, or null: then out_rows says where each is */
    long out_stride;
    float *const *out_rows;
    const float *bias;
    float softcap; /* 0: none */
    enum epilogue epilogue;
    enum activation activation;
    int narrow_out; /* out is bfloat16 */
};

/* Query heads of one KV head, for some rows, over entries of one page table. */
struct attention {
    int format; /* of pages: FLOAT32 or BFLOAT16 */
    long rows, heads, head_dim;
    const char *q;       /* [rows * heads][head_dim] in the pages' format */
    const long *limits;  /* [rows]: a row sees entries below its limit, */
    long window;         /* not further back than that (0: all), */
    const uint32_t *const *masks; /* [rows]: and, unless null, those whose bit is set; a word a page */
    float scale, softcap;
    const int32_t *pages;
    const char *k, *v; /* this layer's and head's block in page 0 */
    long page_bytes, block_bytes;
};

/* A softmax in progress of rows * heads query vectors; one that has seen nothing has a max of -infinity. */
struct softmax {
    float *max, *sum; /* [vectors] */
    float *value;     /* [vectors][head_dim], not yet divided by sum */
};

#define ROOM(vectors) ((vectors) * (BLOCK + 16 + 1)) /* floats that attend() needs beside */

struct kernels {
    const char *name;
    /* One panel's columns of rows [first, last). */
    void (*product)(const struct product *p, long panel, long first, long last);
    void (*rms_norm)(const float *x, const float *weight, float eps, long n, float *out);
    /* A row of n floats as a product with these weights (not float32) reads it; `scratch` holds as many, and may be x itself. */
    void (*prepare)(const sym_matrix *m, const float *x, long n, void *to, float *scratch);
    void (*to_bfloat16)(const float *x, long n, uint16_t *to);
    /* One split, from nothing. */
    void (*attend)(const struct attention *a, long split, struct softmax *into, float *room);
    /* Adds a later part of the same entries to an earlier one. */
    void (*merge)(struct softmax *into, const struct softmax *from, long vectors, long head_dim);
    /* One row's heads, divided by their sums, as floats or (narrow) bfloat16. */
    void (*finish)(const struct softmax *from, long first, long heads, long head_dim, void *out, int narrow);
    /* The softmax of each vector over all that it sees: its highest score, as a power of two, and 1 / its sum of weights. */
    void (*measure)(const struct attention *a, float *max, float *share, float *room);
    /* Adds to mass[0 .. entries - 1] what all vectors, one after the other, give the entries from `first` on; at most BLOCK,
     * and `first` begins one. */
    void (*spread)(const struct attention *a, long first, long entries, const float *max, const float *share,
                   float *mass, float *room);
};

#endif
