/* What the kernels of every instruction set are asked to do. */

#ifndef SYMPHONY_WORK_H
#define SYMPHONY_WORK_H

#include <stdint.h>

#define PAGE 32  /* entries in a page: libsym.abi.PAGE_ENTRIES */
#define PANEL 32 /* output features that a packed panel holds side by side */

/* Entries after which a running softmax starts afresh, to be merged by log-sum-exp. The boundaries are
 * part of the arithmetic: they depend on nothing but the entry's index, so that a row's bits do not
 * depend on how many threads shared its work. 256 entries of one head are 128 KiB of K and V. */
#define SPLIT 256

enum epilogue {
    PUT,     /* out = product */
    ADD,     /* out += product */
    SWIGLU,  /* out = silu(gate) * up; a panel is 16 gate features and their 16 up features */
};

/* out[rows, n] (epilogue) a[rows, k] . packed[n, k]^T */
struct product {
    const float *a;
    long a_stride;
    const float *packed; /* [n / PANEL, rounded up][k][PANEL] */
    long k, n;
    float *out; /* rows out_stride apart, or null: then out_rows says where each is */
    long out_stride;
    float *const *out_rows;
    enum epilogue epilogue;
};

/* Query heads of one KV head, for consecutive rows of one chunk, over entries of one split. */
struct attention {
    const float *q; /* the first row's query heads of this KV head: [heads][head_dim] */
    long q_stride;
    long rows, heads, head_dim;
    float scale;
    long limit; /* the first row sees entries 0 .. limit - 1, the next one more */
    const int32_t *pages;
    const float *k, *v; /* this layer's and head's block in page 0 */
    long page_floats;
};

/* A softmax in progress of rows * heads query vectors. */
struct softmax {
    float *max, *sum; /* [vectors] */
    float *value;     /* [vectors][head_dim], not yet divided by sum */
};

#define ROOM(vectors, head_dim) ((vectors) * ((head_dim) + PAGE + 16 + 1) + 16)

struct kernels {
    const char *name;
    /* One panel's columns of rows [first, last). */
    void (*product)(const struct product *p, long panel, long first, long last);
    void (*rms_norm)(const float *x, const float *weight, float eps, long n, float *out);
    /* One split from nothing; `room` holds ROOM(vectors, head_dim) floats. */
    void (*attend)(const struct attention *a, long split, struct softmax *into, float *room);
    /* Adds a later split to an earlier one. */
    void (*merge)(struct softmax *into, const struct softmax *from, long first, long vectors, long head_dim);
    void (*finish)(const struct softmax *from, const struct attention *a, float *out, long out_stride);
};

#endif
