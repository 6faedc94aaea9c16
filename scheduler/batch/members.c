/* Members of the standing run: how their files grow, how members end, and how the scheduler learns of growth and ends.
 * */
#include "loop_state.h"

#include <string.h>
#include <unistd.h>

void sym_ring(int fd) {
    if (fd < 0)
        return; /* the run has not started */
    const uint64_t one = 1;
    const ssize_t written = write(fd, &one, sizeof one);
    (void)written; /* EAGAIN: it is ringing already */
}

void sym_tell(sym_loop *loop) {
    if (loop->is_told || !loop->must_tell || loop->engine.wake_fd < 0)
        return;
    loop->is_told = 1;
    loop->counts.num_wakes++;
    sym_ring(loop->engine.wake_fd);
}

void sym_news_of(sym_loop *loop, int32_t index) {
    sym_member *member = loop->members[index];
    if (!member->has_news) {
        member->has_news = 1;
        loop->news[loop->num_news++] = index; /* the array has room for every place: see sym_free_place */
    }
}

void sym_act_on(sym_loop *loop, int32_t index) {
    sym_news_of(loop, index);
    loop->must_tell = 1;
}

void sym_called(sym_loop *loop, sym_member *member, int64_t earliest_ns, int64_t latest_ns) {
    member->stream =
        sym_streams_called(loop->streams, member->connection, member->stream, member->share, earliest_ns, latest_ns);
    member->is_under_way = 1;
}

void sym_over(sym_loop *loop, sym_member *member, int is_answered, int64_t now_ns) {
    if (member->is_under_way)
        sym_streams_over(loop->streams, member->connection, member->stream, is_answered, now_ns);
    member->is_under_way = 0;
}

void sym_end_member(sym_loop *loop, int32_t index, int32_t why) {
    sym_member *member = loop->members[index];
    sym_over(loop, member, why != SYM_END_ASKED && why != SYM_END_STEP && why != SYM_END_ROOM, sym_now_ns());
    member->state = SYM_ENDED;
    member->end = why;
    sym_act_on(loop, index);
}

void sym_wake_loop(sym_loop *loop) {
    if (loop->is_asleep)
        pthread_cond_signal(&loop->has_work);
}

/* ---- growing files */

/* Ask the scheduler for more room if little room is left after the next `num_coming` entries. */
static void note_room(sym_loop *loop, int32_t index, int32_t num_coming) {
    sym_member *member = loop->members[index];
    if (!member->is_low && member->capacity - entries(member) - num_coming < SYM_LOW_ENTRIES - member->slack) {
        member->is_low = 1;
        sym_act_on(loop, index);
    }
}

void sym_count_entries(sym_loop *loop, int32_t index, int32_t num_entries, int64_t now_ns) {
    sym_member *member = loop->members[index];
    if (member->num_done == 0)
        member->begun_ns = now_ns;
    memcpy(member->log + member->num_done, member->tokens, (size_t)num_entries * sizeof(int32_t));
    if (member->positions == NULL)
        member->position += num_entries;
    else
        member->position = member->positions[num_entries - 1] + 1;
    member->num_done += num_entries;
    member->positions = NULL;
    atomic_fetch_add(&loop->progress, 1);
    sym_news_of(loop, index);
    if (member->kind != SYM_PROGRAM) /* a program may make no further call: see sym_continue_with */
        note_room(loop, index, 0);
}

void sym_continue_with(sym_loop *loop, int32_t index, const sym_hot_call *call, int64_t earliest_ns, int64_t now_ns) {
    sym_member *member = loop->members[index];
    member->stream = call->stream;
    sym_called(loop, member, earliest_ns, now_ns);
    member->call_id = call->id;
    member->decode.slot = call->slot;
    member->decode.row = call->row;
    member->rows = call->row == NULL ? NULL : &member->decode.row;
    member->decode.token = call->token;
    member->since_ns = member->arrived_ns = member->asked_ns = now_ns;
    member->deadline_ns = SYM_NO_DEADLINE;
    member->tokens = &member->decode.token;
    member->num_tokens = 1;
    member->state = SYM_COMPUTING;
    note_room(loop, index, 1);
}

