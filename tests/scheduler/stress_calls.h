/* Connections whose calls the core carries out, and what Python does for them: for programs that sanitizers look at. */
#ifndef STRESS_CALLS_H
#define STRESS_CALLS_H

#include "../kvfs/core/small_pool.h"

#include "abi.h"
#include "stays.h"

enum { CONNECTIONS = 3, MOST = 100 };

static sym_gate gate = {.files = &files};
static sym_connection connections[CONNECTIONS];
static core_account *payers[ROWS]; /* by row: of the file that has it */
static int32_t numbers[MOST];
/* Python takes over a stay; a gate without a run has none. */
static void (*adopt)(sym_stay *stay);

static inline void open_connections(void) {
    open_pool();
    for (int i = 0; i < CONNECTIONS; i++) {
        core_maker maker = {.account = accounts + i, .uid = (uint32_t)i, .gid = 7};
        connections[i] = (sym_connection){.gate = &gate, .holdings = holdings + !!i, .maker = maker};
    }
}

/* One that is open, or was, or never is. */
static inline uint64_t any_handle(const sym_connection *connection) {
    uint64_t found[4 * ROWS];
    int64_t num = sym_handles_list(connection, 0, found, 4 * ROWS);
    const uint64_t odd[] = {0, 1, UINT64_MAX, connection->last_handle, connection->last_handle + 1};
    return num && below(16) ? found[below((int)num)] : odd[below(5)];
}

static inline int64_t any_argument(const core_table *file) {
    int64_t length = file ? file->length : 0;
    const int64_t some[] = {0, 1, 0600, 07777, 010000, -1, length, length - 1, length + 1, INT64_MAX, INT64_MIN};
    return below(3) ? some[below(sizeof some / sizeof *some)] : below((int)length + 1);
}

/* ---- Python's part */

static inline void see(sym_connection *connection, uint64_t number, core_table *file) {
    if (file->stay)
        adopt(file->stay);
    if (file->is_branch)
        core_branch_seen(file, &files);
    sym_handle_seen(connection, number);
}

static inline void close_handle(sym_connection *connection, uint64_t number, core_table *file) {
    see(connection, number, file);
    sym_handle_forget(connection, number);
    HOLDS(core_hold(connection->holdings, CORE_HANDLE, -1, 0) == CORE_DONE);
    if (--pool.row.num_users[file->row] == 0)
        close_table(file, payers[file->row]);
}

static inline void open_file(sym_connection *connection, core_table *file) {
    if (!core_may_hold(connection->holdings, CORE_HANDLE, 1, 0))
        return;
    HOLDS(sym_handle_new(connection, file, 1) == connection->last_handle);
    HOLDS(core_hold(connection->holdings, CORE_HANDLE, 1, 0) == CORE_DONE);
    pool.row.num_users[file->row]++;
}

static inline void create(sym_connection *connection) {
    core_account *account = connection->maker.account;
    if (!core_has_room_for_files(account, 1, 0) || !core_may_hold(connection->holdings, CORE_HANDLE, 1, 0))
        return;
    core_table *file = core_table_new(&pool, account, 0, 0, NULL, 0);
    if (core_row_new(file, 1) != CORE_DONE) {
        close_table(file, NULL);
        return;
    }
    file->number = files.next_number++;
    file->is_odd = below(8) == 0;
    HOLDS(core_charge_files(account, 1) == CORE_DONE);
    payers[file->row] = account;
    open_file(connection, file);
}

/* Sometimes the entries are reserved for a while. */
static inline void append(core_table *file) {
    int num = 1 + below(MOST);
    int32_t pages[NUMBERS];
    if (!file->is_reserved && core_reserve(file, numbers, NULL, num, 0) != CORE_DONE)
        return;
    if (below(8) == 0)
        return;
    if (core_num_there(file) < file->num_reserved_pages + (file->target != CORE_NOBODY) || below(8) == 0) {
        HOLDS(core_abort(file) == CORE_DONE);
        return;
    }
    core_pin(file);
    core_pages_to_zero(file, file->num_entries, pages);
    HOLDS(core_commit(file, numbers, file->num_entries) == CORE_DONE);
}

/* ---- what Python asks, and the end */

static inline void look(const sym_connection *connection) {
    int64_t num_pages = connection->num_pages, most = connection->num_handles;
    HOLDS(2 * most <= connection->room);
    HOLDS(sym_branches_page_seconds(connection) >= 0);
    int32_t *pages = zeros(num_pages, sizeof *pages);
    sym_branches_pages(connection, pages);
    for (int64_t i = 0; i < num_pages; i++)
        HOLDS(pool.page.refcount[pages[i]] > 0);
    uint64_t *found = zeros(most, sizeof *found);
    HOLDS(sym_handles_list(connection, 0, found, most) == most);
    for (int64_t i = 0; i < most; i++)
        HOLDS(sym_handle_find(connection, found[i]));
    HOLDS(sym_handles_list(connection, 1, found, most) == most - connection->num_seen);
    for (int64_t i = 0; i < most - connection->num_seen; i++)
        num_pages -= sym_handle_find(connection, found[i])->num_pages;
    HOLDS(num_pages == 0);
    HOLDS(sym_handles_list(connection, 0, found, most / 2) == most / 2);
    free(found);
    free(pages);
}

static inline void leave(sym_connection *connection) {
    uint64_t number;
    int64_t num_unseen = connection->num_handles - connection->num_seen;
    int64_t num_closed = sym_branches_close(connection, INT64_MAX);
    HOLDS(num_closed >= 0 && num_closed <= num_unseen);
    while (sym_handles_list(connection, 0, &number, 1))
        close_handle(connection, number, sym_handle_find(connection, number));
    sym_connection_free(connection);
    HOLDS(!connection->num_handles && !connection->num_seen);
}

#endif
