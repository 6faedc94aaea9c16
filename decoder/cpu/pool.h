/* The threads of a step: the caller and its workers, which park on a futex between steps.
 *
 * Inside a step they meet at barriers, some ten a layer. A waiter spins briefly, since the others are a few
 * microseconds away, then sleeps: a neighbour who wants the core gets it. (Engines that only spin lose two
 * orders of magnitude beside a busy process.) */

#ifndef SYMPHONY_POOL_H
#define SYMPHONY_POOL_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000 /* pauses before a waiter sleeps: tens of microseconds */

/* A number that others wait to see changed; on a cache line of its own. */
struct event {
    _Alignas(64) atomic_uint value;
    atomic_uint sleepers;
};

struct pool {
    struct event job, barrier;
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) atomic_long next_unit;
    _Alignas(64) void (*run)(void *context, int thread);
    void *context;
    int threads; /* with the caller */
    int active;  /* in this job */
    int stop;
    pthread_t *ids;
};

struct pool_member {
    struct pool *pool;
    int thread;
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void event_wait(struct event *e, unsigned old)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&e->value, memory_order_acquire) != old) return;
        relax();
    }
    atomic_fetch_add(&e->sleepers, 1);
    while (atomic_load(&e->value) == old)
        syscall(SYS_futex, &e->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&e->sleepers, 1);
}

static void event_signal(struct event *e)
{
    atomic_fetch_add(&e->value, 1);
    if (atomic_load(&e->sleepers)) syscall(SYS_futex, &e->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* All active threads meet; the last one to come also rewinds the units of the next phase. `active` is a copy that the
 * thread took when the job began: behind the job's last meeting the caller may have begun another one already, so from
 * there on a worker may read nothing that the job shares. */
static void pool_meet(struct pool *p, int active)
{
    unsigned old = atomic_load(&p->barrier.value);
    if (atomic_fetch_add(&p->arrived, 1) + 1 < (unsigned)active) {
        event_wait(&p->barrier, old);
        return;
    }
    atomic_store(&p->arrived, 0);
    atomic_store(&p->next_unit, 0);
    if (active > 1) event_signal(&p->barrier);
}

/* The next unit of this phase, for whoever asks first. Which thread computes a unit never shows in its bits. */
static long pool_take(struct pool *p)
{
    return atomic_fetch_add_explicit(&p->next_unit, 1, memory_order_relaxed);
}

static void *pool_worker(void *argument)
{
    struct pool_member me = *(struct pool_member *)argument;
    struct pool *p = me.pool;
    free(argument);
    for (unsigned seen = 0;; seen++) {
        event_wait(&p->job, seen);
        if (p->stop) return NULL;
        p->run(p->context, me.thread);
    }
}

/* Runs run(context, 0 .. threads - 1), here as thread 0. It must end with a pool_meet, and read nothing shared after. */
static void pool_run(struct pool *p, int threads, void (*run)(void *, int), void *context)
{
    p->run = run;
    p->context = context;
    p->active = threads;
    if (threads > 1) event_signal(&p->job);
    run(context, 0);
}

static void pool_stop(struct pool *p, int started)
{
    p->stop = 1;
    event_signal(&p->job);
    for (int i = 0; i < started; i++) pthread_join(p->ids[i], NULL);
    free(p->ids);
}

/* 0, or an errno. Workers take no signals: those are for the program's own threads. */
static int pool_start(struct pool *p, int threads)
{
    p->threads = threads;
    p->ids = calloc((size_t)threads, sizeof *p->ids);
    if (!p->ids) return ENOMEM;
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
            if (error) free(member);
        }
        if (error) pool_stop(p, i - 1);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

#endif
