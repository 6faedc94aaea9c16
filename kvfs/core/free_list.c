/* Free pages. The list has one bit for each page, and a tree of blocks above the bits. Each block has 64 parts, and
 * stores its longest runs of free pages.
 *
 * The tree has five levels, whatever the capacity. A search for a run examines 64 blocks or words of each level. A
 * change to the pages of one block examines as many. So the work of a call is bounded by the number of pages that the
 * call names. A set bit means that the page is taken, so a new list consists of untouched memory.
 */

#include "free_list.h"

#include <stdlib.h>
#include <string.h>

enum { FAN = 64, LEVELS = 5, SHIFT = 6 };

/* Return the number of pages in each part of a block of this level. The parts are words, or blocks of the level
 * below. */
static int64_t width(int level) { return INT64_C(64) << SHIFT * level; }

static int longest(uint64_t free) {
    uint64_t runs[7] = {free}; /* a bit of runs[k] is set where 2^k free pages begin */
    int k = 0;
    while (k < 5 && (runs[k + 1] = runs[k] & runs[k] >> (1 << k)))
        k++;
    int length = 1 << k;
    for (uint64_t found = runs[k], more; k-- > 0;)
        if ((more = found & runs[k] >> length)) {
            found = more;
            length += 1 << k;
        }
    return length;
}

static free_runs of_word(uint64_t free) {
    if (!free)
        return (free_runs){0, 0, 0};
    if (!~free)
        return (free_runs){64, 64, 64};
    return (free_runs){__builtin_ctzll(~free), __builtin_clzll(~free), longest(free)};
}

/* Return the parts of a block. On the lowest level they are words, whose runs are put into `room`. */
static const free_runs *parts(const free_list *list, int level, int64_t block, free_runs room[FAN]) {
    if (level)
        return list->runs[level - 1] + block * FAN;
    for (int i = 0; i < FAN; i++)
        room[i] = of_word(~list->taken[block * FAN + i]);
    return room;
}

static free_runs of_block(const free_list *list, int level, int64_t block) {
    free_runs room[FAN];
    const free_runs *part = parts(list, level, block, room);
    int64_t begin = -1, run = 0, within = 0;
    for (int i = 0; i < FAN; i++) {
        int64_t first = run + part[i].begin;
        within = first > within ? first : within;
        within = part[i].within > within ? part[i].within : within;
        if (part[i].begin == width(level)) {
            run = first;
        } else {
            begin = begin < 0 ? first : begin;
            run = part[i].end;
        }
    }
    return (free_runs){begin < 0 ? run : begin, run, within};
}

/* Update the tree after pages of one block of the lowest level have changed. */
static void update(free_list *list, int64_t block) {
    for (int level = 0; level < LEVELS; level++, block /= FAN) {
        free_runs found = of_block(list, level, block), *known = list->runs[level] + block;
        list->num_looked += FAN;
        if (!memcmp(&found, known, sizeof found))
            return;
        *known = found;
    }
}

/* Return where `count` free pages begin in a word. The word must have that many free pages in a row. */
static int first_in(uint64_t free, int64_t count) {
    for (int64_t length = 1, step; length < count; length += step) {
        step = length < count - length ? length : count - length;
        free &= free >> step;
    }
    return __builtin_ctzll(free);
}

/* Return the first page of the lowest run of `count` free pages, which must exist. */
static int64_t find(free_list *list, int64_t count) {
    int64_t at = 0;
    for (int level = LEVELS - 1; level >= 0; level--) {
        free_runs room[FAN];
        const free_runs *part = parts(list, level, at, room);
        int64_t run = 0;
        list->num_looked += FAN;
        for (at *= FAN; run + part->begin < count && part->within < count; at++, part++)
            run = part->begin == width(level) ? run + part->begin : part->end;
        if (run + part->begin >= count)
            return at * width(level) - run;
    }
    return at * 64 + first_in(~list->taken[at], count);
}

