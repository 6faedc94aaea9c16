/* The daemon's half of a channel. No function blocks or trusts the bytes that the client wrote.
 *
 * One thread, the receiver, takes requests. The run also takes hot calls out of the ring (hot.c), under `receive_lock`.
 * Any thread pushes replies, under `push_lock`. If the ring has no space, the caller of sym_server_push keeps the
 * reply, and `queueing` is set. While any reply waits, that caller keeps all later replies, too. So replies keep their
 * order.
 */
#include "server_state.h"

#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>

#define SERVES_NS 500000

/* Makes a server and writes the header of the region. `base` points to `plan->region_bytes` zero bytes. The caller owns
 * `bell_fd`, and keeps it open until sym_server_close. `version` is the ABI version of the welcome. */
sym_server *sym_server_new(char *base, const sym_plan *plan, int bell_fd, uint32_t version) {
    sym_server *server = calloc(1, sizeof *server); /* inbox pages are committed as they are used */
    if (server == NULL)
        return NULL;
    server->base = base;
    server->region = (struct sym_region *)(void *)base;
    server->plan = *plan;
    server->bell_fd = bell_fd;
    pthread_mutex_init(&server->receive_lock, NULL);
    atomic_init(&server->num_open, 0);
    atomic_init(&server->num_given_rows, 0);
    atomic_init(&server->num_settled_rows, 0);
    pthread_mutex_init(&server->push_lock, NULL);
    struct sym_region *region = server->region;
    region->magic = SYM_MAGIC;
    region->version = version;
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

/* Wakes an event loop of the client, if one waits. The bell is a pipe with a non-blocking write end. In place of a
 * pipe, an eventfd would have one file description on both sides, and the client could make it blocking. */
static void ring_bell(sym_server *server) {
    if (atomic_load_explicit(&server->region->bell_wanted, memory_order_relaxed) == 0 ||
        atomic_exchange(&server->region->bell_wanted, 0) == 0)
        return;
    const uint64_t one = 1;
    const ssize_t written = write(server->bell_fd, &one, sizeof one); /* a full pipe rings already */
    (void)written;
}

void sym_server_took_requests(sym_server *server, uint64_t head) {
    struct sym_region *region = server->region;
    server->submit_head = head;
    atomic_store_explicit(&region->submit_head, head, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&region->space_waiters, memory_order_relaxed) != 0) {
        atomic_fetch_add_explicit(&region->space_seq, 1, memory_order_seq_cst);
        futex_op(&region->space_seq, FUTEX_WAKE, INT_MAX, NULL);
        ring_bell(server);
    }
}

int64_t sym_server_receive(sym_server *server) {
    struct sym_region *region = server->region;
    atomic_store_explicit(&region->daemon_asleep, 0, memory_order_relaxed);
    atomic_store_explicit(&region->daemon_cpu, (uint32_t)sched_getcpu(), memory_order_relaxed);
    pthread_mutex_lock(&server->receive_lock);
    const int64_t bytes = submitted_bytes(server);
    server->receiver_has = bytes > 0;
    if (bytes > 0) {
        ring_read(server->base + server->plan.submit_offset, SYM_RING_BYTES, server->submit_head, server->inbox,
                  (uint64_t)bytes);
        sym_server_took_requests(server, server->submit_head + (uint64_t)bytes);
    }
    pthread_mutex_unlock(&server->receive_lock);
    return bytes;
}

/* Reads the next request of the inbox into `taken`, and moves behind that request. 0: the frame is malformed. */
static int look_at(sym_server *server, sym_taken *taken) {
    struct sym_request request;
    memcpy(&request, server->inbox + server->inbox_at, sizeof request);
    const uint64_t there = server->inbox_end - server->inbox_at;
    if (request.frame_bytes < sizeof request || request.frame_bytes > SYM_MAX_FRAME_BYTES ||
        padded(request.frame_bytes) > there || request.reserved1 != 0)
        return 0;
    *taken = (sym_taken){.id = request.id,
                         .handle = request.handle,
                         .flags = request.flags,
                         .op = request.op,
                         .stream = request.stream,
                         .payload_at = (uint32_t)(server->inbox_at + sizeof request),
                         .payload_bytes = request.frame_bytes - (uint32_t)sizeof request};
    memcpy(taken->args, request.args, sizeof taken->args);
    server->inbox_at += padded(request.frame_bytes);
    return 1;
}

