/* Changes: which files were made, changed and closed since a call looked last.
 *
 * Changes have consecutive numbers. The journal has the last CORE_JOURNAL of them: the row of a file, or the record of
 * a file that is gone. As long as no call has read the last change of a file, a further change of the file needs no
 * number. So the journal grows with what was read, and not with what happens. An entry of a row is *stale* if the row's
 * `changed` is another number. Without a journal nothing is noted: no call has asked for changes yet. */

#include "inside.h"

#include <stdlib.h>
#include <time.h>

enum { PAGES_A_LOOK = 1 << 16 };

static core_change *add(core_pool *pool) {
    pool->last_change++;
    if (pool->is_watched)
        pool->news |= CORE_CHANGED;
    pool->is_watched = 0;
    core_change *change = pool->journal + pool->last_change % CORE_JOURNAL;
    *change = (core_change){.row = CORE_NOBODY};
    return change;
}

void core_changed(const core_table *table) {
    core_pool *pool = table->pool;
    if (table->row == CORE_NOBODY || !pool->journal || pool->row.changed[table->row] > pool->read_change)
        return;
    add(pool)->row = table->row;
    pool->row.changed[table->row] = pool->last_change;
}

void core_row_changed(core_pool *pool, int32_t row) {
    const core_table *table = (const core_table *)(uintptr_t)pool->row.table[row];
    if (table)
        core_changed(table);
}

void core_is_file(core_table *table, int64_t number, uint32_t uid) {
    table->number = number;
    table->uid = uid;
    if (table->row != CORE_NOBODY)
        table->pool->row.changed[table->row] = 0; /* a change that comes behind the loss of the number's last file */
    core_changed(table);
}

/* Describe a file. Return the number of its pages, which were looked at. */
static int32_t describe(const core_table *table, core_change *change) {
    int32_t num_there = 0;
    for (int32_t at = 0; at < table->num_pages; at++)
        num_there += core_number(table->pool->page.frame[table->slots[at]]) != CORE_NOBODY;
    *change = (core_change){
        .number = table->number,
        .origin = table->forked_from,
        .length = table->length,
        .shared = table->shared,
        .account = table->account->number,
        .row = table->row,
        .num_pages = table->num_pages,
        .num_in_memory = num_there,
        .uid = table->uid,
        .program = table->program,
    };
    return table->num_pages;
}

void core_gone(core_table *table) {
    core_pool *pool = table->pool;
    if (!pool->journal)
        return;
    int64_t *changed = pool->row.changed + table->row;
    const _Bool is_there = *changed > pool->read_change && *changed > pool->last_change - CORE_JOURNAL;
    core_change *change = is_there ? pool->journal + *changed % CORE_JOURNAL : add(pool);
    *changed = 0;
    describe(table, change);
    change->row = CORE_NOBODY;
}

void core_name_gone(core_table *table) {
    core_pool *pool = table->pool;
    if (table->row == CORE_NOBODY || !pool->journal)
        return;
    pool->row.changed[table->row] = 0; /* later changes come behind this one */
    *add(pool) =
        (core_change){.number = table->number, .account = table->account->number, .row = CORE_NOBODY, .is_name = 1};
}

int64_t core_begin_changes(core_pool *pool) {
    if (!pool->journal) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        pool->journal = calloc(CORE_JOURNAL, sizeof *pool->journal);
        pool->last_change = now.tv_sec * INT64_C(1000000) + now.tv_nsec / 1000; /* later than those of past daemons */
        pool->first_change = pool->last_change;
    }
    pool->read_change = pool->last_change;
    return pool->journal ? pool->last_change : CORE_NOBODY;
}

int64_t core_change_of_none(core_pool *pool) {
    if (pool->journal)
        add(pool);
    return pool->last_change;
}

int64_t core_all_files(const core_pool *pool, int32_t *row, core_change *found, int64_t max) {
    int64_t num = 0, num_pages = 0;
    const int64_t stop = *row + max < pool->num_rows ? *row + max : pool->num_rows;
    for (; *row < stop && num_pages < PAGES_A_LOOK; ++*row)
        if (pool->row.table[*row])
            num_pages += describe((const core_table *)(uintptr_t)pool->row.table[*row], found + num++);
    return num;
}

int64_t core_changes(core_pool *pool, int64_t *since, core_change *found, int64_t max) {
    int64_t num = 0, num_pages = 0;
    const int64_t oldest = pool->last_change - CORE_JOURNAL;
    if (!pool->journal || *since > pool->last_change || *since < pool->first_change || *since < oldest)
        return CORE_NOBODY;
    const int64_t stop = *since + max < pool->last_change ? *since + max : pool->last_change;
    while (*since < stop && num_pages < PAGES_A_LOOK) {
        const core_change *change = pool->journal + ++*since % CORE_JOURNAL;
        if (change->row == CORE_NOBODY)
            found[num++] = *change;
        else if (pool->row.changed[change->row] == *since)
            num_pages += describe((const core_table *)(uintptr_t)pool->row.table[change->row], found + num++);
    }
    if (*since > pool->read_change)
        pool->read_change = *since;
    return num;
}
