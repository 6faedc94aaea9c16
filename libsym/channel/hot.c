/* The fast path of a decode loop through the daemon. The thread of the run (scheduler/batch/loop.c) takes the calls
 * that it expects out of the rings itself, without the interpreter and without the daemon's thread.
 *
 * A hot call is the common call of a decode loop: one token for the expected file, at the next position, with the last
 * row as its result. Like any request, a hot call is copied before it is checked. All other requests stay in the ring
 * for the receiver.
 */
#include "rows.h"
#include "server_state.h"

/* Whether a copied request has the form of a hot call. Its handle, token and position are checked later. */
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

/* Under receive_lock. Takes a hot call as sym_server_take_hot does. While the receiver has earlier requests, or has set
 * `stop`, no request is taken. So requests keep their order. */
static int take_hot(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call) {
    if (server->closed || server->receiver_has || __atomic_load_n(stop, __ATOMIC_ACQUIRE))
        return SYM_HOT_NONE;
    const int64_t bytes = submitted_bytes(server);
    if (bytes <= 0)
        return bytes == 0 ? SYM_HOT_NONE : SYM_HOT_COLD; /* the receiver reports the malformed ring */
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
        return SYM_HOT_COLD; /* the call has to wait for a slot, in the scheduler */
    sym_server_took_requests(server, server->submit_head + padded(request.frame_bytes));
    atomic_fetch_add(&server->num_open, 1);
    *call = (sym_hot_call){
        .id = request.id, .slot = slot, .row = row_of(server, slot), .token = numbers[0], .stream = request.stream};
    return SYM_HOT_TAKEN;
}

/* Takes the next request if it is a hot call that continues the file `handle` at `position`, and if the receiver has no
 * earlier request. Once the receiver has set `stop`, no request is taken. For any thread. */
int sym_server_take_hot(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call) {
    pthread_mutex_lock(&server->receive_lock);
    const int outcome = take_hot(server, handle, position, stop, call);
    pthread_mutex_unlock(&server->receive_lock);
    return outcome;
}

/* Answers a call that was taken. From then on the program owns the call's row. 0: sent. 1: not sent, because other
 * replies wait, the ring has no space, or the channel was closed. */
int sym_server_answer_hot(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries) {
    const int rc = sym_server_push_now(server, id, 0, slot, 1, num_entries, NULL, 0, NULL, 0);
    if (rc == 0)
        sym_server_settle_rows(server, 1);
    return rc;
}

/* Answers all calls of a PRED_BATCH. The payload has their replies. The result is as in sym_server_answer_hot. */
static int answer_all(sym_server *server, uint64_t id, int64_t num, const char *payload, uint32_t payload_bytes,
                      uint32_t num_rows) {
    const int rc = sym_server_push_now(server, id, 0, num, 0, 0, payload, payload_bytes, NULL, 0);
    if (rc == 0)
        sym_server_settle_rows(server, num_rows);
    return rc;
}

/* Notes that the run polls the ring from now on, so that the client need not ring the doorbell. Returns whether the
 * daemon's thread slept. */
int sym_server_watch(sym_server *server) { return atomic_exchange(&server->region->daemon_asleep, 0) != 0; }

/* Notes that the run no longer polls the ring. `slept` is the result of sym_server_watch. 1: requests wait in the ring,
 * and the caller has to wake the daemon's thread. (The caller must not ring the doorbell: the client could have made it
 * blocking.) */
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
        .answer_all = answer_all,
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
        .read_reducer = sym_reducer_read,
        .free_reducer = sym_reducer_free,
        .reduced_bytes = sym_reducer_bytes,
        .reduce = sym_reducer_reduce,
        .stops_add = sym_stops_add,
    };
    return &functions;
}
