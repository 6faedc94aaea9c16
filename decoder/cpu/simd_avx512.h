/* Sixteen float lanes in one AVX-512 register. AVX-512F alone: no DQ, no VL. */

#define VEC __m512

#define TILE_ROWS 12 /* 12 x 2 accumulators, 2 panel vectors and a broadcast of 32 registers */

OP VEC FN(load)(const float *p) { return _mm512_loadu_ps(p); }
OP void FN(store)(float *p, VEC a) { _mm512_storeu_ps(p, a); }
OP VEC FN(splat)(float a) { return _mm512_set1_ps(a); }
OP VEC FN(fma)(VEC a, VEC b, VEC c) { return _mm512_fmadd_ps(a, b, c); }
OP VEC FN(add)(VEC a, VEC b) { return _mm512_add_ps(a, b); }
OP VEC FN(sub)(VEC a, VEC b) { return _mm512_sub_ps(a, b); }
OP VEC FN(mul)(VEC a, VEC b) { return _mm512_mul_ps(a, b); }
OP VEC FN(div)(VEC a, VEC b) { return _mm512_div_ps(a, b); }
OP VEC FN(max)(VEC a, VEC b) { return _mm512_max_ps(a, b); }
OP VEC FN(min)(VEC a, VEC b) { return _mm512_min_ps(a, b); }

/* Lane i of a where i < n, else fill. */
OP VEC FN(first)(VEC a, int n, float fill)
{
    unsigned mask = n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u;
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)mask, a);
}

/* a where x >= limit, else 0. */
OP VEC FN(zero_below)(VEC a, VEC x, float limit)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), a);
}

/* 2^n for the integer n in the low bits of a float that was rounded by adding 1.5 * 2^23. */
OP VEC FN(power_of_two)(VEC shifted)
{
    __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23)));
}

/* Halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1: every instruction set does it in this order. */
OP float FN(sum)(VEC a)
{
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

OP float FN(largest)(VEC a)
{
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
