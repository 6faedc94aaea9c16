/* Passes over rows of float32, in 16 lanes. Each lanes_*.c includes this file for one instruction set. The including
 * file defines FN(name), which names the functions, and WIDTH, the number of lanes in a register. `passes.c` chooses
 * the instruction set.
 *
 * All instruction sets give the same bits. Every sum uses the same 16 lanes and the same blocks. The compiler may
 * neither reorder nor contract operations (no fast-math, -ffp-contract=off). The intrinsics in this file (maximum, bits
 * of a comparison, packing) round nothing. A test compares the results of all instruction sets.
 *
 * Within a lane of a block, at most 32 numbers are added in float32. The float32 sums are then added in double.
 * Converting every entry to double would take a third of the time, and the exponentials have errors of up to 2 ulp
 * anyway.
 */
#include "passes.h"
#include "simd/registers.h"

#include <errno.h>

/* Loads a register. Lanes from `n` on get -inf, which is never the maximum and has no mass. */
static inline vf FN(load)(const float *row, int64_t n) {
    if (n >= WIDTH)
        return *(const vf_at *)row;
    vf result = (vf){0} - INFINITY;
    if (n > 0)
        memcpy(&result, row, (size_t)n * sizeof *row);
    return result;
}

/* Returns the result of a comparison as one bit for each lane. */
static inline uint32_t FN(bits)(vi mask) {
#if WIDTH == 16
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined MM
    return (uint32_t)MM(movemask_ps)((vf)mask);
#else
    uint32_t result = 0;
    for (int lane = 0; lane < WIDTH; lane++)
        result |= (uint32_t)(mask[lane] & 1) << lane;
    return result;
#endif
}

/* Clears the bits of the lanes from `n` on. */
static inline uint32_t FN(first)(uint32_t bits, int64_t n) { return n < WIDTH ? bits & ((1u << n) - 1) : bits; }

/* Packs the lanes whose bits are set, and stores them at `to`. The store may overwrite all WIDTH numbers at `to`. */
static inline void FN(pack)(float *to, vf x, uint32_t bits) {
#if WIDTH == 16
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)bits, (__m512)x));
#elif WIDTH == 8
    const __m256i order = _mm256_load_si256((const __m256i *)pack_order[bits]);
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)x, order));
#else
    for (; bits != 0; bits &= bits - 1)
        *to++ = x[__builtin_ctz(bits)];
#endif
}

/* Returns exp(x) for x <= 0, with an error of at most 2 ulp (the polynomial is from Cephes). The result is 0 for NaN
 * and for x <= -87. */
static inline vf FN(exp)(vf x) {
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

typedef float half_at __attribute__((vector_size(2 * WIDTH), aligned(4), may_alias));
typedef double vd __attribute__((vector_size(4 * WIDTH)));
typedef double vd_at __attribute__((vector_size(4 * WIDTH), aligned(8), may_alias));

/* Adds WIDTH numbers to as many sums in double. */
static inline void FN(add)(double *sums, vf x) {
    const half_at *halves = (const half_at *)&x;
#if WIDTH == 16
    const vd low = _mm512_cvtps_pd((__m256)halves[0]), high = _mm512_cvtps_pd((__m256)halves[1]);
#else
    const vd low = __builtin_convertvector(halves[0], vd), high = __builtin_convertvector(halves[1], vd);
#endif
    *(vd_at *)sums += low;
    *(vd_at *)(sums + WIDTH / 2) += high;
}

static inline double FN(sum)(const float *lanes) {
    double result = 0.0;
    for (int lane = 0; lane < LANES; lane++)
        result += (double)lanes[lane];
    return result;
}

/* Finds the largest logit of the row, and of each group. A group is one lane of one block. Returns 0, or -EDOM if the
 * row has NaN or +inf. */
static int FN(scan)(const float *row, int64_t n, float *groups, float *max) {
    vf best = (vf){0} - INFINITY;
    vi fine = ~(vi){0};
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        for (int part = 0; part < LANES; part += WIDTH) {
            vf even = (vf){0} - INFINITY, odd = even; /* two, because each maximum depends on the previous one */
            for (int64_t i = start + part; i < end; i += 2 * LANES) {
                const vf x = FN(load)(row + i, end - i), y = FN(load)(row + i + LANES, end - i - LANES);
                fine &= (x < INFINITY) & (y < INFINITY);
                even = larger(x, even);
                odd = larger(y, odd);
            }
            even = larger(odd, even);
            best = larger(even, best);
            if (groups != NULL)
                *(vf_at *)(groups + start / BLOCK * LANES + part) = even;
        }
    }
    *max = -INFINITY;
    for (int lane = 0; lane < WIDTH; lane++)
        *max = best[lane] > *max ? best[lane] : *max;
    return FN(bits)(~fine) == 0 ? 0 : -EDOM;
}

