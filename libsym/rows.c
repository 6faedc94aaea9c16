/* Arithmetic over rows of float32 logits: what a Dist offers. `rank.c` orders, `sampler.c` draws.
 *
 * The passes are in `lanes.h`, built for several sets of instructions; the best that this processor has is picked when
 * the library is loaded. The order of every sum is fixed there, so a row and a uniform number give the same token
 * in every build and on every machine. Exponentials are of x - max, so never above 1; 0 stands for a probability of
 * nothing (-inf, or far below). A row with NaN or +inf is refused: such a distribution has no meaning, and an argmax of
 * it would hide a fault.
 */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

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
    void (*moments)(const float *row, int64_t n, float max, double *total, double *weighted);
    int (*mask)(const float *row, int64_t n, const void *allowed, const void *also, float *out);
    int64_t (*collect)(const float *row, int64_t n, float least, float *values, int32_t *indices);
    void (*split)(const float *values, const float *weights, int64_t count, float low, float high, double *above,
                  double *within);
    int64_t (*keep_between)(const sym_list *from, float low, float high, sym_list *to);
    int64_t (*keep_best)(sym_list *list, sym_mark mark, float lightest);
};

static int32_t pack_order[256][8] __attribute__((aligned(32))); /* for each byte: the places of its bits that are set */

#define LANES_NAME(name) name##_plain
#include "lanes.h"
#undef LANES_NAME

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx2,popcnt")
#define LANES_256
#define LANES_NAME(name) name##_avx2
#include "lanes.h"
#undef LANES_NAME
#undef LANES_256
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,popcnt")
#define LANES_512
#define LANES_NAME(name) name##_avx512
#include "lanes.h"
#undef LANES_NAME
#undef LANES_512
#pragma GCC pop_options
#endif

static const struct passes *passes = &passes_plain;

/* Which instructions the passes use: 512, 256, or 0 for what every processor has. For tests: -ENOTSUP if this one has
 * not got them, and then nothing changes. */
int sym_rows_use(int vector_bits) {
    if (vector_bits == 0) {
        passes = &passes_plain;
        return 0;
    }
#ifdef __x86_64__
    __builtin_cpu_init();
    if (vector_bits == 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        passes = &passes_avx512;
        return 0;
    }
    if (vector_bits == 256 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt")) {
        passes = &passes_avx2;
        return 0;
    }
#endif
    return -ENOTSUP;
}

__attribute__((constructor)) static void choose_passes(void) {
    for (int byte = 0; byte < 256; byte++) {
        int count = 0;
        for (int bit = 0; bit < 8; bit++)
            if (byte >> bit & 1)
                pack_order[byte][count++] = bit;
    }
    if (sym_rows_use(512) != 0)
        sym_rows_use(256);
}

/* ---- a thread's own room ----------------------------------------------------------------------------- */

/* Kept from draw to draw: asking for it anew would cost page faults. Untouched parts of it take no memory. */
struct scratch {
    int64_t room;         /* entries */
    float *row;           /* a row with penalties, or without what is not allowed */
    float *groups;        /* the largest of each group, as if the groups were a row */
    double *masses;       /* of each block */
    sym_list list, other; /* each as long as a row */
    uint64_t *keys;       /* twice as long: for sorting */
};

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

static void *take(char **from, size_t bytes) {
    void *result = *from;
    *from += (bytes + 63) / 64 * 64;
    return result;
}

/* For rows of n; NULL: no memory. Valid until this thread asks for more. */
static struct scratch *scratch_for(int64_t n) {
    pthread_once(&scratch_once, make_scratch_key);
    struct scratch *scratch = pthread_getspecific(scratch_key);
    if (scratch != NULL && scratch->room >= n)
        return scratch;
    free(scratch);
    const size_t room = ((size_t)n + BLOCK) / BLOCK * BLOCK + LANES; /* whole blocks, and whole vectors at any place */
    char *at = aligned_alloc(64, (sizeof *scratch + 63) / 64 * 64 + room * 64);
    pthread_setspecific(scratch_key, at);
    if (at == NULL)
        return NULL;
    scratch = take(&at, sizeof *scratch);
    scratch->room = n;
    scratch->row = take(&at, room * sizeof(float));
    scratch->groups = take(&at, room * sizeof(float));
    scratch->masses = take(&at, room / BLOCK * sizeof(double));
    for (int i = 0; i < 2; i++) {
        sym_list *list = i == 0 ? &scratch->list : &scratch->other;
        list->values = take(&at, room * sizeof(float));
        list->weights = take(&at, room * sizeof(float));
        list->indices = take(&at, room * sizeof(int32_t));
    }
    scratch->keys = take(&at, 2 * room * sizeof(uint64_t));
    return scratch;
}

/* The row with -inf for what is not allowed (`allowed`: bits, NULL for all), in the thread's room. 0, -EDOM, -ENOMEM */
static int only_allowed(const float **row, int64_t n, const void *allowed) {
    if (allowed == NULL)
        return 0;
    struct scratch *scratch = scratch_for(n);
    if (scratch == NULL)
        return -ENOMEM;
    const int rc = passes->mask(*row, n, allowed, NULL, scratch->row);
    *row = scratch->row;
    return rc;
}

/* ---- what a row says, of the allowed tokens alone (NULL: of all) -------------------------------------- */

/* `*max` of a row that is a distribution; else -EDOM: NaN or +inf; -ERANGE: all are -inf. */
static int look(const float **row, int64_t n, const void *allowed, float *groups, float *max) {
    int rc = only_allowed(row, n, allowed);
    if (rc == 0)
        rc = passes->scan(*row, n, groups, max);
    return rc != 0 ? rc : *max == -INFINITY ? -ERANGE : 0;
}

/* The largest logit's index, the lowest of equals. */
int64_t sym_row_argmax(const float *row, int64_t n, const void *allowed) {
    float max;
    const int rc = look(&row, n, allowed, NULL, &max);
    return rc != 0 ? rc : passes->find(row, n, max);
}

int sym_row_logsumexp(const float *row, int64_t n, const void *allowed, double *result) {
    float max;
    const int rc = look(&row, n, allowed, NULL, &max);
    if (rc == 0)
        *result = (double)max + log(passes->mass(row, n, max, 1.0f, 0.0f, NULL));
    return rc;
}

/* In nats. */
int sym_row_entropy(const float *row, int64_t n, const void *allowed, double *result) {
    float max;
    double total, weighted;
    const int rc = look(&row, n, allowed, NULL, &max);
    if (rc != 0)
        return rc;
    passes->moments(row, n, max, &total, &weighted);
    *result = log(total) - weighted / total;
    return 0;
}

int sym_row_softmax(const float *row, int64_t n, const void *allowed, float *out) {
    float max;
    const int rc = look(&row, n, allowed, NULL, &max);
    if (rc != 0)
        return rc;
    const int64_t whole = n / LANES * LANES;
    float last[LANES]; /* `out` ends with the row */
    double total = passes->weigh(row, whole, max, 1.0f, out);
    total += passes->weigh(row + whole, n - whole, max, 1.0f, last);
    memcpy(out + whole, last, (size_t)(n - whole) * sizeof *out);
    passes->scale(out, n, (float)(1.0 / total));
    return 0;
}
