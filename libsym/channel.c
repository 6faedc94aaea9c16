/* The two halves of a channel. See abi.h for what they share.
 *
 * Client half: many threads of one process share one connection. A request is written under a mutex. Replies
 * are taken by whichever waiting thread holds the drain lock (the leader): it hands each reply to the thread
 * that waits for it, and when its own has come it leaves and wakes one of the others to lead. A thread of its own
 * for this would cost every reply one more switch; a lock around "wait" would make a short call wait for a long
 * one. Only the leader looks at shared memory and spins; followers park on a futex of their own.
 *
 * Every park ends after PARK_NS at the latest and returns to Python with -EINTR: so a signal that came between
 * two parks is seen, and the death of a daemon that could not say goodbye is noticed (poll on the socket).
 *
 * Lock order: submit_lock before table_lock. Nothing sleeps while it holds either.
 *
 * Where one side sleeps and the other must see it, both use the store-fence-load pattern: publish, fence, look
 * at the other's flag. Either the sleeper sees what was published, or the publisher sees the sleeper.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "abi.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PARK_NS 100000000L /* 100 ms: the longest a Ctrl-C or a dead daemon goes unnoticed */
#define SPIN_PAUSES 300    /* about 10-20 us: a reply that needs no step is here by then, a step is not */
#define MAX_CALLS 4096u    /* under way at once in one process: more wait, as for a full ring */
#define CALL_INDEX_BITS 12

_Static_assert(MAX_CALLS == 1u << CALL_INDEX_BITS, "an id is a generation and an index");

static long futex_op(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, (uint32_t *)word, op, value, timeout, NULL, 0);
}

/* 0: woken or the word had changed; -ETIMEDOUT; -EINTR */
static int futex_park(_Atomic uint32_t *word, uint32_t seen, int private_flag) {
    const struct timespec timeout = {.tv_sec = 0, .tv_nsec = PARK_NS};
    if (futex_op(word, FUTEX_WAIT | private_flag, seen, &timeout) == 0 || errno == EAGAIN)
        return 0;
    return errno == ETIMEDOUT ? -ETIMEDOUT : -EINTR;
}

static void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t padded(uint64_t frame_bytes) {
    return (frame_bytes + SYM_FRAME_ALIGN - 1) & ~(uint64_t)(SYM_FRAME_ALIGN - 1);
}

static void ring_write(char *ring, uint64_t ring_bytes, uint64_t position, const void *data, uint64_t bytes) {
    const uint64_t at = position & (ring_bytes - 1);
    const uint64_t first = bytes < ring_bytes - at ? bytes : ring_bytes - at;
    memcpy(ring + at, data, first);
    memcpy(ring, (const char *)data + first, bytes - first);
}

static void ring_read(const char *ring, uint64_t ring_bytes, uint64_t position, void *data, uint64_t bytes) {
    const uint64_t at = position & (ring_bytes - 1);
    const uint64_t first = bytes < ring_bytes - at ? bytes : ring_bytes - at;
    memcpy(data, ring + at, first);
    memcpy((char *)data + first, ring, bytes - first);
}

/* ---- geometry ---------------------------------------------------------------------------------------- */

typedef struct sym_plan {
    uint64_t region_bytes, states_offset, submit_offset, complete_offset, slots_offset, slot_bytes;
    uint32_t slot_count, vocab_size;
} sym_plan;