/* ---- news for the scheduler */

static int is_rung(const sym_member *member) { return member->kind == SYM_PROGRAM && member->decode.is_rung; }

/* Return whether the member needs the scheduler. */
static int is_urgent(const sym_member *member) {
    return member->state == SYM_ENDED || is_rung(member) || (member->is_low && !member->was_told_low);
}

static sym_news news_of(const sym_member *member, int32_t index) {
    const sym_decode nothing = {0}, *decode = member->kind == SYM_PROGRAM ? &member->decode : &nothing;
    return (sym_news){.index = index,
                      .state = member->state,
                      .num_done = member->num_done,
                      .is_low = member->is_low && !member->was_told_low,
                      .is_rung = is_rung(member),
                      .has_ended = member->state == SYM_ENDED && !member->in_step,
                      .answered_ns = member->state == SYM_WAITING ? decode->answered_ns : 0,
                      .num_entries = entries(member),
                      .num_calls = decode->num_calls,
                      .compute_ns = member->compute_ns,
                      .queue_ns = member->queue_ns,
                      .num_steps = member->num_steps,
                      .num_rows_computed = member->num_rows_computed};
}

void sym_loop_look(sym_loop *loop, int32_t index, sym_news *news) {
    pthread_mutex_lock(&loop->lock);
    *news = news_of(loop->members[index], index);
    pthread_mutex_unlock(&loop->lock);
}

int32_t sym_loop_news(sym_loop *loop, sym_news *news, int32_t max, int all) {
    int32_t n = 0, num_kept = 0, num_missed = 0;
    pthread_mutex_lock(&loop->lock);
    loop->is_told = loop->must_tell = 0;
    for (int32_t at = 0; at < loop->num_news; at++) {
        const int32_t index = loop->news[at];
        sym_member *member = loop->members[index];
        const int is_wanted = all || is_urgent(member), is_looked_at = member->in_step && member->state == SYM_ENDED;
        if (n == max || !is_wanted || is_looked_at) {
            loop->news[num_kept++] = index;
            num_missed += is_wanted;
            continue;
        }
        news[n] = news_of(member, index);
        member->has_news = 0;
        if (news[n].is_rung)
            member->decode.is_rung = 0;
        member->was_told_low |= news[n++].is_low;
    }
    loop->num_news = num_kept;
    loop->must_tell = num_missed > 0;
    if (n == max) /* all other unread news is about members in the step: the end of the step tells it */
        sym_tell(loop);
    pthread_mutex_unlock(&loop->lock);
    return n;
}

void *sym_loop_take_rung(sym_loop *loop) {
    void *found = NULL;
    pthread_mutex_lock(&loop->lock);
    for (int32_t at = 0; at < loop->num_news && !found; at++) {
        sym_member *member = loop->members[loop->news[at]];
        if (is_rung(member) && (found = loop->plan.hot->served_by(member->server)))
            member->decode.is_rung = 0;
    }
    pthread_mutex_unlock(&loop->lock);
    return found;
}

int sym_loop_is_quiet(sym_loop *loop) {
    int is_quiet = 1;
    pthread_mutex_lock(&loop->lock);
    for (int32_t at = 0; at < loop->num_news && is_quiet; at++)
        is_quiet = !is_urgent(loop->members[loop->news[at]]);
    if (is_quiet)
        loop->is_told = loop->must_tell = 0;
    pthread_mutex_unlock(&loop->lock);
    return is_quiet;
}

int32_t sym_loop_num_places(const sym_loop *loop) { return loop->num_places; }

int64_t sym_loop_progress(const sym_loop *loop) { return atomic_load(&loop->progress); }

void sym_loop_expect(sym_loop *loop, int32_t more) {
    int32_t before = loop->num_expected, after;
    do
        after = before + more < 0 ? 0 : before + more; /* the number of expected calls stays at 0 or above */
    while (!atomic_compare_exchange_weak(&loop->num_expected, &before, after));
}
