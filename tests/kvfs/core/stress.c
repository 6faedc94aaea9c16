/* Random calls of the core, for sanitizers: tables that grow, fork, change hands and close, and branches, with little
 * room. In the end nobody holds anything. test_core.py compares answers; here every access to memory counts.
 */

#include "small_pool.h"

enum { TABLES = 12, MOST = 900 };
#ifdef SHORT_RUN
enum { ROUNDS = 30000 };
#else
enum { ROUNDS = 3000000 };
#endif

static core_table *tables[TABLES];
static core_account *payers[TABLES]; /* of files that are branches, or were */
static int32_t numbers[MOST];
static double now_s = 1;

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

static void branch(core_table *source, int at) {
    core_maker maker = {.account = accounts + below(ACCOUNTS), .uid = 1};
    files.num_names = below(3);
    source->is_odd = below(8) == 0;
    pool.row_room = below(4) ? ROWS : pool.num_rows;
    core_outcome outcome = core_branch(source, &files, &maker, 0600, tables + at);
    pool.row_room = ROWS;
    HOLDS(outcome == CORE_DONE || outcome == CORE_COLD);
    payers[at] = outcome ? NULL : maker.account;
    tables[at] = outcome ? NULL : tables[at];
}

static void cut_or_close(int at) {
    core_table *table = tables[at];
    _Bool is_branch = table->is_branch, is_there = 1;
    int64_t length = below((int)table->length + 3) - 1;
    core_outcome outcome = CORE_DONE, expected = is_branch ? CORE_DONE : CORE_COLD;
    _Bool is_within = length >= 0 && length <= table->length;
    switch (below(4)) {
    case 0:
        outcome = core_branch_truncate(table, length);
        expected = is_within ? expected : CORE_COLD;
        break;
    case 1:
        outcome = core_branch_close(table, &files);
        is_there = outcome != CORE_DONE;
        break;
    case 2:
        if (is_branch)
            core_branch_seen(table, &files);
        core_note_use(table, now_s += below(2));
        expected = CORE_DONE;
        break;
    default:
        if (is_branch)
            core_branch_seen(table, &files);
        close_table(table, payers[at]);
        expected = CORE_DONE;
        is_there = 0;
    }
    HOLDS(outcome == expected);
    tables[at] = is_there ? table : NULL;
}

static void step(void) {
    int at = below(TABLES);
    core_table **table = tables + at, *other = tables[below(TABLES)];
    core_account *account = accounts + below(ACCOUNTS);
    if (!*table) {
        payers[at] = NULL;
        if (!other || below(4) == 0)
            HOLDS(*table = core_table_new(&pool, account, 0, 0, NULL, 0));
        else if (below(2))
            branch(other, at);
        else if (core_fork(other, account, table))
            *table = NULL;
        if (*table && (*table)->row == CORE_NOBODY && below(4))
            HOLDS(core_row_new(*table, now_s += below(2)) == CORE_DONE);
    } else if (!(*table)->is_branch && below(4)) {
        reserve_and_more(*table);
    } else if (!(*table)->is_branch && below(6) == 0) {
        core_change_owner(*table, account);
    } else if (!(*table)->is_branch && !(*table)->is_reserved && below(2)) {
        HOLDS(core_truncate(*table, below((int)(*table)->length + 1)) == CORE_DONE);
    } else {
        cut_or_close(at);
    }
    take_news();
    if (below(100) == 0)
        take_used();
    for (int32_t page = 0; page < NUMBERS && below(8) == 0; page++)
        if (pool.page.refcount[page] && below(4) == 0)
            pool.page.slot[page].complement = ~page;
}

int main(void) {
    open_pool();
    for (int i = 0; i < MOST; i++)
        numbers[i] = i;
    for (int round = 0; round < ROUNDS; round++) {
        step();
        if (round % 1000)
            continue;
        pool.is_awaited = below(2);
        pool.low_water = below(4);
        pool.num_promised = below(8) ? 0 : 40;
        HOLDS(files.num_branches == num_branches());
    }
    for (int i = 0; i < TABLES; i++) {
        if (tables[i] && tables[i]->is_branch)
            HOLDS(core_branch_close(tables[i], &files) == CORE_DONE);
        else if (tables[i])
            close_table(tables[i], payers[i]);
    }
    close_pool();
    printf("core: %d calls\n", ROUNDS);
    return 0;
}
