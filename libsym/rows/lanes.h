/* Passes over rows of float32, in 16 lanes. Included by a unit for each set of instructions (lanes_*.c), with
 * LANES_NAME(name) naming its functions and LANES_512 or LANES_256 saying what there is; `passes.c` picks one.
 *
 * The same bits come out of all of them: every sum is made in the same 16 lanes and the same blocks, the compiler
 * may neither reorder nor contract (no fast-math, -ffp-contract=off), and where an instruction is named here (the
 * larger of two, the bits of a comparison, packing) it rounds nothing. A test runs each and compares.
 *
 * A sum is made in float32 within a lane of a block (32 additions at most) and in double from there on: converting
 * every entry would take a third of the time, and the exponentials are good to 2 ulp only.
 */
#include "passes.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define F LANES_NAME
#if defined LANES_512
#define WIDTH 16
#elif defined LANES_256
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define vf F(vf)
#define vi F(vi)
#define vf_at F(vf_at)
#define vi_at F(vi_at)
#define vu F(vu)

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
typedef float vf_at __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t vi_at __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static inline vf F(choose)(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* The lanes from `n` on are -inf: never the largest, and without a mass. */
static inline vf F(load)(const float *row, int64_t n) {
    if (n >= WIDTH)
        return *(const vf_at *)row;
    vf result = (vf){0} - INFINITY;
    if (n > 0)
        memcpy(&result, row, (size_t)n * sizeof *row);
    return result;
}

/* a > b ? a : b in each lane. */
static inline vf F(larger)(vf a, vf b) {
#if defined LANES_512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined LANES_256
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined __SSE2__
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return F(choose)(a > b, a, b);
#endif
}

/* The lanes of a comparison as bits. */
static inline uint32_t F(bits)(vi mask) {
#if defined LANES_512
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined LANES_256
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined __SSE2__
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t result = 0;
    for (int lane = 0; lane < WIDTH; lane++)
        result |= (uint32_t)(mask[lane] & 1) << lane;
    return result;
#endif
}

/* The bits of the lanes before `n`. */
static inline uint32_t F(first)(uint32_t bits, int64_t n) { return n < WIDTH ? bits & ((1u << n) - 1) : bits; }

/* The lanes whose bit is set, side by side at `to`; places after them, up to WIDTH, may be overwritten, too. */
static inline void F(pack)(float *to, vf x, uint32_t bits) {
#if defined LANES_512
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)bits, (__m512)x));
#elif defined LANES_256
    const __m256i order = _mm256_load_si256((const __m256i *)pack_order[bits]);
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)x, order));
#else
    for (; bits != 0; bits &= bits - 1)
        *to++ = x[__builtin_ctz(bits)];
#endif
}

/* exp(x) for x <= 0, to 2 ulp (Cephes' polynomial); below -87, and for NaN, it is 0. */
static inline vf F(exp)(vf x) {
    const vi in_range = x > -87.0f;
    const vf shifted = x * 1.44269504088896341f + 12582912.0f; /* + 1.5 * 2^23: rounds, into the low bits */
    const vf n = shifted - 12582912.0f;
    const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = (vf){0} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const vu scaled = (vu)p + ((vu)shifted << 23); /* the bits of 12582912.0f vanish in the shift */
    return (vf)(scaled & (vu)in_range);
}

/* Adds to WIDTH sums in double. */
static inline void F(add)(double *sums, vf x) {
#if defined LANES_512
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x))));
    _mm512_storeu_pd(sums + 8,
                     _mm512_add_pd(_mm512_loadu_pd(sums + 8), _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1))));
#elif defined LANES_256
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x))));
    _mm256_storeu_pd(sums + 4,
                     _mm256_add_pd(_mm256_loadu_pd(sums + 4), _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1))));
#elif defined __SSE2__
    _mm_storeu_pd(sums, _mm_add_pd(_mm_loadu_pd(sums), _mm_cvtps_pd((__m128)x)));
    _mm_storeu_pd(sums + 2, _mm_add_pd(_mm_loadu_pd(sums + 2), _mm_cvtps_pd(_mm_movehl_ps((__m128)x, (__m128)x))));
#else
    for (int lane = 0; lane < WIDTH; lane++)
        sums[lane] += (double)x[lane];
#endif
}

static inline double F(sum)(const float *lanes) {
    double result = 0.0;
    for (int lane = 0; lane < LANES; lane++)
        result += (double)lanes[lane];
    return result;
}

