/* What comes of a step: entries count, programs are answered, tokens are drawn and sent, and each member goes on or ends.
 *
 * Programs are answered first: they think while tokens of generations are drawn. Draws and reductions are the work of all
 * threads of the decoder, or of the run's crew where it has none to lend. They hold no lock: nobody else touches what is in
 * a step.
 *
 * A guided generation draws from what is allowed, and that is decided elsewhere, while the step of its last token runs: see
 * sym_loop_decide. Until then that token's entry does not count: the decision may be that the text was over with it.
 */
#include "loop_state.h"

#include "abi.h"

#include <errno.h>
#include <string.h>

#define NOTHING_DRAWN INT64_MIN

static int is_complete(const sym_member *member) { return member->num_computed == member->num_tokens; }

/* Its file goes on: the scheduler gives it more room before the last is used up. */
static void note_room(sym_loop *loop, int32_t index, int32_t num_coming) {
    sym_member *member = loop->members[index];
    if (!member->is_low && member->capacity - entries(member) - num_coming < SYM_LOW_ENTRIES) {
        member->is_low = 1;
        sym_act_on(loop, index);
    }
}

/* The entries of its stretch are part of the file from now on. */
static void count_stretch(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    if (member->num_done == 0)
        member->begun_ns = now_ns;
    memcpy(member->log + member->num_done, member->tokens, (size_t)member->num_tokens * sizeof(int32_t));
    if (member->positions == NULL)
        member->position += member->num_tokens;
    else
        member->position = member->positions[member->num_tokens - 1] + 1;
    member->num_done += member->num_tokens;
    member->num_tokens = member->num_computed = 0;
    member->positions = NULL;
    atomic_fetch_add(&loop->progress, 1);
    sym_news_of(loop, index);
    if (member->kind != SYM_PROGRAM) /* which may have no other call: see sym_continue_with */
        note_room(loop, index, 0);
}

/* It is computed: how long that took since it was asked for, and how much of it nobody computed it. */
static void count_times(sym_loop *loop, sym_member *member, int64_t now_ns) {
    const int64_t took_ns = now_ns - member->asked_ns;
    sym_count_time(&loop->counts.stretches, took_ns);
    sym_count_time(&loop->counts.waits, took_ns - (member->compute_ns - member->told_ns));
    member->told_ns = member->compute_ns;
}

static void begin_stretch(sym_member *member, const int32_t *tokens, int32_t num_tokens) {
    member->tokens = tokens;
    member->num_tokens = num_tokens;
    member->num_computed = 0;
}

/* ---- programs */

/* A program's call is computed: it gets its row, and its next call is waited for. */
static void answer(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    if (member->leave == SYM_LEAVE_NOW) {
        sym_end_member(loop, index, SYM_END_ASKED);
        return;
    }
    count_stretch(loop, index, now_ns);
    member->num_calls++;
    sym_over(loop, member, 1, now_ns);
    if (loop->plan.hot->answer(member->server, member->call_id, member->slot, entries(member)) != 0)
        sym_end_member(loop, index, SYM_END_UNSENT);
    else if (member->leave == SYM_LEAVE_ANSWERED)
        sym_end_member(loop, index, SYM_END_ASKED);
    else
        member->state = SYM_WAITING;
    member->answered_ns = now_ns;
}

void sym_continue_with(sym_loop *loop, int32_t index, const sym_hot_call *call, int64_t earliest_ns, int64_t now_ns) {
    sym_member *member = loop->members[index];
    member->stream = call->stream;
    sym_called(loop, member, earliest_ns, now_ns);
    member->call_id = call->id;
    member->slot = call->slot;
    member->row = call->row;
    member->rows = &member->row;
    member->token = call->token;
    member->since_ns = member->arrived_ns = member->asked_ns = now_ns;
    member->deadline_ns = SYM_NO_DEADLINE;
    begin_stretch(member, &member->token, 1);
    member->state = SYM_COMPUTING;
    note_room(loop, index, 1);
}

/* ---- generations */

