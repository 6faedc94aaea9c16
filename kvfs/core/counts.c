/* Counts of references to each page, and the number of pages with a count above a floor. */

#include "counts.h"

static int are_pages(const page_counts *counts, const int32_t *pages, int64_t num_pages) {
    for (int64_t i = 0; i < num_pages; i++)
        if (pages[i] < 0 || pages[i] >= counts->num_pages)
            return 0;
    return 1;
}

int64_t counts_add(page_counts *counts, const int32_t *pages, int64_t num_pages) {
    int64_t num = 0;
    if (!are_pages(counts, pages, num_pages))
        return -1;
    for (int64_t i = 0; i < num_pages; i++) {
        num += counts->of[pages[i]]++ == counts->floor;
        if (pages[i] >= counts->top)
            counts->top = pages[i] + INT64_C(1);
    }
    counts->num_above += num;
    return num;
}

int64_t counts_subtract(page_counts *counts, const int32_t *pages, int64_t num_pages) {
    int64_t num = 0, are_negative = 0;
    if (!are_pages(counts, pages, num_pages))
        return -1;
    for (int64_t i = 0; i < num_pages; i++) {
        int32_t left = --counts->of[pages[i]];
        num += left == counts->floor;
        are_negative |= left < 0;
    }
    counts->num_above -= num;
    return are_negative ? -2 : num;
}

int64_t counts_num_new(page_counts *counts, const int32_t *pages, int64_t num_pages) {
    int64_t num = 0;
    if (!are_pages(counts, pages, num_pages))
        return -1;
    for (int64_t i = 0; i < num_pages; i++)
        if (!counts->of[pages[i]]) {
            counts->of[pages[i]] = -1;
            num++;
        }
    for (int64_t i = 0; i < num_pages; i++)
        if (counts->of[pages[i]] < 0)
            counts->of[pages[i]] = 0;
    return num;
}
