/* Where the trio thread sleeps. After a step the interpreter's code is out of the caches, and some 300 us pass before Python
 * has found out which call has come. So whoever wakes up looks here first at what has rung: a program, or the run, which
 * has seen a call in a ring that is for the gate. If all that came is carried out (see calls.c), the thread sleeps on. */
#include "handles.h"

#include <errno.h>
#include <math.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { LOOKS_NS = 1000000 };

/* Whether nothing is left for Python of what a program asks for. What the core has for Python comes before any other call. */
static int is_done_for(sym_gate *gate, sym_connection *connection) {
    return !gate->pool->news && !connection->waits_for_slots &&
           gate->hot->drain(connection->server, connection->doorbell);
}

/* A program that Python has to look at is woken as if it had rung: its descriptor tells nothing more until it is waited for. */
static sym_woken as_if_rung(int epoll_fd, int32_t doorbell) {
    struct epoll_event nothing = {.events = EPOLLONESHOT, .data.fd = doorbell};
    (void)epoll_ctl(epoll_fd, EPOLL_CTL_MOD, doorbell, &nothing);
    return (sym_woken){doorbell, EPOLLIN};
}

/* The same of what the run tells, which may see calls as fast as they are carried out: Python gets what is left. */
static int is_done_for_run(sym_gate *gate, int epoll_fd, sym_woken *woken, int *num_woken) {
    const int64_t until_ns = sym_now_ns() + LOOKS_NS;
    sym_connection *connection;
    uint64_t count;
    if (read(gate->wake_fd, &count, sizeof count) < 0 && errno != EAGAIN)
        return 0;
    while (*num_woken < SYM_MAX_WOKEN / 2 && sym_now_ns() < until_ns && (connection = sym_loop_take_rung(gate->loop)))
        if (connection->doorbell && !is_done_for(gate, connection))
            woken[(*num_woken)++] = as_if_rung(epoll_fd, connection->doorbell);
    return !gate->is_rung && sym_loop_is_quiet(gate->loop);
}

static int look_at(sym_gate *gate, int epoll_fd, const struct epoll_event *event, sym_woken *woken, int num_woken) {
    const int32_t fd = event->data.fd;
    sym_connection *connection = fd < gate->num_doorbells ? gate->by_doorbell[fd] : NULL;
    int is_done = 0;
    if (event->events == EPOLLIN && fd == gate->wake_fd)
        is_done = is_done_for_run(gate, epoll_fd, woken, &num_woken);
    else if (event->events == EPOLLIN && connection)
        is_done = is_done_for(gate, connection);
    struct epoll_event again = {.events = EPOLLIN | EPOLLONESHOT, .data.fd = fd};
    if (!is_done || epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &again) != 0)
        woken[num_woken++] = (sym_woken){fd, event->events};
    return num_woken;
}

int sym_gate_wait(sym_gate *gate, int epoll_fd, double timeout_s, sym_woken woken[SYM_MAX_WOKEN]) {
    struct epoll_event events[SYM_MAX_WOKEN / 2];
    const int64_t until_ns = sym_now_ns() + (int64_t)(timeout_s * 1e9);
    int num_woken = 0;
    double left_s = timeout_s;
    do {
        const int num = epoll_wait(epoll_fd, events, SYM_MAX_WOKEN / 2, (int)ceil(left_s * 1e3));
        if (num <= 0)
            return num < 0 ? -errno : 0;
        for (int at = 0; at < num; at++)
            num_woken = look_at(gate, epoll_fd, events + at, woken, num_woken);
        left_s = (double)(until_ns - sym_now_ns()) * 1e-9;
    } while (num_woken == 0 && !gate->pool->news && left_s > 0);
    return num_woken;
}
