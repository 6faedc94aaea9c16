/* Kernels for mass. kernels.h includes this file for each instruction set.
 *
 * Attention overwrites a block's weights with those of the next block. So mass computes the weights again, in two
 * passes over the scores. The first pass finds each query vector's highest score and sum of weights. The second pass
 * adds up weight / sum. An entry's mass is one chain of additions over the rows in their order, and over the heads of
 * each row. The chain does not depend on the rows that are computed together. So mass has the same bits for any chunks
 * of a prefill. */

OP void FN(measure_pages)(const int format, const struct attention *a, float *max, float *share, float *room) {
    long vectors = a->rows * a->heads, end = a->limits[a->rows - 1], begin = a->window ? a->limits[0] - a->window : 0;
    float *scores = room, *sums = scores + vectors * BLOCK, *decay = sums + vectors * 16;
    for (long i = 0; i < vectors; i++) {
        max[i] = -__builtin_inff();
        FN(store)(sums + i * 16, FN(splat)(0.0f));
    }
    for (long entry = begin > 0 ? begin / BLOCK * BLOCK : 0; entry < end; entry += BLOCK) {
        long page = entry / SYM_PAGE_ENTRIES, past = (end + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES;
        long pages = past - page < BLOCK_PAGES ? past - page : BLOCK_PAGES;
        for (long j = page + BLOCK_PAGES; j < page + 2 * BLOCK_PAGES && j < past; j++)
            FN(fetch)(a, j, a->k);
        for (long j = 0; j < pages; j++)
            FN(scores)(format, a, a->k + a->pages[page + j] * a->page_bytes, scores + j * SYM_PAGE_ENTRIES, NULL);
        if (a->softcap != 0)
            FN(weigh)(SYM_FLOAT32, 1, a, page, pages, scores, decay, max, sums);
        else
            FN(weigh)(SYM_FLOAT32, 0, a, page, pages, scores, decay, max, sums);
    }
    for (long i = 0; i < vectors; i++)
        share[i] = 1.0f / FN(sum)(FN(load)(sums + i * 16));
}

static void FN(measure)(const struct attention *a, float *max, float *share, float *room) {
    if (a->format == SYM_FLOAT32)
        FN(measure_pages)(SYM_FLOAT32, a, max, share, room);
    else
        FN(measure_pages)(SYM_BFLOAT16, a, max, share, room);
}

OP void FN(spread_pages)(const int format, const struct attention *a, long first, long entries, const float *max,
                         const float *share, float *mass, float *room) {
    const float nothing = -__builtin_inff(), scale = a->softcap != 0 ? LOG2_E : a->scale * LOG2_E; /* as in weigh() */
    long page = first / SYM_PAGE_ENTRIES, pages = (entries + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES;
    float totals[BLOCK] = {0};
    VEC total[BLOCK / 16];
    memcpy(totals, mass, (size_t)entries * sizeof *mass);
    for (int j = 0; j < BLOCK / 16; j++)
        total[j] = FN(load)(totals + 16 * j);
    for (long j = 0; j < pages; j++)
        FN(scores)(format, a, a->k + a->pages[page + j] * a->page_bytes, room + j * SYM_PAGE_ENTRIES, NULL);
    for (long row = 0; row < a->rows; row++) {
        uint32_t seen[BLOCK_PAGES];
        for (long j = 0; j < BLOCK_PAGES; j++)
            seen[j] = j < pages ? FN(seen)(a, row, page + j) : 0;
        for (long i = row * a->heads; i < (row + 1) * a->heads; i++) {
            VEC base = FN(splat)(-max[i]), part = FN(splat)(share[i]);
            for (int j = 0; j < BLOCK / 16; j++) {
                if (!seen[j / 2])
                    continue; /* the scores may be undefined */
                VEC x = FN(load)(room + i * BLOCK + 16 * j);
                if (a->softcap != 0)
                    x = FN(capped)(FN(mul)(x, FN(splat)(a->scale)), a->softcap);
                if (seen[j / 2] != 0xffffffffu)
                    x = FN(pick)(x, seen[j / 2] >> (j % 2 * 16) & 0xffff, nothing);
                total[j] = FN(fma)(FN(exp2_up_to_127)(FN(fma)(x, FN(splat)(scale), base)), part, total[j]);
            }
        }
    }
    for (int j = 0; j < BLOCK / 16; j++)
        FN(store)(totals + 16 * j, total[j]);
    memcpy(mass, totals, (size_t)entries * sizeof *mass);
}

static void FN(spread)(const struct attention *a, long first, long entries, const float *max, const float *share,
                       float *mass, float *room) {
    if (a->format == SYM_FLOAT32)
        FN(spread_pages)(SYM_FLOAT32, a, first, entries, max, share, mass, room);
    else
        FN(spread_pages)(SYM_BFLOAT16, a, first, entries, max, share, mass, room);
}
