/* Calls that are carried out here, and what makes each of them cold.
 *
 *   KV_FORK      with a name, or a mode that is none; of a file that a step appends to, or that has more than entries to
 *                hand on: marks of other arithmetic, turns, attributes that may follow; without room for the handle, the
 *                file or its pages; of a domain that has ended
 *   KV_CLOSE     of a file that is no branch
 *   KV_TRUNCATE  the same; beyond its end
 *   KV_READ      with an answer of entries: here is told how many there are
 *
 * Any call is cold that has a payload, or that a program with limits makes; and so is one by a handle that there is not. */
#include "handles.h"

#include "abi.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

typedef core_outcome call_function(sym_connection *connection, core_table *file, const sym_taken *request,
                                   int64_t answer[4]);

static core_outcome fork_file(sym_connection *connection, core_table *file, const sym_taken *request,
                              int64_t answer[4]) {
    core_maker *maker = &connection->maker;
    core_table *branch;
    if (request->args[0] & ~INT64_C(07777) || maker->account->is_ended ||
        !core_may_hold(connection->holdings, CORE_HANDLE, 1, 0) || !sym_handles_grow(connection))
        return CORE_COLD;
    core_outcome outcome = core_branch(file, connection->gate->files, maker, (uint32_t)request->args[0], &branch);
    if (outcome)
        return outcome;
    answer[0] = (int64_t)sym_handles_add(connection, branch, 0);
    answer[1] = branch->length;
    answer[2] = branch->number;
    return core_hold(connection->holdings, CORE_HANDLE, 1, 0);
}

static core_outcome close_file(sym_connection *connection, core_table *file, const sym_taken *request,
                               int64_t answer[4]) {
    (void)answer;
    return sym_branch_close(connection, request->handle, file);
}

static core_outcome truncate_file(sym_connection *connection, core_table *file, const sym_taken *request,
                                  int64_t answer[4]) {
    (void)connection;
    answer[0] = request->args[0];
    return core_branch_truncate(file, request->args[0]);
}

static core_outcome tell_length(sym_connection *connection, core_table *file, const sym_taken *request,
                                int64_t answer[4]) {
    (void)connection;
    if (file->is_reserved || request->args[0] < file->length || request->args[1] < 0)
        return CORE_COLD;
    answer[1] = file->length;
    answer[2] = file->cuts;
    return CORE_DONE;
}

static call_function *const CALLS[SYM_NUM_OPERATIONS] = {
    [SYM_KV_FORK] = fork_file,
    [SYM_KV_CLOSE] = close_file,
    [SYM_KV_TRUNCATE] = truncate_file,
    [SYM_KV_READ] = tell_length,
};

uint64_t sym_connection_operations(void) {
    uint64_t found = 0;
    for (int op = 0; op < SYM_NUM_OPERATIONS; op++)
        found |= (uint64_t)(CALLS[op] != NULL) << op;
    return found;
}

int sym_connection_serve(void *context, const sym_taken *request, int64_t answer[4]) {
    sym_connection *connection = context;
    core_table *file = sym_handle_find(connection, request->handle);
    if (!file || request->payload_bytes)
        return 0;
    core_outcome outcome = CALLS[request->op](connection, file, request, answer);
    if (outcome == CORE_COLD)
        return 0;
    if (outcome) { /* the books are wrong: what is on disk is whole, and nothing goes on from here */
        fprintf(stderr, "symphony: operation %u on inode %" PRId64 " of uid %u: outcome %d of the core\n", request->op,
                file->number, connection->maker.uid, outcome);
        abort();
    }
    connection->gate->num_calls[request->op]++;
    return 1;
}
