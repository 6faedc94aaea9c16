/* The threads of a step, their barriers, and the work between steps, which pool.h describes. */

#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000 /* pause instructions before a waiter sleeps: tens of microseconds */
#define NUMBERED 2 /* job.value is the serial number of the job times NUMBERED, */
#define OF_ITEMS 1 /* plus OF_ITEMS if the job has items */

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

static void event_wake(struct event *e, int most) {
    if (atomic_load(&e->sleepers))
        syscall(SYS_futex, &e->value, FUTEX_WAKE_PRIVATE, most, NULL, NULL, 0);
}

static void event_signal(struct event *e) {
    atomic_fetch_add(&e->value, 1);
    event_wake(e, INT_MAX);
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

/* Do items of a job until none is left. Return the number that this thread has done. A thread may read the job's shared
 * data only while it has an item. Otherwise the caller may have returned, and begun another job. */
static int do_items(struct pool *p, unsigned job) {
    int num_done = 0;
    uint64_t items = atomic_load(&p->items);
    while (items >> 32 == job && (uint32_t)items != 0) {
        if (!atomic_compare_exchange_weak(&p->items, &items, items - 1))
            continue;
        p->work(p->work_context, p->num_items - (int32_t)(uint32_t)items);
        num_done++;
        items = atomic_load(&p->items);
    }
    return num_done;
}

static void *pool_worker(void *argument) {
    struct pool_member me = *(struct pool_member *)argument;
    struct pool *p = me.pool;
    free(argument);
    for (unsigned job = 0;;) {
        event_wait(&p->job, job);
        job = atomic_load(&p->job.value); /* the latest job: an earlier job with items may be over by now */
        if (atomic_load(&p->stop))
            return NULL;
        if (!(job & OF_ITEMS)) {
            p->run(p->context, me.thread);
            continue;
        }
        const int num_done = do_items(p, job);
        if (num_done > 0 && atomic_fetch_sub(&p->num_undone, num_done) == num_done)
            event_signal(&p->all_done);
    }
}

static unsigned next_job(const struct pool *p, unsigned kind) {
    return (p->job.value / NUMBERED + 1) * NUMBERED | kind;
}

void pool_run(struct pool *p, int threads, void (*run)(void *, int), void *context) {
    p->run = run;
    p->context = context;
    p->active = threads;
    if (threads > 1) {
        atomic_store(&p->job.value, next_job(p, 0));
        event_wake(&p->job, INT_MAX);
    }
    run(context, 0);
}

void pool_each(struct pool *p, void (*work)(void *, int32_t), void *context, int32_t count) {
    if (count < SYM_PARALLEL_MIN || p->threads == 1) {
        for (int32_t i = 0; i < count; i++)
            work(context, i);
        return;
    }
    const unsigned job = next_job(p, OF_ITEMS), before = atomic_load(&p->all_done.value);
    p->work = work;
    p->work_context = context;
    p->num_items = count;
    atomic_store(&p->num_undone, count + 1); /* one more than the items: the caller subtracts it last */
    atomic_store(&p->items, (uint64_t)job << 32 | (uint32_t)count);
    atomic_store(&p->job.value, job);
    event_wake(&p->job, count - 1);
    const int num_done = do_items(p, job) + 1;
    if (atomic_fetch_sub(&p->num_undone, num_done) != num_done)
        event_wait(&p->all_done, before);
}

void pool_stop(struct pool *p, int started) {
    atomic_store(&p->stop, 1);
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