/* -EINVAL: no region can hold rows of this size. Memory is committed as it is touched, not here. */
int sym_region_plan(uint32_t vocab_size, uint64_t limit_bytes, sym_plan *plan) {
    if (vocab_size == 0 || vocab_size > 1u << 24)
        return -EINVAL;
    const uint64_t row_bytes = (uint64_t)vocab_size * sizeof(float);
    const uint64_t align = row_bytes < 4096 ? 64 : 4096;
    const uint64_t fixed = 2 * SYM_HEADER_BYTES + 2 * (uint64_t)SYM_RING_BYTES;
    plan->vocab_size = vocab_size;
    plan->slot_bytes = (row_bytes + align - 1) / align * align;
    uint64_t count = limit_bytes > fixed ? (limit_bytes - fixed) / plan->slot_bytes : 0;
    if (count < SYM_MIN_SLOTS)
        count = SYM_MIN_SLOTS;
    if (count > SYM_MAX_SLOTS)
        count = SYM_MAX_SLOTS;
    plan->slot_count = (uint32_t)count;
    plan->states_offset = SYM_HEADER_BYTES; /* SYM_MAX_SLOTS states of 4 bytes: one page */
    plan->submit_offset = 2 * SYM_HEADER_BYTES;
    plan->complete_offset = plan->submit_offset + SYM_RING_BYTES;
    plan->slots_offset = plan->complete_offset + SYM_RING_BYTES;
    plan->region_bytes = (plan->slots_offset + count * plan->slot_bytes + 4095) / 4096 * 4096;
    return 0;
}

/* ---- the daemon's half ------------------------------------------------------------------------------- */

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

/* ---- the client's half ------------------------------------------------------------------------------- */

struct sym_client;

enum call_state { CALL_NEW, CALL_PENDING, CALL_DONE };

/* One call; it owns what its reply brought: the payload, result slots, a handle nobody has claimed yet. */
typedef struct sym_call {
    struct sym_client *client;
    uint64_t id;
    uint16_t op;
    uint32_t flags;
    uint64_t handle;
    int64_t request_args[4];
    _Atomic uint32_t state;
    _Atomic uint32_t wake; /* futex, of this process alone: done, dead, or your turn to lead */
    int32_t err;
    int64_t args[4];
    char *payload;
    uint32_t payload_bytes;
    int32_t claimed; /* a KV object has taken over the handle in args[0] */
} sym_call;

struct entry {
    uint64_t id; /* 0: unused */
    uint64_t generation;
    sym_call *call; /* NULL: abandoned, the reply is still to come */
    uint16_t op;
};

typedef struct sym_client {
    struct sym_region *region;
    char *base;
    sym_plan plan;
    int socket_fd, doorbell_fd; /* -1 once closed */
    _Atomic int refs;           /* the owner and every call: a Dist keeps its row mapped through its call */
    _Atomic int dead;           /* errno that says why; 0 while all is well */
    pid_t owner;                /* in a fork's child nothing may be touched: no lock can be relied on there */
    pthread_mutex_t submit_lock;
    uint64_t submit_tail;  /* under submit_lock */
    _Atomic int draining;  /* the drain lock */
    uint64_t complete_head; /* under the drain lock */
    pthread_mutex_t table_lock;
    /* under table_lock: */
    int users; /* threads inside: the descriptors stay open until the last has left */
    struct entry table[MAX_CALLS];
    uint32_t free_indices[MAX_CALLS], num_free;
    uint64_t *closes; /* handles to close with the next call */
    uint32_t num_closes, room_for_closes;
} sym_client;

static int disowned(const sym_client *client) { return getpid() != client->owner; }

static int gives_handle(uint16_t op) { return op == SYM_KV_CREATE || op == SYM_KV_OPEN || op == SYM_KV_FORK; }

static void client_unref(sym_client *client) {
    if (atomic_fetch_sub(&client->refs, 1) != 1)
        return;
    munmap(client->base, client->plan.region_bytes);
    if (client->socket_fd >= 0)
        close(client->socket_fd);
    if (client->doorbell_fd >= 0)
        close(client->doorbell_fd);
    pthread_mutex_destroy(&client->submit_lock);
    pthread_mutex_destroy(&client->table_lock);
    free(client->closes);
    free(client);
}

static int region_is_sane(const struct sym_region *region, uint64_t region_bytes) {
    sym_plan plan;
    return region->magic == SYM_MAGIC && region->version == SYM_ABI_VERSION && region->region_bytes == region_bytes &&
           region->submit_bytes == SYM_RING_BYTES && region->complete_bytes == SYM_RING_BYTES &&
           region->slot_count <= SYM_MAX_SLOTS && sym_region_plan(region->vocab_size, 0, &plan) == 0 &&
           region->slot_bytes == plan.slot_bytes && region->states_offset == plan.states_offset &&
           region->submit_offset == plan.submit_offset && region->complete_offset == plan.complete_offset &&
           region->slots_offset == plan.slots_offset &&
           region->slots_offset + region->slot_count * region->slot_bytes <= region_bytes;
}

