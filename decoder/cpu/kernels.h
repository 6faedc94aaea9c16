/* The kernels, written once over sixteen lanes and compiled once for each instruction set.
 *
 * The including file defines FN(name), which gives a name its suffix, and OP, the qualifiers of an inlined
 * function; the simd_*.h file before this one defines VEC and its operations.
 *
 * Every result is one chain of operations whose order depends on the row's own data alone: an element of a
 * matrix product is one fused multiply-add after the other over k, whatever the tile it was computed in. So
 * the bits do not depend on what else is in the batch, how a prefill was chunked, or how many threads ran. */

/* acc[rows][vectors] += a[rows, k] . b[k, 16 * vectors]; everything but k is known at compile time. */
OP void FN(tile)(VEC acc[][2], const int rows, const int vectors, long k, const float *a, long a_stride,
                 const float *b, long b_stride)
{
    for (long i = 0; i < k; i++, a++, b += b_stride) {
        VEC b0 = FN(load)(b), b1 = b0;
        if (vectors == 2) b1 = FN(load)(b + 16);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            VEC x = FN(splat)(a[r * a_stride]);
            acc[r][0] = FN(fma)(x, b0, acc[r][0]);
            if (vectors == 2) acc[r][1] = FN(fma)(x, b1, acc[r][1]);
        }
    }
}

/* Rows of a tile as a constant: body is expanded once for each, with ROWS in it. */
#define CASE(n, body) case n: { enum { ROWS = n }; body } break;
#if TILE_ROWS == 12
#define FOR_ROWS(rows, body) switch (rows) { CASE(1, body) CASE(2, body) CASE(3, body) CASE(4, body) \
    CASE(5, body) CASE(6, body) CASE(7, body) CASE(8, body) CASE(9, body) CASE(10, body) CASE(11, body) \
    CASE(12, body) }
#elif TILE_ROWS == 3
#define FOR_ROWS(rows, body) switch (rows) { CASE(1, body) CASE(2, body) CASE(3, body) }
#elif TILE_ROWS == 2
#define FOR_ROWS(rows, body) switch (rows) { CASE(1, body) CASE(2, body) }
#endif

/* Rows of the next tile when `left` are to do: as few tiles as can be, of as equal a height as can be. */
OP long FN(tile_rows)(long left)
{
    long tiles = (left + TILE_ROWS - 1) / TILE_ROWS;
    return (left + tiles - 1) / tiles;
}

/* e^x, within 1.2e-7 relative; 0 below -87.3 (no denormals), at most e^88. e^0 is exactly 1. */
OP VEC FN(exp)(VEC x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    VEC y = FN(min)(FN(splat)(88.0f), FN(max)(FN(splat)(-88.0f), x)); /* a NaN stays */
    VEC shifted = FN(fma)(y, FN(splat)(1.44269504f), FN(splat)(round));
    VEC n = FN(sub)(shifted, FN(splat)(round));
    VEC r = FN(fma)(n, FN(splat)(-0.693359375f), y); /* ln 2 in two parts, the first exact in 10 bits */
    r = FN(fma)(n, FN(splat)(2.12194440e-4f), r);
    VEC p = FN(splat)(1.9875691500e-4f);
    p = FN(fma)(p, r, FN(splat)(1.3981999507e-3f));
    p = FN(fma)(p, r, FN(splat)(8.3334519073e-3f));
    p = FN(fma)(p, r, FN(splat)(4.1665795894e-2f));
    p = FN(fma)(p, r, FN(splat)(1.6666665459e-1f));
    p = FN(fma)(p, r, FN(splat)(5.0000001201e-1f));
    p = FN(fma)(p, FN(mul)(r, r), r);
    p = FN(add)(p, FN(splat)(1.0f));
    return FN(zero_below)(FN(mul)(p, FN(power_of_two)(shifted)), x, -87.3f);
}

OP void FN(put)(float *out, VEC x, long room)
{
    if (room >= 16) {
        FN(store)(out, x);
    } else if (room > 0) {
        float lanes[16];
        FN(store)(lanes, x);
        memcpy(out, lanes, (size_t)room * sizeof(float));
    }
}

OP void FN(epilogue)(const struct product *p, long panel, long row, VEC a, VEC b)
{
    float *out = p->out ? p->out + row * p->out_stride : p->out_rows[row];
    if (p->epilogue == SWIGLU) {
        VEC one = FN(splat)(1.0f);
        VEC silu = FN(div)(a, FN(add)(one, FN(exp)(FN(sub)(FN(splat)(0.0f), a))));
        FN(store)(out + panel * (PANEL / 2), FN(mul)(silu, b));
        return;
    }
    out += panel * PANEL;
    long room = p->n - panel * PANEL;
    if (p->epilogue == ADD) {
        a = FN(add)(FN(load)(out), a);
        if (room > 16) b = FN(add)(FN(load)(out + 16), b);
    }
    FN(put)(out, a, room);
    FN(put)(out + 16, b, room - 16);
}

