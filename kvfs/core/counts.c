/* Counts of references to each page, and the number of pages with a count above a floor. */

#include "counts.h"

static int are_pages(const page_counts *counts, int64_t base, const int32_t *pages, int64_t num_pages) {
    for (int64_t i = 0; i < num_pages; i++)
        if (pages[i] < 0 || base + pages[i] >= counts->num_pages)
            return 0;
    return 1;
}

int64_t counts_add(page_counts *counts, int64_t base, const int32_t *pages, int64_t num_pages) {
    int64_t num = 0;
    if (!are_pages(counts, base, pages, num_pages))
        return -1;
    int32_t *of = counts->of + base;
    for (int64_t i = 0; i < num_pages; i++) {
        num += of[pages[i]]++ == counts->floor;
        if (base + pages[i] >= counts->top)
            counts->top = base + pages[i] + 1;
    }
    counts->num_above += num;
    return num;
}

int64_t counts_subtract(page_counts *counts, int64_t base, const int32_t *pages, int64_t num_pages) {
    int64_t num = 0, are_negative = 0;
    if (!are_pages(counts, base, pages, num_pages))
        return -1;
    int32_t *of = counts->of + base;
    for (int64_t i = 0; i < num_pages; i++) {
        int32_t left = --of[pages[i]];
        num += left == counts->floor;
        are_negative |= left < 0;
    }
    counts->num_above -= num;
    return are_negative ? -2 : num;
}

int64_t counts_num_new(page_counts *counts, int64_t base, const int32_t *pages, int64_t num_pages) {
    int64_t num = 0;
    if (!are_pages(counts, base, pages, num_pages))
        return -1;
    int32_t *of = counts->of + base;
    for (int64_t i = 0; i < num_pages; i++)
        if (!of[pages[i]]) {
            of[pages[i]] = -1;
            num++;
        }
    for (int64_t i = 0; i < num_pages; i++)
        if (of[pages[i]] < 0)
            of[pages[i]] = 0;
    return num;
}
