/* The threads of a step, and of work between two steps: the caller and its workers. Idle workers sleep on a futex.
 *
 * In a step, the threads meet at barriers, some ten in each layer. A waiter spins briefly, because the other threads
 * are a few microseconds away. Then it sleeps, and another process can use the core. (An engine that only spins becomes
 * a hundred times as slow beside a busy process.)
 *
 * Work between steps is a number of independent items. The caller begins at once. A worker takes items that are left
 * when it wakes, and a late worker finds no item. The caller waits only for items that a worker has taken. So the work
 * costs no more than the system call that wakes the workers, however late they are. */

#ifndef SYMPHONY_POOL_H
#define SYMPHONY_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

/* A number on a cache line of its own. Threads wait until another thread changes the number. */
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
    int threads; /* including the caller */
    int active;  /* threads of this job */
    atomic_int stop;
    pthread_t *ids;
    /* For pool_each. */
    _Alignas(64) _Atomic uint64_t items; /* high 32 bits: the job's serial number; low 32 bits: items not yet taken */
    atomic_int num_undone;
    struct event all_done;
    void (*work)(void *context, int32_t item);
    void *work_context;
    int32_t num_items;
};

/* Take the next unit of this phase. A unit's result has the same bits on every thread. */
static inline long pool_take(struct pool *p) {
    return atomic_fetch_add_explicit(&p->next_unit, 1, memory_order_relaxed);
}

/* Take a unit beside the one that the thread computes now, so that the thread can prefetch its data. Return `units`,
 * the number of units in this phase, if each thread has at most one: another thread would idle meanwhile. */
static inline long pool_take_ahead(struct pool *p, long units) { return units > p->active ? pool_take(p) : units; }

/* Return the unit that was taken ahead, or take one. */
static inline long pool_take_after(struct pool *p, long units, long ahead) {
    return ahead < units ? ahead : pool_take(p);
}

/* Wait until all active threads have arrived. The last thread to arrive also resets the units for the next phase.
 * `active` is a copy that the thread made when the job began. After the job's last pool_meet, the caller may already
 * have begun another job. So from then on, a worker may not read shared data. */
void pool_meet(struct pool *p, int active);
/* Run run(context, thread) on threads 0 .. threads - 1; the caller is thread 0. `run` must end with a pool_meet, and
 * may not read shared data after that call. */
void pool_run(struct pool *p, int threads, void (*run)(void *, int), void *context);
/* Least number of items for which workers are woken. The measured items are draws from 49,152 logits, on two cores of a
 * Xeon with AVX-512. Right after a step, two threads need 0.54 of one thread's time for two items of 5 us, 0.53 for two
 * items of 30 us, and 0.5 for 64 such items. If the workers sleep, or other processes use their cores, the call that
 * wakes the workers costs 2 to 5 us. */
#define SYM_PARALLEL_MIN 2

/* Run work(context, i) once for each i of 0 .. count - 1, on the threads that are awake in time. Fewer items than
 * SYM_PARALLEL_MIN, or a pool of one thread, wake no worker. */
void pool_each(struct pool *p, void (*work)(void *, int32_t), void *context, int32_t count);
void pool_stop(struct pool *p, int started);
/* Start the workers. Return 0, or an errno. Workers block all signals, which are for the process's other threads. */
int pool_start(struct pool *p, int threads);

#endif
