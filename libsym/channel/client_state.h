/* The LIP's half of a channel: declarations that its files share, and the concurrency contract.
 *
 * Many threads and event loops of one process share one connection. A thread writes a request under a mutex. The leader
 * is the waiting thread that holds the drain lock. The leader takes replies out of the ring, and hands each reply to
 * its call. When the leader's own reply has come, the leader wakes another waiting thread to lead. A dedicated thread
 * would cost each reply one more context switch. A lock around the whole wait would make a short call wait for a long
 * one. Only the leader looks at shared memory and spins. Followers park on a futex of their call.
 *
 * An event loop waits for other descriptors, too, so it cannot park on a futex. The loop sleeps on an epoll descriptor
 * over three others. First, the bell: the daemon rings the bell if `bell_wanted` is set. Second, the loop's eventfd: a
 * thread that delivers a reply to a call of the loop writes to it. Third, the socket, which hangs up when the daemon
 * dies. When the loop wakes, it leads while it drains the ring, unless a thread is leading. A reply that comes while no
 * thread leads or waits rings the bell. A leader that stops leading looks once more at the ring. If a reply came in
 * that moment, that thread notifies the loops.
 *
 * A call may have many replies. Replies queue up in the call until the program takes them. A reply is an object
 * (sym_answer) that owns its result slots, handles or message. A dropped object gives these back exactly once, unless
 * they were claimed before. A reply to a call that was dropped is dropped immediately.
 *
 * Every park ends after at most PARK_NS and returns to Python with -EINTR. So Python handles a signal that came between
 * two parks. After a park that timed out, the client polls the socket, and so notices that the daemon was killed.
 *
 * Lock order: submit_lock before table_lock. No thread sleeps while it holds one of the two.
 *
 * Where one side sleeps and the other must wake it, both publish, fence, and then look at the other's flag. So either
 * the sleeper sees the news, or the publisher sees the sleeper. The same holds between the two processes, between a
 * leader that leaves and a follower that is about to park (`draining` and `parked`), and between a thread that delivers
 * and a loop that is about to sleep (`ready` and `asleep`).
 */
#ifndef SYM_CLIENT_STATE_H
#define SYM_CLIENT_STATE_H

#include "client.h"
#include "region.h"
#include "ring.h"

#include <pthread.h>

#define MAX_CALLS 1024u    /* largest number of calls in flight; further calls wait, as for a full ring */
#define CALL_INDEX_BITS 10

_Static_assert(MAX_CALLS == 1u << CALL_INDEX_BITS, "an id is a generation and an index");

enum call_state { CALL_NEW, CALL_PENDING, CALL_OVER };

struct sym_call {
    struct sym_client *client;
    struct sym_event_loop *loop; /* the event loop that waits for the call; NULL: a thread waits */
    struct sym_call *next_ready;
    int is_ready;  /* whether the call is in its loop's list of ready calls */
    int is_cancelled;
    uint64_t tag;  /* the number by which the loop knows the call */
    uint64_t id;
    uint16_t op, stream; /* stream 0: the stream of the submitting thread */
    uint32_t flags;
    uint64_t handle;
    int64_t request_args[4];
    _Atomic uint32_t state;
    _Atomic uint32_t num_answers; /* length of the queue, which is under table_lock */
    sym_answer *answers, **answers_end;
    _Atomic uint32_t parked; /* a follower sleeps on `wake`, or is about to sleep */
    _Atomic uint32_t wake;   /* private futex: a reply has come, the connection is dead, or the thread shall lead */
};

struct entry {
    uint64_t id; /* 0: unused */
    uint64_t generation;
    sym_call *call; /* NULL: the call was dropped, and its last reply is still to come */
    uint16_t op, num_handles;
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
    _Atomic int refs; /* references by the owner, calls, loops and answers: the answer of a Dist keeps the row mapped */
    _Atomic int dead; /* errno of the connection's end; 0: the connection is alive */
    pid_t owner; /* pid of the maker; a fork's child must not use the client: its locks may be held for ever */
    pthread_mutex_t submit_lock;
    uint64_t submit_tail; /* under submit_lock */
    _Atomic int draining; /* the drain lock: 1 while a thread holds it */
    _Atomic uint64_t complete_head; /* written under the drain lock */
    _Atomic int num_parked, num_loops;
    _Atomic uint32_t table_seq, table_waiters; /* private futex: a full table has a free entry again */
    pthread_mutex_t table_lock;
    /* under table_lock: */
    int users; /* threads that use the descriptors, and so keep them open */
    struct entry table[MAX_CALLS];
    uint32_t free_indices[MAX_CALLS], num_free;
    struct later *later; /* requests without a reply, to be sent with the next call at the latest */
    uint32_t num_later, room_for_later;
    struct sym_event_loop *loops;
};

