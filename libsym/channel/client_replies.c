/* Replies: the leader takes them out of the ring and hands them to their calls, while the followers wait. */
#include "client_state.h"

#include <limits.h>
#include <sched.h>

#define PARK_NS 100000000L /* 100 ms: the longest time until Ctrl-C or a dead daemon is noticed */
/* The reply to a short call comes from another CPU in some 10 us. A wake-up takes 60 us (two vCPUs of one machine). */
#define SPIN_PAUSES 1000

/* -- out of the ring -- */

/* Under table_lock. Queues the reply in its call, and returns the thread to wake. */
static _Atomic uint32_t *hand_over(sym_call *call, sym_answer *answer) {
    *call->answers_end = answer;
    call->answers_end = &answer->next;
    atomic_fetch_add(&call->num_answers, 1);
    if ((answer->flags & SYM_MORE) == 0)
        atomic_store(&call->state, CALL_OVER);
    sym_event_loop *loop = call->loop;
    if (loop == NULL)
        return thread_of(call);
    if (!call->is_ready) {
        call->is_ready = 1;
        call->next_ready = NULL;
        *loop->ready_end = call;
        loop->ready_end = &call->next_ready;
    }
    notify_loop(loop);
    return NULL;
}

/* Under table_lock. Frees an entry of the table, and wakes the loops and threads that wait for a free entry. */
static void free_entry(sym_client *client, uint32_t index) {
    client->table[index].id = 0;
    client->table[index].call = NULL;
    client->free_indices[client->num_free++] = index;
    if (client->num_free > 1)
        return;
    for (sym_event_loop *loop = client->loops; loop != NULL; loop = loop->next)
        if (loop->wanted_bytes != 0)
            notify_loop(loop);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&client->table_waiters, memory_order_relaxed) != 0) {
        atomic_fetch_add(&client->table_seq, 1);
        futex_op(&client->table_seq, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL);
    }
}

/* Hands a reply to its call. The reply is dropped if the id is not in the table, or if the call was dropped. */
static void deliver(sym_client *client, uint64_t id, sym_answer *answer) {
    const uint32_t index = id & (MAX_CALLS - 1);
    _Atomic uint32_t *thread = NULL;
    pthread_mutex_lock(&client->table_lock);
    struct entry *entry = &client->table[index];
    if (id != 0 && entry->id == id) {
        sym_call *call = entry->call;
        const int more = (answer->flags & SYM_MORE) != 0;
        answer_is_of(answer, entry->op, entry->num_handles);
        if (call != NULL) {
            thread = hand_over(call, answer);
            answer = NULL;
        }
        if (!more)
            free_entry(client, index);
    }
    pthread_mutex_unlock(&client->table_lock);
    wake_thread(thread);
    if (answer != NULL)
        answer_free(answer);
}

/* Under the drain lock. Takes one reply out of the ring. Returns 0, or an errno that ends the connection. */
static int take_reply(sym_client *client, uint64_t available) {
    const char *ring = client->base + client->plan.complete_offset;
    struct sym_reply reply;
    ring_read(ring, SYM_RING_BYTES, client->complete_head, &reply, sizeof reply);
    const uint64_t frame = reply.frame_bytes;
    if (frame < sizeof reply || frame > SYM_MAX_FRAME_BYTES || padded(frame) > available)
        return EPROTO;
    const uint32_t payload_bytes = (uint32_t)(frame - sizeof reply);
    sym_answer *answer = answer_new(client, &reply, payload_bytes);
    if (answer == NULL)
        return ENOMEM;
    if (payload_bytes > 0)
        ring_read(ring, SYM_RING_BYTES, client->complete_head + sizeof reply, answer->payload, payload_bytes);
    client->complete_head += padded(frame);
    atomic_store_explicit(&client->region->complete_head, client->complete_head, memory_order_release);
    deliver(client, reply.id, answer);
    return 0;
}

/* Under the drain lock. Takes all replies out of the ring, and hands them to their calls. */
void client_drain(sym_client *client) {
    if (!replies_wait(client))
        return;
    while (replies_wait(client)) {
        const uint64_t tail = atomic_load_explicit(&client->region->complete_tail, memory_order_acquire);
        const uint64_t available = tail - client->complete_head;
        const int reason = available > SYM_RING_BYTES ? EPROTO : take_reply(client, available);
        if (reason != 0) {
            client_declare_dead(client, reason);
            return;
        }
    }
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&client->region->backlog, memory_order_relaxed) != 0)
        ring_fd(client->doorbell_fd);
}

/* -- the leader -- */

int client_try_lead(sym_client *client) {
    int free_now = 0;
    return atomic_load(&client->draining) == 0 && atomic_compare_exchange_strong(&client->draining, &free_now, 1);
}

/* If no thread leads, wakes a parked follower to lead, or notifies the loops if replies wait. A follower that stops
 * waiting calls this function, too: if it was woken to lead, another thread has to lead in its place. */