/* Returns the index of the first entry that equals x, or n if no entry does. */
static int64_t FN(find)(const float *row, int64_t n, float x) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        const uint32_t bits = FN(first)(FN(bits)(FN(load)(row + i, n - i) == x), n - i);
        if (bits != 0)
            return i + __builtin_ctz(bits);
    }
    return n;
}

/* Returns the sum of exp((x - max) * inverse_temperature) over a row. Exponentials below `floor` count as 0. `masses`,
 * if not NULL, receives the sum of each block. */
static double FN(mass)(const float *row, int64_t n, float max, float inverse_temperature, float floor, double *masses) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[LANES];
        for (int part = 0; part < LANES; part += WIDTH) {
            vf sum = {0};
            for (int64_t i = start + part; i < end; i += LANES) {
                const vf e = FN(exp)((FN(load)(row + i, end - i) - max) * inverse_temperature);
                sum += (vf)((vi)e & (e >= floor));
            }
            *(vf_at *)(lanes + part) = sum;
        }
        const double here = FN(sum)(lanes);
        total += here;
        if (masses != NULL)
            masses[start / BLOCK] = here;
    }
    return total;
}

/* Stores exp((x - max) * inverse_temperature) for each entry in `out`, and returns the sum. The capacity of `out` is a
 * multiple of 16 entries. */
static double FN(weigh)(const float *row, int64_t n, float max, float inverse_temperature, float *out) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[LANES];
        for (int part = 0; part < LANES; part += WIDTH) {
            vf sum = {0};
            for (int64_t i = start + part; i < end; i += LANES) {
                const vf e = FN(exp)((FN(load)(row + i, end - i) - max) * inverse_temperature);
                sum += e;
                *(vf_at *)(out + i) = e;
            }
            *(vf_at *)(lanes + part) = sum;
        }
        total += FN(sum)(lanes);
    }
    return total;
}

static void FN(scale)(float *row, int64_t n, float factor) {
    for (int64_t i = 0; i + WIDTH <= n; i += WIDTH)
        *(vf_at *)(row + i) *= factor;
    for (int64_t i = n / WIDTH * WIDTH; i < n; i++)
        row[i] *= factor;
}

/* Computes two sums over a row, with s = (x - max) * inverse_temperature: the sum of exp(s), and the sum of exp(s) *
 * s. */
static void FN(moments)(const float *row, int64_t n, float max, float inverse_temperature, double *total,
                        double *weighted) {
    *total = *weighted = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[LANES], other_lanes[LANES];
        for (int part = 0; part < LANES; part += WIDTH) {
            vf sum = {0}, products = {0};
            for (int64_t i = start + part; i < end; i += LANES) {
                const vf below = (FN(load)(row + i, end - i) - max) * inverse_temperature;
                const vf e = FN(exp)(below);
                sum += e;
                products += (vf)((vi)(e * below) & (e > 0.0f));
            }
            *(vf_at *)(lanes + part) = sum;
            *(vf_at *)(other_lanes + part) = products;
        }
        *total += FN(sum)(lanes);
        *weighted += FN(sum)(other_lanes);
    }
}

/* Copies the row to `out`, with -inf for entries whose bit is 0 in either bitmask. A bitmask that is NULL has all bits
 * set. Returns 0, or -EDOM if any entry of the row is NaN or +inf. */
static int FN(mask)(const float *row, int64_t n, const void *allowed, const void *also, float *out) {
    vi fine = ~(vi){0};
    for (int64_t i = 0; i < n; i += LANES) {
        uint16_t bits = 0xffff, others = 0xffff;
        if (allowed != NULL)
            memcpy(&bits, (const char *)allowed + i / 8, sizeof bits);
        if (also != NULL)
            memcpy(&others, (const char *)also + i / 8, sizeof others);
        for (int part = 0; part < LANES; part += WIDTH) {
            const vf x = FN(load)(row + i + part, n - i - part);
            fine &= x < INFINITY;
            *(vf_at *)(out + i + part) = pick((unsigned)(bits & others) >> part, x, (vf){0} - INFINITY);
        }
    }
    return FN(bits)(~fine) == 0 ? 0 : -EDOM;
}

