/* VEC: sixteen lanes of 32 bits in one, two or four registers. kernels.h is written in operations on VEC.
 *
 * EACH(statement) repeats a statement for every register i; P(x) is register i of x. The i is a constant. With a loop
 * instead, the AVX2 kernels take twice as long to compile, and products in plain C take up to 2.2 times as long. */

#include "simd/registers.h"

#define FOR_PART(n, ...)                                                                                               \
    {                                                                                                                  \
        enum { i = n };                                                                                                \
        __VA_ARGS__;                                                                                                   \
    }
#if WIDTH == 16
typedef vf VEC; /* no structure: in a structure, tiles of six rows stay in memory, and take 2.7 times as long */
#define PART(x, i) (x)
#define EACH(...) FOR_PART(0, __VA_ARGS__)
#else
typedef struct {
    vf part[16 / WIDTH];
} VEC;
#define PART(x, i) ((x).part[i])
#if WIDTH == 8
#define EACH(...) FOR_PART(0, __VA_ARGS__) FOR_PART(1, __VA_ARGS__)
#else
#define EACH(...) FOR_PART(0, __VA_ARGS__) FOR_PART(1, __VA_ARGS__) FOR_PART(2, __VA_ARGS__) FOR_PART(3, __VA_ARGS__)
#endif
#endif
#define P(x) PART(x, i)
#define LANES for (int lane = 0; lane < WIDTH; lane++)

OP VEC FN(load)(const float *p) {
    VEC x;
    EACH(P(x) = *(const vf_at *)(p + i * WIDTH));
    return x;
}
/* Load into registers. With few rows, the compiler would rather load again for each use, and loads are the bound. */
OP VEC FN(load_once)(const float *p) {
    VEC x = FN(load)(p);
#if WIDTH == 16
    __asm__("" : "+v"(PART(x, 0)));
#endif
    return x;
}
OP void FN(store)(float *p, VEC x) { EACH(*(vf_at *)(p + i * WIDTH) = P(x)); }
OP VEC FN(splat)(float a) {
    VEC x;
    EACH(P(x) = __builtin_shuffle((vf){a}, (vi){0}));
    return x;
}
OP float FN(first)(VEC x) { return PART(x, 0)[0]; }
OP VEC FN(fma)(VEC x, VEC y, VEC z) {
    EACH(P(z) = fused(P(x), P(y), P(z)));
    return z;
}

#define LANEWISE(name, result)                                                                                         \
    OP VEC FN(name)(VEC x, VEC y) {                                                                                    \
        EACH(P(x) = (vf)(result));                                                                                     \
        return x;                                                                                                      \
    }
LANEWISE(add, P(x) + P(y))
LANEWISE(sub, P(x) - P(y))
LANEWISE(mul, P(x) * P(y))
LANEWISE(div, P(x) / P(y))
LANEWISE(max, larger(P(x), P(y)))
LANEWISE(min, smaller(P(x), P(y)))
LANEWISE(add_int, (vu)P(x) + (vu)P(y))
LANEWISE(sub_int, (vu)P(x) - (vu)P(y))
LANEWISE(mul_int, (vu)P(x) * (vu)P(y))
LANEWISE(or_bits, (vu)P(x) | (vu)P(y))

/* Return lane j of x where bit j is set, and `fill` in the other lanes. */
OP VEC FN(pick)(VEC x, unsigned bits, float fill) {
    VEC rest = FN(splat)(fill);
    EACH(P(x) = pick(bits >> (i * WIDTH), P(x), P(rest)));
    return x;
}