free_list *free_list_new(int64_t num_pages) {
    free_list *list = calloc(1, sizeof *list);
    if (!list)
        return NULL;
    list->num_pages = list->num_free = num_pages;
    int64_t num_blocks = num_pages / width(1) + 1, num_whole = num_blocks - 1;
    int64_t num_words = num_blocks * FAN;
    list->taken = calloc(num_words, sizeof *list->taken);
    int is_made = list->taken != NULL;
    for (int level = 0; level < LEVELS; level++) {
        int64_t room = (num_blocks + FAN - 1) / FAN * FAN;
        list->runs[level] = calloc(room, sizeof **list->runs);
        is_made &= list->runs[level] != NULL;
        num_blocks = room / FAN;
    }
    if (!is_made) {
        free_list_delete(list);
        return NULL;
    }
    for (int64_t page = num_pages; page < num_words * 64; page++)
        list->taken[page / 64] |= UINT64_C(1) << page % 64;
    for (int64_t block = 0; block < num_whole; block++)
        list->runs[0][block] = (free_runs){width(1), width(1), width(1)};
    list->runs[0][num_whole] = of_block(list, 0, num_whole);
    for (int64_t level = 1, last = num_whole / FAN; level < LEVELS; level++, last /= FAN)
        for (int64_t block = 0; block <= last; block++)
            list->runs[level][block] = of_block(list, level, block);
    return list;
}

void free_list_delete(free_list *list) {
    if (!list)
        return;
    for (int level = 0; level < LEVELS; level++)
        free(list->runs[level]);
    free(list->taken);
    free(list);
}

void free_list_take_lowest(free_list *list, int64_t count, int32_t *pages) {
    list->num_free -= count;
    while (count) {
        int64_t page = find(list, 1), block = page / width(1);
        for (int64_t word = page / 64; count && word < (block + 1) * FAN; word++) {
            list->num_looked++;
            for (uint64_t free; count && (free = ~list->taken[word]); count--, list->taken[word] |= free & -free)
                *pages++ = page = word * 64 + __builtin_ctzll(free);
        }
        list->top = page >= list->top ? page + 1 : list->top;
        update(list, block);
    }
}

void free_list_take(free_list *list, int64_t count, int32_t *pages) {
    if (list->runs[LEVELS - 1]->within < count) {
        free_list_take_lowest(list, count, pages);
        return;
    }
    int64_t first = find(list, count), stop = first + count;
    list->num_free -= count;
    list->top = stop > list->top ? stop : list->top;
    for (int64_t page = first; page < stop; page++) {
        *pages++ = page;
        list->taken[page / 64] |= UINT64_C(1) << page % 64;
    }
    for (int64_t block = first / width(1); block <= (stop - 1) / width(1); block++)
        update(list, block);
}

int free_list_set(free_list *list, const int32_t *pages, int64_t num_pages, int are_free) {
    for (int64_t i = 0; i < num_pages; i++)
        if (pages[i] < 0 || pages[i] >= list->num_pages)
            return -1;
    for (int64_t i = 0; i < num_pages; i++) {
        uint64_t *word = list->taken + pages[i] / 64, bit = UINT64_C(1) << pages[i] % 64;
        int is_free = !(*word & bit);
        list->num_free += are_free - is_free;
        *word = are_free ? *word & ~bit : *word | bit;
        if (!are_free && pages[i] >= list->top)
            list->top = pages[i] + INT64_C(1);
    }
    for (int64_t i = 0, before = -1; i < num_pages; i++) {
        int64_t block = pages[i] / width(1);
        if (block != before)
            update(list, before = block);
    }
    return 0;
}

int free_list_is_sound(const free_list *list) {
    int64_t num_free = 0, num_blocks = list->num_pages / width(1) + 1;
    for (int64_t word = 0; word < num_blocks * FAN; word++)
        num_free += __builtin_popcountll(~list->taken[word]);
    for (int level = 0; level < LEVELS; level++, num_blocks = (num_blocks + FAN - 1) / FAN)
        for (int64_t block = 0; block < num_blocks; block++) {
            free_runs found = of_block(list, level, block);
            if (memcmp(&found, list->runs[level] + block, sizeof found))
                return 0;
        }
    return num_free == list->num_free;
}
