/* The standing run: steps follow each other without the interpreter, as long as the daemon lives.
 *
 * A step streams a model's weights through the caches. After that, every line of Python runs three times slower than
 * usual, and scheduling a step in Python takes most of a millisecond. So Python makes its decisions ahead of time, and
 * C runs one step after the other.
 *
 * A *member* is a call that appends to a file, from the time when it has room until it is over. The run cuts prefills
 * into chunks, takes the next calls of decode loops over pred() out of the programs' rings, and draws the tokens of
 * generations. Members join and leave between steps, and no step waits for a member that leaves or joins:
 *
 *   members.c     how members grow and end, and news for the scheduler
 *   joining.c     how members join, leave and are taken back
 *   facts.c       shares and costs, which the scheduler sets; counts and steps, which it reads
 *   layout.c      the policy chooses the next step's calls, which become a batch
 *   results.c     entries count, programs are answered
 *   generation.c  tokens are drawn and sent
 *
 * A member needs the scheduler when it is over, when its room is nearly used up, and when its grammar has to decide.
 * The run then rings an eventfd. If the scheduler is slow, the next steps go on without that member. The scheduler may
 * look at each member at any time. Entries count before their answer is sent, so a program that has its answer finds
 * that its file has grown.
 *
 * One thread, the step thread, runs all of this. The step thread holds `lock` unless it computes, draws, waits or
 * sleeps. */
#include "loop_state.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SPINS_BEFORE_YIELD 20 /* polls before the thread yields its core, which another thread may need */
#define SPIN_NS 300000        /* time of polling before the thread sleeps between polls: programs need the core */
#define LOOK_NS 50000         /* longest sleep between two polls of the rings; a joining member ends the sleep */
#define DECISION_NS 500000    /* longest wait for a grammar's decision about a generation with a draft */
#define LOOK_UNSEEN_NS 200000 /* sleep between polls while the first request of every ring is for the gate */

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

/* ---- the rings; all functions are called under the lock */

/* Tell the scheduler that a program's ring has a request for the gate. If all members of the program have ended, there
 * is no such news: the scheduler hears of their end, and looks at the ring when it takes them back. */
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

/* Watch the rings of all programs, so that no program needs to ring its doorbell. */
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

/* Return whether the loop watches any ring. If the loop watches no ring, only calls that the gate begins can arrive.
 * Such calls wake the loop. */
static int is_watching(const sym_loop *loop) {
    for (int32_t i = 0; i < loop->num_servers; i++)
        if (loop->servers[i].slept)
            return 1;
    return 0;
}

/* Add a member to the calls that a step would hold if it began now. */
static void add_ready(const sym_loop *loop, const sym_member *member, sym_ready *ready) {
    const int32_t account = loop->shares[member->share].parent;
    ready->account = ready->num_calls == 0 || ready->account == account ? account : SYM_SEVERAL;
    ready->num_calls++;
    ready->is_hurried |= member->deadline_ns != SYM_NO_DEADLINE || member->priority > 0;
}

/* For each waiting member, take its next call out of the ring. If the first request of a ring is not such a call, the
 * gate has to take that request immediately, because calls of members may lie behind it. */
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
        if (loop->servers[i].num_other == loop->servers[i].num_asked) /* both are 0 if nobody waits for this ring */
            unwatch(loop, i);
}

/* Return the time until which the step waits for calls that are due: see streams.c. Calls of one request that are still
 * being submitted are due now. */
static int64_t wait_until(sym_loop *loop, const sym_ready *ready, int64_t now_ns) {
    const sym_loop_plan *plan = &loop->plan;
    const int64_t until_ns = sym_streams_wait_until(loop->streams, ready, &plan->wait, &plan->limits, &loop->cost,
                                                    &loop->work, loop->batch.num_chunks, loop->shares, now_ns);
    const int64_t submitted_ns = ready->began_ns + sym_policy_wait_ns(&plan->wait, loop->counts.last_step_ns);
    return loop->num_expected > 0 && submitted_ns > until_ns ? submitted_ns : until_ns;
}

/* Sleep until a time, or until a member joins or goes on. */
static void sleep_until(sym_loop *loop, int64_t until_ns) {
    const struct timespec until = {.tv_sec = until_ns / 1000000000L, .tv_nsec = until_ns % 1000000000L};
    loop->is_asleep = 1;
    pthread_cond_timedwait(&loop->has_work, &loop->lock, &until);
    loop->is_asleep = 0;
}

/* Wait for calls of streams that are due, as long as waiting is expected to give more tokens a second than starting the
 * step. Without this wait, a batch falls apart into halves that alternate. */
static void wait_for_calls(sym_loop *loop) {
    const int64_t began_ns = sym_now_ns();
    int64_t now_ns = began_ns;
    sym_ready ready = {.began_ns = began_ns};
    for (int64_t spins = 0;; spins++) {
        const int32_t num_before = ready.num_calls;
        poll_calls(loop, now_ns, &ready);
        if (num_before == 0)
            ready.began_ns = ready.num_calls == 0 ? began_ns : now_ns; /* the wait of a call begins with its arrival */
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

/* Wait a moment for grammars. A decision takes some 0.1 ms. */
static void wait_for_decisions(sym_loop *loop) {
    const int64_t most_ns = sym_policy_wait_ns(&loop->plan.wait, loop->counts.last_step_ns);
    const int64_t until_ns = sym_now_ns() + (most_ns < DECISION_NS ? most_ns : DECISION_NS);
    while (sym_waits_for_decisions(loop) && !is_closed(loop) && sym_now_ns() < until_ns)
        sleep_until(loop, until_ns);
}

/* Gather the calls of the next step. The loop has watched the rings until now: see `watch`. */
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

/* Add to each call's `queue_ns` the time since its stretch became ready, or since the step that computed an earlier
 * part of the stretch. */
static void count_waits(sym_loop *loop, int64_t now_ns) {
    for (int32_t n = 0; n < loop->num_seats; n++) {
        sym_member *member = loop->seats[n].member;
        member->queue_ns += now_ns - (member->num_computed == 0 ? member->since_ns : member->stepped_ns);
    }
}

/* Record the step that is about to be computed. */
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
    watch(loop); /* before any program is answered, so that its next call needs no doorbell */
    pthread_mutex_unlock(&loop->lock);
    sym_take_results(loop, record.ended_ns - record.began_ns, error);
    pthread_mutex_lock(&loop->lock);
    if (error == 0)
        count(loop, &record);
    sym_tell(loop);
    gather(loop);
}

/* Fail all calls that are ready, because there was no memory to lay out their step. */
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
