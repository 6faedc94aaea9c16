/* The threads of a step, and of work between two steps: the caller and its workers, which park on a futex.
 *
 * Inside a step they meet at barriers, some ten a layer. A waiter spins briefly, since the others are a few
 * microseconds away, then sleeps: a neighbour who wants the core gets it. (Engines that only spin lose two
 * orders of magnitude beside a busy process.)
 *
 * Work between steps is items that have nothing to do with each other. There nobody is waited for who has none: the
 * caller begins at once, workers take what is left when they are awake, and one that comes too late finds nothing. So it
 * costs no more than the system call that wakes them, however long they take to come. */

#ifndef SYMPHONY_POOL_H
#define SYMPHONY_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

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
    atomic_int stop;
    pthread_t *ids;
    /* Of pool_each. */
    _Alignas(64) _Atomic uint64_t items; /* the job, and below it in 32 bits how many are left to be taken */
    atomic_int num_undone;
    struct event all_done;
    void (*work)(void *context, int32_t item);
    void *work_context;
    int32_t num_items;
};

/* The next unit of this phase, for whoever asks first. Which thread computes a unit never shows in its bits. */
static inline long pool_take(struct pool *p) {
    return atomic_fetch_add_explicit(&p->next_unit, 1, memory_order_relaxed);
}

/* All active threads meet; the last one to come also rewinds the units of the next phase. `active` is a copy that the
 * thread took when the job began: behind the job's last meeting the caller may have begun another one already, so from
 * there on a worker may read nothing that the job shares. */
void pool_meet(struct pool *p, int active);
/* Runs run(context, 0 .. threads - 1), here as thread 0. It must end with a pool_meet, and read nothing shared after. */
void pool_run(struct pool *p, int threads, void (*run)(void *, int), void *context);
/* Items from which on the others are asked. Draws from 49,152 logits (scripts/bench/draws.py, two cores of a Xeon with
 * AVX-512): right after a step two of 5 us take 0.54 of their time alone, two of 30 us 0.53, 64 of them half; where the
 * others sleep or their cores are taken, the call that would wake them costs 2 to 5 us. */
#define SYM_PARALLEL_MIN 2

/* Runs work(context, 0 .. count - 1), each once, on whichever threads come; fewer items, or one thread, wake nobody. */
void pool_each(struct pool *p, void (*work)(void *, int32_t), void *context, int32_t count);
void pool_stop(struct pool *p, int started);
/* 0, or an errno. Workers take no signals: those are for the program's own threads. */
int pool_start(struct pool *p, int threads);

#endif
