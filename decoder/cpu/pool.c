/* Threads that meet, and wait for each other: pool.h says how. */

#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000 /* pauses before a waiter sleeps: tens of microseconds */

struct pool_member {
    struct pool *pool;
    int thread;
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void event_wait(struct event *e, unsigned old) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&e->value, memory_order_acquire) != old)
            return;
        relax();
    }
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->value) == old)
        syscall(SYS_futex, &e->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&e->sleepers, 1);
}

static void event_signal(struct event *e) {
    atomic_fetch_add(&e->value, 1);
    if (atomic_load(&e->sleepers))
        syscall(SYS_futex, &e->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void pool_meet(struct pool *p, int active) {
    unsigned old = atomic_load(&p->barrier.value);
    if (atomic_fetch_add(&p->arrived, 1) + 1 < (unsigned)active) {
        event_wait(&p->barrier, old);
        return;
    }
    atomic_store(&p->arrived, 0);
    atomic_store(&p->next_unit, 0);
    if (active > 1)
        event_signal(&p->barrier);
}

static void *pool_worker(void *argument) {
    struct pool_member me = *(struct pool_member *)argument;
    struct pool *p = me.pool;
    free(argument);
    for (unsigned seen = 0;; seen++) {
        event_wait(&p->job, seen);
        if (p->stop)
            return NULL;
        p->run(p->context, me.thread);
    }
}

void pool_run(struct pool *p, int threads, void (*run)(void *, int), void *context) {
    p->run = run;
    p->context = context;
    p->active = threads;
    if (threads > 1)
        event_signal(&p->job);
    run(context, 0);
}

void pool_stop(struct pool *p, int started) {
    p->stop = 1;
    event_signal(&p->job);
    for (int i = 0; i < started; i++)
        pthread_join(p->ids[i], NULL);
    free(p->ids);
}

int pool_start(struct pool *p, int threads) {
    p->threads = threads;
    p->ids = calloc((size_t)threads, sizeof *p->ids);
    if (!p->ids)
        return ENOMEM;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = 0;
    for (int i = 1; i < threads && !error; i++) {
        struct pool_member *member = malloc(sizeof *member);
        if (!member) {
            error = ENOMEM;
        } else {
            *member = (struct pool_member){p, i};
            error = pthread_create(&p->ids[i - 1], NULL, pool_worker, member);
            if (error)
                free(member);
        }
        if (error)
            pool_stop(p, i - 1);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}