/* The largest logit of each group: lane i of a block. 0; -EDOM: a NaN or +inf. */
static int F(scan)(const float *row, int64_t n, float *groups, float *max) {
    vf best = (vf){0} - INFINITY;
    vi fine = ~(vi){0};
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        for (int part = 0; part < LANES; part += WIDTH) {
            vf even = (vf){0} - INFINITY, odd = even; /* two, for a maximum waits for the one before */
            for (int64_t i = start + part; i < end; i += 2 * LANES) {
                const vf x = F(load)(row + i, end - i), y = F(load)(row + i + LANES, end - i - LANES);
                fine &= (x < INFINITY) & (y < INFINITY);
                even = F(larger)(x, even);
                odd = F(larger)(y, odd);
            }
            even = F(larger)(odd, even);
            best = F(larger)(even, best);
            if (groups != NULL)
                *(vf_at *)(groups + start / BLOCK * LANES + part) = even;
        }
    }
    *max = -INFINITY;
    for (int lane = 0; lane < WIDTH; lane++)
        *max = best[lane] > *max ? best[lane] : *max;
    return F(bits)(~fine) == 0 ? 0 : -EDOM;
}

/* The first entry that equals x; n: none. */
static int64_t F(find)(const float *row, int64_t n, float x) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        const uint32_t bits = F(first)(F(bits)(F(load)(row + i, n - i) == x), n - i);
        if (bits != 0)
            return i + __builtin_ctz(bits);
    }
    return n;
}

/* exp((x - max) * inverse_temperature), or 0 where that is less than `floor`: its sum over a whole row, and over
 * each block if `masses` is given. */
static double F(mass)(const float *row, int64_t n, float max, float inverse_temperature, float floor, double *masses) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[LANES];
        for (int part = 0; part < LANES; part += WIDTH) {
            vf sum = {0};
            for (int64_t i = start + part; i < end; i += LANES) {
                const vf e = F(exp)((F(load)(row + i, end - i) - max) * inverse_temperature);
                sum += (vf)((vi)e & (e >= floor));
            }
            *(vf_at *)(lanes + part) = sum;
        }
        const double here = F(sum)(lanes);
        total += here;
        if (masses != NULL)
            masses[start / BLOCK] = here;
    }
    return total;
}

/* The same exponentials, stored, and their sum. `out` has room for whole 16 lanes. */
static double F(weigh)(const float *row, int64_t n, float max, float inverse_temperature, float *out) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[LANES];
        for (int part = 0; part < LANES; part += WIDTH) {
            vf sum = {0};
            for (int64_t i = start + part; i < end; i += LANES) {
                const vf e = F(exp)((F(load)(row + i, end - i) - max) * inverse_temperature);
                sum += e;
                *(vf_at *)(out + i) = e;
            }
            *(vf_at *)(lanes + part) = sum;
        }
        total += F(sum)(lanes);
    }
    return total;
}

static void F(scale)(float *row, int64_t n, float factor) {
    for (int64_t i = 0; i + WIDTH <= n; i += WIDTH)
        *(vf_at *)(row + i) *= factor;
    for (int64_t i = n / WIDTH * WIDTH; i < n; i++)
        row[i] *= factor;
}

/* With s = (x - max) * inverse_temperature, the sums of exp(s), and of exp(s) * s. */
static void F(moments)(const float *row, int64_t n, float max, float inverse_temperature, double *total,
                       double *weighted) {
    *total = *weighted = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[LANES], other_lanes[LANES];
        for (int part = 0; part < LANES; part += WIDTH) {
            vf sum = {0}, products = {0};
            for (int64_t i = start + part; i < end; i += LANES) {
                const vf below = (F(load)(row + i, end - i) - max) * inverse_temperature;
                const vf e = F(exp)(below);
                sum += e;
                products += (vf)((vi)(e * below) & (e > 0.0f));
            }
            *(vf_at *)(lanes + part) = sum;
            *(vf_at *)(other_lanes + part) = products;
        }
        *total += F(sum)(lanes);
        *weighted += F(sum)(other_lanes);
    }
}

