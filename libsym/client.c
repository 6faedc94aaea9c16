/* The LIP's half of a channel.
 *
 * Many threads of one process share one connection. A request is written under a mutex. Replies
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
#include "ring.h"

#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define PARK_NS 100000000L /* 100 ms: the longest a Ctrl-C or a dead daemon goes unnoticed */
/* A short call's reply from another CPU is here after some 10 us; being woken takes 60 (two vCPUs of one machine). */
#define SPIN_PAUSES 1000
#define MAX_CALLS 1024u    /* under way at once in one process: more wait, as for a full ring */
#define CALL_INDEX_BITS 10

_Static_assert(MAX_CALLS == 1u << CALL_INDEX_BITS, "an id is a generation and an index");

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

static int gives_handle(uint16_t op) {
    return op == SYM_KV_CREATE || op == SYM_KV_OPEN || op == SYM_KV_FORK || op == SYM_KV_EXTRACT || op == SYM_KV_MERGE;
}

/* Calls that wait for something: a step, a worker, somebody else's lock. */
static int takes_long(uint16_t op) {
    return op == SYM_PRED || op == SYM_KV_EXTRACT || op == SYM_KV_MERGE || op == SYM_KV_LOCK;
}

static void close_descriptors(sym_client *client) {
    if (client->socket_fd >= 0)
        close(client->socket_fd);
    if (client->doorbell_fd >= 0)
        close(client->doorbell_fd);
    client->socket_fd = client->doorbell_fd = -1;
}

/* 0: everything was given back already. */
static int client_ref(sym_client *client) {
    int refs = atomic_load(&client->refs);
    while (refs > 0 && !atomic_compare_exchange_weak(&client->refs, &refs, refs + 1))
        continue;
    return refs > 0;
}

/* Gives everything back but the struct, which stays for ever (40 KB for each connection that a process ever makes):
 * Python finalizes the objects of a garbage cycle in any order, so a file's finalizer may still come and ask. */
static void client_unref(sym_client *client) {
    if (atomic_fetch_sub(&client->refs, 1) != 1)
        return;
    munmap(client->base, client->plan.region_bytes);
    close_descriptors(client);
    free(client->closes);
    client->closes = NULL;
    client->base = NULL;
    client->region = NULL;
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
    if (disowned(client) || atomic_load(&client->dead) != 0)
        return; /* the daemon closes everything itself when it sees our end */
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

/* Spinning pays for a lone short call to a daemon on another CPU. A step takes milliseconds, and may need this very
 * CPU; several callers keep each other busy. */
static int pauses_to_spin(sym_client *client, const sym_call *call) {
    if (takes_long(call->op))
        return 0;
    if (atomic_load_explicit(&client->region->daemon_cpu, memory_order_relaxed) == (uint32_t)sched_getcpu())
        return 0;
    pthread_mutex_lock(&client->table_lock);
    const int alone = client->num_free == MAX_CALLS - 1;
    pthread_mutex_unlock(&client->table_lock);
    return alone ? SPIN_PAUSES : 0;
}

/* Under the drain lock: 0 when `call` is done or the connection dead, -EINTR to let Python look around. */
static int lead(sym_client *client, sym_call *call) {
    struct sym_region *region = client->region;
    int pauses = pauses_to_spin(client, call);
    for (;;) {
        drain(client);
        if (atomic_load(&call->state) == CALL_DONE || atomic_load(&client->dead) != 0)
            return 0;
        for (; pauses > 0 && !replies_wait(client); pauses--)
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

/* -- what Python calls -- */

/* NULL: the connection was closed, or there is no memory. */
sym_call *sym_call_new(sym_client *client, uint16_t op, uint32_t flags, uint64_t handle, int64_t a0, int64_t a1,
                       int64_t a2, int64_t a3) {
    sym_call *call = calloc(1, sizeof *call);
    if (call == NULL || !client_ref(client)) {
        free(call);
        return NULL;
    }
    const int64_t args[4] = {a0, a1, a2, a3};
    memcpy(call->request_args, args, sizeof args);
    call->client = client;
    call->op = op;
    call->flags = flags;
    call->handle = handle;
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
    if (disowned(client) || !client_ref(client))
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
    client_unref(client);
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
