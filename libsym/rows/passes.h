/* Passes over a row of logits, and their scratch memory. `lanes.h` has the passes. Each lanes_*.c compiles them for one
 * instruction set. The best set of this processor is chosen when the library is loaded. */
#ifndef SYM_PASSES_H
#define SYM_PASSES_H

#include <stdint.h>

#define LANES 16
#define BLOCK 512 /* entries whose mass is summed together: a draw searches the blocks, then inside one block */

/* Entries of a row, as one array for each field. The entries are in the order of their indices, or by rank if
 * `sorted`. */
typedef struct sym_list {
    float *values; /* logits */
    float *weights;
    int32_t *indices;
    int64_t count;
    int sorted;
} sym_list;

/* A place in the order of ranks: after all larger values, and after equal values up to `index`. */
typedef struct sym_mark {
    float value;
    int32_t index;
} sym_mark;

struct passes {
    int (*scan)(const float *row, int64_t n, float *groups, float *max);
    int64_t (*find)(const float *row, int64_t n, float x);
    double (*mass)(const float *row, int64_t n, float max, float inverse_temperature, float floor, double *masses);
    double (*weigh)(const float *row, int64_t n, float max, float inverse_temperature, float *out);
    void (*scale)(float *row, int64_t n, float factor);
    void (*moments)(const float *row, int64_t n, float max, float inverse_temperature, double *total, double *weighted);
    int (*mask)(const float *row, int64_t n, const void *allowed, const void *also, float *out);
    int64_t (*collect)(const float *row, int64_t n, float least, float *values, int32_t *indices);
    void (*split)(const float *values, const float *weights, int64_t count, float low, float high, double *above,
                  double *within);
    int64_t (*keep_between)(const sym_list *from, float low, float high, sym_list *to);
    int64_t (*keep_best)(sym_list *list, sym_mark mark, float lightest);
};

extern const struct passes passes_plain;
#ifdef __x86_64__
extern const struct passes passes_avx2, passes_avx512;
#endif
extern const struct passes *passes; /* the passes for the chosen instruction set */

extern int32_t pack_order[256][8]; /* for each byte: the positions of its set bits */

/* Scratch memory of a thread. The thread keeps the memory from draw to draw, because a new allocation would cost page
 * faults. Untouched parts take no memory. */
struct scratch {
    int64_t room; /* capacity in entries */
    float *row; /* a row with penalties, or with -inf for tokens that are not allowed */
    float *groups; /* the largest logit of each group of entries */
    double *masses; /* the mass of each block */
    sym_list list, other; /* each as long as a row */
    uint64_t *keys; /* twice as long as a row, for sorting */
};

/* Returns the thread's scratch memory for rows of n entries; NULL: no memory. Valid until the thread asks for more. */
struct scratch *scratch_for(int64_t n);

#endif
