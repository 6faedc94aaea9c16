/* Sixteen float lanes in two AVX registers. */

typedef struct {
    __m256 a, b; /* lanes 0..7 and 8..15 */
} FN(vec);
#define VEC FN(vec)

#define TILE_ROWS 3 /* 3 x 2 x 2 accumulators of 16 registers */

#define BOTH(op, x, y) \
    (VEC) { op((x).a, (y).a), op((x).b, (y).b) }

OP VEC FN(load)(const float *p) { return (VEC){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OP void FN(store)(float *p, VEC x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
OP VEC FN(splat)(float x) { return (VEC){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OP VEC FN(fma)(VEC x, VEC y, VEC z) { return (VEC){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
OP VEC FN(add)(VEC x, VEC y) { return BOTH(_mm256_add_ps, x, y); }
OP VEC FN(sub)(VEC x, VEC y) { return BOTH(_mm256_sub_ps, x, y); }
OP VEC FN(mul)(VEC x, VEC y) { return BOTH(_mm256_mul_ps, x, y); }
OP VEC FN(div)(VEC x, VEC y) { return BOTH(_mm256_div_ps, x, y); }
OP VEC FN(max)(VEC x, VEC y) { return BOTH(_mm256_max_ps, x, y); }
OP VEC FN(min)(VEC x, VEC y) { return BOTH(_mm256_min_ps, x, y); }

/* Lane i of x where i < n, else fill. */
OP VEC FN(first)(VEC x, int n, float fill)
{
    __m256 index = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), rest = _mm256_set1_ps(fill);
    return (VEC){
        _mm256_blendv_ps(rest, x.a, _mm256_cmp_ps(index, _mm256_set1_ps((float)n), _CMP_LT_OQ)),
        _mm256_blendv_ps(rest, x.b, _mm256_cmp_ps(index, _mm256_set1_ps((float)(n - 8)), _CMP_LT_OQ)),
    };
}

/* a where x >= limit, else 0. */
OP VEC FN(zero_below)(VEC a, VEC x, float limit)
{
    __m256 l = _mm256_set1_ps(limit);
    return (VEC){_mm256_and_ps(a.a, _mm256_cmp_ps(x.a, l, _CMP_NLT_UQ)),
                 _mm256_and_ps(a.b, _mm256_cmp_ps(x.b, l, _CMP_NLT_UQ))};
}

OP __m256 FN(power_of_two_half)(__m256 shifted)
{
    __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)));
}

/* 2^n for the integer n in the low bits of a float that was rounded by adding 1.5 * 2^23. */
OP VEC FN(power_of_two)(VEC x) { return (VEC){FN(power_of_two_half)(x.a), FN(power_of_two_half)(x.b)}; }

/* Halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1: every instruction set does it in this order. */
OP float FN(sum)(VEC x)
{
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

OP float FN(largest)(VEC x)
{
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#undef BOTH