/* Maps the region and takes over both descriptors. NULL with errno: they are still the caller's. */
sym_client *sym_client_new(int memfd, uint64_t region_bytes, int socket_fd, int doorbell_fd) {
    if (region_bytes < SYM_HEADER_BYTES) {
        errno = EPROTO;
        return NULL;
    }
    char *base = mmap(NULL, region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (base == MAP_FAILED)
        return NULL;
    struct sym_region *region = (struct sym_region *)(void *)base;
    sym_client *client = calloc(1, sizeof *client);
    if (client == NULL || !region_is_sane(region, region_bytes)) {
        free(client);
        munmap(base, region_bytes);
        errno = client == NULL ? ENOMEM : EPROTO;
        return NULL;
    }
    client->region = region;
    client->base = base;
    sym_region_plan(region->vocab_size, 0, &client->plan);
    client->plan.region_bytes = region_bytes;
    client->plan.slot_count = region->slot_count;
    client->socket_fd = socket_fd;
    client->doorbell_fd = doorbell_fd;
    client->owner = getpid();
    atomic_init(&client->refs, 1);
    pthread_mutex_init(&client->submit_lock, NULL);
    pthread_mutex_init(&client->table_lock, NULL);
    for (uint32_t i = 0; i < MAX_CALLS; i++)
        client->free_indices[i] = MAX_CALLS - 1 - i;
    client->num_free = MAX_CALLS;
    return client;
}

uint32_t sym_client_vocab_size(sym_client *client) { return client->plan.vocab_size; }

uint32_t sym_client_slot_count(sym_client *client) { return client->plan.slot_count; }

int sym_client_dead(sym_client *client) { return atomic_load(&client->dead); }

/* Under table_lock. Every waiter looks at its state again. */
static void wake_all(sym_client *client) {
    for (uint32_t i = 0; i < MAX_CALLS; i++) {
        sym_call *call = client->table[i].call;
        if (client->table[i].id != 0 && call != NULL) {
            atomic_fetch_add(&call->wake, 1);
            futex_op(&call->wake, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL);
        }
    }
}

static void declare_dead(sym_client *client, int reason) {
    int alive = 0;
    if (!atomic_compare_exchange_strong(&client->dead, &alive, reason))
        return;
    pthread_mutex_lock(&client->table_lock);
    wake_all(client);
    pthread_mutex_unlock(&client->table_lock);
}

static void ring_doorbell(sym_client *client) {
    const uint64_t one = 1;
    /* EAGAIN: it is ringing already. Anything else: the socket will tell. */
    const ssize_t written = write(client->doorbell_fd, &one, sizeof one);
    (void)written;
}

static int socket_hung_up(sym_client *client) {
    struct pollfd poll_fd = {.fd = client->socket_fd, .events = POLLRDHUP};
    return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLHUP | POLLRDHUP | POLLERR | POLLNVAL)) != 0;
}

/* -- requests -- */

static uint64_t submit_room(sym_client *client) {
    return SYM_RING_BYTES -
           (client->submit_tail - atomic_load_explicit(&client->region->submit_head, memory_order_acquire));
}

/* Under submit_lock, with room. Not yet visible: publish() makes it so. */
static void write_frame(sym_client *client, const struct sym_request *request, const char *payload) {
    char *ring = client->base + client->plan.submit_offset;
    ring_write(ring, SYM_RING_BYTES, client->submit_tail, request, sizeof *request);
    ring_write(ring, SYM_RING_BYTES, client->submit_tail + sizeof *request, payload,
               request->frame_bytes - sizeof *request);
    client->submit_tail += padded(request->frame_bytes);
}

/* Under submit_lock. */
static void publish(sym_client *client) {
    atomic_store_explicit(&client->region->submit_tail, client->submit_tail, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&client->region->daemon_asleep, memory_order_relaxed) != 0 &&
        atomic_exchange(&client->region->daemon_asleep, 0) != 0)
        ring_doorbell(client);
}

