/* Products on Intel's matrix tiles: sixteen rows by sixteen features at a time. All other kernels of this instruction
 * set are the AVX-512 kernels, FN(name), which are included just before this file.
 *
 * This file is included twice: with the instructions themselves, and with AMX_EMULATED. The emulation has the same
 * results in plain C, and aborts where an instruction would fault. So any machine with AVX-512 can test the code around
 * the instructions. A row's bits must not depend on the batch. So even a single row uses tiles: a row's result in a
 * tile does not depend on the tile's other rows. */

#ifdef AMX_EMULATED
#define T(name) name##_emulated
#define TILE_CONFIG(c) emulated_config(c)
#define TILE_ZERO(t) memset(emulated_tiles[t], 0, sizeof emulated_tiles[t])
#define TILE_LOAD(t, p, stride) emulated_load(t, p, stride)
#define TILE_STORE(t, p, stride) emulated_store(t, p, stride)
#define TILE_DOT_BFLOAT16(c, a, b) emulated_dot(c, a, b, 1)
#define TILE_DOT_CODES(c, a, b) emulated_dot(c, a, b, 0)
#define TILE_RELEASE() memset(&emulated_shape, 0, sizeof emulated_shape)
#else
/* The compiler does not know tiles. The memory clobbers force it to store data before a tile loads it. */
#define T(name) name##_tiles
#define TILE_CONFIG(c) __asm__ volatile("ldtilecfg %0" ::"m"(*(c)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t::: "memory")
#define TILE_LOAD(t, p, stride)                                                                                        \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, p, stride)                                                                                       \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_DOT_BFLOAT16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::: "memory")
#define TILE_DOT_CODES(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c::: "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#endif

#ifndef AMX_ONCE
#define AMX_ONCE

/* Operand of ldtilecfg. Tiles 0-3 hold sums, tiles 4 and 5 hold rows, and tiles 6 and 7 hold features. */
struct tile_shape {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* bytes in a row of each tile */
    uint8_t rows[16];
};

#define SHAPE(row_bytes, feature_rows)                                                                                 \
    {                                                                                                                  \
        .palette = 1, .bytes = {64, 64, 64, 64, row_bytes, row_bytes, 64, 64},                                         \
        .rows = {16, 16, 16, 16, 16, 16, feature_rows, feature_rows}                                                   \
    }
static const struct tile_shape bfloat16_shape = SHAPE(64, 16), block_shape = SHAPE(32, 8), half_shape = SHAPE(16, 4);
/* Codes: groups of 32 and of 16 inputs. */

static _Thread_local struct tile_shape emulated_shape;
static _Thread_local char emulated_tiles[8][16][64];

static void emulated_config(const struct tile_shape *shape) {
    emulated_shape = *shape;
    memset(emulated_tiles, 0, sizeof emulated_tiles);
}

static void emulated_load(int t, const char *p, long stride) {
    memset(emulated_tiles[t], 0, sizeof emulated_tiles[t]);
    for (int i = 0; i < emulated_shape.rows[t]; i++)
        memcpy(emulated_tiles[t][i], p + i * stride, emulated_shape.bytes[t]);
}

static void emulated_store(int t, void *p, long stride) {
    for (int i = 0; i < emulated_shape.rows[t]; i++)
        memcpy((char *)p + i * stride, emulated_tiles[t][i], emulated_shape.bytes[t]);
}

static void emulated_dot(int c, int a, int b, int numbers) {
    const struct tile_shape *s = &emulated_shape;
    if (s->palette != 1 || s->rows[c] != s->rows[a] || s->bytes[a] != 4 * s->rows[b] || s->bytes[c] != s->bytes[b])
        abort();
    for (int i = 0; i < s->rows[c]; i++)
        for (int k = 0; k < s->bytes[a] / 4; k++)
            for (int j = 0; j < s->bytes[c] / 4; j++) {
                const char *x = emulated_tiles[a][i] + 4 * k, *y = emulated_tiles[b][k] + 4 * j;
                char *to = emulated_tiles[c][i] + 4 * j;
                if (numbers) {
                    uint16_t xs[2], ys[2];
                    float sum;
                    memcpy(xs, x, 4), memcpy(ys, y, 4), memcpy(&sum, to, 4);
                    for (int l = 0; l < 2; l++)
                        sum += of_bfloat16(xs[l]) * of_bfloat16(ys[l]);
                    memcpy(to, &sum, 4);
                } else {
                    int32_t sum;
                    memcpy(&sum, to, 4);
                    for (int l = 0; l < 4; l++)
                        sum += (int8_t)x[l] * (uint8_t)y[l];
                    memcpy(to, &sum, 4);
                }
            }
}

#endif

#define TILE_SUMS 32 /* rows of sums: two tiles high and two tiles wide */

