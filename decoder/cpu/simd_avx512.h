/* Sixteen lanes of 32 bits in one AVX-512 register. Without BFLOAT16_DOT, pairs of bfloat16 are widened by shifts. */

#define VEC __m512

#define TILE_ROWS 6 /* 6 x 2 accumulators hide the latency; more rows were not faster */
#define CODE_ROWS 6 /* 6 x 2 sums of codes and as many totals, scales, mins: 30 registers */

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

/* Lane i of a where bit i is set, else fill. */
OP VEC FN(pick)(VEC a, unsigned bits, float fill) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)bits, a);
}

OP VEC FN(round)(VEC a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* a * 2^n for a whole n, also where that is 0. */
OP VEC FN(times_power_of_two)(VEC a, VEC n) { return _mm512_scalef_ps(a, n); }

/* Halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1: every instruction set does it in this order. */
OP float FN(sum)(VEC a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

OP float FN(largest)(VEC a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* ---- lanes as integers, pairs of bfloat16 or four codes ---- */

OP VEC FN(and_bits)(VEC a, uint32_t bits) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)bits)));
}

OP VEC FN(shift_left)(VEC a, int n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), (unsigned)n));
}
OP VEC FN(shift_right)(VEC a, int n) {
    return _mm512_castsi512_ps(_mm512_srli_epi32(_mm512_castps_si512(a), (unsigned)n));
}
OP VEC FN(mul_int)(VEC a, VEC b) {
    return _mm512_castsi512_ps(_mm512_mullo_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

OP VEC FN(from_int)(VEC a) { return _mm512_cvtepi32_ps(_mm512_castps_si512(a)); }

#ifdef BFLOAT16_DOT
OP VEC FN(dot_bfloat16)(VEC a, VEC b, VEC sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
OP void FN(store_bfloat16)(uint16_t *p, VEC a) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a)); }
#else
OP VEC FN(dot_bfloat16)(VEC a, VEC b, VEC sum) {
    sum = FN(fma)(FN(shift_left)(a, 16), FN(shift_left)(b, 16), sum);
    return FN(fma)(FN(and_bits)(a, 0xffff0000u), FN(and_bits)(b, 0xffff0000u), sum);
}

OP void FN(store_bfloat16)(uint16_t *p, VEC a) {
    __m512i bits = _mm512_castps_si512(a), one = _mm512_set1_epi32(1);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), bits, _mm512_set1_epi32(1 << 22));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

/* Signed codes of a with unsigned ones of b; exact. */
OP VEC FN(dot_codes)(VEC a, VEC b, VEC sum) {
    return _mm512_castsi512_ps(
        _mm512_dpbusd_epi32(_mm512_castps_si512(sum), _mm512_castps_si512(b), _mm512_castps_si512(a)));
}

OP VEC FN(load_halves)(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

/* Lane i of the result is lane i ^ s of a. */
OP VEC FN(swap)(VEC a, const int s) {
    if (s == 1)
        return _mm512_permute_ps(a, 0xb1);
    if (s == 2)
        return _mm512_permute_ps(a, 0x4e);
    return s == 4 ? _mm512_shuffle_f32x4(a, a, 0xb1) : _mm512_shuffle_f32x4(a, a, 0x4e);
}

/* Lanes rounded to the nearest integer, ties to even, as signed bytes. */
OP void FN(store_codes)(int8_t *p, VEC a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}
