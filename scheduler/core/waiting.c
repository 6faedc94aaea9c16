/* The sleep of the trio thread. After a step, the interpreter's code is out of the caches, and Python needs some 300 us
 * to find out which call has arrived. So the thread first checks in C what has rung: the doorbell of a program, or the
 * eventfd of the run. The run writes to its eventfd when it has seen a request for the gate in a program's ring. If
 * calls.c can carry out all calls that have arrived, the thread sleeps on. */
#include "handles.h"

#include <errno.h>
#include <math.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { LOOKS_NS = 1000000 }; /* longest time in which calls are carried out here for one ring of `wake_fd` */

/* Carry out the calls of a program. Return whether nothing is left for Python. While the core has news for Python, or
 * calls wait for result slots, nothing is carried out here: Python has to act first. */
static int is_done_for(sym_gate *gate, sym_connection *connection) {
    return !gate->pool->news && !connection->waits_for_slots &&
           gate->hot->drain(connection->server, connection->doorbell);
}

/* Report a program to Python as if its doorbell had rung. The descriptor is disarmed until Python waits for it
 * again. */
static sym_woken as_if_rung(int epoll_fd, int32_t doorbell) {
    struct epoll_event nothing = {.events = EPOLLONESHOT, .data.fd = doorbell};
    (void)epoll_ctl(epoll_fd, EPOLL_CTL_MOD, doorbell, &nothing);
    return (sym_woken){doorbell, EPOLLIN};
}

/* Carry out calls of the programs that the run reports. Return whether nothing is left for Python. The run may report
 * calls as fast as they are carried out: after LOOKS_NS Python gets the rest. */
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
