/* Event loops: calls whose replies an event loop waits for, together with other descriptors. No function here waits. */
#include "client_state.h"

#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

static int watch(int epoll_fd, int fd, uint32_t events) {
    struct epoll_event event = {.events = events, .data = {.fd = fd}};
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

/* Makes a loop. Returns NULL with errno on failure. ENOTCONN: the connection was closed. */
sym_event_loop *sym_event_loop_new(sym_client *client) {
    errno = ENOTCONN;
    if (disowned(client) || !client_ref(client))
        return NULL;
    sym_event_loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL) {
        client_unref(client);
        return NULL;
    }
    loop->client = client;
    loop->ready_end = &loop->ready;
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    loop->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_lock(&client->table_lock);
    const int rc = loop->epoll_fd < 0 || loop->event_fd < 0 || watch(loop->epoll_fd, loop->event_fd, EPOLLIN) != 0 ||
                   watch(loop->epoll_fd, client->bell_fd, EPOLLIN) != 0 ||
                   watch(loop->epoll_fd, client->socket_fd, EPOLLRDHUP) != 0;
    const int reason = client->socket_fd < 0 ? ENOTCONN : errno;
    if (rc == 0) {
        loop->next = client->loops;
        client->loops = loop;
        atomic_fetch_add(&client->num_loops, 1);
    }
    pthread_mutex_unlock(&client->table_lock);
    if (rc != 0) {
        close_fd(&loop->epoll_fd);
        close_fd(&loop->event_fd);
        free(loop);
        client_unref(client);
        errno = reason;
        return NULL;
    }
    return loop;
}

/* Returns the loop's descriptor, which is readable when replies may have come or space may have been freed. */
int sym_event_loop_fd(sym_event_loop *loop) { return loop->epoll_fd; }

/* The caller holds table_lock. */
static void stop_wanting(sym_event_loop *loop) {
    if (loop->wanted_bytes != 0)
        atomic_fetch_sub(&loop->client->region->space_waiters, 1);
    loop->wanted_bytes = 0;
}

/* Frees the loop. The caller drops the loop's calls one by one, before or after. In a fork's child, only the
 * descriptors are closed. */
void sym_event_loop_drop(sym_event_loop *loop) {
    sym_client *client = loop->client;
    close_fd(&loop->epoll_fd);
    close_fd(&loop->event_fd);
    if (disowned(client))
        return;
    pthread_mutex_lock(&client->table_lock);
    for (sym_event_loop **each = &client->loops; *each != NULL; each = &(*each)->next)
        if (*each == loop) {
            *each = loop->next;
            break;
        }
    atomic_fetch_sub(&client->num_loops, 1);
    stop_wanting(loop);
    for (uint32_t i = 0; i < MAX_CALLS; i++)
        if (client->table[i].id != 0 && client->table[i].call != NULL && client->table[i].call->loop == loop)
            client->table[i].call->loop = NULL;
    for (sym_call *call = loop->ready; call != NULL; call = call->next_ready) {
        call->is_ready = 0;
        call->loop = NULL;
    }
    pthread_mutex_unlock(&client->table_lock);
    free(loop);
    client_unref(client);
}

/* The caller holds table_lock. */
void call_forget_ready(sym_call *call) {
    if (!call->is_ready)
        return;
    sym_event_loop *loop = call->loop;
    sym_call **each = &loop->ready;
    while (*each != call)
        each = &(*each)->next_ready;
    *each = call->next_ready;
    if (*each == NULL)
        loop->ready_end = each;
    call->is_ready = 0;
}

/* Sends the request. 0: sent. -EAGAIN: the ring has no space now, and the loop wakes when the ring may have space. Any
 * other error is final. */
