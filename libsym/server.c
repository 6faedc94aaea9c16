/* The daemon's half of a channel. Nothing here blocks, and nothing that the client wrote is believed. */
#include "ring.h"

#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/uio.h>

typedef struct sym_server {
    struct sym_region *region; /* mapped and unmapped by the owner of this struct */
    char *base;
    sym_plan plan;
    uint64_t submit_head, complete_tail; /* ours; the copies in the region are for the client to read */
    char inbox[SYM_RING_BYTES];          /* frames are copied here before anybody looks at them */
} sym_server;

/* `base` is `plan->region_bytes` of zeroes. */
sym_server *sym_server_new(char *base, const sym_plan *plan) {
    sym_server *server = malloc(sizeof *server); /* inbox pages are committed as they are used */
    if (server == NULL)
        return NULL;
    server->base = base;
    server->region = (struct sym_region *)(void *)base;
    server->plan = *plan;
    server->submit_head = server->complete_tail = 0;
    struct sym_region *region = server->region;
    region->magic = SYM_MAGIC;
    region->version = SYM_ABI_VERSION;
    region->region_bytes = plan->region_bytes;
    region->states_offset = plan->states_offset;
    region->submit_offset = plan->submit_offset;
    region->submit_bytes = SYM_RING_BYTES;
    region->complete_offset = plan->complete_offset;
    region->complete_bytes = SYM_RING_BYTES;
    region->slots_offset = plan->slots_offset;
    region->slot_bytes = plan->slot_bytes;
    region->slot_count = plan->slot_count;
    region->vocab_size = plan->vocab_size;
    return server;
}

void sym_server_free(sym_server *server) { free(server); }

char *sym_server_inbox(sym_server *server) { return server->inbox; }

/* Moves everything submitted into the inbox and makes room for more: the bytes moved, or -EPROTO. */
int64_t sym_server_receive(sym_server *server) {
    struct sym_region *region = server->region;
    atomic_store_explicit(&region->daemon_asleep, 0, memory_order_relaxed);
    atomic_store_explicit(&region->daemon_cpu, (uint32_t)sched_getcpu(), memory_order_relaxed);
    const uint64_t tail = atomic_load_explicit(&region->submit_tail, memory_order_acquire);
    const uint64_t bytes = tail - server->submit_head;
    if (bytes > SYM_RING_BYTES || bytes % SYM_FRAME_ALIGN != 0)
        return -EPROTO;
    if (bytes == 0)
        return 0;
    ring_read(server->base + server->plan.submit_offset, SYM_RING_BYTES, server->submit_head, server->inbox, bytes);
    server->submit_head = tail;
    atomic_store_explicit(&region->submit_head, tail, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&region->space_waiters, memory_order_relaxed) != 0) {
        atomic_fetch_add_explicit(&region->space_seq, 1, memory_order_seq_cst);
        futex_op(&region->space_seq, FUTEX_WAKE, INT_MAX, NULL);
    }
    return (int64_t)bytes;
}

