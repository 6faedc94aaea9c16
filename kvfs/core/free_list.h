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
    int64_t num_looked; /* words and blocks that were examined: tests measure work by this */
    uint64_t *taken;    /* one bit for each page; bits behind the last page are set */
    free_runs *runs[5]; /* for each level: the runs of its blocks, of 64^2 to 64^6 pages */
} free_list;

/* Make a list with all pages free. NULL: there is no memory. */
free_list *free_list_new(int64_t num_pages);
void free_list_delete(free_list *list);

/* Take `count` pages, which must be free: the lowest run that fits, else the lowest pages. */
void free_list_take(free_list *list, int64_t count, int32_t *pages);

/* Take the lowest `count` pages, whether or not they are a run. */
void free_list_take_lowest(free_list *list, int64_t count, int32_t *pages);

/* Make pages free, or taken. Pages that have that state already stay as they are. -1: a number is not a page number,
 * and nothing has changed. */
int free_list_set(free_list *list, const int32_t *pages, int64_t num_pages, int are_free);

/* Return whether the counts and blocks agree with the bits. */
int free_list_is_sound(const free_list *list);

#endif
