/* cffi reads this file: declarations only. */
#ifndef KVFS_COUNTS_H
#define KVFS_COUNTS_H

#include <stdint.h>

typedef struct {
    int32_t *of; /* a count a page */
    int64_t num_pages;
    int32_t floor;
    int64_t num_above; /* pages with a higher count than `floor` */
    int64_t top;       /* no page from here on ever had a count */
} page_counts;

/* Each of these returns -1, and has changed nothing, where a number is no page's. */

/* Count each mention of a page: how many pages rise above the floor. */
int64_t counts_add(page_counts *counts, const int32_t *pages, int64_t num_pages);

/* Take each mention back: how many pages fall to the floor. -2: a count is below zero now. */
int64_t counts_subtract(page_counts *counts, const int32_t *pages, int64_t num_pages);

/* How many of these pages have no count, each mentioned once. */
int64_t counts_num_new(page_counts *counts, const int32_t *pages, int64_t num_pages);

#endif