static void FN(product)(const struct product *p, long panel, long first, long last)
{
    const float *b = p->packed + panel * p->k * PANEL;
    while (first < last) {
        long rows = FN(tile_rows)(last - first);
        const float *a = p->a + first * p->a_stride;
        FOR_ROWS(rows, {
            VEC acc[ROWS][2];
            for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = FN(splat)(0.0f);
            FN(tile)(acc, ROWS, 2, p->k, a, p->a_stride, b, PANEL);
            for (int r = 0; r < ROWS; r++) FN(epilogue)(p, panel, first + r, acc[r][0], acc[r][1]);
        })
        first += rows;
    }
}

static void FN(rms_norm)(const float *x, const float *weight, float eps, long n, float *out)
{
    VEC squares = FN(splat)(0.0f);
    for (long i = 0; i < n; i += 16) {
        VEC v = FN(load)(x + i);
        squares = FN(fma)(v, v, squares);
    }
    VEC scale = FN(splat)(1.0f / sqrtf(FN(sum)(squares) / (float)n + eps));
    for (long i = 0; i < n; i += 16)
        FN(store)(out + i, FN(mul)(FN(load)(weight + i), FN(mul)(FN(load)(x + i), scale)));
}

/* scores[vectors][PAGE] = q . K block ([head_dim][PAGE], lanes along entries). */
static void FN(scores)(const float *q, long vectors, long head_dim, const float *k, float *scores)
{
    for (long first = 0; first < vectors;) {
        long rows = FN(tile_rows)(vectors - first);
        const float *a = q + first * head_dim;
        float *out = scores + first * PAGE;
        FOR_ROWS(rows, {
            VEC acc[ROWS][2];
            for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = FN(splat)(0.0f);
            FN(tile)(acc, ROWS, 2, head_dim, a, head_dim, k, PAGE);
            for (int r = 0; r < ROWS; r++) {
                FN(store)(out + r * PAGE, acc[r][0]);
                FN(store)(out + r * PAGE + 16, acc[r][1]);
            }
        })
        first += rows;
    }
}

/* value = value * decay + p . V block ([PAGE][head_dim], lanes along dimensions), its first `entries` alone. */
static void FN(values)(float *value, const float *decay, const float *p, long vectors, long entries, long head_dim,
                       const float *v)
{
    for (long first = 0; first < vectors;) {
        long rows = FN(tile_rows)(vectors - first);
        const float *a = p + first * PAGE;
        for (long d = 0; d < head_dim; d += 32) {
            float *out = value + first * head_dim + d;
            int pair = head_dim - d >= 32;
            FOR_ROWS(rows, {
                VEC acc[ROWS][2];
                for (int r = 0; r < ROWS; r++) {
                    VEC factor = FN(splat)(decay[first + r]);
                    acc[r][0] = FN(mul)(FN(load)(out + r * head_dim), factor);
                    acc[r][1] = pair ? FN(mul)(FN(load)(out + r * head_dim + 16), factor) : factor;
                }
                if (pair) FN(tile)(acc, ROWS, 2, entries, a, PAGE, v + d, head_dim);
                else FN(tile)(acc, ROWS, 1, entries, a, PAGE, v + d, head_dim);
                for (int r = 0; r < ROWS; r++) {
                    FN(store)(out + r * head_dim, acc[r][0]);
                    if (pair) FN(store)(out + r * head_dim + 16, acc[r][1]);
                }
            })
        }
        first += rows;
    }
}

/* The softmax of one page's scores, in place; `sums` are the sixteen partial sums of each vector. Slots that a
 * row does not see may hold anything: their score is replaced before it is looked at. */