static void fail(sym_loop *loop, int32_t index, int64_t rc) {
    loop->members[index]->error = (int32_t)-rc;
    sym_end_member(loop, index, SYM_END_DRAW);
}

static int is_stop_token(const sym_member *member, int32_t token) {
    for (int32_t i = 0; i < member->num_stop_tokens; i++)
        if (member->stop_tokens[i] == token)
            return 1;
    return 0;
}

/* What is sent of a token: itself, and the numbers of its row where they were asked for. Those of a token that was drawn are
 * there already; one that a grammar forced has no row. */
static const char *token_payload(sym_member *member, const int32_t *token, int is_drawn, size_t *bytes) {
    *bytes = sizeof *token;
    if (member->reducer == NULL)
        return (const char *)token;
    const size_t row_bytes = (size_t)member->answer_row_bytes;
    struct sym_reduced *head = (struct sym_reduced *)(void *)(member->answer + sizeof *token);
    if (!is_drawn) {
        memset(head, 0, row_bytes);
        *head = (struct sym_reduced){.sampled = *token, .entropy = -1}; /* no row has such an entropy */
    }
    memcpy(member->answer, token, sizeof *token);
    *bytes += row_bytes;
    return member->answer;
}

/* A token is generated: noted, sent, and looked at. 0: it was the last. */
static int emit(sym_loop *loop, int32_t index, int32_t token, int is_drawn) {
    sym_member *member = loop->members[index];
    const sym_hot_functions *hot = loop->plan.hot;
    size_t bytes;
    const char *payload = token_payload(member, &token, is_drawn, &bytes);
    const int rc = hot->note(member->sampler, token);
    if (rc < 0) {
        fail(loop, index, rc);
        return 0;
    }
    member->num_to_emit--;
    if (member->num_unsent > 0 || hot->push(member->server, member->call_id, 0, SYM_MORE, 1, entries(member), 0, 0,
                                            payload, (uint32_t)bytes) != 0)
        member->num_unsent++;
    if (member->stops != NULL)
        member->stop_text = hot->stops_add(member->stops, token);
    if (member->stop_text >= 0)
        sym_end_member(loop, index, SYM_END_STOP_TEXT);
    else if (member->num_to_emit == 0)
        sym_end_member(loop, index, SYM_END_LENGTH);
    return member->state != SYM_ENDED;
}

/* It has its next stretch, if that finds room and what was drawn could be sent. */
static void go_on(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    member->state = SYM_COMPUTING;
    member->since_ns = member->asked_ns = now_ns;
    if (member->num_unsent > 0)
        sym_end_member(loop, index, SYM_END_UNSENT);
    else if (entries(member) + member->num_tokens > member->capacity)
        sym_end_member(loop, index, SYM_END_ROOM);
    else if (member->leave == SYM_LEAVE_ANSWERED)
        sym_end_member(loop, index, SYM_END_ASKED);
}

/* What was decided for the next draw comes true. 1: a token is to be drawn. */
static int take_decision(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    const int32_t num_forced = member->num_forced;
    while (member->num_forced_taken < num_forced) {
        const int goes_on = emit(loop, index, member->forced[member->num_forced_taken], 0);
        member->num_forced_taken += member->end != SYM_END_DRAW; /* what could not be noted is not generated */
        if (!goes_on)
            return 0;
    }
    if (member->is_over) {
        sym_end_member(loop, index, SYM_END_GRAMMAR);
        return 0;
    }
    count_stretch(loop, index, now_ns);
    if (num_forced == 0)
        return 1;
    member->num_forced = 0; /* what is allowed is for the draw behind them */
    begin_stretch(member, member->forced, num_forced);
    go_on(loop, index, now_ns);
    return 0;
}

/* Its stretch is computed. 1: a token is to be drawn from the last row. */
static int complete_generation(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    if (member->is_guided && !member->is_decided) {
        if (member->leave == SYM_LEAVE_NOW)
            sym_end_member(loop, index, SYM_END_ASKED);
        else
            member->state = SYM_UNDECIDED;
        return 0;
    }
    if (!member->is_guided)
        count_stretch(loop, index, now_ns);
    else
        return take_decision(loop, index, now_ns);
    return 1;
}

