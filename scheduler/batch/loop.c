/* The standing run: steps follow each other without the interpreter, as long as the daemon lives.
 *
 * After a step has streamed a model's weights through the caches, every line of Python runs three times slower than usual:
 * scheduling a step by it takes most of a millisecond. So Python decides what may be decided ahead, and steps follow each
 * other here. Every call that appends to a file is a *member*, from when it has room until it is over: prefills, whose
 * chunks are cut here; decode loops over pred(), whose next calls are taken out of the programs' rings; generations, whose
 * tokens are drawn here. Members join and leave between steps, and no step waits for any of them:
 *
 *   members.c     they join, leave, and have news for the scheduler
 *   facts.c       what the scheduler says of shares and costs, and asks of steps
 *   layout.c      the policy chooses the next step's calls; they become a batch
 *   results.c     entries count, programs are answered
 *   generation.c  tokens are drawn and sent
 *
 * A member needs the scheduler when it is over, when its room is nearly used up, and for what a grammar allows. It is told
 * by an eventfd, and the next steps go on without that member if it takes long. The scheduler may ask at any time how far
 * each member is: entries count before their answer is sent, so nobody who was answered can find a file that has not grown.
 *
 * One thread runs; `lock` is held whenever it is not computing, drawing, waiting or asleep.
 */
#include "loop_state.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SPINS_BEFORE_YIELD 20 /* then whoever wants this core, or the lock, gets it */
#define SPIN_NS 300000        /* for so long; then the core is left to those that are waited for */
#define LOOK_NS 50000         /* between two looks at the rings after that: who joins wakes the loop sooner */
#define DECISION_NS 500000    /* for generations that guess and have a grammar, at most */
#define LOOK_UNSEEN_NS 200000 /* the same, while the gate has to take something out of each ring first */

sym_loop *sym_loop_new(const sym_loop_plan *plan) {
    sym_loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL)
        return NULL;
    loop->plan = *plan;
    loop->engine = (sym_engine){.wake_fd = -1, .guide_fd = -1};
    loop->layout.stamps = calloc((size_t)plan->num_pages, sizeof *loop->layout.stamps);
    loop->streams = sym_streams_new();
    if (loop->layout.stamps == NULL || loop->streams == NULL) {
        free(loop->streams);
        free(loop->layout.stamps);
        free(loop);
        return NULL;
    }
    pthread_mutex_init(&loop->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&loop->has_work, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return loop;
}

void sym_loop_free(sym_loop *loop) {
    struct layout *layout = &loop->layout;
    sym_scratch_free(loop->scratch);
    if (loop->streams != NULL)
        sym_streams_free(loop->streams);
    for (int32_t i = 0; i < layout->num_scratch; i++)
        free(layout->scratch[i]);
    void *const arrays[] = {layout->tokens,   layout->positions,  layout->first_row, layout->start,  layout->first_page,
                            layout->wanted,   layout->masks,      layout->mask_at,   layout->pages,  layout->out,
                            layout->copies,   layout->mask_words, layout->scratch,   layout->stamps, layout->masses,
                            loop->candidates, loop->candidate_of, loop->num_now,     loop->seats,    loop->record_seats,
                            loop->servers,    loop->shares,       loop->free_shares, loop->news,     loop->free_places};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    for (int32_t i = 0; i < loop->num_places; i++)
        free(loop->members[i]);
    free(loop->members);
    pthread_mutex_destroy(&loop->lock);
    pthread_cond_destroy(&loop->has_work);
    free(loop);
}

static int is_closed(const sym_loop *loop) { return __atomic_load_n(&loop->closed, __ATOMIC_ACQUIRE); }

void sym_loop_close(sym_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    __atomic_store_n(&loop->closed, 1, __ATOMIC_RELEASE);
    pthread_cond_signal(&loop->has_work);
    pthread_mutex_unlock(&loop->lock);
}

/* ---- the rings; all under the lock */

