/* Steps that follow each other without the interpreter.
 *
 * After a step has streamed a model's weights through the caches, every line of Python runs three times slower than usual:
 * scheduling a step by it takes most of a millisecond. So while all that there is to do is one token for each of some
 * files, the steps follow each other here. What comes after a row is either drawn from it (generate()), or is the next
 * call of the program that got the row (a loop over pred()), which is taken out of its ring.
 *
 * The room was reserved before, so nothing is decided here: when a member needs a decision (more room, an end to be told,
 * another kind of call), or somebody else has work, the run ends and the scheduler goes on. It may look at any time how
 * far each member is: `num_done` is stored after the token and before the answer is sent, so nobody who was answered
 * can find a file that has not grown.
 *
 * One thread runs; `lock` is for the state of members, because calls may come by the gate as well (inject).
 */
#include "loop.h"

#include "abi.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SPINS_BEFORE_YIELD 200 /* some 10 us: then whoever wants this core gets it */

struct sym_run {
    const sym_hot_functions *hot;
    sym_step_function *step;
    sym_decoder *decoder;
    sym_member *members;
    int32_t num_members;
    sym_run_wait wait;
    int wake_fd;
    int stop; /* atomic: set by others */
    pthread_mutex_t lock;
    sym_server *servers[SYM_MAX_MEMBERS]; /* each once */
    int slept[SYM_MAX_MEMBERS];
    int32_t num_servers;
    sym_batch batch;
    int32_t active[SYM_MAX_MEMBERS], num_active; /* of the step under way */
    int32_t tokens[SYM_MAX_MEMBERS], positions[SYM_MAX_MEMBERS], first_row[SYM_MAX_MEMBERS + 1], start[SYM_MAX_MEMBERS],
        first_page[SYM_MAX_MEMBERS + 1], wanted[SYM_MAX_MEMBERS];
    const uint32_t *masks[SYM_MAX_MEMBERS];
    float *out[SYM_MAX_MEMBERS];
    int32_t *pages; /* room for every page of every member */
    _Atomic int64_t progress, num_taken;
    int64_t num_steps, step_ns, last_step_ns, steps_of[SYM_MAX_MEMBERS + 1];
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static int is_stopped(const sym_run *loop) { return __atomic_load_n(&loop->stop, __ATOMIC_SEQ_CST); }

static int32_t pages_for(int32_t entries) { return (entries + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES; }

static int32_t entries(const sym_member *member) { return member->first + member->num_done; }

sym_run *sym_run_new(const sym_hot_functions *hot, sym_step_function *step, sym_decoder *decoder, sym_member *members,
                     int32_t num_members, const int32_t *copies, int32_t num_copies, sym_run_wait wait, int wake_fd) {
    sym_run *loop = num_members <= SYM_MAX_MEMBERS ? calloc(1, sizeof *loop) : NULL;
    if (loop == NULL)
        return NULL;
    size_t num_pages = 0;
    for (int32_t i = 0; i < num_members; i++) {
        num_pages += (size_t)pages_for(members[i].capacity);
        int32_t known = 0;
        while (known < loop->num_servers && loop->servers[known] != members[i].server)
            known++;
        if (known == loop->num_servers && members[i].sampler == NULL)
            loop->servers[loop->num_servers++] = members[i].server;
    }
    loop->pages = malloc(num_pages * sizeof *loop->pages);
    if (loop->pages == NULL) {
        free(loop);
        return NULL;
    }
    loop->hot = hot;
    loop->step = step;
    loop->decoder = decoder;
    loop->members = members;
    loop->num_members = num_members;
    loop->wait = wait;
    loop->wake_fd = wake_fd;
    loop->batch.copies = copies;
    loop->batch.num_copies = num_copies;
    pthread_mutex_init(&loop->lock, NULL);
    return loop;
}

void sym_run_free(sym_run *loop) {
    pthread_mutex_destroy(&loop->lock);
    free(loop->pages);
    free(loop);
}

/* Every member that has a token becomes a chunk of one row. */
static void lay_out(sym_run *loop) {
    int32_t num_pages = 0, n = 0;
    pthread_mutex_lock(&loop->lock);
    for (int32_t i = 0; i < loop->num_members; i++) {
        const sym_member *member = &loop->members[i];
        if (member->state != SYM_COMPUTING)
            continue;
        const int32_t used = pages_for(entries(member) + 1);
        loop->active[n] = i;
        loop->tokens[n] = member->token;
        loop->positions[n] = member->position;
        loop->first_row[n] = n;
        loop->start[n] = entries(member);
        loop->first_page[n] = num_pages;
        loop->wanted[n] = 1;
        loop->out[n] = member->row;
        memcpy(loop->pages + num_pages, member->pages, (size_t)used * sizeof *loop->pages);
        num_pages += used;
        n++;
    }
    pthread_mutex_unlock(&loop->lock);
    loop->first_row[n] = n;
    loop->first_page[n] = num_pages;
    loop->num_active = n;
    sym_batch *batch = &loop->batch;
    batch->num_rows = batch->num_chunks = batch->num_wanted = n;
    batch->tokens = loop->tokens;
    batch->positions = loop->positions;
    batch->first_row = loop->first_row;
    batch->start = loop->start;
    batch->first_page = loop->first_page;
    batch->pages = loop->pages;
    batch->wanted = loop->wanted;
    batch->masks = loop->masks;
    batch->out = loop->out;
}

static void end_member(sym_member *member, int32_t why) {
    member->state = SYM_ENDED;
    member->end = why;
}

static int is_stop_token(const sym_member *member, int32_t token) {
    for (int32_t i = 0; i < member->num_stop_tokens; i++)
        if (member->stop_tokens[i] == token)
            return 1;
    return 0;
}

/* A program's call is computed: it gets its row, and its next call is waited for. 0: it can't go on. */
static int answer(sym_run *loop, sym_member *member) {
    pthread_mutex_lock(&loop->lock);
    if (loop->hot->answer(member->server, member->call_id, member->slot, entries(member)) != 0)
        end_member(member, SYM_END_UNSENT);
    else if (entries(member) >= member->capacity)
        end_member(member, SYM_END_ROOM);
    else
        member->state = SYM_WAITING;
    const int goes_on = member->state != SYM_ENDED;
    pthread_mutex_unlock(&loop->lock);
    return goes_on;
}

static int fail_draw(sym_member *member, int64_t rc) {
    member->draw_error = (int32_t)-rc;
    end_member(member, SYM_END_DRAW);
    return 0;
}

/* The next token is drawn, sent, and computed in the next step. 0: it can't go on. */
static int draw(sym_run *loop, sym_member *member) {
    const int64_t drawn = loop->hot->draw(member->sampler, member->row, NULL, member->draw_index);
    if (drawn < 0)
        return fail_draw(member, drawn);
    const int32_t token = (int32_t)drawn;
    member->draw_index++;
    if (is_stop_token(member, token)) {
        member->token = token;
        end_member(member, SYM_END_STOP_TOKEN);
        return 0;
    }
    const int rc = loop->hot->note(member->sampler, token);
    if (rc < 0)
        return fail_draw(member, rc);
    member->token = token;
    member->num_to_emit--;
    if (loop->hot->push(member->server, member->call_id, 0, SYM_MORE, 1, entries(member), 0, 0, (const char *)&token,
                        sizeof token) != 0)
        end_member(member, SYM_END_UNSENT);
    else if (member->num_to_emit == 0)
        end_member(member, SYM_END_LENGTH);
    else if (entries(member) >= member->capacity)
        end_member(member, SYM_END_ROOM);
    return member->state != SYM_ENDED;
}

/* After a step: whether every member can go on. Programs are answered first: they think while others' tokens are drawn. */
static int take_results(sym_run *loop) {
    int all_go_on = 1;
    for (int32_t n = 0; n < loop->num_active; n++) {
        sym_member *member = &loop->members[loop->active[n]];
        member->log[member->num_done] = member->token;
        member->compute_ns += loop->last_step_ns;
        member->position++;
        member->num_calls += member->sampler == NULL;
        __atomic_store_n(&member->num_done, member->num_done + 1, __ATOMIC_RELEASE);
        atomic_fetch_add(&loop->progress, 1);
        if (member->sampler == NULL)
            all_go_on &= answer(loop, member);
    }
    for (int32_t n = 0; n < loop->num_active; n++) {
        sym_member *member = &loop->members[loop->active[n]];
        if (member->sampler != NULL)
            all_go_on &= draw(loop, member);
    }
    return all_go_on;
}

static void continue_with(sym_member *member, const sym_hot_call *call) {
    member->call_id = call->id;
    member->slot = call->slot;
    member->row = call->row;
    member->token = call->token;
    member->is_quick = 1;
    member->state = SYM_COMPUTING;
}

/* Takes every call that is there; how many members are still waited for. -1: something else has come. */
static int32_t poll_calls(sym_run *loop) {
    int32_t num_missing = 0;
    int cold = 0;
    pthread_mutex_lock(&loop->lock);
    for (int32_t i = 0; i < loop->num_members; i++) {
        sym_member *member = &loop->members[i];
        if (member->state != SYM_WAITING)
            continue;
        sym_hot_call call;
        const int outcome = loop->hot->take(member->server, member->handle, member->position, &loop->stop, &call);
        if (outcome == SYM_HOT_TAKEN) {
            continue_with(member, &call);
            atomic_fetch_add(&loop->num_taken, 1);
        } else {
            num_missing += member->is_quick;
        }
        cold |= outcome == SYM_HOT_COLD;
    }
    pthread_mutex_unlock(&loop->lock);
    return cold ? -1 : num_missing;
}

static void wait_for_calls(sym_run *loop) {
    int64_t wait_ns = loop->last_step_ns * loop->wait.share_percent / 100;
    wait_ns = wait_ns < loop->wait.min_ns ? loop->wait.min_ns : wait_ns;
    wait_ns = wait_ns > loop->wait.max_ns ? loop->wait.max_ns : wait_ns;
    const int64_t deadline_ns = now_ns() + wait_ns;
    int64_t spins = 0;
    int32_t num_missing;
    while ((num_missing = poll_calls(loop)) > 0 && !is_stopped(loop) && now_ns() < deadline_ns) {
        if (++spins > SPINS_BEFORE_YIELD)
            sched_yield();
    }
    if (num_missing <= 0)
        return;
    pthread_mutex_lock(&loop->lock);
    for (int32_t i = 0; i < loop->num_members; i++)
        if (loop->members[i].state == SYM_WAITING)
            loop->members[i].is_quick = 0;
    pthread_mutex_unlock(&loop->lock);
}

static void watch(sym_run *loop) {
    for (int32_t i = 0; i < loop->num_servers; i++)
        loop->slept[i] = loop->hot->watch(loop->servers[i]);
}

/* What has come for the gate meanwhile is rung for. */
static void unwatch(sym_run *loop) {
    uint64_t rings = 0;
    for (int32_t i = 0; i < loop->num_servers; i++)
        rings += loop->hot->unwatch(loop->servers[i], loop->slept[i]) != 0;
    if (rings != 0) {
        const ssize_t written = write(loop->wake_fd, &rings, sizeof rings);
        (void)written; /* EAGAIN: it is ringing already */
    }
}

int sym_run_execute(sym_run *loop) {
    for (;;) {
        lay_out(loop);
        if (loop->num_active == 0)
            return 0;
        const int64_t began_ns = now_ns();
        const int error = loop->step(loop->decoder, &loop->batch);
        if (error != 0)
            return error;
        loop->batch.num_copies = 0;
        loop->last_step_ns = now_ns() - began_ns;
        loop->step_ns += loop->last_step_ns;
        loop->steps_of[loop->num_active]++;
        loop->num_steps++;
        watch(loop); /* before anybody is answered, so that nobody rings */
        const int all_go_on = take_results(loop);
        if (all_go_on && !is_stopped(loop))
            wait_for_calls(loop);
        unwatch(loop);
        if (!all_go_on || is_stopped(loop))
            return 0;
    }
}

void sym_run_stop(sym_run *loop) { __atomic_store_n(&loop->stop, 1, __ATOMIC_SEQ_CST); }

int sym_run_inject(sym_run *loop, int32_t index, const sym_hot_call *call, int32_t position) {
    pthread_mutex_lock(&loop->lock);
    sym_member *member = &loop->members[index];
    const int continues = position < 0 || position == member->position;
    const int waits = member->state == SYM_WAITING && continues && !is_stopped(loop);
    if (waits)
        continue_with(member, call);
    pthread_mutex_unlock(&loop->lock);
    return waits;
}

int64_t sym_run_progress(const sym_run *loop) { return atomic_load(&loop->progress); }

int64_t sym_run_num_taken(const sym_run *loop) { return atomic_load(&loop->num_taken); }

int64_t sym_run_num_steps(const sym_run *loop) { return loop->num_steps; }

int32_t sym_member_num_done(const sym_member *member) { return __atomic_load_n(&member->num_done, __ATOMIC_ACQUIRE); }

int64_t sym_run_step_ns(const sym_run *loop) { return loop->step_ns; }

int64_t sym_run_last_step_ns(const sym_run *loop) { return loop->last_step_ns; }

int64_t sym_run_steps_of(const sym_run *loop, int32_t num_calls) { return loop->steps_of[num_calls]; }
