/* cffi reads this file: declarations only. */
#ifndef KVFS_COUNTS_H
#define KVFS_COUNTS_H

#include <stdint.h>

typedef struct {
    int32_t *of; /* a count for each page */
    int64_t num_pages;
    int32_t floor;
    int64_t num_above; /* pages with a count above `floor` */
    int64_t top;       /* no page from here on ever had a count */
} page_counts;

/* The count of page p is `of[base + p]`: several pools may share counts, each from its own `base` on. Each of these
 * functions returns -1, and changes nothing, if a number in `pages` is not a page number. */

/* Add 1 to a page's count each time that `pages` names the page. Return how many pages rise above the floor. */
int64_t counts_add(page_counts *counts, int64_t base, const int32_t *pages, int64_t num_pages);

/* Subtract 1 from a page's count each time that `pages` names the page. Return how many pages fall to the floor. -2: a
 * count is below zero now. */
int64_t counts_subtract(page_counts *counts, int64_t base, const int32_t *pages, int64_t num_pages);

/* Return how many distinct pages in `pages` have the count 0. */
int64_t counts_num_new(page_counts *counts, int64_t base, const int32_t *pages, int64_t num_pages);

#endif