/* The scheduler's thread sleeps, and something has come that is for it. Where all members have ended nobody is told: that they
 * have is told once, and whoever takes them back looks at the ring. */
static void rung(sym_loop *loop, int32_t server) {
    for (int32_t i = 0; i < loop->num_places; i++) {
        sym_member *member = loop->members[i];
        const int is_there = member->state != SYM_GONE && member->state != SYM_ENDED;
        if (is_there && member->kind == SYM_PROGRAM && member->decode.server_index == server) {
            member->decode.is_rung = 1;
            sym_act_on(loop, i);
            return;
        }
    }
}

/* From here on no program needs to ring. */
static void watch(sym_loop *loop) {
    for (int32_t i = 0; i < loop->num_servers; i++)
        if (!loop->servers[i].slept)
            loop->servers[i].slept = loop->plan.hot->watch(loop->servers[i].server);
}

static void unwatch(sym_loop *loop, int32_t server) {
    struct watched *watched = &loop->servers[server];
    if (watched->slept && loop->plan.hot->unwatch(watched->server, 1))
        rung(loop, server);
    watched->slept = 0;
}

static void unwatch_all(sym_loop *loop) {
    for (int32_t i = 0; i < loop->num_servers; i++)
        unwatch(loop, i);
}

/* Else the next calls of all rings are the gate's: who comes by it wakes the loop. */
static int is_watching(const sym_loop *loop) {
    for (int32_t i = 0; i < loop->num_servers; i++)
        if (loop->servers[i].slept)
            return 1;
    return 0;
}

/* Its call would be in a step that began now. */
static void add_ready(const sym_loop *loop, const sym_member *member, sym_ready *ready) {
    const int32_t account = loop->shares[member->share].parent;
    ready->account = ready->num_calls == 0 || ready->account == account ? account : SYM_SEVERAL;
    ready->num_calls++;
    ready->is_hurried |= member->deadline_ns != SYM_NO_DEADLINE || member->priority > 0;
}

/* Takes every call that is there. What is first in a ring and no member's is the gate's, and at once: calls of members may
 * come after it. */
static void poll_calls(sym_loop *loop, int64_t now_ns, sym_ready *ready) {
    *ready = (sym_ready){.account = SYM_NOBODY, .began_ns = ready->began_ns};
    for (int32_t i = 0; i < loop->num_servers; i++)
        loop->servers[i].num_asked = loop->servers[i].num_other = 0;
    for (int32_t i = 0; i < loop->num_places; i++) {
        sym_member *member = loop->members[i];
        if (member->state == SYM_COMPUTING)
            add_ready(loop, member, ready);
        if (member->state != SYM_WAITING || entries(member) >= member->capacity)
            continue;
        struct watched *watched = &loop->servers[member->decode.server_index];
        sym_hot_call call;
        const int outcome =
            loop->plan.hot->take(member->server, member->decode.handle, member->position, &loop->closed, &call);
        watched->num_asked++;
        watched->num_other += outcome == SYM_HOT_OTHER;
        if (outcome == SYM_HOT_TAKEN) {
            sym_continue_with(loop, i, &call, loop->looked_ns, now_ns);
            loop->counts.num_taken++;
            add_ready(loop, member, ready);
        } else if (outcome == SYM_HOT_COLD) {
            unwatch(loop, member->decode.server_index);
        }
    }
    loop->looked_ns = now_ns;
    for (int32_t i = 0; i < loop->num_servers; i++)
        if (loop->servers[i].num_other == loop->servers[i].num_asked) /* of a ring that no member looks at, too */
            unwatch(loop, i);
}

/* Until when to wait for calls that are about to come: see streams.c. Of one request they come at once. */
static int64_t wait_until(sym_loop *loop, const sym_ready *ready, int64_t now_ns) {
    const sym_loop_plan *plan = &loop->plan;
    const int64_t until_ns = sym_streams_wait_until(loop->streams, ready, &plan->wait, &plan->limits, &loop->cost,
                                                    &loop->work, loop->batch.num_chunks, loop->shares, now_ns);
    const int64_t submitted_ns = ready->began_ns + sym_policy_wait_ns(&plan->wait, loop->counts.last_step_ns);
    return loop->num_expected > 0 && submitted_ns > until_ns ? submitted_ns : until_ns;
}