/* Under submit_lock: sends the closes that garbage collection left, as far as they fit beside `reserved`. */
static void write_closes(sym_client *client, uint64_t reserved) {
    pthread_mutex_lock(&client->table_lock);
    while (client->num_closes > 0 && submit_room(client) >= reserved + sizeof(struct sym_request)) {
        const struct sym_request request = {.frame_bytes = sizeof(struct sym_request),
                                            .op = SYM_KV_CLOSE,
                                            .handle = client->closes[--client->num_closes]};
        write_frame(client, &request, NULL);
    }
    pthread_mutex_unlock(&client->table_lock);
}

/* Under table_lock. Without memory for it the handle stays open until the process ends. */
static void queue_close(sym_client *client, uint64_t handle) {
    if (client->num_closes == client->room_for_closes) {
        const uint32_t room = client->room_for_closes ? 2 * client->room_for_closes : 16;
        uint64_t *closes = realloc(client->closes, room * sizeof *closes);
        if (closes == NULL)
            return;
        client->closes = closes;
        client->room_for_closes = room;
    }
    client->closes[client->num_closes++] = handle;
}

/* Closes `handle` with the next call. Never waits: for finalizers. */
void sym_client_close_later(sym_client *client, uint64_t handle) {
    if (disowned(client))
        return;
    pthread_mutex_lock(&client->table_lock);
    queue_close(client, handle);
    pthread_mutex_unlock(&client->table_lock);
}

/* Under submit_lock. 0, or -EBUSY: too many calls under way. */
static int enter_table(sym_client *client, sym_call *call) {
    int rc = -EBUSY;
    pthread_mutex_lock(&client->table_lock);
    if (client->num_free > 0) {
        const uint32_t index = client->free_indices[--client->num_free];
        struct entry *entry = &client->table[index];
        entry->generation++;
        entry->id = entry->generation << CALL_INDEX_BITS | index;
        entry->call = call;
        entry->op = call->op;
        call->id = entry->id;
        atomic_store(&call->state, CALL_PENDING);
        rc = 0;
    }
    pthread_mutex_unlock(&client->table_lock);
    return rc;
}

/* 0: submitted; -EAGAIN: no room in the ring now; -EBUSY: none in the table. */
static int try_submit(sym_client *client, sym_call *call, const char *payload, uint32_t payload_bytes) {
    struct sym_request request = {.frame_bytes = (uint32_t)sizeof(struct sym_request) + payload_bytes,
                                  .op = call->op,
                                  .flags = call->flags,
                                  .handle = call->handle};
    const uint64_t needed = padded(request.frame_bytes);
    memcpy(request.args, call->request_args, sizeof request.args);
    pthread_mutex_lock(&client->submit_lock);
    int rc = submit_room(client) >= needed ? enter_table(client, call) : -EAGAIN;
    if (rc == 0) {
        if (client->num_closes > 0) /* a stale look only delays a close to the next call */
            write_closes(client, needed);
        request.id = call->id;
        write_frame(client, &request, payload);
        publish(client);
    }
    pthread_mutex_unlock(&client->submit_lock);
    return rc;
}

/* -- replies -- */

static void release_slots(sym_client *client, int64_t first, int64_t count) {
    _Atomic uint32_t *states = (_Atomic uint32_t *)(void *)(client->base + client->plan.states_offset);
    const int64_t slot_count = client->plan.slot_count;
    if (first < 0 || first >= slot_count || count < 0 || count > slot_count - first)
        return;
    for (int64_t slot = first; slot < first + count; slot++)
        atomic_store_explicit(&states[slot], SYM_SLOT_FREE, memory_order_release);
}

/* Under table_lock: gives back what a reply brought and nobody will use. */
static void discard_reply(sym_client *client, uint16_t op, int32_t err, const int64_t args[4]) {
    if (err == 0 && op == SYM_PRED)
        release_slots(client, args[0], args[1]);
    if (err == 0 && gives_handle(op))
        queue_close(client, (uint64_t)args[0]);
}

