/* Calls of three connections that the core carries out, for sanitizers: any handle, any number, and little room. Python's
 * part is done in between: it sees branches, appends to files, opens them again, and closes what the core leaves to it. In
 * the end nobody holds anything. tests/scheduler/test_served_calls.py compares answers; here every access to memory counts.
 */
#include "../kvfs/core/small_pool.h"

#include "abi.h"
#include "connection.h"

#include <string.h>

enum { CONNECTIONS = 3, MOST = 100 };
#ifdef SHORT_RUN
enum { ROUNDS = 100000 };
#else
enum { ROUNDS = 3000000 };
#endif

static sym_gate gate = {.files = &files};
static sym_connection connections[CONNECTIONS];
static core_account *payers[ROWS]; /* by row: of the file that has it */
static int32_t numbers[MOST];

/* What a call changes. */
typedef struct {
    int64_t files, branches, next_number, names, handles, pages, references, weight, tables, calls;
} facts;

static facts facts_of(const sym_connection *connection) {
    facts found = {.files = total.num_files,
                   .branches = files.num_branches,
                   .next_number = files.next_number,
                   .names = files.num_names,
                   .handles = connection->num_handles,
                   .pages = pool.numbers->num_free,
                   .weight = holdings[0].num_bytes + holdings[1].num_bytes};
    for (int page = 0; page < NUMBERS; page++)
        found.references += pool.page.refcount[page];
    for (int i = 0; i < ACCOUNTS; i++)
        found.tables += accounts[i].num_tables;
    for (int op = 0; op < SYM_NUM_OPERATIONS; op++)
        found.calls += gate.num_calls[op];
    return found;
}

/* One that is open, or was, or never is. */
static uint64_t any_handle(const sym_connection *connection) {
    uint64_t found[4 * ROWS];
    int64_t num = sym_handles_list(connection, 0, found, 4 * ROWS);
    const uint64_t odd[] = {0, 1, UINT64_MAX, connection->last_handle, connection->last_handle + 1};
    return num && below(16) ? found[below((int)num)] : odd[below(5)];
}

static int64_t any_argument(const core_table *file) {
    int64_t length = file ? file->length : 0;
    const int64_t some[] = {0, 1, 0600, 07777, 010000, -1, length, length - 1, length + 1, INT64_MAX, INT64_MIN};
    return below(3) ? some[below(sizeof some / sizeof *some)] : below((int)length + 1);
}

/* ---- Python's part */

static void see(sym_connection *connection, uint64_t number, core_table *file) {
    if (file->is_branch)
        core_branch_seen(file, &files);
    sym_handle_seen(connection, number);
}

static void close_handle(sym_connection *connection, uint64_t number, core_table *file) {
    see(connection, number, file);
    sym_handle_forget(connection, number);
    HOLDS(core_hold(connection->holdings, CORE_HANDLE, -1, 0) == CORE_DONE);
    if (--pool.row.num_users[file->row] == 0)
        close_table(file, payers[file->row]);
}

static void open_file(sym_connection *connection, core_table *file) {
    if (!core_may_hold(connection->holdings, CORE_HANDLE, 1, 0))
        return;
    HOLDS(sym_handle_new(connection, file) == connection->last_handle);
    HOLDS(core_hold(connection->holdings, CORE_HANDLE, 1, 0) == CORE_DONE);
    pool.row.num_users[file->row]++;
}