OP VEC FN(round)(VEC x) {
#if WIDTH == 16
    EACH(P(x) = _mm512_roundscale_ps(P(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif WIDTH == 8
    EACH(P(x) = _mm256_round_ps(P(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    EACH(LANES P(x)[lane] = nearbyintf(P(x)[lane]));
#endif
    return x;
}

/* Return a * 2^n for a whole n. Without AVX-512, the result is 0 where 2^n would be a denormal. */
OP VEC FN(times_power_of_two)(VEC a, VEC n) {
#if WIDTH == 16
    EACH(P(a) = _mm512_scalef_ps(P(a), P(n)));
#else
    EACH(vf power = (vf)(((vu) __builtin_convertvector(P(n), vi) + 127) << 23), x = P(a) * power;
         P(a) = (vf)((vi)x & ~(P(n) < -126.0f))); /* a NaN stays a NaN */
#endif
    return a;
}

/* Lane j of the result is lane j ^ s of x. */
OP VEC FN(swap)(VEC x, const int s) {
    VEC y;
    EACH(P(y) = __builtin_shuffle(PART(x, i ^ s / WIDTH), *(const vi_at *)lane_numbers ^ s % WIDTH));
    return y;
}

/* A reduction folds one half of the lanes onto the other: 16 -> 8 -> 4 -> 2 -> 1. All instruction sets use this
 * order. */
#define FOLD(name, of_two)                                                                                             \
    OP float FN(name)(VEC x) {                                                                                         \
        x = FN(of_two)(x, FN(swap)(x, 8));                                                                             \
        x = FN(of_two)(x, FN(swap)(x, 4));                                                                             \
        x = FN(of_two)(x, FN(swap)(x, 2));                                                                             \
        return PART(FN(of_two)(x, FN(swap)(x, 1)), 0)[0];                                                              \
    }
FOLD(sum, add)
FOLD(largest, max)

/* ---- lanes as integers, pairs of bfloat16 or four codes ---- */

OP VEC FN(and_bits)(VEC x, uint32_t bits) {
    EACH(P(x) = (vf)((vu)P(x) & bits));
    return x;
}
OP VEC FN(shift_left)(VEC x, int n) {
    EACH(P(x) = (vf)((vu)P(x) << (uint32_t)n));
    return x;
}
OP VEC FN(shift_right)(VEC x, int n) {
    EACH(P(x) = (vf)((vu)P(x) >> (uint32_t)n));
    return x;
}
OP VEC FN(from_int)(VEC x) {
    EACH(P(x) = __builtin_convertvector((vi)P(x), vf));
    return x;
}

OP VEC FN(dot_bfloat16)(VEC x, VEC y, VEC sum) {
#ifdef BFLOAT16_DOT
    EACH(P(sum) = _mm512_dpbf16_ps(P(sum), (__m512bh)P(x), (__m512bh)P(y)));
    return sum;
#else
    sum = FN(fma)(FN(shift_left)(x, 16), FN(shift_left)(y, 16), sum);
    return FN(fma)(FN(and_bits)(x, 0xffff0000u), FN(and_bits)(y, 0xffff0000u), sum);
#endif
}

typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t vh_at __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

OP vh FN(to_bfloat16s)(vf x) {
#ifdef BFLOAT16_DOT
    return (vh)_mm512_cvtneps_pbh(x);
#else
    vu bits = (vu)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
#if WIDTH == 16
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i quiet = _mm512_mask_or_epi32((__m512i)rounded, is_nan, (__m512i)bits, _mm512_set1_epi32(1 << 22));
    return (vh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
#else
    return __builtin_convertvector((vu)choose(x == x, (vf)rounded, (vf)(bits | 1u << 22)) >> 16, vh);
#endif
#endif
}

OP void FN(store_bfloat16)(uint16_t *p, VEC x) { EACH(*(vh_at *)(p + i * WIDTH) = FN(to_bfloat16s)(P(x))); }

OP vf FN(of_halves)(const uint16_t *p) {
#if WIDTH == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif WIDTH == 8
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    return (vf){of_float16(p[0]), of_float16(p[1]), of_float16(p[2]), of_float16(p[3])};
#endif
}

OP VEC FN(load_halves)(const void *p) {
    VEC x;
    EACH(P(x) = FN(of_halves)((const uint16_t *)p + i * WIDTH));
    return x;
}

OP vf FN(of_bytes)(const int8_t *p) {
#if WIDTH == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif WIDTH == 8
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return (vf){p[0], p[1], p[2], p[3]};
#endif
}

OP VEC FN(load_bytes)(const int8_t *p) {
    VEC x;
    EACH(P(x) = FN(of_bytes)(p + i * WIDTH));
    return x;
}

typedef uint8_t vb __attribute__((vector_size(4 * WIDTH)));

/* Each byte of the result is the byte of the table that a byte of x, below 16, numbers. */
OP VEC FN(lookup)(VEC table, VEC x) {
#if WIDTH == 16
    EACH(P(x) = (vf)_mm512_shuffle_epi8((__m512i)P(table), (__m512i)P(x)));
#elif WIDTH == 8
    EACH(P(x) = (vf)_mm256_shuffle_epi8((__m256i)P(table), (__m256i)P(x)));
#else
    EACH(P(x) = (vf)__builtin_shuffle((vb)P(table), (vb)P(x)));
#endif
    return x;
}

/* Add the dot products of signed codes of x and unsigned codes of y. No sum of products can overflow 32 bits. */
OP vi FN(dot_of_codes)(vi x, vi y, vi sum) {
#if WIDTH == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)y, (__m512i)x);
#elif WIDTH == 8
    __m256i a = (__m256i)x, b = (__m256i)y, low = _mm256_set1_epi16(0xff);
    __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), _mm256_and_si256(b, low));
    __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(a, 8), _mm256_srli_epi16(b, 8));
    return (vi)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(even, odd));
#else
    for (int byte = 0; byte < 4; byte++)
        sum += (x << (24 - 8 * byte) >> 24) * (y >> (8 * byte) & 255);
    return sum;
#endif
}

OP VEC FN(dot_codes)(VEC x, VEC y, VEC sum) {
    EACH(P(sum) = (vf)FN(dot_of_codes)((vi)P(x), (vi)P(y), (vi)P(sum)));
    return sum;
}

/* Store the lanes as signed bytes, rounded to the nearest integer, ties to even. */
OP void FN(store_codes)(int8_t *p, VEC x) {
#if WIDTH == 16
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(PART(x, 0))));
#elif WIDTH == 8
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(PART(x, 0)), _mm256_cvtps_epi32(PART(x, 1)));
    words = _mm256_permute4x64_epi64(words, 0xd8); /* quarters 0 2 1 3 */
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    EACH(LANES p[i * WIDTH + lane] = (int8_t)fmaxf(-128, fminf(127, nearbyintf(P(x)[lane]))));
#endif
}
