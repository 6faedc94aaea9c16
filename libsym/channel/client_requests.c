/* Requests: threads write them into the ring, under a mutex. */
#include "client_state.h"

#include <stdlib.h>

/* Under submit_lock. Writes a frame, for which the ring has space. publish() makes the frame visible to the daemon. */
static void write_frame(sym_client *client, const struct sym_request *request, const char *payload) {
    char *ring = client->base + client->plan.submit_offset;
    ring_write(ring, SYM_RING_BYTES, client->submit_tail, request, sizeof *request);
    ring_write(ring, SYM_RING_BYTES, client->submit_tail + sizeof *request, payload,
               request->frame_bytes - sizeof *request);
    client->submit_tail += padded(request->frame_bytes);
}

/* The caller holds submit_lock. */
static void publish(sym_client *client) {
    atomic_store_explicit(&client->region->submit_tail, client->submit_tail, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&client->region->daemon_asleep, memory_order_relaxed) != 0 &&
        atomic_exchange(&client->region->daemon_asleep, 0) != 0)
        ring_fd(client->doorbell_fd);
}

/* Under submit_lock. Writes deferred requests, in order, as long as `reserved` bytes of the ring stay free. Returns the
 * number of requests written. */
static uint32_t write_later(sym_client *client, uint64_t reserved) {
    pthread_mutex_lock(&client->table_lock);
    uint32_t written = 0;
    for (; written < client->num_later && submit_room(client) >= reserved + sizeof(struct sym_request); written++) {
        const struct later *later = &client->later[written];
        const struct sym_request request = {
            .frame_bytes = sizeof(struct sym_request), .op = later->op, .handle = later->handle, .args = {later->arg}};
        write_frame(client, &request, "");
    }
    client->num_later -= written;
    if (written > 0)
        memmove(client->later, client->later + written, client->num_later * sizeof *client->later);
    pthread_mutex_unlock(&client->table_lock);
    return written;
}

/* Under table_lock. Defers a request. Without memory the request is dropped: the daemon cleans up when the process
 * ends. */
void client_put_off(sym_client *client, uint16_t op, uint64_t handle, int64_t arg) {
    if (client->num_later == client->room_for_later) {
        const uint32_t room = client->room_for_later ? 2 * client->room_for_later : 16;
        struct later *later = realloc(client->later, room * sizeof *later);
        if (later == NULL)
            return;
        client->later = later;
        client->room_for_later = room;
    }
    client->later[client->num_later++] = (struct later){.op = op, .handle = handle, .arg = arg};
}

/* Sends the deferred requests now, as far as the ring has space. Never waits. */
void client_send_later(sym_client *client) {
    pthread_mutex_lock(&client->submit_lock);
    if (atomic_load(&client->dead) == 0 && write_later(client, 0) > 0)
        publish(client);
    pthread_mutex_unlock(&client->submit_lock);
}

/* Returns the stream of this thread, a number by which the daemon predicts the thread's next call. */
static uint16_t this_thread(void) {
    static _Atomic uint16_t last;
    static _Thread_local uint16_t stream;
    while (stream == 0)
        stream = (uint16_t)(atomic_fetch_add(&last, 1) + 1);
    return stream;
}

/* Number of handles in the call's reply. */
static uint16_t num_handles_of(const sym_call *call) {
    const int64_t num_forks = call->op == SYM_KV_FORK ? call->request_args[1] : 1;
    if (!gives_handle(call->op))
        return 0;
    return num_forks >= 1 && num_forks <= SYM_MAX_FORKS ? (uint16_t)num_forks : 1;
}

/* Under submit_lock. Gives the call an entry and an id. Returns 0, or -EBUSY if MAX_CALLS calls are in flight. */
static int enter_table(sym_client *client, sym_call *call, sym_event_loop *loop) {
    int rc = -EBUSY;
    pthread_mutex_lock(&client->table_lock);
    if (client->num_free > 0) {
        const uint32_t index = client->free_indices[--client->num_free];
        struct entry *entry = &client->table[index];
        entry->generation++;
        entry->id = entry->generation << CALL_INDEX_BITS | index;
        entry->call = call;
        entry->op = call->op;
        entry->num_handles = num_handles_of(call);
        call->loop = loop;
        call->id = entry->id;
        atomic_store(&call->state, CALL_PENDING);
        rc = 0;
    }
    pthread_mutex_unlock(&client->table_lock);
    return rc;
}

/* Submits a request. 0: submitted. -EAGAIN: the ring has no space now. -EBUSY: the table has no free entry. `loop` is
 * NULL if a thread will wait. */
int client_try_submit(sym_client *client, sym_call *call, sym_event_loop *loop, const char *payload,
                      uint32_t payload_bytes) {
    struct sym_request request = {.frame_bytes = (uint32_t)sizeof(struct sym_request) + payload_bytes,
                                  .op = call->op,
                                  .stream = call->stream != 0 ? call->stream : this_thread(),
                                  .flags = call->flags,
                                  .handle = call->handle};
    const uint64_t needed = padded(request.frame_bytes);
    memcpy(request.args, call->request_args, sizeof request.args);
    pthread_mutex_lock(&client->submit_lock);
    int rc = submit_room(client) >= needed ? enter_table(client, call, loop) : -EAGAIN;
    if (rc == 0) {
        write_later(client, needed);
        request.id = call->id;
        write_frame(client, &request, payload);
        publish(client);
    }
    pthread_mutex_unlock(&client->submit_lock);
    return rc;
}
