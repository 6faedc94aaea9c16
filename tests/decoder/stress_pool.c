/* The threads of a step without steps, under sanitizers: jobs that all meet in, jobs of items, and none, in any order,
 * so that threads which come late to one find another. What a job shares lies on the caller's stack, and goes with it. */
#include "pool.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { NUM_ROUNDS = 4000, MOST_ITEMS = 40, NUM_PHASES = 3 };

static uint32_t random_state = 1;

static uint32_t below(uint32_t limit) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % limit;
}

static void spin(long rounds) {
    for (volatile long i = 0; i < rounds; i++)
        ;
}

/* -- items: each is done once, with what its own job says -- */

struct work {
    int times[MOST_ITEMS]; /* plain: whose caller is back, nobody writes any more */
    int32_t round, length;
};

static void do_item(void *context, int32_t item) {
    struct work *work = context;
    spin(work->length);
    work->times[item] += work->round;
}

static void run_items(struct pool *p, int32_t round) {
    struct work work = {.round = round, .length = below(4) ? 20 : 3000};
    const int32_t count = (int32_t)below(MOST_ITEMS + 1);
    pool_each(p, do_item, &work, count);
    for (int32_t i = 0; i < MOST_ITEMS; i++)
        CHECK(work.times[i] == (i < count ? round : 0));
}

/* -- phases: all threads meet, as in a step -- */

struct phases {
    struct pool *pool;
    long units;
    atomic_long num_taken;
};

static void walk(void *context, int thread) {
    struct phases *phases = context;
    struct pool *pool = phases->pool; /* behind the last meeting nothing shared is read */
    const int active = pool->active;
    const long units = phases->units;
    (void)thread;
    for (int i = 0; i < NUM_PHASES; i++) {
        while (pool_take(pool) < units)
            atomic_fetch_add(&phases->num_taken, 1);
        pool_meet(pool, active);
    }
}

static void run_phases(struct pool *p, int threads) {
    struct phases phases = {.pool = p, .units = below(30)};
    pool_run(p, threads, walk, &phases);
    CHECK(atomic_load(&phases.num_taken) == NUM_PHASES * phases.units);
}

/* -- units taken ahead: each is computed once, and as many units as threads are computed at the same time -- */

enum { MOST_UNITS = 30, PATIENCE_S = 60 };

struct ahead {
    struct pool *pool;
    long units;
    atomic_int times[NUM_PHASES][MOST_UNITS];
    atomic_long num_begun[NUM_PHASES];
};

static void wait_for_all(struct ahead *ahead, int phase) {
    for (const time_t began = time(NULL); atomic_load(&ahead->num_begun[phase]) < ahead->units; sched_yield())
        CHECK(time(NULL) - began < PATIENCE_S);
}

static void walk_ahead(void *context, int thread) {
    struct ahead *ahead = context;
    struct pool *pool = ahead->pool;
    const int active = pool->active;
    const long units = ahead->units;
    (void)thread;
    for (int i = 0; i < NUM_PHASES; i++) {
        for (long unit = pool_take(pool), next; unit < units; unit = pool_take_after(pool, units, next)) {
            next = pool_take_ahead(pool, units);
            atomic_fetch_add(&ahead->times[i][unit], 1);
            atomic_fetch_add(&ahead->num_begun[i], 1);
            if (units <= active)
                wait_for_all(ahead, i);
        }
        pool_meet(pool, active);
    }
}

static void run_ahead(struct pool *p, int threads) {
    struct ahead ahead = {.pool = p, .units = below(3) ? threads : (long)below(MOST_UNITS)};
    pool_run(p, threads, walk_ahead, &ahead);
    for (int i = 0; i < NUM_PHASES; i++)
        for (long unit = 0; unit < MOST_UNITS; unit++)
            CHECK(atomic_load(&ahead.times[i][unit]) == (unit < ahead.units));
}

int main(void) {
    for (int threads = 1; threads <= 4; threads++) {
        struct pool *p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
        CHECK(p != NULL);
        memset(p, 0, sizeof *p);
        CHECK(pool_start(p, threads) == 0);
        for (int32_t round = 1; round <= NUM_ROUNDS; round++) {
            switch (below(6)) {
            case 0:
                run_phases(p, threads);
                break;
            case 1:
                run_phases(p, 1);
                break;
            case 2:
                if (below(20) == 0)
                    nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL); /* the others fall asleep */
                break;
            default:
                run_items(p, round);
            }
        }
        for (int round = 0; round < NUM_ROUNDS / 100; round++)
            run_ahead(p, threads);
        run_items(p, 1);
        pool_stop(p, threads - 1);
        free(p);
    }
    return 0;
}
