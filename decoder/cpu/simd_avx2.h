/* Sixteen float lanes in two AVX registers. */

typedef struct {
    __m256 a, b; /* lanes 0..7 and 8..15 */
} FN(vec);
#define VEC FN(vec)

#define TILE_ROWS 3 /* 3 x 2 accumulators of two registers: 12 of 16 */
#define CODE_ROWS 2

#define BOTH(op, x, y)                                                                                                 \
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

/* Lane i of x where bit i is set, else fill. */
OP __m256 FN(pick_half)(__m256 x, unsigned bits, __m256 rest) {
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)bits), bit);
    return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)));
}

OP VEC FN(pick)(VEC x, unsigned bits, float fill) {
    __m256 rest = _mm256_set1_ps(fill);
    return (VEC){FN(pick_half)(x.a, bits, rest), FN(pick_half)(x.b, bits >> 8, rest)};
}

OP VEC FN(round)(VEC x) {
    return (VEC){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

/* a * 2^n for a whole n; 0 where 2^n is too small for a float without losing digits. */
OP __m256 FN(times_power_of_two_half)(__m256 a, __m256 n) {
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    __m256 enough = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ); /* a NaN stays */
    return _mm256_and_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(power)), enough);
}

OP VEC FN(times_power_of_two)(VEC a, VEC n) {
    return (VEC){FN(times_power_of_two_half)(a.a, n.a), FN(times_power_of_two_half)(a.b, n.b)};
}

/* Halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1: every instruction set does it in this order. */
OP float FN(sum)(VEC x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

OP float FN(largest)(VEC x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* ---- lanes as integers, pairs of bfloat16 or four codes ---- */

#define INT(x) _mm256_castps_si256(x)
#define FLT(x) _mm256_castsi256_ps(x)

OP VEC FN(and_bits)(VEC x, uint32_t bits) {
    __m256 mask = FLT(_mm256_set1_epi32((int)bits));
    return (VEC){_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}

OP VEC FN(shift_left)(VEC x, int n) {
    return (VEC){FLT(_mm256_slli_epi32(INT(x.a), n)), FLT(_mm256_slli_epi32(INT(x.b), n))};
}
OP VEC FN(shift_right)(VEC x, int n) {
    return (VEC){FLT(_mm256_srli_epi32(INT(x.a), n)), FLT(_mm256_srli_epi32(INT(x.b), n))};
}
OP VEC FN(mul_int)(VEC x, VEC y) {
    return (VEC){FLT(_mm256_mullo_epi32(INT(x.a), INT(y.a))), FLT(_mm256_mullo_epi32(INT(x.b), INT(y.b)))};
}

OP VEC FN(from_int)(VEC x) { return (VEC){_mm256_cvtepi32_ps(INT(x.a)), _mm256_cvtepi32_ps(INT(x.b))}; }

OP VEC FN(dot_bfloat16)(VEC x, VEC y, VEC sum) {
    sum = FN(fma)(FN(shift_left)(x, 16), FN(shift_left)(y, 16), sum);
    return FN(fma)(FN(and_bits)(x, 0xffff0000u), FN(and_bits)(y, 0xffff0000u), sum);
}

OP __m256i FN(round_half)(__m256 x) {
    __m256i bits = INT(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(1 << 22));
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_srli_epi32(INT(_mm256_blendv_ps(FLT(rounded), FLT(quiet), is_nan)), 16);
}

OP void FN(store_bfloat16)(uint16_t *p, VEC x) {
    __m256i packed = _mm256_packus_epi32(FN(round_half)(x.a), FN(round_half)(x.b)); /* quarters 0 2 1 3 */
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

/* Signed codes of x with unsigned ones of y; exact, since pairs of 16-bit products cannot overflow 32. */
OP __m256 FN(dot_codes_half)(__m256 x, __m256 y, __m256 sum) {
    __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(INT(x), 8), 8), x_odd = _mm256_srai_epi16(INT(x), 8);
    __m256i y_even = _mm256_and_si256(INT(y), _mm256_set1_epi16(0xff)), y_odd = _mm256_srli_epi16(INT(y), 8);
    __m256i products = _mm256_add_epi32(_mm256_madd_epi16(x_even, y_even), _mm256_madd_epi16(x_odd, y_odd));
    return FLT(_mm256_add_epi32(INT(sum), products));
}

OP VEC FN(dot_codes)(VEC x, VEC y, VEC sum) {
    return (VEC){FN(dot_codes_half)(x.a, y.a, sum.a), FN(dot_codes_half)(x.b, y.b, sum.b)};
}

OP VEC FN(load_halves)(const void *p) {
    const __m128i *q = p;
    return (VEC){_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

/* Lane i of the result is lane i ^ s of x. */
OP VEC FN(swap)(VEC x, const int s) {
    if (s == 1)
        return (VEC){_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
    if (s == 2)
        return (VEC){_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
    if (s == 4)
        return (VEC){_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    return (VEC){x.b, x.a};
}

/* Lanes rounded to the nearest integer, ties to even, as signed bytes. */
OP void FN(store_codes)(int8_t *p, VEC x) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

#undef INT
#undef FLT
#undef BOTH
