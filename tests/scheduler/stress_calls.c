/* Calls of three connections that the core carries out, for sanitizers: any handle, any number, and little room. Python's
 * part is done in between: it sees branches, appends to files, opens them again, and closes what the core leaves to it. In
 * the end nobody holds anything. tests/scheduler/test_served_calls.py compares answers; here every access to memory counts.
 */
#include "stress_calls.h"

#include <string.h>

#ifdef SHORT_RUN
enum { ROUNDS = 30000 };
#else
enum { ROUNDS = 3000000 };
#endif

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

/* ---- Python's part */

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
    if (taken.op == SYM_KV_FORK && below(8))
        taken.args[1] = below(4) ? below(5) : below(SYM_MAX_FORKS + 2);
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
    int num_forks = taken.op != SYM_KV_FORK ? 0 : taken.args[1] ? (int)taken.args[1] : 1;
    int num = num_forks - (taken.op == SYM_KV_CLOSE);
    HOLDS(after.handles == before.handles + num && after.files == before.files + num);
    HOLDS(after.branches == before.branches + num && after.branches == num_branches());
    if (num > 0) {
        HOLDS(num <= SYM_MAX_FORKS && !file->is_odd && after.names >= 0 && answer[1] == length);
        for (int i = 0; i < num; i++) {
            core_table *branch = sym_handle_find(connection, (uint64_t)answer[0] + i);
            HOLDS(branch && branch->is_branch && branch->length == length && branch->number == answer[2] + i);
            HOLDS(branch->mode == taken.args[0]);
            payers[branch->row] = connection->maker.account;
        }
        require_within_limits(connection->maker.account);
    } else if (taken.op == SYM_KV_TRUNCATE) {
        HOLDS(file->length == taken.args[0] && answer[0] == file->length);
    } else if (taken.op == SYM_KV_READ) {
        HOLDS(answer[0] == 0 && answer[1] == length);
    }
}

static void play(void) {
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

static void all_leave(void) {
    for (int i = 0; i < CONNECTIONS; i++)
        leave(connections + i);
    take_used();
}

#ifdef FUZZING
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!pool.numbers)
        open_connections();
    input = data;
    input_left = size;
    while (input_left)
        play();
    all_leave();
    require_empty();
    return 0;
}
#else
int main(void) {
    open_connections();
    for (int round = 0; round < ROUNDS; round++)
        play();
    all_leave();
    close_pool();
    printf("calls: %d rounds, of forks %d were carried out, of closes %d, of truncations %d, of lengths %d\n", ROUNDS,
           (int)gate.num_calls[SYM_KV_FORK], (int)gate.num_calls[SYM_KV_CLOSE], (int)gate.num_calls[SYM_KV_TRUNCATE],
           (int)gate.num_calls[SYM_KV_READ]);
    return 0;
}
#endif
