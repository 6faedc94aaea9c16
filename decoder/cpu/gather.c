/* Pages made of entries of other pages, in the layouts that step.h describes. A word is a float32, or the two bfloat16
 * that lie side by side. */

#include <string.h>

#include "step.h"

enum { ENTRIES = SYM_PAGE_ENTRIES };

/* Return the number of entries from `i` on that lie side by side in one source. */
static long together(const uint32_t *const *sources, const int32_t *slots, long i, long count) {
    long stop = i + 1;
    while (stop < count && sources[stop] == sources[i] && slots[stop] == slots[stop - 1] + 1)
        stop++;
    return stop - i;
}

/* Fill a block of K, [words][32]: column i is column slots[i] of sources[i]. */
static void gather_keys(const uint32_t *const *sources, const int32_t *slots, long count, long words, uint32_t *block) {
    for (long i = 0, run; i < count; i += run) {
        run = together(sources, slots, i, count);
        for (long w = 0; w < words; w++)
            memcpy(block + w * ENTRIES + i, sources[i] + w * ENTRIES + slots[i], (size_t)run * sizeof *block);
    }
    for (long w = 0; count < ENTRIES && w < words; w++)
        memset(block + w * ENTRIES + count, 0, (size_t)(ENTRIES - count) * sizeof *block);
}

/* Fill a block of V in float32, [32][dim]. */
static void gather_floats(const uint32_t *const *sources, const int32_t *slots, long count, long dim, uint32_t *block) {
    for (long i = 0; i < count; i++)
        memcpy(block + i * dim, sources[i] + slots[i] * dim, (size_t)dim * sizeof *block);
    memset(block + count * dim, 0, (size_t)((ENTRIES - count) * dim) * sizeof *block);
}

/* Fill a block of V in bfloat16, [16][dim][2]. An even entry is the low half of a word. */
static void gather_pairs(const uint32_t *const *sources, const int32_t *slots, long count, long dim, uint32_t *block) {
    long i = 0;
    for (; i < count; i += 2, block += dim) {
        const long other = i + 1 < count ? i + 1 : i;
        const uint32_t high_mask = other > i ? 0xffff0000 : 0;
        const uint32_t *low = sources[i] + slots[i] / 2 * dim, *high = sources[other] + slots[other] / 2 * dim;
        const int low_shift = slots[i] % 2 * 16, high_shift = 16 - slots[other] % 2 * 16;
        for (long d = 0; d < dim; d++)
            block[d] = (low[d] >> low_shift & 0xffff) | (high[d] << high_shift & high_mask);
    }
    memset(block, 0, (size_t)((ENTRIES - i) / 2 * dim) * sizeof *block);
}

void sym_gather(const sym_shape *shape, char *arena, int64_t target, const int32_t *sources, const int32_t *slots,
                int64_t count) {
    const int is_narrow = shape->kv_format == SYM_BFLOAT16;
    const long dim = shape->head_dim, words = is_narrow ? dim / 2 : dim; /* words of an entry */
    const long num_blocks = 2L * shape->layers * shape->kv_heads, block_words = words * ENTRIES;
    const long page_words = num_blocks * block_words;
    uint32_t *const pages = (uint32_t *)arena;
    const uint32_t *from[ENTRIES];
    for (long block = 0; block < num_blocks; block++) {
        for (long i = 0; i < count; i++)
            from[i] = pages + sources[i] * page_words + block * block_words;
        uint32_t *const to = pages + target * page_words + block * block_words;
        if (block / shape->kv_heads % 2 == 0)
            gather_keys(from, slots, count, words, to);
        else if (is_narrow)
            gather_pairs(from, slots, count, dim, to);
        else
            gather_floats(from, slots, count, dim, to);
    }
}