/* What was drawn is sent, and computed in the next step; or it is the end. */
static void take_drawn(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    const int64_t drawn = member->drawn;
    if (drawn < 0) {
        fail(loop, index, drawn);
        return;
    }
    member->token = (int32_t)drawn;
    member->draw_index++;
    member->is_decided = member->num_forced_taken = 0;
    if (is_stop_token(member, member->token)) {
        sym_end_member(loop, index, SYM_END_STOP_TOKEN);
        return;
    }
    begin_stretch(member, &member->token, 1);
    if (!emit(loop, index, member->token, 1))
        return;
    member->was_drawn = member->is_guided;
    go_on(loop, index, now_ns);
}

/* ---- all that takes long, on all threads */

/* One row of a mass, by its entries or by its pages, added to what there is. */
static void fold_row(const float *sums, int32_t columns, int is_by_page, float *to) {
    for (int32_t c = 0; c < columns && !is_by_page; c++)
        to[c] += sums[c];
    for (int32_t first = 0; first < columns && is_by_page; first += SYM_PAGE_ENTRIES) {
        const int32_t count = columns - first < SYM_PAGE_ENTRIES ? columns - first : SYM_PAGE_ENTRIES;
        float lanes[8] = {0};
        for (int32_t i = 0; i < count; i++)
            lanes[i % 8] += sums[first + i];
        to[first / SYM_PAGE_ENTRIES] +=
            ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    }
}

/* What is answered of all that a call's rows attend to. */
static void fold(const sym_member *member) {
    const int32_t columns = member->mass.columns, width = member->is_mass_by_page ? pages_for(columns) : columns;
    for (int32_t row = 0; row < member->mass.layers * member->mass.kv_heads; row++)
        fold_row(member->mass.sums + (size_t)row * (size_t)columns, columns, member->is_mass_by_page,
                 member->folded + (member->is_mass_summed ? 0 : (size_t)row * (size_t)width));
}

/* Draws, and where it was asked for takes the numbers of the row that was drawn from. */
static int64_t draw(const sym_hot_functions *hot, sym_member *member) {
    const int64_t drawn =
        hot->draw(member->sampler, member->row, member->is_guided ? member->allowed : NULL, member->draw_index);
    if (drawn < 0 || member->reducer == NULL)
        return drawn;
    char *answer = member->answer + sizeof(int32_t);
    const int rc = hot->reduce(member->reducer, member->row, 0, answer);
    if (rc != 0)
        return rc;
    struct sym_reduced *head = (struct sym_reduced *)(void *)answer;
    head->sampled = (int32_t)drawn;
    head->sampled_logprob = (float)((double)member->row[drawn] - (double)head->logsumexp);
    return drawn;
}

static void digest(void *context, int32_t n) {
    sym_loop *loop = context;
    const struct seat *seat = &loop->seats[n];
    sym_member *member = seat->member;
    if (seat->is_drawn) {
        member->drawn = draw(loop->plan.hot, member);
        return;
    }
    if (seat->is_folded)
        fold(member);
    if (!seat->is_reduced || member->error != 0)
        return;
    const int32_t first = member->num_rows == 1 ? 0 : member->num_computed - seat->num_now;
    for (int32_t k = 0; k < seat->num_wanted; k++) {
        const int rc =
            loop->plan.hot->reduce(member->reducer, loop->batch.out[seat->first_out + k], (uint64_t)(first + k),
                                   member->answer + (size_t)(first + k) * (size_t)member->answer_row_bytes);
        if (rc != 0) {
            member->error = -rc;
            return;
        }
    }
}

static void digest_all(sym_loop *loop, int32_t num_digests) {
    if (loop->engine.parallel != NULL && num_digests > 1) {
        loop->engine.parallel(loop->engine.crew, digest, loop, loop->num_seats);
        return;
    }
    for (int32_t n = 0; n < loop->num_seats; n++)
        digest(loop, n);
}

