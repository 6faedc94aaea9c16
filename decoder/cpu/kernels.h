/* The kernels, written once for vectors of sixteen lanes, and compiled once for each instruction set.
 *
 * The including file defines FN(name), which adds a suffix to a name; OP, the qualifiers of an inlined function; WIDTH,
 * the lanes of a register; and the rows of a tile (TILE_ROWS, CODE_ROWS).
 *
 * Every result is one chain of operations, whose order depends only on the row's own data. An element of a matrix
 * product is one chain of multiply-adds over k, whatever the size of the tile. So the bits do not depend on the rest of
 * the batch, on the chunks of a prefill, or on the number of threads.
 *
 * A step of a product multiplies four bytes of each row of a by four bytes of each feature of b: one float, two
 * bfloat16 or four codes. In each function that loops, the format is a constant. */

#include "vec.h"

typedef float FN(word) __attribute__((may_alias, aligned(2))); /* four bytes that may be unaligned, of any type */
#define WORD(p) (*(const FN(word) *)(p))

OP VEC FN(dot)(const int format, VEC a, VEC b, VEC sum) {
    if (format == SYM_FLOAT32)
        return FN(fma)(a, b, sum);
    if (format == SYM_BFLOAT16)
        return FN(dot_bfloat16)(a, b, sum);
    return FN(dot_codes)(a, b, sum);
}

/* Compute one step for `rows` rows and one or two vectors of b. */
OP void FN(step)(const int format, VEC acc[][2], const int rows, const int vectors, const char *a, long a_stride,
                 VEC b0, VEC b1) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        VEC x = FN(splat)(WORD(a + r * a_stride));
        acc[r][0] = FN(dot)(format, x, b0, acc[r][0]);
        if (vectors == 2)
            acc[r][1] = FN(dot)(format, x, b1, acc[r][1]);
    }
}

/* acc[rows][vectors] += a[rows, steps] . b[steps, 16 * vectors]; strides are in bytes. If `fetch`, each step prefetches
 * `pace` bytes of the data `ahead` (at most two cache lines), which will be read later. */
OP void FN(tile)(const int format, VEC acc[][2], const int rows, const int vectors, long steps, const char *a,
                 long a_stride, const char *b, long b_stride, const int fetch, const char *ahead, long pace) {
    for (long i = 0; i < steps; i++, a += 4, b += b_stride, ahead += fetch ? pace : 0) {
        VEC b0 = FN(load_once)((const float *)b), b1 = b0;
        if (vectors == 2)
            b1 = FN(load_once)((const float *)(b + 64));
        if (fetch) {
            __builtin_prefetch(ahead, 0, 2);
            if (pace > 64)
                __builtin_prefetch(ahead + 64, 0, 2);
        }
        FN(step)(format, acc, rows, vectors, a, a_stride, b0, b1);
    }
}

/* The same for tiles of attention, which have few steps. Four steps at a time prefetch one cache line of `ahead`, unless
 * it is null. */
OP void FN(short_tile)(const int format, VEC acc[][2], const int rows, const int vectors, long steps, const char *a,
                       long a_stride, const char *b, long b_stride, const char *ahead) {
    for (; rows > 3 && steps >= 4; steps -= 4) { /* unrolled low tiles were slower */
        if (ahead) {
            __builtin_prefetch(ahead, 0, 2);
            ahead += 64;
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, a += 4, b += b_stride) {
            VEC b0 = FN(load_once)((const float *)b), b1 = b0;
            if (vectors == 2)
                b1 = FN(load_once)((const float *)(b + 64));
            FN(step)(format, acc, rows, vectors, a, a_stride, b0, b1);
        }
    }
    FN(tile)(format, acc, rows, vectors, steps, a, a_stride, b, b_stride, 0, NULL, 0);
}

/* Return the rows of the next tile if `left` rows remain. The number of tiles is minimal, and they are about equal in
 * height. */