static void FN(weigh)(const struct attention *a, long page, float *scores, float *decay, float *max, float *sums)
{
    const float nothing = -__builtin_inff();
    long vectors = a->rows * a->heads;
    for (long i = 0; i < vectors; i++) {
        float *s = scores + i * PAGE;
        long seen = a->limit + i / a->heads - page * PAGE;
        if (seen < PAGE) {
            FN(store)(s, FN(first)(FN(load)(s), (int)(seen > 0 ? seen : 0), nothing));
            FN(store)(s + 16, FN(first)(FN(load)(s + 16), (int)(seen > 16 ? seen - 16 : 0), nothing));
        }
        float best = FN(largest)(FN(max)(FN(load)(s), FN(load)(s + 16)));
        best = best > max[i] ? best : max[i];
        decay[i] = best == max[i] ? 0.0f : max[i] - best;
        max[i] = best;
    }
    for (long i = 0; i < vectors; i += 16) FN(store)(decay + i, FN(exp)(FN(load)(decay + i)));
    for (long i = 0; i < vectors; i++) {
        float *s = scores + i * PAGE;
        VEC best = FN(splat)(max[i] == nothing ? 0.0f : max[i]);
        VEC p0 = FN(exp)(FN(sub)(FN(load)(s), best));
        VEC p1 = FN(exp)(FN(sub)(FN(load)(s + 16), best));
        FN(store)(s, p0);
        FN(store)(s + 16, p1);
        VEC sum = FN(fma)(FN(load)(sums + i * 16), FN(splat)(decay[i]), FN(add)(p0, p1));
        FN(store)(sums + i * 16, sum);
    }
}

static void FN(attend)(const struct attention *a, long split, struct softmax *into, float *room)
{
    long vectors = a->rows * a->heads, width = a->heads * a->head_dim;
    float *q = room, *scores = q + vectors * a->head_dim, *sums = scores + vectors * PAGE;
    float *decay = sums + vectors * 16; /* rounded up to 16: a vector's exp */
    VEC scale = FN(splat)(a->scale), zero = FN(splat)(0.0f);
    for (long r = 0; r < a->rows; r++)
        for (long i = 0; i < width; i += 16)
            FN(store)(q + r * width + i, FN(mul)(FN(load)(a->q + r * a->q_stride + i), scale));
    for (long i = 0; i < vectors; i++) {
        into->max[i] = -__builtin_inff();
        FN(store)(sums + i * 16, zero);
    }
    for (long i = vectors; i < vectors + 15; i++) decay[i] = 0.0f;
    for (long i = 0; i < vectors * a->head_dim; i += 16) FN(store)(into->value + i, zero);

    long last_limit = a->limit + a->rows - 1, end = (split + 1) * SPLIT;
    if (end > last_limit) end = last_limit;
    for (long page = split * (SPLIT / PAGE); page * PAGE < end; page++) {
        long block = a->pages[page] * a->page_floats;
        long entries = end - page * PAGE < PAGE ? end - page * PAGE : PAGE;
        FN(scores)(q, vectors, a->head_dim, a->k + block, scores);
        FN(weigh)(a, page, scores, decay, into->max, sums);
        FN(values)(into->value, decay, scores, vectors, entries, a->head_dim, a->v + block);
    }
    for (long i = 0; i < vectors; i++) into->sum[i] = FN(sum)(FN(load)(sums + i * 16));
}

static void FN(merge)(struct softmax *into, const struct softmax *from, long first, long vectors, long head_dim)
{
    for (long i = first; i < vectors; i++) {
        float best = from->max[i] > into->max[i] ? from->max[i] : into->max[i];
        float pair[16] = {into->max[i] - best, from->max[i] - best};
        FN(store)(pair, FN(exp)(FN(load)(pair)));
        VEC old = FN(splat)(pair[0]), new = FN(splat)(pair[1]);
        into->max[i] = best;
        into->sum[i] = into->sum[i] * pair[0] + from->sum[i] * pair[1];
        float *x = into->value + i * head_dim;
        const float *y = from->value + i * head_dim;
        for (long d = 0; d < head_dim; d += 16)
            FN(store)(x + d, FN(fma)(FN(load)(y + d), new, FN(mul)(FN(load)(x + d), old)));
    }
}

static void FN(finish)(const struct softmax *from, const struct attention *a, float *out, long out_stride)
{
    for (long r = 0; r < a->rows; r++)
        for (long h = 0; h < a->heads; h++) {
            long i = r * a->heads + h;
            VEC share = FN(splat)(1.0f / from->sum[i]);
            const float *value = from->value + i * a->head_dim;
            float *to = out + r * out_stride + h * a->head_dim;
            for (long d = 0; d < a->head_dim; d += 16) FN(store)(to + d, FN(mul)(FN(load)(value + d), share));
        }
}

static const struct kernels FN(kernels) = {
    .name = ISA_NAME,
    .product = FN(product),
    .rms_norm = FN(rms_norm),
    .attend = FN(attend),
    .merge = FN(merge),
    .finish = FN(finish),
};

#undef CASE
#undef FOR_ROWS
#undef TILE_ROWS
#undef VEC