/* Compute the sums of up to 32 rows over a whole panel: [rows][32] floats or integers. */
OP void T(panel_sums)(const int numbers, const sym_matrix *w, const char *a, long a_stride, const char *b, long rows,
                      void *sums) {
    char *low = sums, *high = low + 16 * STEP;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (long left = numbers ? 2 * w->k : w->k; left > 0; left -= 64, a += 64, b += 16 * STEP) { /* bytes of a row */
        TILE_LOAD(4, a, a_stride);
        TILE_LOAD(6, b, STEP);
        TILE_LOAD(7, b + 64, STEP);
        if (numbers) {
            TILE_DOT_BFLOAT16(0, 4, 6);
            TILE_DOT_BFLOAT16(1, 4, 7);
        } else {
            TILE_DOT_CODES(0, 4, 6);
            TILE_DOT_CODES(1, 4, 7);
        }
        if (rows <= 16)
            continue;
        TILE_LOAD(5, a + 16 * a_stride, a_stride);
        if (numbers) {
            TILE_DOT_BFLOAT16(2, 5, 6);
            TILE_DOT_BFLOAT16(3, 5, 7);
        } else {
            TILE_DOT_CODES(2, 5, 6);
            TILE_DOT_CODES(3, 5, 7);
        }
    }
    TILE_STORE(0, low, STEP);
    TILE_STORE(1, low + 64, STEP);
    TILE_STORE(2, high, STEP);
    TILE_STORE(3, high + 64, STEP);
}

static void T(product_bfloat16)(const struct product *p, long panel, long first, long last) {
    _Alignas(64) float sums[TILE_SUMS][PANEL];
    const char *panel_data = p->w->data + panel * panel_bytes(p->w);
    TILE_CONFIG(&bfloat16_shape);
    for (; first < last; first += TILE_SUMS) {
        long rows = last - first < TILE_SUMS ? last - first : TILE_SUMS;
        const char *a = p->a + first * p->a_stride;
        T(panel_sums)(1, p->w, a, p->a_stride, panel_data, rows, sums);
        for (long r = 0; r < rows; r++)
            FN(epilogue)(p, panel, first + r, FN(load)(sums[r]), FN(load)(sums[r] + 16));
    }
    TILE_RELEASE();
}

/* Return one block's codes with a byte for each: [step][feature][4]. */
OP const char *T(widened)(const struct FN(codes) c, const char *codes, VEC levels, char *wide) {
    if (c.bits == 8)
        return codes;
    for (int i = 0; i < SYM_BLOCK / 4; i++)
        for (int half = 0; half < STEP; half += 64)
            FN(store)((float *)(wide + i * STEP + half), FN(load_codes)(c, codes + half, i, levels));
    return wide;
}

OP VEC T(codes_sum)(const int32_t *sums, VEC start) { return FN(add_int)(FN(load)((const float *)sums), start); }

OP void T(product_codes)(const struct FN(codes) c, const struct product *p, long panel, long first, long last) {
    _Alignas(64) float totals[TILE_SUMS][PANEL];
    _Alignas(64) int32_t sums[TILE_SUMS][PANEL];
    _Alignas(64) char wide[8 * STEP];
    const sym_matrix *w = p->w;
    const enum scale_form form = w->has_supers ? FACTORS : HALVES;
    const long blocks = w->k / SYM_BLOCK, bytes = codes_block_bytes(w), size = scale_bytes(w);
    const long groups = SYM_BLOCK / c.group;
    VEC unit = FN(splat)(CODE_UNIT);
    TILE_CONFIG(c.group == SYM_BLOCK ? &block_shape : &half_shape);
    for (; first < last; first += TILE_SUMS) {
        long rows = last - first < TILE_SUMS ? last - first : TILE_SUMS;
        const char *a = p->a + first * p->a_stride, *info = a + w->k, *b = w->data + panel * panel_bytes(w);
        struct FN(tables) tables = FN(tables_of)(c, w);
        memset(totals, 0, sizeof totals);
        for (long i = 0; i < blocks; i++, b += bytes, info += sizeof(struct block_info)) {
            if (form == FACTORS && i % BLOCKS_OF_SUPER == 0)
                b = FN(load_supers)(c.has_mins, b, &tables);
            const char *codes = T(widened)(c, b + block_head(w), tables.levels, wide);
            for (int g = 0; g < groups; g++, a += c.group, codes += c.group / 4 * STEP) {
                VEC scales[2], mins[2];
                FN(load_scales)(form, b + g * size, tables.scales, scales);
                mins[0] = mins[1] = scales[0];
                if (c.has_mins)
                    FN(load_scales)(form, b + (groups + g) * size, tables.mins, mins);
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_LOAD(4, a, p->a_stride);
                TILE_LOAD(6, codes, STEP);
                TILE_LOAD(7, codes + 64, STEP);
                TILE_DOT_CODES(0, 4, 6);
                TILE_DOT_CODES(1, 4, 7);
                TILE_STORE(0, sums[0], STEP);
                TILE_STORE(1, sums[0] + 16, STEP);
                if (rows > 16) {
                    TILE_ZERO(2);
                    TILE_ZERO(3);
                    TILE_LOAD(5, a + 16 * p->a_stride, p->a_stride);
                    TILE_DOT_CODES(2, 5, 6);
                    TILE_DOT_CODES(3, 5, 7);
                    TILE_STORE(2, sums[16], STEP);
                    TILE_STORE(3, sums[16] + 16, STEP);
                }
                for (long r = 0; r < rows; r++) {
                    const struct block_info *of_row = (const void *)(info + r * p->a_stride);
                    VEC start = FN(codes_start)(c, g, of_row);
                    VEC c0 = T(codes_sum)(sums[r], start), c1 = T(codes_sum)(sums[r] + 16, start);
                    FN(store)(totals[r], FN(add_group)(c, g, of_row, c0, scales[0], mins[0], FN(load)(totals[r])));
                    FN(store)(totals[r] + 16,
                              FN(add_group)(c, g, of_row, c1, scales[1], mins[1], FN(load)(totals[r] + 16)));
                }
            }
        }
        for (long r = 0; r < rows; r++)
            FN(epilogue)(p, panel, first + r, FN(mul)(FN(load)(totals[r]), unit),
                         FN(mul)(FN(load)(totals[r] + 16), unit));
    }
    TILE_RELEASE();
}