static void pass_lead(sym_client *client) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&client->draining) != 0)
        return;
    if (atomic_load(&client->num_parked) == 0 && (atomic_load(&client->num_loops) == 0 || !replies_wait(client)))
        return;
    pthread_mutex_lock(&client->table_lock);
    _Atomic uint32_t *thread = NULL;
    for (uint32_t i = 0; thread == NULL && i < MAX_CALLS && atomic_load(&client->num_parked) != 0; i++) {
        sym_call *call = client->table[i].id != 0 ? client->table[i].call : NULL;
        if (call != NULL && !has_news(call))
            thread = thread_of(call);
    }
    if (thread == NULL && replies_wait(client))
        notify_loops(client);
    pthread_mutex_unlock(&client->table_lock);
    wake_thread(thread);
}

void client_leave_lead(sym_client *client) {
    atomic_store(&client->draining, 0);
    pass_lead(client);
}

/* Declares the connection dead if the daemon has ended. A leader, which holds the drain lock, first takes the last
 * replies of the daemon. */
void client_check_alive(sym_client *client, int leading) {
    if (!atomic_load(&client->region->gone) && !client_socket_hung_up(client))
        return;
    if (leading)
        client_drain(client);
    client_declare_dead(client, ENOTCONN);
}

/* -- waiting -- */

/* Sleeps on a futex. 0: woken, or the word had changed. -ETIMEDOUT: PARK_NS has passed. -EINTR: a signal has come. */
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

/* Spinning pays only for a single short call to a daemon on another CPU. A step takes milliseconds, and may need this
 * CPU. With several callers, the CPU has other work. */
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

/* Leads under the drain lock. 0: `call` has a reply, or the connection is dead. -EINTR: let Python handle its
 * signals. */
static int lead(sym_client *client, sym_call *call) {
    struct sym_region *region = client->region;
    int pauses = pauses_to_spin(client, call);
    for (;;) {
        client_drain(client);
        if (has_news(call) || atomic_load(&client->dead) != 0)
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
            client_check_alive(client, 1);
        else if (!replies_wait(client) && atomic_load(&client->dead) == 0)
            rc = futex_park(&region->complete_seq, seen, 0);
        atomic_store(&region->complete_waiters, 0);
        if (rc == -ETIMEDOUT)
            client_check_alive(client, 1);
        if (rc != 0) {
            client_drain(client);
            return has_news(call) ? 0 : -EINTR;
        }
    }
}

/* Parks a follower. 0: woken, by a reply, by the end of the connection, or because no thread leads. -EINTR: a signal
 * has come, or PARK_NS has passed. */
static int follow(sym_client *client, sym_call *call) {
    const uint32_t seen = atomic_load(&call->wake);
    int rc = 0;
    atomic_store(&call->parked, 1);
    atomic_fetch_add(&client->num_parked, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (!has_news(call) && atomic_load(&client->dead) == 0 && atomic_load(&client->draining) != 0)
        rc = futex_park(&call->wake, seen, FUTEX_PRIVATE_FLAG);
    atomic_fetch_sub(&client->num_parked, 1);
    atomic_store(&call->parked, 0);
    if (rc == -ETIMEDOUT) {
        client_check_alive(client, 0);
        rc = -EINTR;
    }
    if (rc != 0)
        pass_lead(client);
    return rc;
}

/* Waits until `call` has a reply that the caller has not taken, or until the call is over. */
int client_wait_reply(sym_client *client, sym_call *call) {
    for (int rc = 0; rc == 0;) {
        if (has_news(call))
            break;
        if (atomic_load(&client->dead) != 0)
            return -ENOTCONN;
        if (client_try_lead(client)) {
            rc = lead(client, call);
            client_leave_lead(client);
        } else {
            rc = follow(client, call);
        }
        if (rc != 0 && !has_news(call))
            return rc;
    }
    return 0;
}

/* Drains the ring unless another thread does. */
void client_drain_in_passing(sym_client *client) {
    if (!client_try_lead(client))
        return;
    client_drain(client);
    client_leave_lead(client);
}

/* Waits for space for a request. First drains the replies, so that the daemon does not wait for this process. */
int client_wait_room(sym_client *client, uint64_t needed) {
    struct sym_region *region = client->region;
    client_drain_in_passing(client);
    if (atomic_load(&region->gone)) {
        client_check_alive(client, 0);
        return -EINTR;
    }
    const uint32_t seen = atomic_load(&region->space_seq);
    atomic_fetch_add(&region->space_waiters, 1);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&client->submit_lock);
    const int room = submit_room(client) >= needed;
    pthread_mutex_unlock(&client->submit_lock);
    const int rc = room ? 0 : futex_park(&region->space_seq, seen, 0);
    atomic_fetch_sub(&region->space_waiters, 1);
    if (rc == -ETIMEDOUT)
        client_check_alive(client, 0);
    return rc == 0 ? 0 : -EINTR;
}

/* Waits for a free entry of the table: MAX_CALLS calls are in flight, and at least one call has to end. */
int client_wait_entry(sym_client *client) {
    client_drain_in_passing(client);
    const uint32_t seen = atomic_load(&client->table_seq);
    atomic_fetch_add(&client->table_waiters, 1);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&client->table_lock);
    const int room = client->num_free > 0;
    pthread_mutex_unlock(&client->table_lock);
    const int rc = room ? 0 : futex_park(&client->table_seq, seen, FUTEX_PRIVATE_FLAG);
    atomic_fetch_sub(&client->table_waiters, 1);
    if (rc == -ETIMEDOUT)
        client_check_alive(client, 0);
    return rc == 0 ? 0 : -EINTR;
}