static int is_served(const sym_server *server, const sym_taken *taken) {
    return taken->op < 64 && (server->served >> taken->op & 1);
}

/* Carries out a request and answers it. 1: done. 0: the request needs the interpreter. */
static int carry_out(sym_server *server, const sym_taken *taken) {
    int64_t answer[4] = {0};
    const char *payload = server->inbox + taken->payload_at;
    const int served = server->queueing ? SYM_COLD : server->serve(server->served_by, taken, payload, answer);
    if (served == SYM_COLD)
        return 0;
    atomic_fetch_add(&server->num_open, 1);
    if (served == SYM_LATER)
        return 1;
    server->pushed = sym_server_push(server, taken->id, 0, 0, answer[0], answer[1], answer[2], answer[3], NULL, 0);
    if (server->pushed == 1) {
        server->unsent.id = taken->id;
        memcpy(server->unsent.args, answer, sizeof answer);
    }
    return 1;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* Carries out requests of the inbox, in order, for at most SERVES_NS, or until an answer stays unsent. 1: all requests
 * were carried out, or a limit was reached. 0: the next request needs the interpreter. -EPROTO: the next frame is
 * malformed. */
static int carry_out_first(sym_server *server, uint32_t most) {
    const int64_t until_ns = server->served ? now_ns() + SERVES_NS : 0;
    for (uint32_t num = 0; num < most && server->inbox_at < server->inbox_end && !server->pushed; num++) {
        sym_taken taken;
        const uint64_t before = server->inbox_at;
        if (!look_at(server, &taken))
            return -EPROTO;
        if (!is_served(server, &taken) || !carry_out(server, &taken)) {
            server->inbox_at = before;
            return 0;
        }
        if (now_ns() > until_ns)
            break;
    }
    return 1;
}

/* Puts requests for the interpreter into `taken`, and returns their count. Stops before a request that might be carried
 * out here, so that requests keep their order. */
static int take_cold(sym_server *server, uint32_t most) {
    uint32_t count = 0;
    while (count < most && count < SYM_MAX_TAKEN && server->inbox_at < server->inbox_end) {
        const uint64_t before = server->inbox_at;
        if (!look_at(server, &server->taken[count]))
            return -EPROTO;
        if (count > 0 && is_served(server, &server->taken[count])) {
            server->inbox_at = before;
            break;
        }
        count++;
    }
    atomic_fetch_add(&server->num_open, count);
    return (int)count;
}

static int refill(sym_server *server) {
    const int64_t bytes = sym_server_receive(server);
    if (bytes < 0)
        return (int)bytes;
    server->inbox_at = 0;
    server->inbox_end = (uint64_t)bytes;
    return 0;
}

/* Carries out the requests that `serve` can, and puts the next requests for the interpreter into `taken`. An empty
 * inbox is filled from the ring, unless `ignore_new`. Returns the number of requests in `taken`, plus SYM_UNSENT if an
 * answer is unsent. -EPROTO: the next frame is malformed, or a position of the client is not in its ring. */
int sym_server_take(sym_server *server, uint32_t most, int ignore_new) {
    server->is_armed = 0;
    int outcome = server->inbox_at == server->inbox_end && !ignore_new ? refill(server) : 0;
    if (outcome == 0)
        outcome = carry_out_first(server, most);
    const int is_cold = outcome == 0;
    if (is_cold)
        outcome = take_cold(server, most);
    const int pushed = server->pushed;
    server->pushed = 0;
    if (outcome < 0 || pushed < 0)
        return -EPROTO;
    return (is_cold ? outcome : 0) + (pushed ? SYM_UNSENT : 0);
}

/* Takes and carries out all requests in place of the receiver, which sleeps on the doorbell. 1: all requests were
 * carried out, and the receiver can sleep on. 0: the receiver has to look at the requests. */
int sym_server_drain(sym_server *server, int doorbell_fd) {
    if (!server->is_armed || server->queueing)
        return 0;
    server->is_armed = 0;
    const int64_t until_ns = now_ns() + SERVES_NS;
    int is_done = sym_server_clear_doorbell(doorbell_fd) == 0;
    while (is_done && !server->is_armed) {
        is_done = sym_server_num_open(server) <= SYM_MAX_OPEN - 3 * SYM_MAX_TAKEN && refill(server) == 0 &&
                  carry_out_first(server, SYM_MAX_TAKEN) == 1;
        if (is_done && !sym_server_arm(server, 0)) /* more requests have come, or some are left */
            is_done = server->inbox_at == server->inbox_end && !server->pushed && now_ns() < until_ns;
    }
    return is_done;
}

void sym_server_serve_by(sym_server *server, sym_serve_function *serve, void *connection, uint64_t operations) {
    server->serve = serve;
    server->served_by = connection;
    server->served = operations;
}

void *sym_server_served_by(sym_server *server) { return server->served_by; }

sym_unsent sym_server_unsent(sym_server *server) { return server->unsent; }

int64_t sym_server_num_open(sym_server *server) { return atomic_load(&server->num_open); }

char *sym_server_taken(sym_server *server) { return (char *)server->taken; }

/* Announces that the receiver is about to sleep on the doorbell. 1: sleep. 0: there are requests, do not sleep. */
int sym_server_arm(sym_server *server, int ignore_requests) {
    struct sym_region *region = server->region;
    atomic_store_explicit(&region->daemon_asleep, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    server->is_armed = 0;
    if (server->inbox_at < server->inbox_end || server->pushed)
        return 0;
    if (ignore_requests)
        return 1;
    pthread_mutex_lock(&server->receive_lock);
    const int nothing = submitted_bytes(server) == 0;
    if (nothing)
        server->receiver_has = 0;
    pthread_mutex_unlock(&server->receive_lock);
    if (!nothing)
        atomic_store_explicit(&region->daemon_asleep, 0, memory_order_relaxed);
    server->is_armed = nothing;
    return nothing;
}

/* Empties the doorbell. The client shares the doorbell's file description, and may have made it blocking. Hence
 * RWF_NOWAIT. */
int sym_server_clear_doorbell(int doorbell_fd) {
    uint64_t count;
    struct iovec iov = {.iov_base = &count, .iov_len = sizeof count};
    if (preadv2(doorbell_fd, &iov, 1, -1, RWF_NOWAIT) >= 0 || errno == EAGAIN || errno == EINTR)
        return 0;
    return -errno;
}

/* Under push_lock. Writes a reply into the ring. A reply to id 0 is not sent, since the client ignores it. */
static int push(sym_server *server, const struct sym_reply *reply, const char *payload, const char *more,
                uint32_t more_bytes) {
    struct sym_region *region = server->region;
    const uint32_t payload_bytes = reply->frame_bytes - (uint32_t)sizeof *reply - more_bytes;
    const uint64_t used = server->complete_tail - atomic_load_explicit(&region->complete_head, memory_order_acquire);
    if (used > SYM_RING_BYTES)
        return -EPROTO;
    if (reply->id != 0 && padded(reply->frame_bytes) > SYM_RING_BYTES - used)
        return 1;
    if ((reply->flags & SYM_MORE) == 0)
        atomic_fetch_sub(&server->num_open, 1);
    if (reply->id == 0)
        return 0;
    char *ring = server->base + server->plan.complete_offset;
    ring_write(ring, SYM_RING_BYTES, server->complete_tail, reply, sizeof *reply);
    ring_write(ring, SYM_RING_BYTES, server->complete_tail + sizeof *reply, payload, payload_bytes);
    ring_write(ring, SYM_RING_BYTES, server->complete_tail + sizeof *reply + payload_bytes, more, more_bytes);
    server->complete_tail += padded(reply->frame_bytes);
    atomic_store_explicit(&region->complete_tail, server->complete_tail, memory_order_release);
    atomic_fetch_add_explicit(&region->complete_seq, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    /* The exchange clears the flag, so that replies which follow before the sleeper runs cost no system call. */
    if (atomic_load_explicit(&region->complete_waiters, memory_order_relaxed) != 0 &&
        atomic_exchange(&region->complete_waiters, 0) != 0)
        futex_op(&region->complete_seq, FUTEX_WAKE, INT_MAX, NULL);
    ring_bell(server);
    return 0;
}

static struct sym_reply reply_of(uint64_t id, int32_t err, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                                 int64_t a3, uint32_t payload_bytes) {
    return (struct sym_reply){.frame_bytes = (uint32_t)sizeof(struct sym_reply) + payload_bytes,
                              .err = err,
                              .id = id,
                              .args = {a0, a1, a2, a3},
                              .flags = flags};
}

/* Sends a reply. Only the receiver's thread calls this, and keeps replies that do not fit. 0: sent. 1: no space; the
 * caller queues this reply and all later ones. -EPROTO: the client's head is not in the ring. */
int sym_server_push(sym_server *server, uint64_t id, int32_t err, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                    int64_t a3, const char *payload, uint32_t payload_bytes) {
    const struct sym_reply reply = reply_of(id, err, flags, a0, a1, a2, a3, payload_bytes);
    pthread_mutex_lock(&server->push_lock);
    const int rc = push(server, &reply, payload, NULL, 0);
    if (rc == 1)
        server->queueing = 1;
    pthread_mutex_unlock(&server->push_lock);
    if (rc < 0)
        server->pushed = rc; /* makes carry_out_first stop */
    return rc;
}

/* Sends a reply whose payload has two parts. Any thread may call this. 0: sent. 1: not sent, because other replies
 * wait, the ring has no space, or the channel was closed. */
int sym_server_push_now(sym_server *server, uint64_t id, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                        const char *payload, uint32_t payload_bytes, const char *more, uint32_t more_bytes) {
    const struct sym_reply reply = reply_of(id, 0, flags, a0, a1, a2, 0, payload_bytes + more_bytes);
    pthread_mutex_lock(&server->push_lock);
    const int rc = server->queueing || server->closed ? 1 : push(server, &reply, payload, more, more_bytes);
    pthread_mutex_unlock(&server->push_lock);
    return rc == 0 ? 0 : 1;
}

/* Tells the client whether replies wait. After setting `waiting` to 1, the caller has to try again to send: the client
 * may have read replies just before. */
void sym_server_set_backlog(sym_server *server, int waiting) {
    pthread_mutex_lock(&server->push_lock);
    server->queueing = waiting != 0;
    pthread_mutex_unlock(&server->push_lock);
    atomic_store_explicit(&server->region->backlog, waiting != 0, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
}

/* Asks the client to ring when it frees slots. Then the caller has to look at the slots once more. */
void sym_server_want_slots(sym_server *server) {
    atomic_store_explicit(&server->region->slots_wanted, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
}

static _Atomic uint32_t *slot_states(sym_server *server) {
    return (_Atomic uint32_t *)(void *)(server->base + server->plan.states_offset);
}

/* Takes `num_rows` consecutive slots if all are free, or none. Any thread may call this: the thread that turns FREE
 * into HELD has the slot. */
static int hold_rows(_Atomic uint32_t *states, uint32_t first, uint32_t num_rows) {
    for (uint32_t slot = first; slot < first + num_rows; slot++) {
        uint32_t state = SYM_SLOT_FREE;
        if (!atomic_compare_exchange_strong(&states[slot], &state, SYM_SLOT_HELD)) {
            while (slot-- > first)
                atomic_store_explicit(&states[slot], SYM_SLOT_FREE, memory_order_release);
            return 0;
        }
    }
    return 1;
}

/* Takes the lowest consecutive free slots, so that the program touches little of the region. Returns the first slot, or
 * -ENOBUFS if too few consecutive slots are free now. */
int64_t sym_server_take_rows(sym_server *server, uint32_t num_rows) {
    _Atomic uint32_t *states = slot_states(server);
    uint32_t run = 0;
    for (uint32_t slot = 0; slot < server->plan.slot_count; slot++) {
        const uint32_t state = atomic_load_explicit(&states[slot], memory_order_acquire);
        run = state == SYM_SLOT_FREE ? run + 1 : 0;
        if (run == num_rows && hold_rows(states, slot + 1 - run, num_rows)) {
            atomic_fetch_add(&server->num_given_rows, num_rows);
            return slot + 1 - run;
        }
        run = run == num_rows ? 0 : run;
    }
    return -ENOBUFS;
}

/* Notes that a call with this many slots is over. If the call failed, its slots are freed. If it was answered, the
 * program owns its slots, even if the answer still waits for space in the ring. */
void sym_server_settle_rows(sym_server *server, uint32_t num_rows) {
    atomic_fetch_add(&server->num_settled_rows, num_rows);
}

int64_t sym_server_given_rows(sym_server *server) { return atomic_load(&server->num_given_rows); }

/* Number of slots of calls in flight. */
int64_t sym_server_lent_rows(sym_server *server) {
    return atomic_load(&server->num_given_rows) - atomic_load(&server->num_settled_rows);
}

void sym_server_free_rows(sym_server *server, uint32_t first, uint32_t num_rows) {
    sym_server_settle_rows(server, num_rows);
    for (uint32_t slot = first; slot < first + num_rows && slot < server->plan.slot_count; slot++)
        atomic_store_explicit(&slot_states(server)[slot], SYM_SLOT_FREE, memory_order_release);
}

/* Bytes of all requests since the connection was made, padding included: positions in a ring only grow. */
uint64_t sym_server_request_bytes(sym_server *server) {
    pthread_mutex_lock(&server->receive_lock);
    const uint64_t bytes = server->submit_head;
    pthread_mutex_unlock(&server->receive_lock);
    return bytes;
}

uint64_t sym_server_reply_bytes(sym_server *server) {
    pthread_mutex_lock(&server->push_lock);
    const uint64_t bytes = server->complete_tail;
    pthread_mutex_unlock(&server->push_lock);
    return bytes;
}

uint32_t sym_server_held_rows(sym_server *server) {
    uint32_t held = 0;
    for (uint32_t slot = 0; slot < server->plan.slot_count; slot++)
        held += atomic_load_explicit(&slot_states(server)[slot], memory_order_relaxed) != SYM_SLOT_FREE;
    return held;
}

/* Wakes all waiters of the client, because the daemon ends the connection. Afterwards no descriptor is used. */
void sym_server_close(sym_server *server) {
    struct sym_region *region = server->region;
    pthread_mutex_lock(&server->receive_lock);
    pthread_mutex_lock(&server->push_lock);
    server->closed = 1;
    atomic_store_explicit(&region->gone, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&region->complete_seq, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&region->space_seq, 1, memory_order_seq_cst);
    futex_op(&region->complete_seq, FUTEX_WAKE, INT_MAX, NULL);
    futex_op(&region->space_seq, FUTEX_WAKE, INT_MAX, NULL);
    atomic_store(&region->bell_wanted, 1);
    ring_bell(server);
    pthread_mutex_unlock(&server->push_lock);
    pthread_mutex_unlock(&server->receive_lock);
}