/* Takes over `payload`. An id that is not in the table is the reply to a close that nobody waits for. */
static void deliver(sym_client *client, const struct sym_reply *reply, char *payload, uint32_t payload_bytes) {
    const uint32_t index = reply->id & (MAX_CALLS - 1);
    pthread_mutex_lock(&client->table_lock);
    struct entry *entry = &client->table[index];
    if (reply->id != 0 && entry->id == reply->id) {
        sym_call *call = entry->call;
        if (call == NULL) {
            discard_reply(client, entry->op, reply->err, reply->args);
        } else {
            call->err = reply->err;
            memcpy(call->args, reply->args, sizeof call->args);
            call->payload = payload;
            call->payload_bytes = payload_bytes;
            payload = NULL;
            atomic_store(&call->state, CALL_DONE);
            atomic_fetch_add(&call->wake, 1);
            futex_op(&call->wake, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL);
        }
        entry->id = 0;
        entry->call = NULL;
        client->free_indices[client->num_free++] = index;
    }
    pthread_mutex_unlock(&client->table_lock);
    free(payload);
}

/* Under the drain lock: one reply out of the ring. 0, or an errno that ends the connection. */
static int take_reply(sym_client *client, uint64_t available) {
    const char *ring = client->base + client->plan.complete_offset;
    struct sym_reply reply;
    ring_read(ring, SYM_RING_BYTES, client->complete_head, &reply, sizeof reply);
    const uint64_t frame = reply.frame_bytes;
    if (frame < sizeof reply || frame > SYM_MAX_FRAME_BYTES || padded(frame) > available)
        return EPROTO;
    const uint32_t payload_bytes = (uint32_t)(frame - sizeof reply);
    char *payload = NULL;
    if (payload_bytes > 0) {
        payload = malloc(payload_bytes);
        if (payload == NULL)
            return ENOMEM;
        ring_read(ring, SYM_RING_BYTES, client->complete_head + sizeof reply, payload, payload_bytes);
    }
    client->complete_head += padded(frame);
    atomic_store_explicit(&client->region->complete_head, client->complete_head, memory_order_release);
    deliver(client, &reply, payload, payload_bytes);
    return 0;
}

static int replies_wait(sym_client *client) {
    return atomic_load_explicit(&client->region->complete_tail, memory_order_acquire) != client->complete_head;
}

/* Under the drain lock: hands out every reply that is there. */
static void drain(sym_client *client) {
    if (!replies_wait(client))
        return;
    while (replies_wait(client)) {
        const uint64_t tail = atomic_load_explicit(&client->region->complete_tail, memory_order_acquire);
        const uint64_t available = tail - client->complete_head;
        const int reason = available > SYM_RING_BYTES ? EPROTO : take_reply(client, available);
        if (reason != 0) {
            declare_dead(client, reason);
            return;
        }
    }
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&client->region->backlog, memory_order_relaxed) != 0)
        ring_doorbell(client);
}

static int try_lead(sym_client *client) {
    int free_now = 0;
    return atomic_compare_exchange_strong(&client->draining, &free_now, 1);
}

/* Leaves the lead, and wakes a waiter other than `leaver` to take it. Also called by waiters that leave without
 * having led: the turn that they were given must not be lost. */
static void pass_lead(sym_client *client, const sym_call *leaver, int leading) {
    if (leading)
        atomic_store(&client->draining, 0);
    pthread_mutex_lock(&client->table_lock);
    uint32_t unseen = atomic_load(&client->draining) == 0 ? MAX_CALLS - client->num_free : 0;
    for (uint32_t i = 0; unseen > 0; i++) {
        if (client->table[i].id == 0)
            continue;
        unseen--;
        sym_call *call = client->table[i].call;
        if (call != NULL && call != leaver) {
            atomic_fetch_add(&call->wake, 1);
            futex_op(&call->wake, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL);
            break;
        }
    }
    pthread_mutex_unlock(&client->table_lock);
}

/* With or without the drain lock: is the daemon still there? What it sent before it went still counts. */
static void check_alive(sym_client *client, int leading) {
    if (!atomic_load(&client->region->gone) && !socket_hung_up(client))
        return;
    if (leading)
        drain(client);
    declare_dead(client, ENOTCONN);
}

