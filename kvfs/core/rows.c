/* Rows: files that programs have open, and when they were used. */

#include "inside.h"

#include <math.h>
#include <string.h>

/* A pause that is shorter than this belongs to the use: a program in Python takes a millisecond or two between two
 * tokens. */
static const double LEAST_GAP_S = 0.02;
/* Weight of the newest gap in the mean of a file's gaps. */
static const double NEWS_SHARE = 0.25;

core_outcome core_row_new(core_table *table, double now_s) {
    core_pool *pool = table->pool;
    row_columns *of = &pool->row;
    int32_t row = core_number(pool->free_row);
    if (row != CORE_NOBODY)
        pool->free_row = of->next_row[row];
    else if (pool->num_rows < pool->row_room)
        row = pool->num_rows++;
    else
        return CORE_NO_MEMORY;
    table->row = row;
    of->last_use_s[row] = now_s;
    of->num_uses[row] = 1;
    of->gap_s[row] = of->gap_spread_s[row] = of->pinned_until_s[row] = of->wanted_until_s[row] = 0;
    memset(of->latest_gaps_s[row], 0, sizeof *of->latest_gaps_s);
    of->num_users[row] = of->priority[row] = of->went_down[row] = 0;
    of->is_cold[row] = 0;
    of->table[row] = (uint64_t)(uintptr_t)table;
    of->changed[row] = 0;
    core_changed(table);
    return CORE_DONE;
}

void core_row_remove(core_table *table) {
    core_pool *pool = table->pool;
    double *last_use_s = pool->row.last_use_s;
    int32_t row = table->row, source = core_source_row(table);
    core_gone(table);
    if (core_leave(table, table->slots, table->num_pages) && source != CORE_NOBODY &&
        last_use_s[source] < last_use_s[row])
        last_use_s[source] = last_use_s[row];
    pool->row.table[row] = 0;
    pool->row.next_row[row] = pool->free_row;
    pool->free_row = core_some(row);
    table->row = CORE_NOBODY;
}

double core_begin_use(core_pool *pool, int32_t row, double now_s) {
    row_columns *of = &pool->row;
    double gap_s = now_s - of->last_use_s[row];
    of->is_cold[row] = 0;
    of->wanted_until_s[row] = 0;
    of->went_down[row] = 0;
    if (gap_s < LEAST_GAP_S)
        return 0;
    core_note_gap(of, row, gap_s);
    return gap_s;
}

void core_note_gap(row_columns *of, int32_t row, double gap_s) {
    int64_t num_gaps = of->num_uses[row]++;
    of->latest_gaps_s[row][(num_gaps + 1) % LATEST_GAPS] = gap_s;
    double off_s = gap_s - of->gap_s[row], *spread_s = of->gap_spread_s + row;
    if (num_gaps > 1)
        *spread_s = num_gaps > 2 ? *spread_s + NEWS_SHARE * (fabs(off_s) - *spread_s) : fabs(off_s);
    of->gap_s[row] = num_gaps > 1 ? of->gap_s[row] + NEWS_SHARE * off_s : gap_s;
}