/* The row with -inf where either bitmask (NULL: all bits set) has no bit. -EDOM: a NaN or +inf, anywhere. */
static int F(mask)(const float *row, int64_t n, const void *allowed, const void *also, float *out) {
    vi fine = ~(vi){0}, lane_bits = {0};
    for (int lane = 0; lane < WIDTH; lane++)
        lane_bits[lane] = 1 << lane;
    for (int64_t i = 0; i < n; i += LANES) {
        uint16_t bits = 0xffff, others = 0xffff;
        if (allowed != NULL)
            memcpy(&bits, (const char *)allowed + i / 8, sizeof bits);
        if (also != NULL)
            memcpy(&others, (const char *)also + i / 8, sizeof others);
        for (int part = 0; part < LANES; part += WIDTH) {
            const vf x = F(load)(row + i + part, n - i - part);
            const vi is_on = (((vi){0} + (int32_t)((bits & others) >> part)) & lane_bits) != 0;
            fine &= x < INFINITY;
            *(vf_at *)(out + i + part) = F(choose)(is_on, x, (vf){0} - INFINITY);
        }
    }
    return F(bits)(~fine) == 0 ? 0 : -EDOM;
}

/* ---- lists of entries, see rank.c: their arrays are longer than they are, by 16 lanes at least -------------- */

/* Those of the row that reach `least`. */
static int64_t F(collect)(const float *row, int64_t n, float least, float *values, int32_t *indices) {
    vi index = {0};
    for (int lane = 0; lane < WIDTH; lane++)
        index[lane] = lane;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += WIDTH, index += WIDTH) {
        const vf x = F(load)(row + i, n - i);
        const uint32_t bits = F(first)(F(bits)(x >= least), n - i);
        if (bits == 0)
            continue;
        F(pack)(values + count, x, bits);
        F(pack)((float *)indices + count, (vf)index, bits);
        count += __builtin_popcount(bits);
    }
    return count;
}

/* The weights of values above `high`, and of those from `low` to `high`: in double, for places in the order are found
 * by differences of such sums, also where what is left of them is little. */
static void F(split)(const float *values, const float *weights, int64_t count, float low, float high, double *above,
                     double *within) {
    double over[LANES] = {0}, between[LANES] = {0};
    for (int part = 0; part < LANES; part += WIDTH) {
        for (int64_t i = part; i < count; i += LANES) {
            const vf x = F(load)(values + i, count - i), w = F(load)(weights + i, count - i);
            const vi is_over = x > high;
            const vi is_from = (x >= low) & (w >= 0.0f); /* lanes after the end weigh -inf */
            F(add)(over + part, (vf)((vi)w & is_over));
            F(add)(between + part, (vf)((vi)w & is_from & ~is_over));
        }
    }
    *above = *within = 0.0;
    for (int lane = 0; lane < LANES; lane++) {
        *above += over[lane];
        *within += between[lane];
    }
}

/* Appends the entries at i whose bits are set; gives the new count. */
static inline int64_t F(append)(sym_list *to, int64_t count, const sym_list *from, int64_t i, uint32_t bits) {
    if (bits == 0)
        return count; /* so a list that nothing is kept of stays as it is */
    const vf x = *(const vf_at *)(from->values + i), w = *(const vf_at *)(from->weights + i);
    const vi index = *(const vi_at *)(from->indices + i);
    F(pack)(to->values + count, x, bits);
    F(pack)(to->weights + count, w, bits);
    F(pack)((float *)to->indices + count, (vf)index, bits);
    return count + __builtin_popcount(bits);
}

/* Those from `low` to `high`, in the same order, at `to`, which may be where they are. */
static int64_t F(keep_between)(const sym_list *from, float low, float high, sym_list *to) {
    int64_t count = 0;
    for (int64_t i = 0; i < from->count; i += WIDTH) {
        const vf x = *(const vf_at *)(from->values + i);
        const uint32_t bits = F(bits)((x >= low) & (x <= high));
        count = F(append)(to, count, from, i, F(first)(bits, from->count - i));
    }
    return count;
}

/* Those up to the mark in the order of ranks that weigh at least `lightest`, in place. */
static int64_t F(keep_best)(sym_list *list, sym_mark mark, float lightest) {
    int64_t count = 0;
    for (int64_t i = 0; i < list->count; i += WIDTH) {
        const vf x = *(const vf_at *)(list->values + i), w = *(const vf_at *)(list->weights + i);
        const vi index = *(const vi_at *)(list->indices + i);
        const vi is_best = (x > mark.value) | ((x == mark.value) & (index <= mark.index));
        const uint32_t bits = F(bits)(is_best & (w >= lightest));
        count = F(append)(list, count, list, i, F(first)(bits, list->count - i));
    }
    return count;
}

const struct passes F(passes) = {F(scan), F(find),    F(mass),  F(weigh),        F(scale),    F(moments),
                                 F(mask), F(collect), F(split), F(keep_between), F(keep_best)};
