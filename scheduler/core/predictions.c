/* PRED and PRED_BATCH: the calls of a request are checked, get result slots and room, and begin together. If one call
 * cannot begin, no call begins. */
#include "handles.h"

#include "abi.h"

#include <string.h>

enum {
    MOST_CALLS = 64, /* calls of a batch: more would take the trio thread too long */
    MOST_BYTES = 4096, /* bytes of a request for numbers, and of the numbers of one row */
    NO_SLOT = -1
};

/* Copy `num` numbers from the payload. Return whether all are in [0, `end`). */
static int read_numbers(const char *payload, int64_t num, int64_t end, int32_t *numbers) {
    int64_t at = 0;
    memcpy(numbers, payload, sizeof *numbers * (size_t)num);
    while (at < num && numbers[at] >= 0 && numbers[at] < end)
        at++;
    return at == num;
}

/* If the request gives only the position of the first token, number the other tokens from that position. */
static void number_on(sym_predicted *call) {
    for (int32_t at = 1; call->num_positions == 1 && at < call->num_tokens; at++)
        call->positions[at] = call->positions[0] + at;
    call->num_positions = call->num_positions ? call->num_tokens : 0;
}

/* Check a request and fill in `call`. CORE_COLD: Python has to judge the request. */
static core_outcome judge(const sym_connection *connection, const sym_taken *request, const char *payload,
                          sym_predicted *call) {
    const sym_gate *gate = connection->gate;
    const int64_t *args = request->args, num_tokens = args[0], num_positions = args[1];
    core_table *file = sym_handle_find(connection, request->handle);
    const int is_reduced = request->flags == (SYM_ROWS_LAST | SYM_REDUCED);
    if (!file || (request->flags != SYM_ROWS_LAST && !is_reduced) || num_tokens < 1 || num_tokens > SYM_STAY_TOKENS ||
        (num_positions != 0 && num_positions != 1 && num_positions != num_tokens) || args[2] || args[3])
        return CORE_COLD;
    const uint32_t num_bytes = (uint32_t)sizeof(int32_t) * (uint32_t)(num_tokens + num_positions);
    if (is_reduced ? request->payload_bytes < num_bytes || request->payload_bytes - num_bytes > MOST_BYTES
                   : request->payload_bytes != num_bytes)
        return CORE_COLD;
    call->block = is_reduced ? payload + num_bytes : NULL;
    call->block_bytes = request->payload_bytes - num_bytes;
    call->numbers = NULL;
    call->file = file;
    call->handle = request->handle;
    call->id = request->id;
    call->stream = request->stream;
    call->num_tokens = (int32_t)num_tokens;
    call->num_positions = (int32_t)num_positions;
    if (!read_numbers(payload, num_tokens, gate->vocab_size, call->tokens) ||
        !read_numbers(payload + sizeof(int32_t) * (size_t)num_tokens, num_positions, gate->max_positions,
                      call->positions))
        return CORE_COLD;
    number_on(call);
    if (file->place != CORE_NOBODY)
        return num_tokens == 1 ? CORE_DONE : CORE_COLD;
    call->last_position =
        num_positions ? call->positions[num_tokens - 1] : (int64_t)core_position(file, file->length - 1) + num_tokens;
    const int has_room = file->length + num_tokens <= gate->max_entries && call->last_position < gate->max_positions;
    return file->is_branch && has_room ? CORE_DONE : CORE_COLD;
}

/* Prepare the description of a call for the run. A branch that is not in the run gets room and a stay. */
static core_outcome prepare(sym_connection *connection, const sym_predicted *call, int64_t slot, sym_stay **stay,
                            sym_beginning *beginning) {
    core_table *file = call->file;
    *stay = NULL;
    if (file->place == CORE_NOBODY) {
        core_outcome outcome = sym_stay_begin(connection, call, slot, stay);
        if (!outcome)
            *beginning = (sym_beginning){.index = CORE_NOBODY, .member = &(*stay)->member};
        return outcome;
    }
    *beginning = (sym_beginning){.index = file->place,
                                 .server = connection->server,
                                 .handle = call->handle,
                                 .position = call->num_positions ? call->positions[0] : -1};
    beginning->call = (sym_hot_call){.id = call->id,
                                     .slot = slot,
                                     .row = call->numbers ? NULL : connection->gate->hot->row(connection->server, slot),
                                     .token = call->tokens[0],
                                     .stream = call->stream};
    beginning->numbers = call->numbers;
    return CORE_DONE;
}

static void join_group(sym_stay *stay, sym_beginning *beginning, sym_group *group, int32_t number) {
    beginning->group = group;
    beginning->number = number;
    if (stay) {
        stay->member.decode.group = group;
        stay->member.decode.number = number;
    }
}

/* Put all of the calls into the run, or none. The calls have their slots and numbers already. */
static core_outcome enter(sym_connection *connection, const sym_predicted *calls, int32_t num, int64_t slot,
                          sym_group *group) {
    sym_loop *loop = connection->gate->loop;
    sym_beginning beginnings[MOST_CALLS];
    sym_stay *stays[MOST_CALLS];
    core_outcome outcome = CORE_DONE;
    int32_t n = 0;
    while (n < num &&
           !(outcome = prepare(connection, &calls[n], calls[n].numbers ? NO_SLOT : slot, &stays[n], &beginnings[n]))) {
        slot += !calls[n].numbers;
        join_group(stays[n], &beginnings[n], group, n);
        n++;
    }
    if (!outcome && !sym_loop_begin(loop, beginnings, num))
        outcome = CORE_COLD;
    for (int32_t at = 0; at < n; at++) {
        if (stays[at] && outcome)
            sym_must(sym_stay_undo(stays[at]), "undoing a call", calls[at].file);
        else if (stays[at])
            sym_stay_joined(stays[at], beginnings[at].index);
    }
    if (outcome != CORE_COLD)
        sym_must(outcome, "a call", calls[n < num ? n : 0].file);
    return outcome;
}