/* ---- lists of entries, see rank.c: their arrays are longer than the lists by 16 lanes at least -------------- */

/* Copies the entries of a row that are at least `least` into a list. Returns the length of the list. */
static int64_t FN(collect)(const float *row, int64_t n, float least, float *values, int32_t *indices) {
    vi index = *(const vi_at *)lane_numbers;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += WIDTH, index += WIDTH) {
        const vf x = FN(load)(row + i, n - i);
        const uint32_t bits = FN(first)(FN(bits)(x >= least), n - i);
        if (bits == 0)
            continue;
        FN(pack)(values + count, x, bits);
        FN(pack)((float *)indices + count, (vf)index, bits);
        count += __builtin_popcount(bits);
    }
    return count;
}

/* Sums the weights of the values above `high`, and the weights of the values from `low` to `high`. The sums are in
 * double, because a search subtracts such sums from each other, and small differences have to be exact enough. */
static void FN(split)(const float *values, const float *weights, int64_t count, float low, float high, double *above,
                      double *within) {
    double over[LANES] = {0}, between[LANES] = {0};
    for (int part = 0; part < LANES; part += WIDTH) {
        for (int64_t i = part; i < count; i += LANES) {
            const vf x = FN(load)(values + i, count - i), w = FN(load)(weights + i, count - i);
            const vi is_over = x > high;
            const vi is_from = (x >= low) & (w >= 0.0f); /* lanes past the end have the weight -inf */
            FN(add)(over + part, (vf)((vi)w & is_over));
            FN(add)(between + part, (vf)((vi)w & is_from & ~is_over));
        }
    }
    *above = *within = 0.0;
    for (int lane = 0; lane < LANES; lane++) {
        *above += over[lane];
        *within += between[lane];
    }
}

/* Appends entries of `from`, from index i on: those whose bits are set. Returns the new count. */
static inline int64_t FN(append)(sym_list *to, int64_t count, const sym_list *from, int64_t i, uint32_t bits) {
    if (bits == 0)
        return count; /* then `to` is not written */
    const vf x = *(const vf_at *)(from->values + i), w = *(const vf_at *)(from->weights + i);
    const vi index = *(const vi_at *)(from->indices + i);
    FN(pack)(to->values + count, x, bits);
    FN(pack)(to->weights + count, w, bits);
    FN(pack)((float *)to->indices + count, (vf)index, bits);
    return count + __builtin_popcount(bits);
}

/* Copies the entries with values from `low` to `high` to the list `to`, in the same order. `to` may be `from`. */
static int64_t FN(keep_between)(const sym_list *from, float low, float high, sym_list *to) {
    int64_t count = 0;
    for (int64_t i = 0; i < from->count; i += WIDTH) {
        const vf x = *(const vf_at *)(from->values + i);
        const uint32_t bits = FN(bits)((x >= low) & (x <= high));
        count = FN(append)(to, count, from, i, FN(first)(bits, from->count - i));
    }
    return count;
}

/* Keeps the entries of a list that rank no lower than the mark and have at least the weight `lightest`. Works in
 * place. */
static int64_t FN(keep_best)(sym_list *list, sym_mark mark, float lightest) {
    int64_t count = 0;
    for (int64_t i = 0; i < list->count; i += WIDTH) {
        const vf x = *(const vf_at *)(list->values + i), w = *(const vf_at *)(list->weights + i);
        const vi index = *(const vi_at *)(list->indices + i);
        const vi is_best = (x > mark.value) | ((x == mark.value) & (index <= mark.index));
        const uint32_t bits = FN(bits)(is_best & (w >= lightest));
        count = FN(append)(list, count, list, i, FN(first)(bits, list->count - i));
    }
    return count;
}

const struct passes FN(passes) = {FN(scan), FN(find),    FN(mass),  FN(weigh),        FN(scale),    FN(moments),
                                  FN(mask), FN(collect), FN(split), FN(keep_between), FN(keep_best)};