OP long FN(tile_rows)(long left, long most) {
    long tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

/* A switch over the rows of a tile. The macro expands the body once for each number of rows, with the constant ROWS. */
#define CASE(n, ...)                                                                                                   \
    case n: {                                                                                                          \
        enum { ROWS = n };                                                                                             \
        __VA_ARGS__                                                                                                    \
    } break;
#define UP_TO_1(...) CASE(1, __VA_ARGS__)
#define UP_TO_2(...) UP_TO_1(__VA_ARGS__) CASE(2, __VA_ARGS__)
#define UP_TO_3(...) UP_TO_2(__VA_ARGS__) CASE(3, __VA_ARGS__)
#define UP_TO_6(...) UP_TO_3(__VA_ARGS__) CASE(4, __VA_ARGS__) CASE(5, __VA_ARGS__) CASE(6, __VA_ARGS__)
#define PASTE(a, b) a##b
#define UP_TO(n, ...) PASTE(UP_TO_, n)(__VA_ARGS__)
#define FOR_ROWS(rows, most, ...)                                                                                      \
    switch (rows) { UP_TO(most, __VA_ARGS__) }

#define LOG2_E 1.44269504f

/* Return 2^x for x up to 127, with a relative error below 1e-7. The result is 0 if x is -infinity or too small for a
 * float. 2^0 is exactly 1. A NaN stays a NaN. */
OP VEC FN(exp2_up_to_127)(VEC x) {
    x = FN(max)(FN(splat)(-200.0f), x);
    VEC n = FN(round)(x), r = FN(sub)(x, n);
    VEC p = FN(splat)(1.5403530393e-4f);
    p = FN(fma)(p, r, FN(splat)(1.3333558146e-3f));
    p = FN(fma)(p, r, FN(splat)(9.6181291076e-3f));
    p = FN(fma)(p, r, FN(splat)(5.5504108665e-2f));
    p = FN(fma)(p, r, FN(splat)(2.4022650696e-1f));
    p = FN(fma)(p, r, FN(splat)(6.9314718056e-1f));
    p = FN(fma)(p, r, FN(splat)(1.0f));
    return FN(times_power_of_two)(p, n);
}

OP VEC FN(exp)(VEC x) { return FN(exp2_up_to_127)(FN(min)(FN(splat)(127.0f), FN(mul)(x, FN(splat)(LOG2_E)))); }

OP void FN(put)(float *out, VEC x, long room) {
    if (room >= 16) {
        FN(store)(out, x);
    } else if (room > 0) {
        float lanes[16];
        FN(store)(lanes, x);
        memcpy(out, lanes, (size_t)room * sizeof(float));
    }
}

OP VEC FN(tanh)(VEC x) {
    VEC one = FN(splat)(1.0f), e = FN(exp)(FN(add)(x, x));
    return FN(sub)(one, FN(div)(FN(splat)(2.0f), FN(add)(e, one)));
}

OP VEC FN(capped)(VEC x, float cap) { return FN(mul)(FN(tanh)(FN(div)(x, FN(splat)(cap))), FN(splat)(cap)); }

OP VEC FN(activate)(enum activation activation, VEC x) {
    VEC one = FN(splat)(1.0f);
    if (activation == SILU)
        return FN(div)(x, FN(add)(one, FN(exp)(FN(sub)(FN(splat)(0.0f), x))));
    VEC cube = FN(mul)(FN(mul)(x, x), x);
    VEC inner = FN(mul)(FN(fma)(cube, FN(splat)(0.044715f), x), FN(splat)(0.79788456f));
    return FN(mul)(FN(mul)(FN(splat)(0.5f), x), FN(add)(one, FN(tanh)(inner)));
}

OP char *FN(out_row)(const struct product *p, long row) {
    return p->out ? (char *)p->out + row * p->out_stride : (char *)p->out_rows[row];
}

/* Prefetch the outputs of a tile, while the tile is computed. */
OP void FN(fetch_outputs)(const struct product *p, long panel, long row, const int rows) {
    if (rows < 5)
        return; /* a small batch has its outputs in the cache, and waits for weights */
    const long bytes = p->epilogue != GATED ? 4 * PANEL : p->narrow_out ? PANEL : 2 * PANEL;
    for (int r = 0; r < rows; r++) {
        const char *to = FN(out_row)(p, row + r) + panel * bytes;
        __builtin_prefetch(to, 1);
        __builtin_prefetch(to + bytes - 1, 1);
    }
}

OP void FN(epilogue)(const struct product *p, long panel, long row, VEC a, VEC b) {
    char *out = FN(out_row)(p, row);
    if (p->epilogue == GATED) {
        VEC gated = FN(mul)(FN(activate)(p->activation, a), b);
        if (p->narrow_out)
            FN(store_bfloat16)((uint16_t *)out + panel * (PANEL / 2), gated);
        else
            FN(store)((float *)out + panel * (PANEL / 2), gated);
        return;
    }
    float *to = (float *)out + panel * PANEL;
    long room = p->w->n - panel * PANEL;
    if (p->bias) {
        a = FN(add)(a, FN(load)(p->bias + panel * PANEL));
        if (room > 16)
            b = FN(add)(b, FN(load)(p->bias + panel * PANEL + 16));
    }
    if (p->softcap != 0)
        a = FN(capped)(a, p->softcap), b = FN(capped)(b, p->softcap);
    if (p->epilogue == ADD) {
        a = FN(add)(FN(load)(to), a);
        if (room > 16)
            b = FN(add)(FN(load)(to + 16), b);
    }
    FN(put)(to, a, room);
    FN(put)(to + 16, b, room - 16);
}

#define STREAM_AHEAD 4096 /* bytes; half as many cost a single row 4 % of its time, and four times as many 5 % */

/* Return the address of the data that a panel's kernel prefetches. A single row is done before another panel could
 * arrive, so it prefetches its own panel. */
OP const char *FN(ahead)(const struct product *p, const char *panel, long rows) {
    return rows > 1 ? p->ahead : panel + STREAM_AHEAD;
}

/* Compute a product with weights in float32 or bfloat16. */
OP void FN(product_numbers)(const int format, const struct product *p, long panel, long first, long last) {
    long steps = format == SYM_FLOAT32 ? p->w->k : p->w->k / 2;
    const char *b = p->w->data + panel * steps * STEP, *ahead = FN(ahead)(p, b, last - first);
    long pace = STEP / ((last - first + TILE_ROWS - 1) / TILE_ROWS); /* each tile prefetches part of the next panel */
    while (first < last) {
        long rows = FN(tile_rows)(last - first, TILE_ROWS);
        const char *a = p->a + first * p->a_stride;
        FOR_ROWS(rows, TILE_ROWS, {
            VEC acc[ROWS][2];
            FN(fetch_outputs)(p, panel, first, ROWS);
            for (int r = 0; r < ROWS; r++)
                acc[r][0] = acc[r][1] = FN(splat)(0.0f);
            FN(tile)(format, acc, ROWS, 2, steps, a, p->a_stride, b, STEP, 1, ahead, pace);
            for (int r = 0; r < ROWS; r++)
                FN(epilogue)(p, panel, first + r, acc[r][0], acc[r][1]);
        })
        ahead += pace * steps;
        first += rows;
    }
}

/* Layout of codes, as in sym_matrix. In each function that loops, it is constant. */
struct FN(codes) {
    int bits, group, has_mins, has_levels;
};

/* What blocks of codes refer to: super-scales, super-mins, and the levels of codes plus 128. */
struct FN(tables) {
    VEC scales[2], mins[2], levels;
};

OP struct FN(tables) FN(tables_of)(const struct FN(codes) c, const sym_matrix *w) {
    VEC unit = FN(splat)(CODE_UNIT);
    struct FN(tables) tables = {{unit, unit}, {unit, unit}, unit};
    uint8_t levels[64];
    for (int i = 0; c.has_levels && i < 64; i++)
        levels[i] = (uint8_t)(128 + code_levels[w->levels][i % 16]);
    if (c.has_levels)
        tables.levels = FN(load)((const float *)levels);
    return tables;
}

OP const char *FN(load_supers)(const int has_mins, const char *b, struct FN(tables) * to) {
    to->scales[0] = FN(load_halves)(b);
    to->scales[1] = FN(load_halves)(b + 32);
    if (!has_mins)
        return b + 64;
    to->mins[0] = FN(load_halves)(b + 64);
    to->mins[1] = FN(load_halves)(b + 96);
    return b + 128;
}

/* Load the scales or mins of a group, for the 32 features of a panel. */
OP void FN(load_scales)(const enum scale_form form, const char *b, const VEC supers[2], VEC to[2]) {
    for (int i = 0; i < 2; i++)
        to[i] = form == HALVES    ? FN(load_halves)(b + 32 * i)
                : form == FACTORS ? FN(mul)(FN(load_bytes)((const int8_t *)b + 16 * i), supers[i])
                                  : FN(load)((const float *)b + 16 * i);
}
OP long FN(scales_size)(const enum scale_form form) { return PANEL * (form == HALVES ? 2 : form == FACTORS ? 1 : 4); }

/* Return 16 features' codes of inputs 4 i to 4 i + 3 of a block. */
OP VEC FN(load_codes)(const struct FN(codes) c, const char *b, const int i, VEC levels) {
    if (c.bits == 8)
        return FN(load)((const float *)(b + i * STEP));
    VEC x = FN(load)((const float *)(b + i / 2 * STEP));
    x = FN(and_bits)(i % 2 ? FN(shift_right)(x, 4) : x, 0x0f0f0f0fu);
    if (c.has_levels)
        return FN(lookup)(levels, x);
    if (c.bits == 4)
        return x;
    const int at = i * (c.bits - 4), shift = at % 8; /* of the high bits, which go to bit 4 */
    VEC high = FN(load)((const float *)(b + (4 + at / 8) * STEP));
    high = shift > 4 ? FN(shift_right)(high, shift - 4) : FN(shift_left)(high, 4 - shift);
    return FN(or_bits)(x, FN(and_bits)(high, c.bits == 5 ? 0x10101010u : 0x30303030u));
}

/* -1 times the sum of the activations' codes in one group. */
OP VEC FN(less_of)(const int group, const int index, const struct block_info *info) {
    VEC less = FN(splat)(WORD(group == SYM_BLOCK || index ? &info->less : &info->less_low));
    return index ? FN(sub_int)(less, FN(splat)(WORD(&info->less_low))) : less;
}

/* Return the start value of a group's sums of codes: minus the zero for each activation. */
OP VEC FN(codes_start)(const struct FN(codes) c, const int index, const struct block_info *info) {
    if (c.has_mins)
        return FN(splat)(0.0f);
    return FN(shift_left)(FN(less_of)(c.group, index, info), c.has_levels ? 7 : c.bits - 1);
}

/* total += scale * the group's sum of codes (+ min * the group's sum). */
OP VEC FN(add_group)(const struct FN(codes) c, const int index, const struct block_info *info, VEC codes, VEC scale,
                     VEC min, VEC total) {
    total = FN(fma)(FN(mul)(FN(from_int)(codes), scale), FN(splat)(info->scale), total);
    if (!c.has_mins)
        return total;
    if (c.group == SYM_BLOCK)
        return FN(fma)(min, FN(splat)(info->scaled_sum), total);
    VEC sum = FN(from_int)(FN(less_of)(c.group, index, info));
    return FN(fma)(min, FN(mul)(sum, FN(splat)(-info->scale)), total);
}

/* total += the products of group `index` of a block. */
OP void FN(group_tile)(const struct FN(codes) c, const enum scale_form form, const int index, VEC total[][2],
                       const int rows, const char *a, const char *info, long a_stride, const char *b,
                       const struct FN(tables) * tables) {
    const long size = FN(scales_size)(form), groups = SYM_BLOCK / c.group, steps = c.group / 4;
    VEC acc[CODE_ROWS][2], scales[2], mins[2];
    FN(load_scales)(form, b + index * size, tables->scales, scales);
    mins[0] = mins[1] = scales[0];
    if (c.has_mins)
        FN(load_scales)(form, b + (groups + index) * size, tables->mins, mins);
    b += (c.has_mins ? 2 : 1) * groups * size;
    for (int r = 0; r < rows; r++)
        acc[r][0] = acc[r][1] = FN(codes_start)(c, index, (const void *)(info + r * a_stride));
#pragma GCC unroll 8
    for (int i = index * steps; i < (index + 1) * steps; i++) {
        VEC b0 = FN(load_codes)(c, b, i, tables->levels), b1 = FN(load_codes)(c, b + 64, i, tables->levels);
        FN(step)(SYM_CODES, acc, rows, 2, a + 4 * i, a_stride, b0, b1);
    }
    for (int r = 0; r < rows; r++) {
        const struct block_info *of_row = (const void *)(info + r * a_stride);
        total[r][0] = FN(add_group)(c, index, of_row, acc[r][0], scales[0], mins[0], total[r][0]);
        total[r][1] = FN(add_group)(c, index, of_row, acc[r][1], scales[1], mins[1], total[r][1]);
    }
}

#define WIDE_FROM (2 * CODE_ROWS) /* more rows are worth the cost of unpacking codes into the cache */
#define WIDE_ROWS 96              /* most rows of a call: ROW_BLOCK */

/* Compute a panel's columns, from blocks of so many bytes that begin at `base`. */
OP void FN(product_blocks)(const struct FN(codes) c, const enum scale_form form, const struct product *p, long panel,
                           long first, long last, const char *base, long bytes) {
    const long blocks = p->w->k / SYM_BLOCK;
    const long pace = codes_block_bytes(p->w) / ((last - first + CODE_ROWS - 1) / CODE_ROWS) + 63; /* for each block */
    const char *ahead = FN(ahead)(p, base, last - first);
    VEC unit = FN(splat)(CODE_UNIT);
    while (first < last) {
        long rows = FN(tile_rows)(last - first, CODE_ROWS);
        const char *a = p->a + first * p->a_stride, *info = a + p->w->k, *b = base;
        FOR_ROWS(rows, CODE_ROWS, {
            VEC total[ROWS][2];
            struct FN(tables) tables = FN(tables_of)(c, p->w);
            FN(fetch_outputs)(p, panel, first, ROWS);
            for (int r = 0; r < ROWS; r++)
                total[r][0] = total[r][1] = FN(splat)(0.0f);
            for (long i = 0; i < blocks; i++, a += SYM_BLOCK, b += bytes, info += sizeof(struct block_info)) {
                if (form == FACTORS && i % BLOCKS_OF_SUPER == 0)
                    b = FN(load_supers)(c.has_mins, b, &tables);
                for (long j = 0; j < pace / 64; j++, ahead += 64)
                    __builtin_prefetch(ahead, 0, 2);
                FN(group_tile)(c, form, 0, total, ROWS, a, info, p->a_stride, b, &tables);
                if (c.group < SYM_BLOCK)
                    FN(group_tile)(c, form, 1, total, ROWS, a, info, p->a_stride, b, &tables);
            }
            for (int r = 0; r < ROWS; r++)
                FN(epilogue)(p, panel, first + r, FN(mul)(total[r][0], unit), FN(mul)(total[r][1], unit));
        })
        first += rows;
    }
}

/* Write some blocks with a byte for each code, and with float32 scales. Supers come first. Return the next blocks. */
OP const char *FN(widen)(const struct FN(codes) c, const enum scale_form form, const sym_matrix *w, long blocks,
                         const char *b, char *to) {
    const long size = FN(scales_size)(form), scales = SYM_BLOCK / c.group * (c.has_mins ? 2 : 1);
    const uint32_t zero = c.has_mins || c.has_levels ? 0 : (128 - (1u << (c.bits - 1))) * 0x01010101u;
    struct FN(tables) tables = FN(tables_of)(c, w);
    VEC more = FN(splat)(float_of(zero));
    if (form == FACTORS)
        b = FN(load_supers)(c.has_mins, b, &tables);
    for (; blocks > 0; blocks--, b += w->bits * STEP, to += 8 * STEP) {
        for (long j = 0; j < scales; j++, b += size, to += PANEL * 4) {
            VEC x[2];
            FN(load_scales)(form, b, j < SYM_BLOCK / c.group ? tables.scales : tables.mins, x);
            FN(store)((float *)to, x[0]);
            FN(store)((float *)to + 16, x[1]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < SYM_BLOCK / 4; j++)
            for (int half = 0; half < STEP; half += 64) {
                VEC x = FN(load_codes)(c, b + half, j, tables.levels);
                FN(store)((float *)(to + j * STEP + half), FN(add_int)(x, more));
            }
    }
    return b;
}

/* totals[rows][32] += the products of some widened blocks. Each tile prefetches `pace` lines at each block. */
OP void FN(wide_tiles)(const struct FN(codes) c, long rows, float *totals, const char *a, const char *info,
                       long a_stride, const char *wide, long blocks, const char *ahead, long pace) {
    const struct FN(tables) none = {.levels = FN(splat)(0.0f)};
    const long bytes = SYM_BLOCK / c.group * (c.has_mins ? 2 : 1) * PANEL * 4 + 8 * STEP;
    for (long left = rows, tile; left > 0; left -= tile) {
        tile = FN(tile_rows)(left, CODE_ROWS);
        FOR_ROWS(tile, CODE_ROWS, {
            VEC total[ROWS][2];
            for (int r = 0; r < ROWS; r++) {
                total[r][0] = FN(load)(totals + r * PANEL);
                total[r][1] = FN(load)(totals + r * PANEL + 16);
            }
            for (long i = 0; i < blocks; i++) {
                const char *from = a + i * SYM_BLOCK, *of = info + i * (long)sizeof(struct block_info);
                for (long j = 0; j < pace; j++, ahead += 64)
                    __builtin_prefetch(ahead, 0, 2);
                FN(group_tile)(c, FLOATS, 0, total, ROWS, from, of, a_stride, wide + i * bytes, &none);
                if (c.group < SYM_BLOCK)
                    FN(group_tile)(c, FLOATS, 1, total, ROWS, from, of, a_stride, wide + i * bytes, &none);
            }
            for (int r = 0; r < ROWS; r++) {
                FN(store)(totals + r * PANEL, total[r][0]);
                FN(store)(totals + r * PANEL + 16, total[r][1]);
            }
        })
        a += tile * a_stride, info += tile * a_stride, totals += tile * PANEL;
    }
}

static void FN(add_wide)(const sym_matrix *w, long rows, float *totals, const char *a, const char *info, long a_stride,
                         const char *wide, long blocks, const char *ahead, long pace) {
#define WIDE(group, has_mins)                                                                                          \
    FN(wide_tiles)((struct FN(codes)){8, group, has_mins, 0}, rows, totals, a, info, a_stride, wide, blocks, ahead,    \
                   pace)
    switch ((w->group == SYM_BLOCK) * 2 + !!w->has_mins) {
    case 0:
        WIDE(SYM_BLOCK / 2, 0);
        break;
    case 1:
        WIDE(SYM_BLOCK / 2, 1);
        break;
    case 2:
        WIDE(SYM_BLOCK, 0);
        break;
    default:
        WIDE(SYM_BLOCK, 1);
    }
#undef WIDE
}

/* Compute a panel's columns for many rows. The codes of 256 inputs are unpacked once, into the cache, for all rows. */
OP void FN(product_wide)(const struct FN(codes) c, const enum scale_form form, const struct product *p, long panel,
                         long first, long last, const char *b) {
    _Alignas(64) char wide[BLOCKS_OF_SUPER * (4 * PANEL * 4 + 8 * STEP)];
    _Alignas(64) float totals[WIDE_ROWS][PANEL];
    const long blocks = p->w->k / SYM_BLOCK, tiles = (last - first + CODE_ROWS - 1) / CODE_ROWS;
    const long pace = codes_block_bytes(p->w) / tiles / 64 + 1;
    const char *a = p->a + first * p->a_stride, *info = a + p->w->k, *ahead = p->ahead;
    memset(totals, 0, (size_t)(last - first) * sizeof *totals);
    for (long i = 0; i < blocks; i += BLOCKS_OF_SUPER) {
        const long count = blocks - i < BLOCKS_OF_SUPER ? blocks - i : BLOCKS_OF_SUPER;
        b = FN(widen)(c, form, p->w, count, b, wide);
        FN(add_wide)(p->w, last - first, totals[0], a + i * SYM_BLOCK, info + i * (long)sizeof(struct block_info),
                     p->a_stride, wide, count, ahead, pace);
        ahead += 64 * pace * tiles * count;
    }
    VEC unit = FN(splat)(CODE_UNIT);
    for (long r = 0; r < last - first; r++)
        FN(epilogue)(p, panel, first + r, FN(mul)(FN(load)(totals[r]), unit), FN(mul)(FN(load)(totals[r] + 16), unit));
}

/* Multiply by codes. */
OP void FN(product_codes)(const struct FN(codes) c, const struct product *p, long panel, long first, long last) {
    const char *b = p->w->data + panel * panel_bytes(p->w);
    const long bytes = codes_block_bytes(p->w), rows = last - first;
    if (c.bits < 8 && rows > WIDE_FROM && rows <= WIDE_ROWS) {
        if (p->w->has_supers)
            FN(product_wide)(c, FACTORS, p, panel, first, last, b);
        else
            FN(product_wide)(c, HALVES, p, panel, first, last, b);
    } else if (c.bits < 8 && p->w->has_supers) {
        FN(product_blocks)(c, FACTORS, p, panel, first, last, b, bytes);
    } else {
        FN(product_blocks)(c, HALVES, p, panel, first, last, b, bytes);
    }
}

/* Each layout of codes: bits, group, mins, levels. `_GROUPS` in `packed_weights.py` has the same list. */
#define LAYOUTS(each)                                                                                                  \
    each(4, 32, 0, 0) each(4, 32, 0, 1) each(4, 32, 1, 0) each(4, 16, 0, 0) each(4, 16, 1, 0) each(5, 32, 0, 0)        \
        each(5, 32, 1, 0) each(6, 16, 0, 0) each(6, 16, 1, 0) each(8, 32, 0, 0) each(8, 32, 1, 0)
/* A layout has a function of its own: in one function for all, the compiler keeps more sums in memory, and without
 * optimization its frame exceeds a thread's stack. */
#define LAYOUT_PRODUCT(bits, group, has_mins, has_levels)                                                              \
    static __attribute__((noinline)) void FN(product_##bits##_##group##_##has_mins##_##has_levels)(                    \
        const struct product *p, long panel, long first, long last) {                                                  \
        const struct FN(codes) codes = {bits, group, has_mins, has_levels};                                            \
        FN(product_codes)(codes, p, panel, first, last);                                                               \
    }
LAYOUTS(LAYOUT_PRODUCT)
#define LAYOUT_KEY(bits, group, has_mins, has_levels) ((bits) * 1000 + (group) * 4 + (has_mins) * 2 + (has_levels))
#define KEY_OF(m) LAYOUT_KEY((m)->bits, (m)->group, !!(m)->has_mins, !!(m)->levels)

OP void FN(product_rotated)(const struct product *p, long panel, long first, long last) {
    long steps = p->w->k / 4, bytes = steps * STEP + PANEL * 8;
    const char *b = p->w->data + panel * bytes, *ahead = FN(ahead)(p, b, last - first);
    const float *scales = (const float *)(b + steps * STEP);
    long pace = STEP / ((last - first + TILE_ROWS - 1) / TILE_ROWS);
    VEC d0 = FN(load)(scales), d1 = FN(load)(scales + 16), z0 = FN(load)(scales + PANEL),
        z1 = FN(load)(scales + PANEL + 16);
    while (first < last) {
        long rows = FN(tile_rows)(last - first, TILE_ROWS);
        const char *a = p->a + first * p->a_stride, *info = a + p->w->k;
        FOR_ROWS(rows, TILE_ROWS, {
            VEC acc[ROWS][2];
            FN(fetch_outputs)(p, panel, first, ROWS);
            for (int r = 0; r < ROWS; r++) {
                VEC less = FN(splat)(WORD(info + r * p->a_stride + offsetof(struct block_info, less)));
                acc[r][0] = FN(mul_int)(less, z0);
                acc[r][1] = FN(mul_int)(less, z1);
            }
            FN(tile)(SYM_CODES, acc, ROWS, 2, steps, a, p->a_stride, b, STEP, 1, ahead, pace);
            for (int r = 0; r < ROWS; r++) {
                VEC scale = FN(splat)(((const struct block_info *)(info + r * p->a_stride))->scale);
                VEC x = FN(mul)(FN(mul)(FN(from_int)(acc[r][0]), d0), scale);
                VEC y = FN(mul)(FN(mul)(FN(from_int)(acc[r][1]), d1), scale);
                FN(epilogue)(p, panel, first + r, x, y);
            }
        })
        ahead += pace * steps;
        first += rows;
    }
}

static void FN(product)(const struct product *p, long panel, long first, long last) {
    switch (p->w->format) {
    case SYM_FLOAT32:
        FN(product_numbers)(SYM_FLOAT32, p, panel, first, last);
        return;
    case SYM_BFLOAT16:
        FN(product_numbers)(SYM_BFLOAT16, p, panel, first, last);
        return;
    case SYM_ROTATED8:
        FN(product_rotated)(p, panel, first, last);
        return;
    }
    switch (KEY_OF(p->w)) {
#define CASE_OF_LAYOUT(bits, group, has_mins, has_levels)                                                              \
    case LAYOUT_KEY(bits, group, has_mins, has_levels):                                                                \
        FN(product_##bits##_##group##_##has_mins##_##has_levels)(p, panel, first, last);                               \
        return;
        LAYOUTS(CASE_OF_LAYOUT)
#undef CASE_OF_LAYOUT
    }
    abort(); /* the loader chooses one of the layouts */
}

static void FN(rms_norm)(const float *x, const float *weight, float eps, long n, float *out) {
    VEC squares = FN(splat)(0.0f);
    for (long i = 0; i < n; i += 16) {
        VEC v = FN(load)(x + i);
        squares = FN(fma)(v, v, squares);
    }
    VEC scale = FN(splat)(1.0f / sqrtf(FN(sum)(squares) / (float)n + eps));
    for (long i = 0; i < n; i += 16)
        FN(store)(out + i, FN(mul)(FN(load)(weight + i), FN(mul)(FN(load)(x + i), scale)));
}

#define TINY 1e-30f /* smaller activations count as zero: their inverse would be too large for a float */

OP VEC FN(magnitude)(VEC x) { return FN(and_bits)(x, 0x7fffffffu); }

/* Convert a row to signed codes. In each block, the largest magnitude becomes code 127. */
static void FN(prepare_codes)(const float *x, long n, char *to) {
    long blocks = (n + SYM_BLOCK - 1) / SYM_BLOCK;
    struct block_info *info = (struct block_info *)(to + blocks * SYM_BLOCK);
    int8_t *codes = (int8_t *)to;
    for (long i = 0; i < blocks; i++, x += SYM_BLOCK, codes += SYM_BLOCK, n -= SYM_BLOCK) {
        VEC low = FN(load)(x), high = n > 16 ? FN(load)(x + 16) : FN(splat)(0.0f);
        float top = FN(largest)(FN(max)(FN(magnitude)(low), FN(magnitude)(high)));
        VEC inverse = FN(splat)(top > TINY ? 127 / top : 0);
        low = FN(round)(FN(mul)(low, inverse));
        high = FN(round)(FN(mul)(high, inverse));
        FN(store_codes)(codes, low);
        FN(store_codes)(codes + 16, high);
        float scale = top > TINY ? top / 127 : 0, sum_low = FN(sum)(low), sum = sum_low + FN(sum)(high); /* exact */
        if (sum != sum)
            scale = sum, sum = sum_low = 0; /* a value that is not finite makes the block NaN */
        info[i] = (struct block_info){scale, scale * sum, -(int32_t)sum, -(int32_t)sum_low};
    }
}

/* Stage s of a Hadamard transform of sixteen lanes, which combines lanes i and i ^ s. */
#define LANE_STAGE(x, s, signs) FN(fma)(x, FN(load)(signs), FN(swap)(x, s))

/* Multiply the rows of x [odd][power] by the matrix `mix` [odd][odd], in place. With a small constant for `odd`, all
 * sums of sixteen columns are in registers. */
OP void FN(mix)(const long odd, const float *mix, long power, float *x) {
    for (long j = 0; j < power; j += 16) {
        VEC column[SYM_MAX_MIX];
#pragma GCC unroll 9
        for (long o = 0; o < odd; o++)
            column[o] = FN(load)(x + o * power + j);
#pragma GCC unroll 9
        for (long o = 0; o < odd; o++) {
            VEC sum = FN(splat)(0.0f);
#pragma GCC unroll 9
            for (long i = 0; i < odd; i++)
                sum = FN(fma)(column[i], FN(splat)(mix[o * odd + i]), sum);
            FN(store)(x + o * power + j, sum);
        }
    }
}

/* out = R x, without the factor 1 / sqrt(power), which the caller puts into the scale. */
OP void FN(rotate_inputs)(const sym_matrix *m, const float *x, long n, float *out) {
    static const float signs[4][16] = {
        {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
        {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
        {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
        {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
    };
    long power = n & -n, odd = n / power;
    for (long i = 0; i < n; i += 16) {
        VEC v = FN(load)(x + i);
        v = LANE_STAGE(v, 1, signs[0]);
        v = LANE_STAGE(v, 2, signs[1]);
        v = LANE_STAGE(v, 4, signs[2]);
        v = LANE_STAGE(v, 8, signs[3]);
        FN(store)(out + i, v);
    }
    for (long half = 16; half < power; half *= 2)
        for (long i = 0; i < n; i += 2 * half)
            for (long j = i; j < i + half; j += 16) {
                VEC a = FN(load)(out + j), b = FN(load)(out + j + half);
                FN(store)(out + j, FN(add)(a, b));
                FN(store)(out + j + half, FN(sub)(a, b));
            }
    if (!m->mix)
        return;
    switch (odd) {
    case 3:
        FN(mix)(3, m->mix, power, out);
        break;
    case 5:
        FN(mix)(5, m->mix, power, out);
        break;
    case 7:
        FN(mix)(7, m->mix, power, out);
        break;
    case 9:
        FN(mix)(9, m->mix, power, out);
        break;
    default:
        FN(mix)(odd, m->mix, power, out);
    }
}

/* Rotate a row, and convert it to signed codes. The largest magnitude becomes code 127. */
static void FN(prepare_rotated)(const sym_matrix *m, const float *x, long n, char *to, float *scratch) {
    FN(rotate_inputs)(m, x, n, scratch);
    VEC largest = FN(splat)(0.0f), sum = largest;
    for (long i = 0; i < n; i += 16)
        largest = FN(max)(largest, FN(magnitude)(FN(load)(scratch + i)));
    float top = FN(largest)(largest);
    VEC inverse = FN(splat)(top > TINY ? 127 / top : 0);
    for (long i = 0; i < n; i += 16) {
        VEC code = FN(round)(FN(mul)(FN(load)(scratch + i), inverse));
        FN(store_codes)((int8_t *)to + i, code);
        sum = FN(add)(sum, code); /* whole numbers below 2^24: exact */
    }
    memset(to + n, 0, (size_t)(m->k - n));
    float scale = top > TINY ? top / 127 / sqrtf((float)(n & -n)) : 0, total = FN(sum)(sum);
    if (total != total)
        scale = total, total = 0;
    *(struct block_info *)(to + m->k) = (struct block_info){.scale = scale, .less = -(int32_t)total};
}

static void FN(to_bfloat16)(const float *x, long n, uint16_t *to) {
    for (long i = 0; i < n; i += 16)
        FN(store_bfloat16)(to + i, FN(load)(x + i));
}

static void FN(rotate)(const float *x, const float *cosines, long half, float *out) {
    const float *sines = cosines + half;
    long i = 0;
    for (; i + 16 <= half; i += 16) {
        VEC a = FN(load)(x + i), b = FN(load)(x + i + half), c = FN(load)(cosines + i), s = FN(load)(sines + i);
        FN(store)(out + i, FN(sub)(FN(mul)(a, c), FN(mul)(b, s)));
        FN(store)(out + i + half, FN(add)(FN(mul)(b, c), FN(mul)(a, s)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        out[i] = a * cosines[i] - b * sines[i];
        out[i + half] = b * cosines[i] + a * sines[i];
    }
}

static void FN(prepare)(const sym_matrix *m, const float *x, long n, void *to, float *scratch) {
    switch (m->format) {
    case SYM_BFLOAT16:
        FN(to_bfloat16)(x, n, to);
        break;
    case SYM_ROTATED8:
        FN(prepare_rotated)(m, x, n, to, scratch);
        break;
    default:
        FN(prepare_codes)(x, n, to);
    }
}

/* ---- attention, in blocks of BLOCK entries; in each block a query has BLOCK scores, one word each ---- */

/* Return a word with a bit for each entry of a page. The bit is set if a row sees the entry. */
OP uint32_t FN(seen)(const struct attention *a, long row, long page) {
    uint32_t bits = 0xffffffffu;
    long limit = a->limits[row] - page * SYM_PAGE_ENTRIES, past = limit - a->window;
    if (limit <= 0 || (a->window && past >= SYM_PAGE_ENTRIES))
        return 0;
    if (limit < SYM_PAGE_ENTRIES)
        bits = (1u << limit) - 1;
    if (a->window && past > 0)
        bits &= 0xffffffffu << past;
    return a->masks[row] ? bits & a->masks[row][page] : bits;
}

/* Return whether so many query vectors share a block that its tiles can prefetch another block, a line at a time. Low
 * tiles prefetch nothing. */
OP int FN(has_many)(const struct attention *a) { return TILE_ROWS > 3 && a->rows * a->heads > 7 * TILE_ROWS; }

/* scores[vectors][BLOCK] = q . K block. The lanes are entries. `ahead`, unless null, is a block to prefetch. */
OP void FN(scores)(const int format, const struct attention *a, const char *k, float *scores, const char *ahead) {
    long vectors = a->rows * a->heads, steps = format == SYM_FLOAT32 ? a->head_dim : a->head_dim / 2;
    for (long first = 0; first < vectors;) {
        long rows = FN(tile_rows)(vectors - first, TILE_ROWS);
        const char *q = a->q + first * steps * 4;
        float *out = scores + first * BLOCK;
        FOR_ROWS(rows, TILE_ROWS, {
            VEC acc[ROWS][2];
            for (int r = 0; r < ROWS; r++)
                acc[r][0] = acc[r][1] = FN(splat)(0.0f);
            FN(short_tile)(format, acc, ROWS, 2, steps, q, steps * 4, k, STEP, ahead);
            for (int r = 0; r < ROWS; r++) {
                FN(store)(out + r * BLOCK, acc[r][0]);
                FN(store)(out + r * BLOCK + 16, acc[r][1]);
            }
        })
        ahead = ahead ? ahead + steps / 4 * 64 : NULL;
        first += rows;
    }
}

/* Replace a block's scores by weights, in the pages' format. Entries that a row does not see may have any contents:
 * their scores are replaced before use. (If other rows of the unit see such an entry, its V is multiplied by zero for
 * this row. So computed and imported entries must be finite.) */
OP void FN(weigh)(const int format, const int capped, const struct attention *a, long first_page, long pages,
                  float *scores, float *decay, float *max, float *sums) {
    const float nothing = -__builtin_inff();
    const float scale = capped ? LOG2_E : a->scale * LOG2_E; /* weights are powers of 2 */
    const long vectors = a->rows * a->heads;
    float *best = decay; /* the highest scores of this block, until the factors replace them */
    for (long row = 0; row < a->rows; row++) {
        uint32_t seen[BLOCK_PAGES], every = 0xffffffffu;
        for (long j = 0; j < BLOCK_PAGES; j++)
            every &= seen[j] = j < pages ? FN(seen)(a, row, first_page + j) : 0;
        for (long i = row * a->heads; i < (row + 1) * a->heads; i++) {
            VEC top = FN(splat)(nothing);
#pragma GCC unroll 8
            for (int j = 0; j < BLOCK / 16; j++) {
                float *s = scores + i * BLOCK + 16 * j;
                VEC x = FN(load)(s);
                if (capped)
                    x = FN(capped)(FN(mul)(x, FN(splat)(a->scale)), a->softcap);
                if (every != 0xffffffffu)
                    x = FN(pick)(x, seen[j / 2] >> (j % 2 * 16) & 0xffff, nothing);
                if (capped || every != 0xffffffffu)
                    FN(store)(s, x);
                top = FN(max)(top, x);
            }
            best[i] = FN(largest)(top) * scale;
        }
    }
    for (long i = 0; i < vectors; i++) {
        float *s = scores + i * BLOCK, before = max[i], highest = best[i] > before ? best[i] : before;
        VEC base = FN(splat)(highest == nothing ? 0.0f : -highest), sum[BLOCK / 16];
        VEC factor = FN(exp2_up_to_127)(FN(add)(FN(splat)(before), base)); /* a branch would be mispredicted */
        max[i] = highest;
#pragma GCC unroll 8
        for (int j = 0; j < BLOCK / 16; j++) {
            sum[j] = FN(exp2_up_to_127)(FN(fma)(FN(load)(s + 16 * j), FN(splat)(scale), base));
            if (format == SYM_FLOAT32)
                FN(store)(s + 16 * j, sum[j]);
            else
                FN(store_bfloat16)((uint16_t *)s + 16 * j, sum[j]);
        }
#pragma GCC unroll 8
        for (int width = BLOCK / 32; width; width /= 2)
            for (int j = 0; j < width; j++)
                sum[j] = FN(add)(sum[j], sum[j + width]);
        FN(store)(sums + i * 16, FN(fma)(FN(load)(sums + i * 16), factor, sum[0]));
        decay[i] = FN(first)(factor);
    }
}

/* value = value * decay + weights . V of `entries` entries. The lanes are dimensions. Each page of V prefetches the page
 * of K that lies a block further on, up to page `past`. */
OP void FN(values)(const int format, const struct attention *a, long first_page, long entries, long past,
                   const float *weights, const float *decay, float *value) {
    long vectors = a->rows * a->heads, per_step = format == SYM_FLOAT32 ? 1 : 2, row_bytes = 4 * a->head_dim;
    long ahead_bytes = SYM_PAGE_ENTRIES / per_step / 4 * 64, fetched = 0; /* of each page */
    for (long first = 0; first < vectors;) {
        long rows = FN(tile_rows)(vectors - first, TILE_ROWS);
        for (long d = 0; d < a->head_dim; d += 32, fetched += ahead_bytes) {
            float *out = value + first * a->head_dim + d;
            int pair = a->head_dim - d >= 32;
            FOR_ROWS(rows, TILE_ROWS, {
                VEC acc[ROWS][2];
                for (int r = 0; r < ROWS; r++) {
                    VEC factor = FN(splat)(decay[first + r]);
                    acc[r][0] = FN(mul)(FN(load)(out + r * a->head_dim), factor);
                    acc[r][1] = pair ? FN(mul)(FN(load)(out + r * a->head_dim + 16), factor) : factor;
                }
                for (long done = 0; done < entries; done += SYM_PAGE_ENTRIES) {
                    long count = entries - done < SYM_PAGE_ENTRIES ? entries - done : SYM_PAGE_ENTRIES,
                         steps = count / per_step;
                    const char *p = (const char *)(weights + first * BLOCK) + done / per_step * 4;
                    long page = first_page + done / SYM_PAGE_ENTRIES, later = page + BLOCK_PAGES;
                    const char *v = a->v + a->pages[page] * a->page_bytes + 4 * d;
                    const char *k = later < past ? a->k + a->pages[later] * a->page_bytes + fetched : NULL;
                    if (pair)
                        FN(short_tile)(format, acc, ROWS, 2, steps, p, 4 * BLOCK, v, row_bytes, k);
                    else
                        FN(short_tile)(format, acc, ROWS, 1, steps, p, 4 * BLOCK, v, row_bytes, NULL);
                    if (count % per_step) { /* the second entry of the pair may have any contents */
                        const char *odd = v + steps * row_bytes;
                        VEC b0 = FN(and_bits)(FN(load)((const float *)odd), 0xffffu), b1 = b0;
                        if (pair)
                            b1 = FN(and_bits)(FN(load)((const float *)(odd + 64)), 0xffffu);
                        FN(step)(format, acc, ROWS, pair ? 2 : 1, p + 4 * steps, 4 * BLOCK, b0, b1);
                    }
                }
                for (int r = 0; r < ROWS; r++) {
                    FN(store)(out + r * a->head_dim, acc[r][0]);
                    if (pair)
                        FN(store)(out + r * a->head_dim + 16, acc[r][1]);
                }
            })
        }
        first += rows;
    }
}

/* Prefetch a block of K or V into the cache. Pages are far apart, so the hardware cannot predict the addresses. */
OP void FN(fetch)(const struct attention *a, long page, const char *blocks) {
    const char *block = blocks + a->pages[page] * a->page_bytes;
    for (long i = 0; i < a->block_bytes; i += 64)
        __builtin_prefetch(block + i, 0, 2);
}

OP void FN(attend_pages)(const int format, const struct attention *a, long split, struct softmax *into, float *room) {
    long vectors = a->rows * a->heads;
    float *scores = room, *sums = scores + vectors * BLOCK, *decay = sums + vectors * 16;
    VEC zero = FN(splat)(0.0f);
    for (long i = 0; i < vectors; i++) {
        into->max[i] = -__builtin_inff();
        FN(store)(sums + i * 16, zero);
    }
    for (long i = 0; i < vectors * a->head_dim; i += 16)
        FN(store)(into->value + i, zero);

    long end = 0, begin = a->limits[0];
    for (long r = 0; r < a->rows; r++) {
        if (a->limits[r] > end)
            end = a->limits[r];
        if (a->limits[r] < begin)
            begin = a->limits[r];
    }
    /* With few vectors, all of a block is prefetched at once. With many, the unit's first block is in the cache, and
     * products prefetch the next one. */
    const int many = FN(has_many)(a);
    const long past = many ? (end + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES : 0;
    for (long page = split * SPLIT_PAGES;
         !many && page < split * SPLIT_PAGES + BLOCK_PAGES && page * SYM_PAGE_ENTRIES < end; page++)
        FN(fetch)(a, page, a->k);
    begin = a->window ? begin - a->window : 0; /* no row sees an earlier entry */
    if (end > (split + 1) * SPLIT)
        end = (split + 1) * SPLIT;
    for (long entry = split * SPLIT; entry < end; entry += BLOCK) {
        if (entry + BLOCK <= begin)
            continue;
        long page = entry / SYM_PAGE_ENTRIES, entries = end - entry < BLOCK ? end - entry : BLOCK;
        long pages = (entries + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES;
        for (long j = 0; !many && j < pages; j++)
            FN(fetch)(a, page + j, a->v);
        for (long j = 0; j < pages; j++) {
            long at = a->pages[page + j] * a->page_bytes;
            FN(scores)(format, a, a->k + at, scores + j * SYM_PAGE_ENTRIES, many ? a->v + at : NULL);
        }
        if (a->softcap != 0)
            FN(weigh)(format, 1, a, page, pages, scores, decay, into->max, sums);
        else
            FN(weigh)(format, 0, a, page, pages, scores, decay, into->max, sums);
        for (long j = page + BLOCK_PAGES; !many && j < page + 2 * BLOCK_PAGES && j * SYM_PAGE_ENTRIES < end; j++)
            FN(fetch)(a, j, a->k);
        FN(values)(format, a, page, entries, past, scores, decay, into->value);
    }
    for (long i = 0; i < vectors; i++)
        into->sum[i] = FN(sum)(FN(load)(sums + i * 16));
}

static void FN(attend)(const struct attention *a, long split, struct softmax *into, float *room) {
    if (a->format == SYM_FLOAT32)
        FN(attend_pages)(SYM_FLOAT32, a, split, into, room);
    else
        FN(attend_pages)(SYM_BFLOAT16, a, split, into, room);
}

static void FN(merge)(struct softmax *into, const struct softmax *from, long vectors, long head_dim) {
    const float nothing = -__builtin_inff();
    for (long i = 0; i < vectors; i++) {
        if (from->max[i] == nothing)
            continue;
        if (into->max[i] == nothing) {
            into->max[i] = from->max[i];
            into->sum[i] = from->sum[i];
            memcpy(into->value + i * head_dim, from->value + i * head_dim, (size_t)head_dim * sizeof(float));
            continue;
        }
        float best = from->max[i] > into->max[i] ? from->max[i] : into->max[i];
        float pair[16] = {into->max[i] - best, from->max[i] - best};
        FN(store)(pair, FN(exp2_up_to_127)(FN(load)(pair)));
        VEC old = FN(splat)(pair[0]), new = FN(splat)(pair[1]);
        into->max[i] = best;
        into->sum[i] = into->sum[i] * pair[0] + from->sum[i] * pair[1];
        float *x = into->value + i * head_dim;
        const float *y = from->value + i * head_dim;
        for (long d = 0; d < head_dim; d += 16)
            FN(store)(x + d, FN(fma)(FN(load)(y + d), new, FN(mul)(FN(load)(x + d), old)));
    }
}

static void FN(finish)(const struct softmax *from, long first, long heads, long head_dim, void *out, int narrow) {
    for (long h = 0; h < heads; h++) {
        VEC share = FN(splat)(1.0f / from->sum[first + h]);
        const float *value = from->value + (first + h) * head_dim;
        for (long d = 0; d < head_dim; d += 16) {
            VEC x = FN(mul)(FN(load)(value + d), share);
            if (narrow)
                FN(store_bfloat16)((uint16_t *)out + h * head_dim + d, x);
            else
                FN(store)((float *)out + h * head_dim + d, x);
        }
    }
}

#include "mass_kernels.h"

const struct kernels FN(kernels) = {
    .name = ISA_NAME,
    .product = FN(product),
    .rms_norm = FN(rms_norm),
    .prepare = FN(prepare),
    .to_bfloat16 = FN(to_bfloat16),
    .rotate = FN(rotate),
    .attend = FN(attend),
    .merge = FN(merge),
    .finish = FN(finish),
    .measure = FN(measure),
    .spread = FN(spread),
};