/* Make numbers for the calls that want them. Return the bytes of the largest answer to one of these calls; -1: an
 * answer needs more than MOST_BYTES, or there is no memory. */
static int64_t make_numbers(const sym_gate *gate, sym_predicted *calls, int32_t num) {
    int64_t most = 0;
    for (int32_t n = 0; n < num; n++) {
        if (!calls[n].block)
            continue;
        sym_numbers *numbers = sym_numbers_new(gate->hot, calls[n].block, calls[n].block_bytes, gate->vocab_size);
        calls[n].numbers = numbers;
        if (!numbers || numbers->answer_bytes > MOST_BYTES)
            return -1;
        most = numbers->answer_bytes > most ? numbers->answer_bytes : most;
    }
    return most;
}

/* Begin all of the calls. CORE_COLD: no call has begun. Each call has a file of its own. `id`: id of the request, if
 * one answer holds all replies; otherwise NULL. */
static core_outcome begin(sym_connection *connection, sym_predicted *calls, int32_t num, const uint64_t *id) {
    sym_gate *gate = connection->gate;
    uint32_t num_slots = 0;
    for (int32_t n = 0; n < num; n++)
        num_slots += !calls[n].block;
    const int64_t most_bytes = make_numbers(gate, calls, num);
    const int has_place = most_bytes >= 0 && sym_gate_has_place(gate, sym_loop_num_places(gate->loop) + num - 1);
    const int64_t slot = has_place && num_slots ? gate->hot->take_rows(connection->server, num_slots) : NO_SLOT;
    const int has_slots = has_place && (slot >= 0 || !num_slots);
    sym_group *group = has_slots && id ? sym_group_new(*id, num, (uint32_t)most_bytes) : NULL;
    if (has_slots && (group || !id) && enter(connection, calls, num, slot, group) == CORE_DONE)
        return CORE_DONE;
    if (group)
        sym_group_free(group);
    if (slot >= 0)
        gate->hot->free_rows(connection->server, (uint32_t)slot, num_slots);
    for (int32_t n = 0; n < num; n++)
        sym_numbers_free(gate->hot, calls[n].numbers);
    return CORE_COLD;
}

/* Return whether C may begin the calls of a request. If the user has no room for a request, Python refuses it.
 * `num_calls`: number of calls in a batch, or 0. */
static int may_begin(const sym_connection *connection, const sym_taken *request, int64_t num_calls) {
    const int64_t num_bytes = request->payload_bytes + SYM_CALL_BYTES * num_calls;
    return !connection->gate->is_closed && !connection->waits_for_slots &&
           (num_bytes <= SYM_FREE_BYTES || core_may_hold(connection->holdings, CORE_FRAME, 1, num_bytes));
}

core_outcome sym_predict(sym_connection *connection, const sym_taken *request, const char *payload) {
    sym_predicted call;
    if (!may_begin(connection, request, 0) || judge(connection, request, payload, &call))
        return CORE_COLD;
    return begin(connection, &call, 1, NULL);
}

/* Read the next call of a batch as if it were a request of its own. 0: the call is invalid. */
static int next_frame(const sym_taken *batch, const char *payload, uint32_t *at, sym_taken *frame) {
    struct sym_request request;
    if (batch->payload_bytes - *at < sizeof request)
        return 0;
    memcpy(&request, payload + *at, sizeof request);
    const uint64_t padded = ((uint64_t)request.frame_bytes + SYM_FRAME_ALIGN - 1) & ~(uint64_t)(SYM_FRAME_ALIGN - 1);
    if (request.frame_bytes < sizeof request || padded > batch->payload_bytes - *at || request.op != SYM_PRED ||
        request.stream || request.reserved1)
        return 0;
    *frame = (sym_taken){.id = batch->id,
                         .handle = request.handle,
                         .flags = request.flags,
                         .op = SYM_PRED,
                         .stream = batch->stream,
                         .payload_at = *at + (uint32_t)sizeof request,
                         .payload_bytes = request.frame_bytes - (uint32_t)sizeof request};
    memcpy(frame->args, request.args, sizeof frame->args);
    *at += (uint32_t)padded;
    return 1;
}

static int is_named_before(const sym_predicted *calls, int32_t n) {
    int32_t at = 0;
    while (at < n && calls[at].file != calls[n].file)
        at++;
    return at < n;
}

core_outcome sym_predict_batch(sym_connection *connection, const sym_taken *request, const char *payload) {
    sym_predicted calls[MOST_CALLS];
    uint32_t at = 0;
    const int64_t num = request->args[0];
    if (num < 1 || num > MOST_CALLS || !may_begin(connection, request, num))
        return CORE_COLD;
    for (int32_t n = 0; n < num; n++) {
        sym_taken frame;
        if (!next_frame(request, payload, &at, &frame) ||
            judge(connection, &frame, payload + frame.payload_at, &calls[n]) || is_named_before(calls, n))
            return CORE_COLD;
    }
    return at == request->payload_bytes ? begin(connection, calls, (int32_t)num, &request->id) : CORE_COLD;
}