int sym_event_loop_submit(sym_event_loop *loop, sym_call *call, uint64_t tag, uint16_t stream, const char *payload,
                          uint32_t payload_bytes) {
    sym_client *client = loop->client;
    if (disowned(client))
        return -EBADF;
    if (payload_bytes > SYM_MAX_FRAME_BYTES - sizeof(struct sym_request))
        return -EMSGSIZE;
    if (atomic_load(&client->dead) != 0 || atomic_load(&client->region->gone) != 0)
        return -ENOTCONN;
    call->tag = tag;
    call->stream = stream;
    const int rc = client_try_submit(client, call, loop, payload, payload_bytes);
    pthread_mutex_lock(&client->table_lock);
    stop_wanting(loop);
    if (rc != 0) {
        loop->wanted_bytes = padded(sizeof(struct sym_request) + (uint64_t)payload_bytes);
        atomic_fetch_add(&client->region->space_waiters, 1);
    }
    pthread_mutex_unlock(&client->table_lock);
    return rc == 0 ? 0 : -EAGAIN;
}

/* Notes that no request waits for space any more, because its task was cancelled. */
void sym_event_loop_want_nothing(sym_event_loop *loop) {
    if (disowned(loop->client))
        return;
    pthread_mutex_lock(&loop->client->table_lock);
    stop_wanting(loop);
    pthread_mutex_unlock(&loop->client->table_lock);
}

/* Takes the tags of up to `most` calls that have replies. -ENOTCONN: no call has replies, and the connection has
 * ended. */
int sym_event_loop_take(sym_event_loop *loop, uint64_t *tags, int most) {
    sym_client *client = loop->client;
    if (disowned(client))
        return -EBADF;
    if (!client_enter(client))
        return -ENOTCONN;
    client_drain_in_passing(client);
    if (atomic_load(&client->region->gone) != 0 || (atomic_load(&client->dead) == 0 && client_socket_hung_up(client)))
        if (client_try_lead(client)) {
            client_check_alive(client, 1);
            client_leave_lead(client);
        }
    int taken = 0;
    pthread_mutex_lock(&client->table_lock);
    for (; taken < most && loop->ready != NULL; taken++) {
        sym_call *call = loop->ready;
        tags[taken] = call->tag;
        loop->ready = call->next_ready;
        call->is_ready = 0;
    }
    if (loop->ready == NULL)
        loop->ready_end = &loop->ready;
    pthread_mutex_unlock(&client->table_lock);
    client_leave(client);
    return taken == 0 && atomic_load(&client->dead) != 0 ? -ENOTCONN : taken;
}

static void empty(int fd) {
    char rung[64];
    const ssize_t got = read(fd, rung, sizeof rung);
    (void)got;
}

/* Prepares the loop to sleep on its descriptor. 1: sleep. 0: do not sleep, because there are replies to take, or there
 * is space for a request. */
int sym_event_loop_arm(sym_event_loop *loop) {
    sym_client *client = loop->client;
    if (disowned(client) || !client_enter(client))
        return 0;
    empty(loop->event_fd);
    empty(client->bell_fd);
    atomic_store(&loop->asleep, 1);
    atomic_store(&client->region->bell_wanted, 1);
    atomic_thread_fence(memory_order_seq_cst);
    /* If a thread leads, that thread takes the waiting replies, because it looks at the ring again before it stops
     * leading. */
    int sleep = !(replies_wait(client) && atomic_load(&client->draining) == 0) && atomic_load(&client->dead) == 0 &&
                atomic_load(&client->region->gone) == 0;
    pthread_mutex_lock(&client->submit_lock);
    pthread_mutex_lock(&client->table_lock);
    if (loop->ready != NULL)
        sleep = 0;
    if (loop->wanted_bytes != 0 && client->num_free > 0 && submit_room(client) >= loop->wanted_bytes)
        sleep = 0;
    pthread_mutex_unlock(&client->table_lock);
    pthread_mutex_unlock(&client->submit_lock);
    if (!sleep)
        atomic_store(&loop->asleep, 0);
    client_leave(client);
    return sleep;
}
