/* The standing run: steps follow each other without the interpreter, as long as the daemon lives.
 *
 * After a step has streamed a model's weights through the caches, every line of Python runs three times slower than usual:
 * scheduling a step by it takes most of a millisecond. So Python decides what may be decided ahead, and steps follow each
 * other here. Every call that appends to a file is a *member*, from when it has room until it is over: prefills, whose
 * chunks are cut here; decode loops over pred(), whose next calls are taken out of the programs' rings; generations, whose
 * tokens are drawn here. Members join and leave between steps, and no step waits for any of them:
 *
 *   members.c   they join, leave, and have news for the scheduler
 *   layout.c    the policy chooses the next step's calls; they become a batch
 *   results.c   entries count, programs are answered, tokens drawn and sent
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

#define SPINS_BEFORE_YIELD 20 /* then whoever wants this core, or the lock, gets it */

sym_loop *sym_loop_new(const sym_loop_plan *plan) {
    sym_loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL)
        return NULL;
    loop->plan = *plan;
    loop->engine = (sym_engine){.wake_fd = -1, .guide_fd = -1};
    loop->layout.stamps = calloc((size_t)plan->num_pages, sizeof *loop->layout.stamps);
    if (loop->layout.stamps == NULL) {
        free(loop);
        return NULL;
    }
    pthread_mutex_init(&loop->lock, NULL);
    pthread_cond_init(&loop->has_work, NULL);
    return loop;
}

void sym_loop_free(sym_loop *loop) {
    struct layout *layout = &loop->layout;
    sym_scratch_free(loop->scratch);
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
        if (is_there && member->kind == SYM_PROGRAM && member->server_index == server) {
            member->is_rung = 1;
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

/* Takes every call that is there; how many that usually come soon are still to come, and how many are there. */
static int32_t poll_calls(sym_loop *loop, int64_t patience_ns, int64_t now_ns, int32_t *num_ready) {
    int32_t num_missing = loop->num_expected;
    *num_ready = 0;
    for (int32_t i = 0; i < loop->num_places; i++) {
        sym_member *member = loop->members[i];
        *num_ready += member->state == SYM_COMPUTING;
        num_missing += member->state == SYM_ENDED && member->end == SYM_END_DONE; /* it is being answered */
        if (member->state != SYM_WAITING || entries(member) >= member->capacity)
            continue;
        sym_hot_call call;
        const int outcome =
            loop->plan.hot->take(member->server, member->handle, member->position, &loop->closed, &call);
        if (outcome == SYM_HOT_TAKEN) {
            sym_continue_with(loop, member, &call, now_ns);
            loop->counts.num_taken++;
            ++*num_ready;
        } else if (outcome == SYM_HOT_COLD) {
            unwatch(loop, member->server_index); /* the gate's, and at once */
        } else {
            num_missing += member->think_ns < patience_ns;
        }
    }
    return num_missing;
}

/* Those that were waited for in vain think longer than they used to. */
static void give_up(sym_loop *loop, int64_t patience_ns) {
    for (int32_t i = 0; i < loop->num_places; i++) {
        sym_member *member = loop->members[i];
        if (member->state == SYM_WAITING && member->think_ns < patience_ns)
            member->think_ns = 2 * patience_ns;
    }
    if (loop->num_expected > 0) {
        loop->misses++; /* first: else who is expected in between would stay so, and nobody would take it back */
        loop->num_expected = 0;
    }
}

/* For programs that come back within a share of a step, so that a batch does not fall apart into halves that take turns.
 * Whoever comes in time saves a step; whoever is there loses the wait. So it is no longer than what it can bring. */
static void wait_for_returning(sym_loop *loop) {
    const int64_t began_ns = sym_now_ns(), step_ns = loop->counts.last_step_ns;
    const int64_t patience_ns = sym_policy_wait_ns(&loop->plan.wait, step_ns);
    int64_t now_ns = began_ns;
    int32_t num_missing, num_ready;
    for (int64_t spins = 0; (num_missing = poll_calls(loop, patience_ns, now_ns, &num_ready)) > 0; spins++) {
        sym_tell(loop);
        int64_t worth_ns = num_ready == 0 ? patience_ns : step_ns * num_missing / num_ready;
        worth_ns = worth_ns < loop->plan.wait.min_ns ? loop->plan.wait.min_ns : worth_ns;
        if (now_ns - began_ns >= (worth_ns < patience_ns ? worth_ns : patience_ns) || is_closed(loop))
            break;
        pthread_mutex_unlock(&loop->lock);
        if (spins > SPINS_BEFORE_YIELD)
            sched_yield();
        pthread_mutex_lock(&loop->lock);
        now_ns = sym_now_ns();
    }
    if (num_missing > 0)
        give_up(loop, patience_ns);
    loop->counts.waited_ns += now_ns - began_ns;
}

/* Those whose calls the loop sees are watched: see `watch`. */
static void gather(sym_loop *loop) {
    wait_for_returning(loop);
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
        if (loop->members[i]->state == SYM_COMPUTING) {
            loop->members[i]->error = ENOMEM;
            sym_end_member(loop, i, SYM_END_STEP);
        }
}

void sym_loop_run(sym_loop *loop, const sym_engine *engine) {
    pthread_mutex_lock(&loop->lock);
    loop->engine = *engine;
    sym_call_guides(loop);
    while (!is_closed(loop)) {
        while (sym_take_decisions(loop))
            continue;
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
            if (loop->num_expected > 0) { /* of one request others follow at once */
                watch(loop);
                gather(loop);
            }
        }
    }
    loop->engine = (sym_engine){.wake_fd = -1, .guide_fd = -1};
    loop->is_told = 0;
    __atomic_store_n(&loop->closed, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&loop->lock);
}
