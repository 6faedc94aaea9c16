/* Calls that are carried out here, and what makes each of them cold.
 *
 *   KV_FORK      with a name, or a mode that is none; of a file that has more than entries to hand on (marks of other
 *                arithmetic, turns, attributes that may follow), or less than was computed for it; without room for the
 *                handle, the file or its pages; of a domain that has ended
 *   KV_CLOSE     of a file that is no branch
 *   KV_TRUNCATE  the same, and of one in the run; beyond its end
 *   KV_READ      with an answer of entries: here is told how many there are; of a file that has less than was computed
 *   PRED         but for one token and its last row, of a branch, or of a file whose member of the run waits for it; with a
 *                deadline or a priority; while result slots are waited for, or memory is short; beyond the model's context
 *
 * Any other call is cold that has a payload, and any that a program with limits makes; and so is one by a handle that there is not. */
#include "handles.h"

#include "abi.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef core_outcome call_function(sym_connection *connection, core_table *file, const sym_taken *request,
                                   const char *payload, int64_t answer[4]);

/* Whether a file has all that was computed for it: of a stay that is seen to here; of other calls Python may have to. */
static int is_shown(sym_connection *connection, core_table *file) {
    sym_news now;
    if (file->place == CORE_NOBODY)
        return 1;
    if (file->stay)
        return sym_stay_show(connection->gate, file->stay);
    sym_loop_look(connection->gate->loop, file->place, &now);
    return now.num_entries == file->length;
}

static core_outcome fork_file(sym_connection *connection, core_table *file, const sym_taken *request,
                              const char *payload, int64_t answer[4]) {
    core_maker *maker = &connection->maker;
    core_table *branch;
    (void)payload;
    if (request->payload_bytes || !is_shown(connection, file) || request->args[0] & ~INT64_C(07777) ||
        maker->account->is_ended || !core_may_hold(connection->holdings, CORE_HANDLE, 1, 0) ||
        !sym_handles_grow(connection))
        return CORE_COLD;
    core_outcome outcome = core_branch(file, connection->gate->files, maker, (uint32_t)request->args[0], &branch);
    if (outcome)
        return outcome;
    sym_branches_grow(connection, branch->num_pages);
    answer[0] = (int64_t)sym_handles_add(connection, branch, 0);
    answer[1] = branch->length;
    answer[2] = branch->number;
    return core_hold(connection->holdings, CORE_HANDLE, 1, 0);
}

static core_outcome close_file(sym_connection *connection, core_table *file, const sym_taken *request,
                               const char *payload, int64_t answer[4]) {
    (void)answer, (void)payload;
    if (request->payload_bytes)
        return CORE_COLD;
    return sym_branch_close(connection, request->handle, file);
}

static core_outcome truncate_file(sym_connection *connection, core_table *file, const sym_taken *request,
                                  const char *payload, int64_t answer[4]) {
    int32_t num_pages = file->num_pages;
    (void)payload;
    answer[0] = request->args[0];
    if (request->payload_bytes || file->place != CORE_NOBODY)
        return CORE_COLD;
    core_outcome outcome = core_branch_truncate(file, request->args[0]);
    if (file->num_pages != num_pages)
        sym_branches_grow(connection, file->num_pages - num_pages);
    return outcome;
}

static core_outcome tell_length(sym_connection *connection, core_table *file, const sym_taken *request,
                                const char *payload, int64_t answer[4]) {
    (void)payload;
    if (request->payload_bytes || !is_shown(connection, file) || request->args[0] < file->length ||
        request->args[1] < 0)
        return CORE_COLD;
    answer[1] = file->length;
    answer[2] = file->cuts;
    return CORE_DONE;
}

static core_outcome predict(sym_connection *connection, core_table *file, const sym_taken *request, const char *payload,
                            int64_t answer[4]) {
    const sym_gate *gate = connection->gate;
    const int64_t *args = request->args;
    int32_t numbers[2] = {0, 0};
    (void)answer;
    if (gate->is_closed || connection->waits_for_slots || request->flags != SYM_ROWS_LAST || args[0] != 1 ||
        (args[1] != 0 && args[1] != 1) || args[2] || args[3] ||
        request->payload_bytes != sizeof(int32_t) * (size_t)(1 + args[1]))
        return CORE_COLD;
    memcpy(numbers, payload, request->payload_bytes);
    const int32_t token = numbers[0];
    if (token < 0 || token >= gate->vocab_size || (args[1] && (numbers[1] < 0 || numbers[1] >= gate->max_positions)))
        return CORE_COLD;
    if (file->place != CORE_NOBODY)
        return sym_go_on(connection, file, request, token, args[1] ? numbers[1] : -1);
    const int64_t position = args[1] ? numbers[1] : (int64_t)core_position(file, file->length - 1) + 1;
    if (!file->is_branch || file->length >= gate->max_entries || position >= gate->max_positions)
        return CORE_COLD;
    return sym_stay_begin(connection, file, request, token, (int32_t)position, (int)args[1]);
}

static call_function *const CALLS[SYM_NUM_OPERATIONS] = {
    [SYM_KV_FORK] = fork_file,   [SYM_KV_CLOSE] = close_file, [SYM_KV_TRUNCATE] = truncate_file,
    [SYM_KV_READ] = tell_length, [SYM_PRED] = predict,
};

uint64_t sym_connection_operations(void) {
    uint64_t found = 0;
    for (int op = 0; op < SYM_NUM_OPERATIONS; op++)
        found |= (uint64_t)(CALLS[op] != NULL) << op;
    return found;
}

void sym_must(core_outcome outcome, const char *what, const core_table *file) {
    if (!outcome)
        return;
    fprintf(stderr, "symphony: %s of inode %" PRId64 " (%" PRId64 " entries): outcome %d of the core\n", what,
            file->number, file->length, outcome);
    abort();
}

int sym_connection_serve(void *context, const sym_taken *request, const char *payload, int64_t answer[4]) {
    sym_connection *connection = context;
    core_table *file = sym_handle_find(connection, request->handle);
    if (!file)
        return SYM_COLD;
    core_outcome outcome = CALLS[request->op](connection, file, request, payload, answer);
    if (outcome == CORE_COLD)
        return SYM_COLD;
    sym_must(outcome, "a call", file);
    connection->gate->num_calls[request->op]++;
    return request->op == SYM_PRED ? SYM_LATER : SYM_SERVED;
}
