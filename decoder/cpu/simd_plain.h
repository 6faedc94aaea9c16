/* Sixteen float lanes in plain C: whatever vectors of four the compiler's target has.
 *
 * Where the target multiplies and adds in one rounding, so do we, and the bits equal the other paths';
 * else (x86-64 before 2013) a product is rounded before it is added. */

typedef float FN(quad) __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t FN(quad_bits) __attribute__((vector_size(16)));
typedef uint32_t FN(quad_unsigned) __attribute__((vector_size(16)));
typedef struct {
    FN(quad) q[4];
} FN(vec);
#define VEC FN(vec)

#define TILE_ROWS 2
#define CODE_ROWS 1

#define EACH for (int i = 0; i < 4; i++)
#define LANES for (int i = 0; i < 16; i++)
#define LANE(x) ((x).q[i / 4][i % 4])

OP VEC FN(load)(const float *p) {
    const FN(quad) *q = (const FN(quad) *)p;
    return (VEC){{q[0], q[1], q[2], q[3]}};
}

OP void FN(store)(float *p, VEC x) { EACH((FN(quad) *)p)[i] = x.q[i]; }
OP VEC FN(splat)(float x) {
    FN(quad) q = {x, x, x, x};
    return (VEC){{q, q, q, q}};
}

OP VEC FN(add)(VEC x, VEC y) {
    EACH x.q[i] += y.q[i];
    return x;
}
OP VEC FN(sub)(VEC x, VEC y) {
    EACH x.q[i] -= y.q[i];
    return x;
}
OP VEC FN(mul)(VEC x, VEC y) {
    EACH x.q[i] *= y.q[i];
    return x;
}
OP VEC FN(div)(VEC x, VEC y) {
    EACH x.q[i] /= y.q[i];
    return x;
}
/* a where the mask's bits are set, else b. */
OP FN(quad) FN(select)(FN(quad_bits) mask, FN(quad) a, FN(quad) b) {
    return (FN(quad))(((FN(quad_bits))a & mask) | ((FN(quad_bits))b & ~mask));
}

OP VEC FN(max)(VEC x, VEC y) {
    EACH x.q[i] = FN(select)(x.q[i] > y.q[i], x.q[i], y.q[i]);
    return x;
}
OP VEC FN(min)(VEC x, VEC y) {
    EACH x.q[i] = FN(select)(x.q[i] < y.q[i], x.q[i], y.q[i]);
    return x;
}

OP VEC FN(fma)(VEC x, VEC y, VEC z) {
#ifdef __FP_FAST_FMAF
    LANES LANE(z) = __builtin_fmaf(LANE(x), LANE(y), LANE(z));
#else
    EACH z.q[i] = x.q[i] * y.q[i] + z.q[i];
#endif
    return z;
}

/* Lane i of x where bit i is set, else fill. */
OP VEC FN(pick)(VEC x, unsigned bits, float fill) {
    LANES if (!(bits >> i & 1)) LANE(x) = fill;
    return x;
}

OP VEC FN(round)(VEC x) {
    LANES LANE(x) = nearbyintf(LANE(x));
    return x;
}

/* a * 2^n for a whole n; 0 where 2^n is too small for a float without losing digits. */
OP VEC FN(times_power_of_two)(VEC a, VEC n) {
    LANES LANE(a) =
        LANE(n) < -126 ? 0 : LANE(a) * float_of(((uint32_t)(int32_t)(LANE(n) == LANE(n) ? LANE(n) : 0) + 127) << 23);
    return a;
}

/* Halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1: every instruction set does it in this order. */
OP float FN(sum)(VEC x) {
    FN(quad) four = (x.q[0] + x.q[2]) + (x.q[1] + x.q[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

OP float FN(largest)(VEC x) {
    float best = x.q[0][0];
    LANES best = LANE(x) > best ? LANE(x) : best;
    return best;
}

/* ---- lanes as integers, pairs of bfloat16 or four codes ---- */

#define BITS(x) ((FN(quad_bits))(x))

OP VEC FN(and_bits)(VEC x, uint32_t bits) {
    EACH x.q[i] = (FN(quad))(BITS(x.q[i]) & (int32_t)bits);
    return x;
}
OP VEC FN(shift_left)(VEC x, int n) {
    EACH x.q[i] = (FN(quad))(BITS(x.q[i]) << n);
    return x;
}
OP VEC FN(shift_right)(VEC x, int n) {
    EACH x.q[i] = (FN(quad))((FN(quad_bits))((FN(quad_unsigned))x.q[i] >> (uint32_t)n));
    return x;
}

OP VEC FN(mul_int)(VEC x, VEC y) {
    EACH x.q[i] = (FN(quad))(BITS(x.q[i]) * BITS(y.q[i]));
    return x;
}
OP VEC FN(from_int)(VEC x) {
    EACH x.q[i] = __builtin_convertvector(BITS(x.q[i]), FN(quad));
    return x;
}

OP VEC FN(dot_bfloat16)(VEC x, VEC y, VEC sum) {
    sum = FN(fma)(FN(shift_left)(x, 16), FN(shift_left)(y, 16), sum);
    return FN(fma)(FN(and_bits)(x, 0xffff0000u), FN(and_bits)(y, 0xffff0000u), sum);
}

OP void FN(store_bfloat16)(uint16_t *p, VEC x) { LANES p[i] = to_bfloat16(LANE(x)); }

/* Signed codes of x with unsigned ones of y; exact. */
OP VEC FN(dot_codes)(VEC x, VEC y, VEC sum) {
    for (int i = 0; i < 4; i++) {
        FN(quad_bits) a = BITS(x.q[i]), b = BITS(y.q[i]), total = BITS(sum.q[i]);
        for (int byte = 0; byte < 4; byte++)
            total += (a << (24 - 8 * byte) >> 24) * (b >> (8 * byte) & 255);
        sum.q[i] = (FN(quad))total;
    }
    return sum;
}

OP VEC FN(load_halves)(const void *p) {
    VEC x = {0};
    const uint16_t *halves = p;
    LANES LANE(x) = of_float16(halves[i]);
    return x;
}

/* Lane i of the result is lane i ^ s of x. */
OP VEC FN(swap)(VEC x, const int s) {
    VEC y = x;
    LANES LANE(y) = x.q[(i ^ s) / 4][(i ^ s) % 4];
    return y;
}

/* Lanes rounded to the nearest integer, ties to even, as signed bytes. */
OP void FN(store_codes)(int8_t *p, VEC x) { LANES p[i] = (int8_t)fmaxf(-128, fminf(127, nearbyintf(LANE(x)))); }

#undef BITS
#undef EACH
#undef LANES
#undef LANE