/* Or until somebody joins, or has come by the gate. */
static void sleep_until(sym_loop *loop, int64_t until_ns) {
    const struct timespec until = {.tv_sec = until_ns / 1000000000L, .tv_nsec = until_ns % 1000000000L};
    loop->is_asleep = 1;
    pthread_cond_timedwait(&loop->has_work, &loop->lock, &until);
    loop->is_asleep = 0;
}

/* For streams that are about to come back, so that a batch does not fall apart into halves that take turns: as long as
 * that is expected to bring more tokens a second than going does. */
static void wait_for_calls(sym_loop *loop) {
    const int64_t began_ns = sym_now_ns();
    int64_t now_ns = began_ns;
    sym_ready ready = {.began_ns = began_ns};
    for (int64_t spins = 0;; spins++) {
        const int32_t num_before = ready.num_calls;
        poll_calls(loop, now_ns, &ready);
        if (num_before == 0)
            ready.began_ns = ready.num_calls == 0 ? began_ns : now_ns; /* a call waits from when it has come */
        sym_tell(loop);
        const int64_t until_ns = wait_until(loop, &ready, now_ns);
        if (until_ns <= now_ns || is_closed(loop))
            break;
        const int is_seen = is_watching(loop);
        if (!is_seen || now_ns - began_ns > SPIN_NS) {
            const int64_t look_ns = now_ns + (is_seen ? LOOK_NS : LOOK_UNSEEN_NS);
            sleep_until(loop, until_ns < look_ns ? until_ns : look_ns);
        } else {
            pthread_mutex_unlock(&loop->lock);
            if (spins > SPINS_BEFORE_YIELD)
                sched_yield();
            pthread_mutex_lock(&loop->lock);
        }
        now_ns = sym_now_ns();
    }
    sym_streams_charge(loop->streams, &ready, loop->shares, now_ns);
    loop->counts.waited_ns += now_ns - began_ns;
}

/* A moment: what a grammar allows takes some 0.1 ms to say. Other generations compute meanwhile. */
static void wait_for_decisions(sym_loop *loop) {
    const int64_t most_ns = sym_policy_wait_ns(&loop->plan.wait, loop->counts.last_step_ns);
    const int64_t until_ns = sym_now_ns() + (most_ns < DECISION_NS ? most_ns : DECISION_NS);
    while (sym_waits_for_decisions(loop) && !is_closed(loop) && sym_now_ns() < until_ns)
        sleep_until(loop, until_ns);
}

/* Those whose calls the loop sees are watched: see `watch`. */
static void gather(sym_loop *loop) {
    wait_for_calls(loop);
    wait_for_decisions(loop);
    unwatch_all(loop);
    sym_tell(loop);
}

/* ---- steps */

static int32_t num_programs(const sym_loop *loop) {
    int32_t count = 0;
    for (int32_t n = 0; n < loop->num_seats; n++) {
        int32_t other = 0;
        while (other < n && loop->seats[other].member->program != loop->seats[n].member->program)
            other++;
        count += other == n;
    }
    return count;
}

/* Its calls have waited since they could be computed; of a stretch that was cut, since its last step. */
static void count_waits(sym_loop *loop, int64_t now_ns) {
    for (int32_t n = 0; n < loop->num_seats; n++) {
        sym_member *member = loop->seats[n].member;
        member->queue_ns += now_ns - (member->num_computed == 0 ? member->since_ns : member->stepped_ns);
    }
}

