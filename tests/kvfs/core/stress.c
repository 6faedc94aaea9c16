/* Random calls of the core, for sanitizers: tables that grow, fork, change hands and close, with little room. In the end
 * nobody holds anything. test_core.py compares answers; here every access to memory counts.
 */

#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBERS = 700, FRAMES = 400, TABLES = 12, MOST = 900, ACCOUNTS = 3 };
#ifdef SHORT_RUN
enum { ROUNDS = 100000 };
#else
enum { ROUNDS = 3000000 };
#endif

#define HOLDS(what)                                                                                                    \
    do                                                                                                                 \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    while (0)

static core_pool pool;
static core_account accounts[ACCOUNTS];
static core_holdings holdings[ACCOUNTS];
static core_total total;
static core_sizes sizes = {.page_bytes = 10};
static core_table *tables[TABLES];
static int32_t numbers[MOST];
static double now_s = 1;
static uint64_t seed = 88172645463325252u;

static int below(int limit) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % limit;
}

static void *zeros(size_t num, size_t size) {
    void *found = calloc(num, size);
    HOLDS(found);
    return found;
}

static void open_all(void) {
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
                        (void **)&row->went_down,    (void **)&row->next_row};
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++)
        *of_rows[i] = zeros(TABLES, sizeof(double));
    row->latest_gaps_s = zeros(TABLES, sizeof *row->latest_gaps_s);
    pool.row_room = TABLES;
    pool.frame.page = zeros(FRAMES, sizeof *pool.frame.page);
    pool.frame.generation = zeros(FRAMES, sizeof *pool.frame.generation);
    pool.frame.bytes_in = zeros(FRAMES, sizeof *pool.frame.bytes_in);
    pool.references = (page_counts){.of = of->refcount, .num_pages = NUMBERS, .floor = 1};
    pool.pins = (page_counts){.of = of->pins, .num_pages = NUMBERS};
    HOLDS((pool.numbers = free_list_new(NUMBERS)) && (pool.frames = free_list_new(FRAMES)));
    for (int i = 0; i < ACCOUNTS; i++) {
        holdings[i].limit_bytes = -1;
        accounts[i] = (core_account){.number = i,
                                     .sizes = &sizes,
                                     .most_bytes = i ? 2500 : -1,
                                     .most_files = -1,
                                     .holdings = holdings + i,
                                     .total = &total,
                                     .is_watched = i == 1};
        accounts[i].pages = (page_counts){.of = zeros(NUMBERS, sizeof(int32_t)), .num_pages = NUMBERS};
    }
    accounts[2].parent = accounts + 1;
}

static void reserve_and_more(core_table *table) {
    int num = 1 + below(MOST);
    if (!table->is_reserved) {
        core_reserve(table, numbers, below(2) ? numbers : NULL, num, below(4) ? 0 : below(MOST));
        return;
    }
    switch (below(8)) {
    case 0:
        HOLDS(core_abort(table) == CORE_DONE);
        return;
    case 1:
        core_extend(table, num);
        return;
    case 2:
        HOLDS(table->is_pinned || core_forget_room(table) == CORE_DONE);
        return;
    case 3:
        core_unpin(table);
        return;
    }
    int32_t frames[NUMBERS], missing = 0;
    int32_t num_pages = table->num_reserved_pages, first = table->num_pages, has_target = table->target != CORE_NOBODY;
    for (int32_t place = first; place < num_pages + has_target; place++)
        missing += !pool.page.frame[table->slots[place]].complement;
    if (missing > pool.frames->num_free)
        return;
    if (missing) {
        free_list_take(pool.frames, missing, frames);
        core_give_room(table, frames);
    }
    if (table->row != CORE_NOBODY)
        core_begin_use(&pool, table->row, now_s += below(2));
    if (!table->is_pinned)
        core_pin(table);
    HOLDS(core_frames(table, num_pages, frames));
    num = 1 + below(table->num_entries < MOST ? table->num_entries : MOST);
    core_pages_to_zero(table, num, frames);
    HOLDS(core_commit(table, numbers, num) == CORE_DONE);
}

static void step(void) {
    int at = below(TABLES);
    core_table **table = tables + at, *other = tables[below(TABLES)];
    core_account *account = accounts + below(ACCOUNTS);
    if (!*table) {
        if (!other || below(4) == 0)
            HOLDS(*table = core_table_new(&pool, account, 0, 0, NULL, 0));
        else if (core_fork(other, account, table))
            *table = NULL;
        if (*table && below(4))
            HOLDS(core_row_new(*table, now_s += below(2)) == CORE_DONE);
    } else if (below(4)) {
        reserve_and_more(*table);
    } else if (below(6) == 0) {
        core_change_owner(*table, account);
    } else if (!(*table)->is_reserved && below(2)) {
        HOLDS(core_truncate(*table, below((*table)->length + 1)) == CORE_DONE);
    } else if (!(*table)->is_reserved) {
        if ((*table)->row != CORE_NOBODY)
            core_row_remove(*table);
        HOLDS(core_table_close(*table) == CORE_DONE);
        *table = NULL;
    }
    pool.num_left = pool.news = 0;
    for (int32_t page = 0; page < NUMBERS && below(8) == 0; page++)
        if (pool.page.refcount[page] && below(4) == 0)
            pool.page.slot[page].complement = ~page;
}

int main(void) {
    open_all();
    for (int i = 0; i < MOST; i++)
        numbers[i] = i;
    for (int round = 0; round < ROUNDS; round++) {
        step();
        if (round % 1000)
            continue;
        pool.is_awaited = below(2);
        pool.low_water = below(4);
        pool.num_promised = below(8) ? 0 : 40;
    }
    for (int i = 0; i < TABLES; i++)
        if (tables[i]) {
            HOLDS(!tables[i]->is_reserved || core_abort(tables[i]) == CORE_DONE);
            HOLDS(core_table_close(tables[i]) == CORE_DONE);
        }
    HOLDS(pool.numbers->num_free == NUMBERS && pool.frames->num_free == FRAMES);
    HOLDS(!pool.references.num_above && !pool.pins.num_above);
    for (int i = 0; i < ACCOUNTS; i++)
        HOLDS(!accounts[i].page_bytes && !accounts[i].pages.num_above && !accounts[i].num_tables);
    HOLDS(free_list_is_sound(pool.numbers) && free_list_is_sound(pool.frames));
    core_close(&pool);
    printf("core: %d calls\n", ROUNDS);
    return 0;
}