static void create(sym_connection *connection) {
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
static void append(core_table *file) {
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

static void in_python(sym_connection *connection) {
    uint64_t number = any_handle(connection);
    core_table *file = sym_handle_find(connection, number);
    if (!file || connection->num_handles < 2) {
        create(connection);
        return;
    }
    switch (below(8)) {
    case 0: /* eviction sees the file, and no handle */
        if (file->is_branch)
            core_branch_seen(file, &files);
        return;
    case 1:
        see(connection, number, file);
        open_file(connections + below(CONNECTIONS), file);
        return;
    default:
        see(connection, number, file);
        append(file);
    }
}

/* ---- the core's part */

static void require_within_limits(const core_account *account) {
    HOLDS(!account->is_ended);
    for (; account; account = account->parent) {
        HOLDS(account->most_files < 0 || account->num_files <= account->most_files);
        HOLDS(account->most_bytes < 0 ||
              account->page_bytes + core_names_bytes(account->num_files) <= account->most_bytes);
    }
}

static void request(sym_connection *connection) {
    const uint32_t ops[] = {SYM_KV_FORK, SYM_KV_FORK, SYM_KV_CLOSE, SYM_KV_TRUNCATE, SYM_KV_READ};
    sym_taken taken = {.handle = any_handle(connection), .op = ops[below(5)], .payload_bytes = below(16) == 0};
    core_table *file = sym_handle_find(connection, taken.handle);
    taken.args[0] = taken.op == SYM_KV_FORK && below(4) ? 0600 : any_argument(file);
    for (int i = 1; i < 4; i++)
        taken.args[i] = any_argument(file);
    HOLDS(sym_connection_operations() >> taken.op & 1);
    files.num_names = below(3);
    pool.row_room = below(4) ? ROWS : pool.num_rows;
    connection->maker.account->is_ended = below(16) == 0;
    int64_t length = file ? file->length : -1, answer[4] = {0};
    facts before = facts_of(connection), after;
    int is_served = sym_connection_serve(connection, &taken, "x", answer);
    after = facts_of(connection);
    pool.row_room = ROWS;
    if (!is_served) {
        HOLDS(memcmp(&before, &after, sizeof before) == 0 && (!file || file->length == length));
        if (file && taken.op == SYM_KV_CLOSE)
            close_handle(connection, taken.handle, file);
        return;
    }
    HOLDS(file && !taken.payload_bytes && after.calls == before.calls + 1);
    int num = (taken.op == SYM_KV_FORK) - (taken.op == SYM_KV_CLOSE);
    HOLDS(after.handles == before.handles + num && after.files == before.files + num);
    HOLDS(after.branches == before.branches + num && after.branches == num_branches());
    if (num > 0) {
        core_table *branch = sym_handle_find(connection, (uint64_t)answer[0]);
        HOLDS(branch && branch->is_branch && branch->length == length && answer[1] == length);
        HOLDS(!file->is_odd && after.names >= 0 && branch->mode == taken.args[0]);
        payers[branch->row] = connection->maker.account;
        require_within_limits(connection->maker.account);
    } else if (taken.op == SYM_KV_TRUNCATE) {
        HOLDS(file->length == taken.args[0] && answer[0] == file->length);
    } else if (taken.op == SYM_KV_READ) {
        HOLDS(answer[0] == 0 && answer[1] == length && !file->is_reserved);
    }
}

/* ---- what Python asks, and the end */

static void look(const sym_connection *connection) {
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
    HOLDS(sym_handles_list(connection, 0, found, most / 2) == most / 2);
    free(found);
    free(pages);
}

static void leave(sym_connection *connection) {
    uint64_t number;
    int64_t num_unseen = connection->num_handles - connection->num_seen;
    int64_t num_closed = sym_branches_close(connection, INT64_MAX);
    HOLDS(num_closed >= 0 && num_closed <= num_unseen);
    while (sym_handles_list(connection, 0, &number, 1))
        close_handle(connection, number, sym_handle_find(connection, number));
    sym_connection_free(connection);
    HOLDS(!connection->num_handles && !connection->num_seen);
}

int main(void) {
    open_pool();
    for (int i = 0; i < CONNECTIONS; i++) {
        core_maker maker = {.account = accounts + i, .uid = (uint32_t)i, .gid = 7};
        connections[i] = (sym_connection){.gate = &gate, .holdings = holdings + !!i, .maker = maker};
    }
    for (int round = 0; round < ROUNDS; round++) {
        sym_connection *connection = connections + below(CONNECTIONS);
        if (below(4))
            request(connection);
        else
            in_python(connection);
        take_news();
        if (below(64) == 0)
            look(connection);
        if (below(64) == 0)
            take_used();
        if (below(1000) == 0)
            HOLDS(sym_branches_close(connection, below(4)) >= 0);
        if (below(5000) == 0)
            leave(connection);
    }
    for (int i = 0; i < CONNECTIONS; i++)
        leave(connections + i);
    close_pool();
    printf("calls: %d rounds, of forks %d were carried out, of closes %d, of truncations %d, of lengths %d\n", ROUNDS,
           (int)gate.num_calls[SYM_KV_FORK], (int)gate.num_calls[SYM_KV_CLOSE], (int)gate.num_calls[SYM_KV_TRUNCATE],
           (int)gate.num_calls[SYM_KV_READ]);
    return 0;
}
