/* A pool of few pages, accounts with little room, and random numbers: for programs that sanitizers look at. */
#ifndef SMALL_POOL_H
#define SMALL_POOL_H

#include "core.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    NUMBERS = 700,
    FRAMES = 400,
    ROWS = 64,
    ACCOUNTS = 3,
    OLD_FILES = CORE_FREE_NAMES - 2,
    MOST_FILES = OLD_FILES + 6
};

#define HOLDS(what)                                                                                                    \
    do                                                                                                                 \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    while (0)

static core_pool pool;
static core_files files = {.next_number = 2};
/* Of two users, and of the second one's domain. Only the second one has limits, and files of before. */
static core_account accounts[ACCOUNTS];
static core_holdings holdings[2];
static core_total total;
static core_sizes sizes = {.page_bytes = 100};

#ifdef FUZZING
/* What a fuzzer has thought out, in place of random numbers. */
static const uint8_t *input;
static size_t input_left;
#endif

static inline int below(int limit) {
    static uint64_t seed = 88172645463325252u;
#ifdef FUZZING
    if (!input_left)
        return 0;
    input_left--;
    if (limit <= 256)
        return *input++ % limit;
#endif
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % limit;
}

static inline void *zeros(size_t num, size_t size) {
    void *found = calloc(num, size);
    HOLDS(found);
    return found;
}

static inline void open_pool(void) {
    page_columns *of = &pool.page;
    void **columns[] = {(void **)&of->pins,         (void **)&of->arena,       (void **)&of->fill,
                        (void **)&of->num_reserved, (void **)&of->row,         (void **)&of->last_use,
                        (void **)&of->tokens,       (void **)&of->positions,   (void **)&of->has_digest,
                        (void **)&of->frame,        (void **)&of->kept_until,  (void **)&of->slot,
                        (void **)&of->num_on_disk,  (void **)&of->num_written, (void **)&of->is_suspect,
                        (void **)&of->generation,   (void **)&of->refcount};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        *columns[i] = zeros(NUMBERS, columns[i] == (void **)&of->tokens || columns[i] == (void **)&of->positions
                                         ? sizeof *of->tokens
                                         : sizeof(double));
    row_columns *row = &pool.row;
    void **of_rows[] = {(void **)&row->last_use_s,   (void **)&row->num_uses,       (void **)&row->gap_s,
                        (void **)&row->gap_spread_s, (void **)&row->num_users,      (void **)&row->priority,
                        (void **)&row->is_cold,      (void **)&row->pinned_until_s, (void **)&row->wanted_until_s,
                        (void **)&row->went_down,    (void **)&row->next_row,       (void **)&row->table,
                        (void **)&row->changed};
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++)
        *of_rows[i] = zeros(ROWS, sizeof(double));
    row->latest_gaps_s = zeros(ROWS, sizeof *row->latest_gaps_s);
    pool.row_room = ROWS;
    pool.frame.page = zeros(FRAMES, sizeof *pool.frame.page);
    pool.frame.generation = zeros(FRAMES, sizeof *pool.frame.generation);
    pool.frame.bytes_in = zeros(FRAMES, sizeof *pool.frame.bytes_in);
    pool.references = (page_counts){.of = of->refcount, .num_pages = NUMBERS, .floor = 1};
    pool.pins = (page_counts){.of = of->pins, .num_pages = NUMBERS};
    HOLDS((pool.numbers = free_list_new(NUMBERS)) && (pool.frames = free_list_new(FRAMES)));
    for (int i = 0; i < ACCOUNTS; i++) {
        accounts[i] = (core_account){.number = i,
                                     .sizes = &sizes,
                                     .most_bytes = i ? 25000 : -1,
                                     .most_files = i == 2 ? 5 : -1,
                                     .holdings = holdings + !!i,
                                     .total = &total,
                                     .is_watched = i == 1};
        accounts[i].pages = (page_counts){.of = zeros(NUMBERS, sizeof(int32_t)), .num_pages = NUMBERS};
    }
    accounts[2].parent = accounts + 1;
    holdings[0].limit_bytes = -1;
    holdings[1].limit_bytes = MOST_FILES * core_weights[CORE_FILE] * CORE_HANDLES_PART / (CORE_HANDLES_PART - 1) + 1;
    HOLDS(core_charge_files(accounts + 1, OLD_FILES) == CORE_DONE);
}

/* What Python does after each call of the core. */
static inline void take_news(void) {
    for (core_account *told = pool.told; told; told = told->next_told)
        told->is_told = told->has_news = 0;
    pool.told = NULL;
    pool.num_left = pool.news = 0;
}

/* Python's use of the list of files that were used, and of the gaps. */
static inline void take_used(void) {
    for (core_table *used = pool.used; used; used = used->next_used)
        used->is_used = 0;
    pool.used = NULL;
    pool.num_gaps = 0;
}

/* Its row, its pages and its charge come back; the charge of a file that has none is 0. */
static inline void close_table(core_table *table, core_account *payer) {
    HOLDS(!table->is_reserved || core_abort(table) == CORE_DONE);
    if (table->row != CORE_NOBODY)
        core_row_remove(table);
    HOLDS(core_table_close(table) == CORE_DONE);
    HOLDS(!payer || core_charge_files(payer, -1) == CORE_DONE);
}

/* Every branch is in the core's list. */
static inline int64_t num_branches(void) {
    int64_t num = 0;
    for (core_table *branch = core_next_branch(&pool, NULL); branch; branch = core_next_branch(&pool, branch))
        num++;
    return num;
}

/* Nobody holds anything, but for the files of before. */
static inline void require_empty(void) {
    HOLDS(pool.numbers->num_free == NUMBERS && pool.frames->num_free == FRAMES);
    HOLDS(!pool.references.num_above && !pool.pins.num_above && !files.num_branches && !num_branches());
    for (int i = 0; i < ACCOUNTS; i++)
        HOLDS(!accounts[i].page_bytes && !accounts[i].pages.num_above && !accounts[i].num_tables);
    for (int row = 0; row < pool.num_rows; row++)
        HOLDS(!pool.row.table[row]);
    HOLDS(free_list_is_sound(pool.numbers) && free_list_is_sound(pool.frames));
}

/* The memory goes, too. */
static inline void close_pool(void) {
    require_empty();
    HOLDS(core_charge_files(accounts + 1, -OLD_FILES) == CORE_DONE);
    for (int i = 0; i < ACCOUNTS; i++)
        HOLDS(!accounts[i].num_files);
    HOLDS(!holdings[0].num_bytes && !holdings[1].num_bytes && !total.num_files);
    core_close(&pool);
}

#endif
