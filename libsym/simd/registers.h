/* Vector registers as vector types of GCC, and the basic operations of all vectorised kernels.
 *
 * A unit is compiled for one set of instructions. Before it includes this file, the unit defines WIDTH, the number of
 * 32-bit lanes in a register: 16 for AVX-512, 8 for AVX2, 4 for any processor. Kernels use the operators of C. All
 * units are compiled with -ffp-contract=off, so x * y + z rounds twice. fused() rounds once. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if WIDTH == 16
#define MM(name) _mm512_##name
#elif WIDTH == 8
#define MM(name) _mm256_##name
#elif defined __SSE2__
#define MM(name) _mm_##name
#endif

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
/* The same types without alignment, for loads and stores. */
typedef float vf_at __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t vi_at __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static const int32_t lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const int32_t lane_bits[8] = {1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7};

static inline vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* Returns the lanes of `yes` whose bits are set, and the other lanes of `no`. */
static inline vf pick(unsigned bits, vf yes, vf no) {
#if WIDTH == 16
    return _mm512_mask_mov_ps(no, (__mmask16)bits, yes);
#else
    return choose((((vi){0} + (int32_t)bits) & *(const vi_at *)lane_bits) != 0, yes, no);
#endif
}

#ifdef MM
/* a > b ? a : b, and a < b ? a : b. If either is NaN, the result is b. */
static inline vf larger(vf a, vf b) { return MM(max_ps)(a, b); }
static inline vf smaller(vf a, vf b) { return MM(min_ps)(a, b); }
#else
static inline vf larger(vf a, vf b) { return choose(a > b, a, b); }
static inline vf smaller(vf a, vf b) { return choose(a < b, a, b); }
#endif

/* x * y + z, rounded once if the instruction set allows. */
static inline vf fused(vf x, vf y, vf z) {
#if WIDTH > 4
    return MM(fmadd_ps)(x, y, z);
#elif defined __FP_FAST_FMAF
    for (int lane = 0; lane < WIDTH; lane++)
        z[lane] = __builtin_fmaf(x[lane], y[lane], z[lane]);
    return z;
#else
    return x * y + z;
#endif
}