/* Under the drain lock: 0 when `call` is done or the connection dead, -EINTR to let Python look around. */
static int lead(sym_client *client, sym_call *call) {
    struct sym_region *region = client->region;
    for (;;) {
        drain(client);
        if (atomic_load(&call->state) == CALL_DONE || atomic_load(&client->dead) != 0)
            return 0;
        for (int i = 0; i < SPIN_PAUSES && !replies_wait(client); i++)
            cpu_pause();
        if (replies_wait(client))
            continue;
        const uint32_t seen = atomic_load(&region->complete_seq);
        atomic_store(&region->complete_waiters, 1);
        atomic_thread_fence(memory_order_seq_cst);
        int rc = 0;
        if (atomic_load(&region->gone))
            check_alive(client, 1);
        else if (!replies_wait(client) && atomic_load(&client->dead) == 0)
            rc = futex_park(&region->complete_seq, seen, 0);
        atomic_store(&region->complete_waiters, 0);
        if (rc == -ETIMEDOUT)
            check_alive(client, 1);
        if (rc != 0) {
            drain(client);
            return atomic_load(&call->state) == CALL_DONE ? 0 : -EINTR;
        }
    }
}

static int wait_reply(sym_client *client, sym_call *call) {
    int rc = 0;
    while (rc == 0) {
        const uint32_t seen = atomic_load(&call->wake);
        if (atomic_load(&call->state) == CALL_DONE)
            break;
        if (atomic_load(&client->dead) != 0) {
            rc = -ENOTCONN;
        } else if (try_lead(client)) {
            rc = lead(client, call);
            pass_lead(client, call, 1);
            continue;
        } else {
            rc = futex_park(&call->wake, seen, FUTEX_PRIVATE_FLAG);
            if (rc == -ETIMEDOUT) {
                check_alive(client, 0);
                rc = -EINTR;
            }
        }
        if (rc != 0)
            pass_lead(client, call, 0);
    }
    return atomic_load(&call->state) == CALL_DONE ? 0 : rc;
}

/* No room for a request: make sure that it is not we who hold the daemon up, then sleep until it takes some. A
 * full table has no futex of its own: MAX_CALLS threads at once are no design, they may wait for a tick. */
static int wait_room(sym_client *client, uint64_t needed, int table_full) {
    struct sym_region *region = client->region;
    if (try_lead(client)) {
        drain(client);
        pass_lead(client, NULL, 1);
    }
    if (atomic_load(&region->gone)) {
        check_alive(client, 0);
        return -EINTR;
    }
    const uint32_t seen = atomic_load(&region->space_seq);
    atomic_fetch_add(&region->space_waiters, 1);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&client->submit_lock);
    const int room = !table_full && submit_room(client) >= needed;
    pthread_mutex_unlock(&client->submit_lock);
    const int rc = room ? 0 : futex_park(&region->space_seq, seen, 0);
    atomic_fetch_sub(&region->space_waiters, 1);
    if (rc == -ETIMEDOUT)
        check_alive(client, 0);
    return rc == 0 ? 0 : -EINTR;
}

static int run_call(sym_client *client, sym_call *call, const char *payload, uint32_t payload_bytes) {
    while (atomic_load(&call->state) == CALL_NEW) {
        if (atomic_load(&client->dead) != 0 || atomic_load(&client->region->gone) != 0)
            return -ENOTCONN;
        const int full = try_submit(client, call, payload, payload_bytes);
        if (full == 0)
            break;
        const uint64_t needed = padded(sizeof(struct sym_request) + (uint64_t)payload_bytes);
        const int rc = wait_room(client, needed, full == -EBUSY);
        if (rc != 0)
            return rc;
    }
    return wait_reply(client, call);
}

static void close_descriptors(sym_client *client) {
    if (client->socket_fd >= 0)
        close(client->socket_fd);
    if (client->doorbell_fd >= 0)
        close(client->doorbell_fd);
    client->socket_fd = client->doorbell_fd = -1;
}

/* -- what Python calls -- */

