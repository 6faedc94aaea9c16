/* Passes over a row of logits, and where they find room. `lanes.h` has them, a unit for each set of instructions
 * (lanes_*.c); the best that this processor has is picked when the library is loaded. */
#ifndef SYM_PASSES_H
#define SYM_PASSES_H

#include <stdint.h>

#define LANES 16
#define BLOCK 512 /* entries whose mass is summed as one piece: the draw walks blocks, then one block */

/* Entries of a row: side by side for the lanes, in the order of their indices, or of their ranks once sorted. */
typedef struct sym_list {
    float *values; /* logits */
    float *weights;
    int32_t *indices;
    int64_t count;
    int sorted;
} sym_list;

/* A place in the order of ranks: those of a larger value come before it, and its equals up to the index. */
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
extern const struct passes *passes; /* those in use */

extern int32_t pack_order[256][8]; /* for each byte: the places of its bits that are set */

/* Kept from draw to draw: asking for it anew would cost page faults. Untouched parts of it take no memory. */
struct scratch {
    int64_t room;         /* entries */
    float *row;           /* a row with penalties, or without what is not allowed */
    float *groups;        /* the largest of each group, as if the groups were a row */
    double *masses;       /* of each block */
    sym_list list, other; /* each as long as a row */
    uint64_t *keys;       /* twice as long: for sorting */
};

/* For rows of n; NULL: no memory. Valid until this thread asks for more. */
struct scratch *scratch_for(int64_t n);

#endif