/* Before it is computed: what it will have been. */
static sym_step_record describe(sym_loop *loop, int64_t now_ns) {
    sym_counts *counts = &loop->counts;
    int64_t first_seat = -1;
    count_waits(loop, now_ns);
    if (loop->is_traced) {
        first_seat = loop->num_record_seats;
        for (int32_t n = 0; n < loop->num_seats; n++) {
            const sym_member *member = loop->seats[n].member;
            loop->record_seats[loop->num_record_seats++ % SYM_NUM_SEATS] =
                (sym_seat){member->number, loop->seats[n].num_now, loop->layout.start[n], member->arrived_ns};
        }
    }
    if (loop->num_seats > counts->max_calls)
        counts->max_calls = loop->num_seats;
    if (loop->num_seats > counts->max_programs) {
        const int32_t programs = num_programs(loop);
        counts->max_programs = programs > counts->max_programs ? programs : counts->max_programs;
    }
    return (sym_step_record){
        .began_ns = now_ns,
        .work = loop->work,
        .predicted_ns = loop->predicted_ns,
        .first_seat = first_seat,
        .num_prefill_rows = loop->num_prefill_rows,
        .num_calls = loop->num_seats,
    };
}

static void count(sym_loop *loop, const sym_step_record *record) {
    sym_counts *counts = &loop->counts;
    int size = 0;
    while (size < 8 && record->num_calls > 1 << size)
        size++;
    loop->records[counts->num_steps % SYM_NUM_RECORDS] = *record;
    counts->sizes[size]++;
    counts->num_steps++;
    __atomic_store_n(&counts->last_step_ns, record->ended_ns - record->began_ns, __ATOMIC_RELAXED);
    counts->step_ns += counts->last_step_ns;
    sym_count_time(&counts->steps, counts->last_step_ns);
    counts->num_tokens += record->work.num_rows;
    counts->num_prefill_tokens += record->num_prefill_rows;
    counts->num_calls_in_steps += record->num_calls;
}

static void run_step(sym_loop *loop) {
    sym_step_record record = describe(loop, sym_now_ns());
    __atomic_store_n(&loop->stepping_since_ns, record.began_ns, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&loop->lock);
    const int error = loop->engine.step(loop->engine.decoder, &loop->batch);
    record.ended_ns = sym_now_ns();
    pthread_mutex_lock(&loop->lock);
    __atomic_store_n(&loop->stepping_since_ns, 0, __ATOMIC_RELAXED);
    watch(loop); /* before anybody is answered, so that nobody rings */
    pthread_mutex_unlock(&loop->lock);
    sym_take_results(loop, record.ended_ns - record.began_ns, error);
    pthread_mutex_lock(&loop->lock);
    if (error == 0)
        count(loop, &record);
    sym_tell(loop);
    gather(loop);
}

/* Without memory for a step its calls fail, as when it had failed. */
static void fail_all(sym_loop *loop) {
    for (int32_t i = 0; i < loop->num_places; i++)
        if (loop->members[i]->state == SYM_COMPUTING && !loop->members[i]->in_step) {
            loop->members[i]->error = ENOMEM;
            sym_end_member(loop, i, SYM_END_STEP);
        }
}

void sym_loop_run(sym_loop *loop, const sym_engine *engine) {
    pthread_mutex_lock(&loop->lock);
    loop->engine = *engine;
    sym_call_guides(loop);
    while (!is_closed(loop)) {
        const int32_t num_calls = sym_lay_out(loop, sym_now_ns());
        if (num_calls < 0)
            fail_all(loop);
        sym_tell(loop);
        if (num_calls > 0) {
            run_step(loop);
        } else if (!is_closed(loop)) {
            loop->is_asleep = 1;
            loop->counts.num_sleeps++;
            pthread_cond_wait(&loop->has_work, &loop->lock);
            loop->is_asleep = 0;
            watch(loop);
            gather(loop);
        }
    }
    loop->engine = (sym_engine){.wake_fd = -1, .guide_fd = -1};
    loop->is_told = 0;
    __atomic_store_n(&loop->closed, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&loop->lock);
}
