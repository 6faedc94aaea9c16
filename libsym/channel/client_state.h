/* The LIP's half of a channel: what its files share.
 *
 * Many threads and event loops of one process share one connection. A request is written under a mutex. Replies are
 * taken by whichever waiting thread holds the drain lock (the leader): it hands each reply to the call that it
 * answers, and when its own has come it leaves and wakes one of the others to lead. A thread of its own for this would
 * cost every reply one more switch; a lock around "wait" would make a short call wait for a long one. Only the leader
 * looks at shared memory and spins; followers park on a futex of their own.
 *
 * An event loop cannot park on a futex, for it waits for other things, too. It sleeps on one descriptor, an epoll
 * over the bell (which the daemon rings for whoever set `bell_wanted`), an eventfd of its own (written by whoever
 * delivers a reply to one of its calls) and the socket (which hangs up when the daemon dies). When it wakes it leads
 * for as long as draining takes, unless a thread is leading. Replies that come while nobody leads, and no thread
 * waits, ring the bell; what comes in the moment in which a leader leaves, the leader sees, and notifies the loops.
 *
 * A call may have many replies: they queue up in it, as many as the daemon sends, until somebody takes them. A reply is
 * an object (sym_answer) that owns what it brought: result slots, or a handle. It gives them back exactly once: when it
 * is dropped, unless somebody claimed them before; so does a reply that comes for a call nobody waits for any more.
 *
 * Every park ends after PARK_NS at the latest and returns to Python with -EINTR: so a signal that came between
 * two parks is seen, and the death of a daemon that could not say goodbye is noticed (poll on the socket).
 *
 * Lock order: submit_lock before table_lock. Nothing sleeps while it holds either.
 *
 * Where one side sleeps and the other must see it, both use the store-fence-load pattern: publish, fence, look
 * at the other's flag. Either the sleeper sees what was published, or the publisher sees the sleeper. So it is between
 * the two processes, between a leader that leaves and a follower that is about to park (`draining` and `parked`), and
 * between whoever delivers and a loop that is about to sleep (`ready` and `asleep`).
 */
#ifndef SYM_CLIENT_STATE_H
#define SYM_CLIENT_STATE_H

#include "client.h"
#include "region.h"
#include "ring.h"

#include <pthread.h>

#define MAX_CALLS 1024u    /* under way at once in one process: more wait, as for a full ring */
#define CALL_INDEX_BITS 10

_Static_assert(MAX_CALLS == 1u << CALL_INDEX_BITS, "an id is a generation and an index");

enum call_state { CALL_NEW, CALL_PENDING, CALL_OVER };

struct sym_call {
    struct sym_client *client;
    struct sym_event_loop *loop; /* whose event loop waits for it; NULL: a thread does */
    struct sym_call *next_ready;
    int is_ready;  /* in its loop's list */
    int is_cancelled;
    uint64_t tag;  /* what its loop knows it by */
    uint64_t id;
    uint16_t op, stream; /* 0: the thread's that submits it */
    uint32_t flags;
    uint64_t handle;
    int64_t request_args[4];
    _Atomic uint32_t state;
    _Atomic uint32_t num_answers; /* in the queue, which is under table_lock */
    sym_answer *answers, **answers_end;
    _Atomic uint32_t parked; /* a follower sleeps on `wake`, or is about to */
    _Atomic uint32_t wake;   /* futex, of this process alone: an answer, dead, or your turn to lead */
};

struct entry {
    uint64_t id; /* 0: unused */
    uint64_t generation;
    sym_call *call; /* NULL: abandoned, the last reply is still to come */
    uint16_t op;
};

struct later {
    uint16_t op;
    uint64_t handle;
    int64_t arg;
};

struct sym_client {
    struct sym_region *region;
    char *base;
    sym_plan plan;
    int socket_fd, doorbell_fd, bell_fd; /* -1 once closed */
    _Atomic int refs; /* the owner, every call, loop and answer: a Dist keeps its row mapped through its answer */
    _Atomic int dead; /* errno that says why; 0 while all is well */
    pid_t owner;      /* in a fork's child nothing may be touched: no lock can be relied on there */
    pthread_mutex_t submit_lock;
    uint64_t submit_tail;   /* under submit_lock */
    _Atomic int draining;   /* the drain lock */
    _Atomic uint64_t complete_head; /* written under the drain lock */
    _Atomic int num_parked, num_loops;
    _Atomic uint32_t table_seq, table_waiters; /* futex of this process: a full table has room again */
    pthread_mutex_t table_lock;
    /* under table_lock: */
    int users; /* threads inside: the descriptors stay open until the last has left */
    struct entry table[MAX_CALLS];
    uint32_t free_indices[MAX_CALLS], num_free;
    struct later *later; /* requests whose answer nobody waits for, to be sent with the next call if not before */
    uint32_t num_later, room_for_later;
    struct sym_event_loop *loops;
};

/* The calls of one event loop on one connection. */
struct sym_event_loop {
    sym_client *client;
    struct sym_event_loop *next;
    int epoll_fd, event_fd;
    _Atomic int asleep; /* whoever clears it writes to event_fd */
    /* under table_lock: */
    sym_call *ready, **ready_end; /* calls with answers that nobody has taken */
    uint64_t wanted_bytes; /* a call waits for so much room in the ring and an entry of the table; 0: none does */
};

