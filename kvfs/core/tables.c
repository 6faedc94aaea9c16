/* Tables: the pages that hold a file's entries, and the number of entries. */

#include "inside.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SMALL = 64 }; /* an unused table keeps memory for this many page numbers */

double core_now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static core_table *new_table(core_pool *pool) {
    core_table *table = calloc(1, sizeof *table);
    if (table) {
        table->older = pool->tables;
        pool->tables = pool->free_tables = table;
    }
    return table;
}

void core_close(core_pool *pool) {
    for (core_table *table = pool->tables, *older; table; table = older) {
        older = table->older;
        free(table->slots);
        free(table);
    }
    free(pool->left);
    free(pool->journal);
    free(pool->scratch);
}

core_table *core_table_new(core_pool *pool, core_account *account, uint8_t arena, int64_t length, const int32_t *pages,
                           int64_t num_pages) {
    core_table *table = pool->free_tables ? pool->free_tables : new_table(pool);
    if (!table || !core_has_slots(table, num_pages))
        return NULL;
    pool->free_tables = table->next;
    table->pool = pool;
    table->account = account;
    table->length = length;
    table->num_pages = table->num_reserved_pages = num_pages;
    table->row = table->target = table->tail_page = table->marked_page = CORE_NOBODY;
    table->arena = arena;
    table->is_reserved = table->is_pinned = 0;
    table->page_seconds = 0;
    table->since_s = core_now_s();
    table->source = NULL;
    table->number = table->hits = table->cuts = table->forked_from = table->shared = 0;
    table->uid = table->program = 0;
    table->heat = table->used_s = 0;
    table->is_odd = table->is_branch = 0;
    table->stay = NULL;
    table->place = CORE_NOBODY;
    if (num_pages)
        memcpy(table->slots, pages, num_pages * sizeof *pages);
    account->num_tables++;
    return table;
}

void core_comes_from(core_table *table, core_table *source) {
    table->source = source;
    table->source_generation = source->generation;
    table->forked_from = source->number;
    table->shared = table->length;
}

core_outcome core_fork(core_table *source, core_account *account, core_table **at) {
    core_pool *pool = source->pool;
    *at = core_table_new(pool, account, source->arena, source->length, source->slots, source->num_pages);
    if (!*at)
        return CORE_NO_MEMORY;
    core_outcome outcome = core_retain(pool, account, source->slots, source->num_pages);
    core_comes_from(*at, source);
    if (outcome)
        core_forget_table(*at);
    return outcome;
}

void core_forget_table(core_table *table) {
    core_pool *pool = table->pool;
    table->account->num_tables--;
    table->generation++;
    if (table->room > SMALL) { /* the next file with this table may be small */
        free(table->slots);
        table->slots = NULL;
        table->room = 0;
    }
    table->next = pool->free_tables;
    pool->free_tables = table;
}

core_outcome core_table_close(core_table *table) {
    core_outcome outcome = core_release(table->pool, table->account, table->slots, table->num_pages);
    if (!outcome)
        core_forget_table(table);
    return outcome;
}

core_outcome core_change_owner(core_table *table, core_account *account) {
    core_outcome outcome = core_move(table->pool, table->account, account, table->slots, core_num_needed(table));
    if (outcome)
        return outcome;
    table->account->num_tables--;
    account->num_tables++;
    table->account = account;
    return CORE_DONE;
}

int32_t core_source_row(const core_table *table) {
    const core_table *source = table->source;
    return source && source->generation == table->source_generation ? source->row : CORE_NOBODY;
}

_Bool core_leave(core_table *table, const int32_t *pages, int64_t num) {
    if (table->row == CORE_NOBODY)
        return 0;
    number_or_none row = core_some(core_source_row(table));
    _Bool were_some = 0;
    for (int64_t i = 0; i < num; i++)
        if (core_number(table->pool->page.row[pages[i]]) == table->row) {
            table->pool->page.row[pages[i]] = row;
            were_some = 1;
        }
    return were_some;
}

double core_page_seconds(const core_table *table) {
    return table->page_seconds + table->num_pages * (core_now_s() - table->since_s);
}

void core_has_pages(core_table *table, int32_t num_pages) {
    if (num_pages == table->num_pages)
        return;
    double now = core_now_s();
    table->page_seconds += table->num_pages * (now - table->since_s);
    table->since_s = now;
    table->num_pages = num_pages;
}

core_outcome core_truncate(core_table *table, int64_t length) {
    int32_t num_pages = core_pages_for(length), num_gone = table->num_pages - num_pages;
    const int32_t *gone = table->slots + num_pages;
    if (!core_has_memory(table->pool, num_gone))
        return CORE_NO_MEMORY;
    core_leave(table, gone, num_gone);
    core_outcome outcome = core_release(table->pool, table->account, gone, num_gone);
    core_has_pages(table, num_pages);
    table->num_reserved_pages = num_pages;
    table->length = length;
    table->shared = length < table->shared ? length : table->shared;
    table->cuts++;
    core_changed(table);
    return outcome;
}