/* Announces that the daemon is about to sleep on the doorbell. 0: there is work, do not sleep; 1: sleep. */
int sym_server_arm(sym_server *server, int ignore_requests) {
    struct sym_region *region = server->region;
    atomic_store_explicit(&region->daemon_asleep, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    if (ignore_requests)
        return 1;
    if (atomic_load_explicit(&region->submit_tail, memory_order_acquire) == server->submit_head)
        return 1;
    atomic_store_explicit(&region->daemon_asleep, 0, memory_order_relaxed);
    return 0;
}

/* Empties the doorbell. The client shares its file description and may have made it blocking: RWF_NOWAIT. */
int sym_server_clear_doorbell(int doorbell_fd) {
    uint64_t count;
    struct iovec iov = {.iov_base = &count, .iov_len = sizeof count};
    if (preadv2(doorbell_fd, &iov, 1, -1, RWF_NOWAIT) >= 0 || errno == EAGAIN || errno == EINTR)
        return 0;
    return -errno;
}

/* 0: sent; 1: no room now; -EPROTO: the client's head is not in the ring. */
int sym_server_push(sym_server *server, uint64_t id, int32_t err, int64_t a0, int64_t a1, int64_t a2, int64_t a3,
                    const char *payload, uint32_t payload_bytes) {
    struct sym_region *region = server->region;
    const struct sym_reply reply = {.frame_bytes = (uint32_t)sizeof(struct sym_reply) + payload_bytes,
                                    .err = err,
                                    .id = id,
                                    .args = {a0, a1, a2, a3}};
    const uint64_t used = server->complete_tail - atomic_load_explicit(&region->complete_head, memory_order_acquire);
    if (used > SYM_RING_BYTES)
        return -EPROTO;
    if (padded(reply.frame_bytes) > SYM_RING_BYTES - used)
        return 1;
    char *ring = server->base + server->plan.complete_offset;
    ring_write(ring, SYM_RING_BYTES, server->complete_tail, &reply, sizeof reply);
    ring_write(ring, SYM_RING_BYTES, server->complete_tail + sizeof reply, payload, payload_bytes);
    server->complete_tail += padded(reply.frame_bytes);
    atomic_store_explicit(&region->complete_tail, server->complete_tail, memory_order_release);
    atomic_fetch_add_explicit(&region->complete_seq, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&region->complete_waiters, memory_order_relaxed) != 0)
        futex_op(&region->complete_seq, FUTEX_WAKE, INT_MAX, NULL);
    return 0;
}

/* After raising it the caller tries once more to send: the client may have made room just before. */
void sym_server_set_backlog(sym_server *server, int waiting) {
    atomic_store_explicit(&server->region->backlog, waiting != 0, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
}

static _Atomic uint32_t *slot_states(sym_server *server) {
    return (_Atomic uint32_t *)(void *)(server->base + server->plan.states_offset);
}

/* The lowest run of free slots, so that little of the region is ever touched; -ENOBUFS: none now. */
int64_t sym_server_take_rows(sym_server *server, uint32_t num_rows) {
    _Atomic uint32_t *states = slot_states(server);
    uint32_t run = 0;
    for (uint32_t slot = 0; slot < server->plan.slot_count; slot++) {
        const uint32_t state = atomic_load_explicit(&states[slot], memory_order_acquire);
        run = state == SYM_SLOT_FREE ? run + 1 : 0;
        if (run == num_rows) {
            const uint32_t first = slot + 1 - run;
            for (uint32_t taken = first; taken <= slot; taken++)
                atomic_store_explicit(&states[taken], SYM_SLOT_HELD, memory_order_relaxed);
            return first;
        }
    }
    return -ENOBUFS;
}

void sym_server_free_rows(sym_server *server, uint32_t first, uint32_t num_rows) {
    for (uint32_t slot = first; slot < first + num_rows && slot < server->plan.slot_count; slot++)
        atomic_store_explicit(&slot_states(server)[slot], SYM_SLOT_FREE, memory_order_release);
}

uint32_t sym_server_held_rows(sym_server *server) {
    uint32_t held = 0;
    for (uint32_t slot = 0; slot < server->plan.slot_count; slot++)
        held += atomic_load_explicit(&slot_states(server)[slot], memory_order_relaxed) != SYM_SLOT_FREE;
    return held;
}

/* Tells every waiter that nothing will come any more. */
void sym_server_close(sym_server *server) {
    struct sym_region *region = server->region;
    atomic_store_explicit(&region->gone, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&region->complete_seq, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&region->space_seq, 1, memory_order_seq_cst);
    futex_op(&region->complete_seq, FUTEX_WAKE, INT_MAX, NULL);
    futex_op(&region->space_seq, FUTEX_WAKE, INT_MAX, NULL);
}