static inline int disowned(const sym_client *client) { return getpid() != client->owner; }

static inline int gives_handle(uint16_t op) {
    return op == SYM_KV_CREATE || op == SYM_KV_OPEN || op == SYM_KV_FORK || op == SYM_KV_EXTRACT ||
           op == SYM_KV_MERGE || op == SYM_KV_CLAIM;
}

static inline int gives_rows(uint16_t op) { return op == SYM_PRED || op == SYM_PRED_BATCH; }

/* Calls that wait for something: a step, a worker, somebody else's lock or message. */
static inline int takes_long(uint16_t op) {
    return gives_rows(op) || op == SYM_KV_EXTRACT || op == SYM_KV_MERGE || op == SYM_KV_LOCK || op == SYM_GENERATE ||
           op == SYM_RECV || op == SYM_KV_SYNC || op == SYM_KV_CLAIM || op == SYM_KV_NAME || op == SYM_CHAT_TOKENS ||
           op == SYM_SCRUB || op == SYM_TRACE;
}

static inline uint64_t submit_room(sym_client *client) {
    return SYM_RING_BYTES -
           (client->submit_tail - atomic_load_explicit(&client->region->submit_head, memory_order_acquire));
}

static inline int replies_wait(sym_client *client) {
    return atomic_load_explicit(&client->region->complete_tail, memory_order_acquire) != client->complete_head;
}

static inline void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* 0: everything was given back already. */
static inline int client_ref(sym_client *client) {
    int refs = atomic_load(&client->refs);
    while (refs > 0 && !atomic_compare_exchange_weak(&client->refs, &refs, refs + 1))
        continue;
    return refs > 0;
}

static inline void ring_fd(int fd) {
    const uint64_t one = 1;
    /* EAGAIN: it is ringing already. Anything else: the socket will tell. */
    const ssize_t written = write(fd, &one, sizeof one);
    (void)written;
}

/* Wakes an event loop that sleeps. What it is woken for was published before. */
static inline void notify_loop(sym_event_loop *loop) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&loop->asleep, memory_order_relaxed) != 0 && atomic_exchange(&loop->asleep, 0) != 0)
        ring_fd(loop->event_fd);
}

/* Under table_lock. */
static inline void notify_loops(sym_client *client) {
    for (sym_event_loop *loop = client->loops; loop != NULL; loop = loop->next)
        notify_loop(loop);
}

/* Under table_lock: the futex of the thread that waits for a call, to be given to wake_thread once the lock is free; NULL:
 * it does not sleep. A thread that was woken under the lock would take the CPU and then wait for the lock. What it is
 * woken for was published before. */
static inline _Atomic uint32_t *thread_of(sym_call *call) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&call->parked, memory_order_relaxed) == 0)
        return NULL;
    atomic_fetch_add(&call->wake, 1);
    return &call->wake;
}

/* The call may be gone by now: its futex is an address here, and whoever sleeps there instead looks again. */
static inline void wake_thread(_Atomic uint32_t *futex) {
    if (futex != NULL)
        futex_op(futex, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL);
}

/* What such a reply brought is given back at once, not with the next call: a message goes to another receiver, a claim to
 * the next who wants to make the file. */
static inline int others_wait_for(uint16_t op) { return op == SYM_RECV || op == SYM_KV_CLAIM; }

/* Its thread need not wait: it will not lead. */
static inline int has_news(const sym_call *call) {
    return atomic_load(&call->num_answers) != 0 || atomic_load(&call->state) == CALL_OVER;
}

/* -- a connection: client.c -- */

void client_unref(sym_client *client);
int client_enter(sym_client *client);
void client_leave(sym_client *client);
void client_declare_dead(sym_client *client, int reason);
int client_socket_hung_up(sym_client *client);

/* -- requests into the ring: client_requests.c -- */

void client_put_off(sym_client *client, uint16_t op, uint64_t handle, int64_t arg);
void client_send_later(sym_client *client);
int client_try_submit(sym_client *client, sym_call *call, sym_event_loop *loop, const char *payload,
                      uint32_t payload_bytes);

/* -- replies out of the ring, who leads and how the others wait: client_replies.c -- */

int client_try_lead(sym_client *client);
void client_leave_lead(sym_client *client);
void client_drain(sym_client *client);
void client_drain_in_passing(sym_client *client);
void client_check_alive(sym_client *client, int leading);
int client_wait_reply(sym_client *client, sym_call *call);
int client_wait_room(sym_client *client, uint64_t needed);
int client_wait_entry(sym_client *client);

/* -- what a reply owns: client_answers.c -- */

sym_answer *answer_new(sym_client *client, const struct sym_reply *reply, uint32_t payload_bytes);
void answer_free(sym_answer *answer);
void answer_is_of(sym_answer *answer, uint16_t op);
int answer_owns_something(const sym_answer *answer);

/* -- calls of event loops: client_loops.c -- */

void call_forget_ready(sym_call *call);

#endif