/* ---- a step is over */

static void fail_step(sym_loop *loop, int error) {
    pthread_mutex_lock(&loop->lock);
    for (int32_t n = 0; n < loop->num_seats; n++) {
        sym_member *member = loop->seats[n].member;
        member->in_step = 0;
        member->error = error;
        sym_end_member(loop, loop->seats[n].index, SYM_END_STEP);
    }
    loop->num_seats = 0;
    pthread_mutex_unlock(&loop->lock);
}

/* Under the lock: what was drawn, and who has asked for a member meanwhile. */
static void end_seats(sym_loop *loop, int64_t now_ns) {
    for (int32_t n = 0; n < loop->num_seats; n++) {
        const struct seat *seat = &loop->seats[n];
        sym_member *member = seat->member;
        if (!member->in_step)
            continue;
        member->in_step = 0;
        if (seat->is_drawn)
            take_drawn(loop, seat->index, now_ns);
        else if (member->state == SYM_COMPUTING && member->kind == SYM_CALL && is_complete(member))
            sym_end_member(loop, seat->index, SYM_END_DONE);
        if (member->state != SYM_ENDED && member->leave == SYM_LEAVE_NOW)
            sym_end_member(loop, seat->index, SYM_END_ASKED);
    }
    sym_call_guides(loop);
    loop->num_seats = 0;
}

void sym_take_results(sym_loop *loop, int64_t step_ns, int error) {
    if (error != 0) {
        fail_step(loop, error);
        return;
    }
    int32_t num_digests = 0;
    pthread_mutex_lock(&loop->lock);
    const int64_t now_ns = sym_now_ns();
    for (int32_t n = 0; n < loop->num_seats; n++) {
        struct seat *seat = &loop->seats[n];
        sym_member *member = seat->member;
        member->num_computed += seat->num_now;
        member->num_copies = 0;
        member->compute_ns += step_ns;
        member->stepped_ns = now_ns;
        member->num_steps++;
        member->num_rows_computed += seat->num_now;
        if (is_complete(member))
            count_times(loop, member, now_ns);
        seat->is_drawn = 0;
        seat->is_reduced = member->kind == SYM_CALL && member->reducer != NULL && seat->num_wanted > 0;
        seat->is_folded = member->folded != NULL && is_complete(member);
        if (member->kind == SYM_PROGRAM && is_complete(member)) {
            member->in_step = 0;
            answer(loop, seat->index, now_ns);
        } else if (member->kind == SYM_GENERATION && is_complete(member)) {
            seat->is_drawn = complete_generation(loop, seat->index, now_ns);
        }
        num_digests += seat->is_drawn || seat->is_reduced || seat->is_folded;
    }
    pthread_mutex_unlock(&loop->lock);
    if (num_digests > 0)
        digest_all(loop, num_digests);
    pthread_mutex_lock(&loop->lock);
    end_seats(loop, sym_now_ns());
    pthread_mutex_unlock(&loop->lock);
}

int sym_take_decisions(sym_loop *loop) {
    const int64_t now_ns = sym_now_ns();
    if (sym_make_room(&loop->seats, &loop->room_seats, loop->num_places, sizeof *loop->seats) != 0)
        return 0; /* later */
    loop->num_seats = 0;
    for (int32_t i = 0; i < loop->num_places; i++) {
        sym_member *member = loop->members[i];
        if (member->state != SYM_UNDECIDED || !member->is_decided)
            continue;
        member->state = SYM_COMPUTING;
        member->in_step = take_decision(loop, i, now_ns);
        if (member->in_step)
            loop->seats[loop->num_seats++] = (struct seat){.member = member, .index = i, .is_drawn = 1};
    }
    if (loop->num_seats == 0)
        return 0;
    pthread_mutex_unlock(&loop->lock);
    digest_all(loop, loop->num_seats);
    pthread_mutex_lock(&loop->lock);
    end_seats(loop, now_ns);
    return 1;
}