/* The calls of one event loop on one connection. */
struct sym_event_loop {
    sym_client *client;
    struct sym_event_loop *next;
    int epoll_fd, event_fd;
    _Atomic int asleep; /* the thread that clears this flag writes to event_fd */
    /* under table_lock: */
    sym_call *ready, **ready_end; /* calls with answers that were not taken yet */
    uint64_t wanted_bytes; /* a request waits for this much space in the ring, and for an entry; 0: no request waits */
};

static inline int disowned(const sym_client *client) { return getpid() != client->owner; }

static inline int gives_handle(uint16_t op) {
    return op == SYM_KV_CREATE || op == SYM_KV_OPEN || op == SYM_KV_FORK || op == SYM_KV_EXTRACT ||
           op == SYM_KV_MERGE || op == SYM_KV_CLAIM || op == SYM_KV_FETCH;
}

static inline int gives_rows(uint16_t op) { return op == SYM_PRED || op == SYM_PRED_BATCH; }

/* Whether a call of this operation waits for a step, for a worker thread, or for the lock or message of another
 * program. */
static inline int takes_long(uint16_t op) {
    return gives_rows(op) || op == SYM_KV_EXTRACT || op == SYM_KV_MERGE || op == SYM_KV_LOCK || op == SYM_GENERATE ||
           op == SYM_RECV || op == SYM_KV_SYNC || op == SYM_KV_CLAIM || op == SYM_KV_NAME || op == SYM_CHAT_TOKENS ||
           op == SYM_SCRUB || op == SYM_TRACE || op == SYM_KV_FETCH || op == SYM_FLEET_PLACE ||
           op == SYM_FLEET_MACHINES || op == SYM_KV_CHANGES;
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

/* Takes a reference. 0: the last reference was dropped already. */
static inline int client_ref(sym_client *client) {
    int refs = atomic_load(&client->refs);
    while (refs > 0 && !atomic_compare_exchange_weak(&client->refs, &refs, refs + 1))
        continue;
    return refs > 0;
}

static inline void ring_fd(int fd) {
    const uint64_t one = 1;
    /* EAGAIN: the eventfd rings already. After any other error, the socket shows that the daemon has ended. */
    const ssize_t written = write(fd, &one, sizeof one);
    (void)written;
}

/* Wakes an event loop if it sleeps. The caller publishes the news first. */
static inline void notify_loop(sym_event_loop *loop) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&loop->asleep, memory_order_relaxed) != 0 && atomic_exchange(&loop->asleep, 0) != 0)
        ring_fd(loop->event_fd);
}

/* The caller holds table_lock. */
static inline void notify_loops(sym_client *client) {
    for (sym_event_loop *loop = client->loops; loop != NULL; loop = loop->next)
        notify_loop(loop);
}

/* Under table_lock. Returns the futex of the thread that waits for a call, or NULL if the thread does not sleep. The
 * caller publishes the news first, and calls wake_thread after it has released the lock: a thread that is woken under
 * the lock would take the CPU and then wait for the lock. */
static inline _Atomic uint32_t *thread_of(sym_call *call) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&call->parked, memory_order_relaxed) == 0)
        return NULL;
    atomic_fetch_add(&call->wake, 1);
    return &call->wake;
}

/* Wakes a thread. The call may be freed by now, and another futex may have this address. The sleeper on that futex
 * checks its own condition again. */
static inline void wake_thread(_Atomic uint32_t *futex) {
    if (futex != NULL)
        futex_op(futex, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL);
}

/* Whether the daemon is told immediately that a reply or a call was dropped, instead of with the next call. Other
 * programs may wait for the dropped message or claim. */
static inline int others_wait_for(uint16_t op) { return op == SYM_RECV || op == SYM_KV_CLAIM; }

/* Whether the call's thread can stop waiting. Such a thread is not woken to lead. */
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

/* -- replies out of the ring, the leader and the followers: client_replies.c -- */

int client_try_lead(sym_client *client);
void client_leave_lead(sym_client *client);
void client_drain(sym_client *client);
void client_drain_in_passing(sym_client *client);
void client_check_alive(sym_client *client, int leading);
int client_wait_reply(sym_client *client, sym_call *call);
int client_wait_room(sym_client *client, uint64_t needed);
int client_wait_entry(sym_client *client);

/* -- ownership of slots, handles and messages: client_answers.c -- */

sym_answer *answer_new(sym_client *client, const struct sym_reply *reply, uint32_t payload_bytes);
void answer_free(sym_answer *answer);
void answer_is_of(sym_answer *answer, uint16_t op, uint16_t num_handles);
int answer_owns_something(const sym_answer *answer);

/* -- calls of event loops: client_loops.c -- */

void call_forget_ready(sym_call *call);

#endif