sym_call *sym_call_new(sym_client *client, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0, int64_t a1,
                       int64_t a2, int64_t a3) {
    sym_call *call = calloc(1, sizeof *call);
    if (call == NULL)
        return NULL;
    const int64_t args[4] = {a0, a1, a2, a3};
    memcpy(call->request_args, args, sizeof args);
    call->client = client;
    call->op = op;
    call->flags = flags;
    call->handle = handle;
    atomic_fetch_add(&client->refs, 1);
    return call;
}

/* 0: the reply is in `call`; -EINTR: let Python handle its signals, then call again; else it failed for good. */
int sym_call_run(sym_call *call, const char *payload, uint32_t payload_bytes) {
    sym_client *client = call->client;
    if (disowned(client))
        return -EBADF;
    if (payload_bytes > SYM_MAX_FRAME_BYTES - sizeof(struct sym_request))
        return -EMSGSIZE;
    pthread_mutex_lock(&client->table_lock);
    client->users++;
    pthread_mutex_unlock(&client->table_lock);
    int rc = client->socket_fd < 0 ? -ENOTCONN : run_call(client, call, payload, payload_bytes);
    if (rc == -ENOTCONN && atomic_load(&client->dead) == 0)
        declare_dead(client, ENOTCONN);
    pthread_mutex_lock(&client->table_lock);
    if (--client->users == 0 && atomic_load(&client->dead) == ESHUTDOWN)
        close_descriptors(client);
    pthread_mutex_unlock(&client->table_lock);
    return rc;
}

/* Ends a call whatever its state: an answer that is still to come will be thrown away by whoever drains it. */
void sym_call_drop(sym_call *call) {
    sym_client *client = call->client;
    if (disowned(client))
        return; /* a fork's child: the slots and handles are the parent's */
    pthread_mutex_lock(&client->table_lock);
    const uint32_t state = atomic_load(&call->state);
    if (state == CALL_PENDING)
        client->table[call->id & (MAX_CALLS - 1)].call = NULL;
    if (state == CALL_DONE && !(gives_handle(call->op) && call->claimed))
        discard_reply(client, call->op, call->err, call->args);
    pthread_mutex_unlock(&client->table_lock);
    if (state == CALL_PENDING)
        pass_lead(client, NULL, 0); /* it may have been woken to lead */
    free(call->payload);
    free(call);
    client_unref(client);
}

/* The first of the rows in a reply to PRED; NULL if the slots named are not there. */
const float *sym_call_rows(sym_call *call) {
    const sym_plan *plan = &call->client->plan;
    const int64_t first = call->args[0], count = call->args[1];
    if (first < 0 || count < 1 || first >= plan->slot_count || count > plan->slot_count - first)
        return NULL;
    return (const float *)(const void *)(call->client->base + plan->slots_offset + (uint64_t)first * plan->slot_bytes);
}

uint64_t sym_client_slot_bytes(sym_client *client) { return client->plan.slot_bytes; }

/* Ends the connection: the daemon sees the socket close, waiters wake with an error, rows stay readable. */
void sym_client_close(sym_client *client) {
    if (disowned(client))
        return;
    declare_dead(client, ESHUTDOWN);
    atomic_store(&client->dead, ESHUTDOWN);
    /* A leader that parks in shared memory is woken through it; the word only has to change. */
    atomic_fetch_add(&client->region->complete_seq, 1);
    futex_op(&client->region->complete_seq, FUTEX_WAKE, INT_MAX, NULL);
    pthread_mutex_lock(&client->table_lock);
    if (client->socket_fd >= 0)
        shutdown(client->socket_fd, SHUT_RDWR);
    if (client->users == 0)
        close_descriptors(client);
    pthread_mutex_unlock(&client->table_lock);
}

/* In the child of a fork: lets go of the socket, or the daemon would not see the parent's end. */
void sym_client_disown(sym_client *client) {
    if (!disowned(client))
        return;
    close_descriptors(client);
}

void sym_client_drop(sym_client *client) {
    if (disowned(client))
        return; /* views of its rows may live on, and the counts are not to be relied on */
    sym_client_close(client);
    client_unref(client);
}
