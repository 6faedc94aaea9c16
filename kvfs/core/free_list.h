/* cffi reads this file: declarations only. */
#ifndef KVFS_FREE_LIST_H
#define KVFS_FREE_LIST_H

#include <stdint.h>

/* The longest run of free pages at the beginning of a block, at its end, and anywhere in it. */
typedef struct {
    int32_t begin, end, within;
} free_runs;

typedef struct {
    int64_t num_pages, num_free;
    int64_t top;        /* no page from here on was ever taken */
    int64_t num_looked; /* words and blocks that were looked at: the work, for tests */
    uint64_t *taken;    /* a bit a page; those behind the last page are set */
    free_runs *runs[5]; /* of blocks of 64^2, 64^3, … 64^6 pages */
} free_list;

/* All pages free; NULL: there is no memory. */
free_list *free_list_new(int64_t num_pages);
void free_list_delete(free_list *list);

/* Take `count` pages, as many as are free at least: the lowest run that fits, else the lowest pages. */
void free_list_take(free_list *list, int64_t count, int32_t *pages);

/* The same, the lowest pages in any case. */
void free_list_take_lowest(free_list *list, int64_t count, int32_t *pages);

/* Make pages free, or taken; what is so already stays. -1 and nothing changed: a page is none. */
int free_list_set(free_list *list, const int32_t *pages, int64_t num_pages, int are_free);

/* Whether counts and blocks say what the bits say. */
int free_list_is_sound(const free_list *list);

#endif