#define LAYOUT_TILES(bits, group, has_mins, has_levels)                                                                \
    static __attribute__((noinline)) void T(product_##bits##_##group##_##has_mins##_##has_levels)(                     \
        const struct product *p, long panel, long first, long last) {                                                  \
        const struct FN(codes) codes = {bits, group, has_mins, has_levels};                                            \
        T(product_codes)(codes, p, panel, first, last);                                                                \
    }
LAYOUTS(LAYOUT_TILES)
#undef LAYOUT_TILES

/* Multiply whole rows of codes. Tiles have `bfloat16_shape`, and the scales are applied once, at the end. */
static void T(product_rotated)(const struct product *p, long panel, long first, long last) {
    _Alignas(64) int32_t sums[TILE_SUMS][PANEL];
    const char *panel_data = p->w->data + panel * panel_bytes(p->w);
    const float *scales = (const float *)(panel_data + p->w->k / 4 * STEP);
    VEC d0 = FN(load)(scales), d1 = FN(load)(scales + 16);
    VEC z0 = FN(load)(scales + PANEL), z1 = FN(load)(scales + PANEL + 16);
    TILE_CONFIG(&bfloat16_shape);
    for (; first < last; first += TILE_SUMS) {
        long rows = last - first < TILE_SUMS ? last - first : TILE_SUMS;
        const char *a = p->a + first * p->a_stride, *info = a + p->w->k;
        T(panel_sums)(0, p->w, a, p->a_stride, panel_data, rows, sums);
        for (long r = 0; r < rows; r++) {
            const struct block_info *of_row = (const void *)(info + r * p->a_stride);
            VEC less = FN(splat)(WORD(&of_row->less)), scale = FN(splat)(of_row->scale);
            VEC x = FN(from_int)(T(codes_sum)(sums[r], FN(mul_int)(less, z0)));
            VEC y = FN(from_int)(T(codes_sum)(sums[r] + 16, FN(mul_int)(less, z1)));
            FN(epilogue)(p, panel, first + r, FN(mul)(FN(mul)(x, d0), scale), FN(mul)(FN(mul)(y, d1), scale));
        }
    }
    TILE_RELEASE();
}

static void T(product)(const struct product *p, long panel, long first, long last) {
    switch (p->w->format) {
    case SYM_FLOAT32:
        FN(product)(p, panel, first, last);
        return;
    case SYM_BFLOAT16:
        T(product_bfloat16)(p, panel, first, last);
        return;
    case SYM_ROTATED8:
        T(product_rotated)(p, panel, first, last);
        return;
    }
    switch (KEY_OF(p->w)) {
#define CASE_OF_LAYOUT(bits, group, has_mins, has_levels)                                                              \
    case LAYOUT_KEY(bits, group, has_mins, has_levels):                                                                \
        T(product_##bits##_##group##_##has_mins##_##has_levels)(p, panel, first, last);                                \
        return;
        LAYOUTS(CASE_OF_LAYOUT)
#undef CASE_OF_LAYOUT
    }
    abort();
}

#ifdef AMX_EMULATED
#define AMX_NAME "amx-emulated"
#else
#define AMX_NAME "amx"
#endif

const struct kernels T(kernels) = {
    .name = AMX_NAME,
    .product = T(product),
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

#undef T
#undef AMX_NAME
#undef TILE_CONFIG
#undef TILE_ZERO
#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_DOT_BFLOAT16
#undef TILE_DOT_CODES
#undef TILE_RELEASE
#undef TILE_SUMS
