/* The shortest way of a decode loop through the daemon: while a loop over steps runs (scheduler/batch/loop.c), the thread that
 * runs it takes the calls that it waits for out of the rings itself, without the interpreter and the daemon's thread.
 *
 * Only what a loop does all the time is taken: one token for the file it is about, the last row wanted, the position that
 * comes next. It is copied before it is looked at, like any request. Anything else stays in the ring for the gate.
 */
#include "rows.h"
#include "server_state.h"

/* Whether a copied request is a hot one at all; whose, and whether it is sane, comes later. */
static int looks_hot(const struct sym_request *request) {
    const int64_t num_positions = request->args[1];
    return request->op == SYM_PRED && request->flags == SYM_ROWS_LAST && request->reserved1 == 0 &&
           request->args[0] == 1 && (num_positions == 0 || num_positions == 1) && request->args[2] == 0 &&
           request->args[3] == 0 &&
           request->frame_bytes == sizeof *request + sizeof(int32_t) * (size_t)(1 + num_positions);
}

static float *row_of(sym_server *server, int64_t slot) {
    return (float *)(void *)(server->base + server->plan.slots_offset + (uint64_t)slot * server->plan.slot_bytes);
}

/* Under receive_lock. What the receiver took, and what it stops the loop for, came before what is in the ring now. */
static int take_hot(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call) {
    if (server->closed || server->receiver_has || __atomic_load_n(stop, __ATOMIC_ACQUIRE))
        return SYM_HOT_NONE;
    const int64_t bytes = submitted_bytes(server);
    if (bytes <= 0)
        return bytes == 0 ? SYM_HOT_NONE : SYM_HOT_COLD; /* the gate will say what is wrong with it */
    const char *ring = server->base + server->plan.submit_offset;
    struct sym_request request;
    int32_t numbers[2] = {0, position};
    ring_read(ring, SYM_RING_BYTES, server->submit_head, &request, sizeof request);
    if (!looks_hot(&request) || padded(request.frame_bytes) > (uint64_t)bytes)
        return SYM_HOT_COLD;
    if (request.handle != handle)
        return SYM_HOT_OTHER;
    ring_read(ring, SYM_RING_BYTES, server->submit_head + sizeof request, numbers,
              request.frame_bytes - sizeof request);
    if (numbers[0] < 0 || (uint32_t)numbers[0] >= server->plan.vocab_size || numbers[1] != position)
        return SYM_HOT_COLD;
    const int64_t slot = sym_server_take_rows(server, 1);
    if (slot < 0)
        return SYM_HOT_COLD; /* it has to wait for a slot: the gate knows how */
    sym_server_took_requests(server, server->submit_head + padded(request.frame_bytes));
    atomic_fetch_add(&server->num_open, 1);
    *call = (sym_hot_call){
        .id = request.id, .slot = slot, .row = row_of(server, slot), .token = numbers[0], .stream = request.stream};
    return SYM_HOT_TAKEN;
}

/* Takes the next request if it is the one that continues the file `handle` at `position`, and if nothing that came before
 * it is still with the receiver. From any thread; `stop`: once the receiver has set it, nothing is taken. */
int sym_server_take_hot(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call) {
    pthread_mutex_lock(&server->receive_lock);
    const int outcome = take_hot(server, handle, position, stop, call);
    pthread_mutex_unlock(&server->receive_lock);
    return outcome;
}

/* Answers a call that was taken: its row is the program's. 0; 1: not sent, others wait or there is no room. */
int sym_server_answer_hot(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries) {
    const int rc = sym_server_push_now(server, id, 0, slot, 1, num_entries, NULL, 0, NULL, 0);
    if (rc == 0)
        sym_server_settle_rows(server, 1);
    return rc;
}

/* Somebody polls the ring from now on, so the client need not ring: whether the daemon's thread slept. */
int sym_server_watch(sym_server *server) { return atomic_exchange(&server->region->daemon_asleep, 0) != 0; }

/* Nobody polls any more; `slept` is what sym_server_watch said. 1: something has come and is still there, and the thread
 * that slept has to be woken for it. (Not by the doorbell: the client could have made a write to it wait.) */
int sym_server_unwatch(sym_server *server, int slept) {
    struct sym_region *region = server->region;
    if (!slept)
        return 0;
    atomic_store(&region->daemon_asleep, 1);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&server->receive_lock);
    const int waits = submitted_bytes(server) != 0;
    pthread_mutex_unlock(&server->receive_lock);
    return waits && atomic_exchange(&region->daemon_asleep, 0) != 0;
}

const sym_hot_functions *sym_hot(void) {
    static const sym_hot_functions functions = {
        .take = sym_server_take_hot,
        .answer = sym_server_answer_hot,
        .push = sym_server_push_now,
        .watch = sym_server_watch,
        .unwatch = sym_server_unwatch,
        .drain = sym_server_drain,
        .served_by = sym_server_served_by,
        .take_rows = sym_server_take_rows,
        .free_rows = sym_server_free_rows,
        .row = row_of,
        .draw = sym_sampler_draw,
        .note = sym_sampler_note,
        .reduce = sym_reducer_reduce,
        .stops_add = sym_stops_add,
    };
    return &functions;
}
