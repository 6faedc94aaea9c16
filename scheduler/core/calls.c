/* Calls that C carries out, and what makes each of them cold.
 *
 *   KV_FORK      a name is given, or the mode or the number of forks is invalid; the file has more to hand on than
 *                entries (marks of entries that other arithmetic computed, turns, attributes), or fewer entries than
 *                were computed for it; there is no room for the handles, the files or their pages; the domain has ended
 *   KV_CLOSE     the file is not a branch
 *   KV_TRUNCATE  the file is not a branch, or is in the run; the new length is beyond its end
 *   KV_READ      entries are wanted (C only tells how many there are); the file has fewer entries than were computed
 *   PRED         the call is anything but one of two kinds: at most a page of tokens and the last row, of a branch; or
 *                one token of a file whose member of the run waits for it. Also: a deadline or a priority; result
 *                slots that calls wait for; a lack of memory; an end beyond the model's context
 *   PRED_BATCH   one of its calls would be cold; two calls are of one file; there are too many calls
 *
 * PRED and PRED_BATCH are also cold if the user has no room in the daemon's memory for the request.
 *
 * The other four calls are cold if they have a payload. Also cold are all calls of a program with limits, and all calls
 * by a handle that is not open. */
#include "handles.h"

#include "abi.h"

#include <stddef.h>

typedef core_outcome call_function(sym_connection *connection, core_table *file, const sym_taken *request,
                                   const char *payload, int64_t answer[4]);

/* Return whether all entries that were computed for a file are committed. This function commits the entries of a stay.
 * If Python has the member, Python may have to commit entries. */
static int is_shown(sym_connection *connection, core_table *file) {
    sym_news now;
    if (file->place == CORE_NOBODY)
        return 1;
    if (file->stay)
        return sym_stay_show(connection->gate, file->stay);
    sym_loop_look(connection->gate->loop, file->place, &now);
    return now.num_entries == file->length;
}

/* Make `num` forks, or no fork. */
static core_outcome make_forks(core_table *source, core_files *files, const core_maker *maker, uint32_t mode,
                               core_table **forks, int64_t num) {
    const core_files before = *files;
    core_outcome outcome = CORE_DONE;
    int64_t num_made = 0;
    while (num_made < num && !(outcome = core_branch(source, files, maker, mode, forks + num_made)))
        num_made++;
    if (!outcome || outcome == CORE_BROKEN)
        return outcome;
    source->hits -= num_made;
    while (num_made > 0)
        if (core_branch_close(forks[--num_made], files)) /* closing needs no more memory than the fork took */
            return CORE_BROKEN;
    files->next_number = before.next_number;
    files->num_names = before.num_names;
    return outcome;
}

static core_outcome fork_file(sym_connection *connection, core_table *file, const sym_taken *request,
                              const char *payload, int64_t answer[4]) {
    core_maker *maker = &connection->maker;
    int64_t num = request->args[1] ? request->args[1] : 1;
    core_table *forks[SYM_MAX_FORKS];
    (void)payload;
    if (request->payload_bytes || !is_shown(connection, file) || request->args[0] & ~INT64_C(07777) || num < 1 ||
        num > SYM_MAX_FORKS || maker->account->is_ended || !core_may_hold(connection->holdings, CORE_HANDLE, num, 0) ||
        !sym_handles_grow(connection, num))
        return CORE_COLD;
    core_outcome outcome = make_forks(file, connection->gate->files, maker, (uint32_t)request->args[0], forks, num);
    if (outcome)
        return outcome;
    sym_branches_grow(connection, num * file->num_pages);
    answer[0] = (int64_t)connection->last_handle + 1;
    answer[1] = file->length;
    answer[2] = forks[0]->number;
    for (int64_t i = 0; i < num; i++)
        sym_handles_add(connection, forks[i], 0, 1);
    return core_hold(connection->holdings, CORE_HANDLE, num, 0);
}

/* Close a branch as `core_branch_close` does, and forget its handle. A branch in the run leaves it first. */
static core_outcome close_branch(sym_connection *connection, uint64_t number, core_table *branch) {
    if (branch->stay) {
        core_outcome left = sym_stay_end(branch->stay);
        if (left)
            return left;
    }
    int32_t num_pages = branch->num_pages;
    core_outcome outcome = core_branch_close(branch, connection->gate->files);
    if (outcome == CORE_COLD)
        return outcome;
    sym_branches_grow(connection, -num_pages);
    sym_handle_forget(connection, number);
    core_outcome held = core_hold(connection->holdings, CORE_HANDLE, -1, 0);
    return outcome ? outcome : held;
}

int64_t sym_branches_close(sym_connection *connection, int64_t max) {
    int64_t num_closed = 0;
    int64_t at = connection->num_swept;
    while (at < connection->room && num_closed < max) {
        const sym_handle handle = connection->handles[at];
        core_outcome outcome = handle.number && !handle.is_seen && handle.table->is_branch
                                   ? close_branch(connection, handle.number, handle.table)
                                   : CORE_COLD;
        if (outcome == CORE_DONE)
            num_closed++; /* `at` stays: another handle may have moved to this place */
        else if (outcome == CORE_COLD)
            at++;
        else
            return -1;
    }
    connection->num_swept = at;
    return num_closed;
}

static core_outcome close_file(sym_connection *connection, core_table *file, const sym_taken *request,
                               const char *payload, int64_t answer[4]) {
    (void)answer, (void)payload;
    if (request->payload_bytes)
        return CORE_COLD;
    return close_branch(connection, request->handle, file);
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

static call_function *const CALLS[SYM_NUM_OPERATIONS] = {
    [SYM_KV_FORK] = fork_file,
    [SYM_KV_CLOSE] = close_file,
    [SYM_KV_TRUNCATE] = truncate_file,
    [SYM_KV_READ] = tell_length,
};

uint64_t sym_connection_operations(void) {
    uint64_t found = UINT64_C(1) << SYM_PRED | UINT64_C(1) << SYM_PRED_BATCH;
    for (int op = 0; op < SYM_NUM_OPERATIONS; op++)
        found |= (uint64_t)(CALLS[op] != NULL) << op;
    return found;
}

static core_outcome carry_out(sym_connection *connection, const sym_taken *request, const char *payload,
                              int64_t answer[4]) {
    core_table *file = sym_handle_find(connection, request->handle);
    core_outcome outcome = file ? CALLS[request->op](connection, file, request, payload, answer) : CORE_COLD;
    if (outcome != CORE_COLD)
        sym_must(outcome, "a call", file);
    return outcome;
}

int sym_connection_serve(void *context, const sym_taken *request, const char *payload, int64_t answer[4]) {
    sym_connection *connection = context;
    const int is_later = request->op == SYM_PRED || request->op == SYM_PRED_BATCH;
    core_outcome outcome = request->op == SYM_PRED         ? sym_predict(connection, request, payload)
                           : request->op == SYM_PRED_BATCH ? sym_predict_batch(connection, request, payload)
                                                           : carry_out(connection, request, payload, answer);
    if (outcome)
        return SYM_COLD;
    connection->gate->num_calls[request->op]++;
    return is_later ? SYM_LATER : SYM_SERVED;
}
