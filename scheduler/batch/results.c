/* What comes of a step: entries count, programs are answered, rows are reduced or drawn from (see generation.c), and each
 * member goes on or ends.
 *
 * Programs are answered first: they think while tokens of generations are drawn. Draws and reductions are the work of all
 * threads of the decoder, or of the run's crew where it has none to lend. They hold no lock: nobody else touches what is in
 * a step. */
#include "loop_state.h"

#include <string.h>

static int is_complete(const sym_member *member) { return member->num_computed == member->num_tokens; }

/* Its file goes on: the scheduler gives it more room before the last is used up. */
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

/* ---- programs */

/* A program's call is computed: it gets its row, and its next call is waited for. */
static void answer(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    if (member->leave == SYM_LEAVE_NOW) {
        sym_end_member(loop, index, SYM_END_ASKED);
        return;
    }
    sym_count_entries(loop, index, member->num_tokens, now_ns);
    member->num_tokens = member->num_computed = 0;
    member->decode.num_calls++;
    sym_over(loop, member, 1, now_ns);
    if (loop->plan.hot->answer(member->server, member->call_id, member->decode.slot, entries(member)) != 0)
        sym_end_member(loop, index, SYM_END_UNSENT);
    else if (member->leave == SYM_LEAVE_ANSWERED)
        sym_end_member(loop, index, SYM_END_ASKED);
    else
        member->state = SYM_WAITING;
    member->decode.answered_ns = now_ns;
}

void sym_continue_with(sym_loop *loop, int32_t index, const sym_hot_call *call, int64_t earliest_ns, int64_t now_ns) {
    sym_member *member = loop->members[index];
    member->stream = call->stream;
    sym_called(loop, member, earliest_ns, now_ns);
    member->call_id = call->id;
    member->decode.slot = call->slot;
    member->decode.row = call->row;
    member->rows = &member->decode.row;
    member->decode.token = call->token;
    member->since_ns = member->arrived_ns = member->asked_ns = now_ns;
    member->deadline_ns = SYM_NO_DEADLINE;
    member->tokens = &member->decode.token;
    member->num_tokens = 1;
    member->state = SYM_COMPUTING;
    note_room(loop, index, 1);
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
static void fold(const sym_asked *asked) {
    const int32_t columns = asked->mass.columns, width = asked->is_mass_by_page ? pages_for(columns) : columns;
    for (int32_t row = 0; row < asked->mass.layers * asked->mass.kv_heads; row++)
        fold_row(asked->mass.sums + (size_t)row * (size_t)columns, columns, asked->is_mass_by_page,
                 asked->folded + (asked->is_mass_summed ? 0 : (size_t)row * (size_t)width));
}

static void digest(void *context, int32_t n) {
    sym_loop *loop = context;
    const struct seat *seat = &loop->seats[n];
    sym_member *member = seat->member;
    if (seat->is_drawn) {
        sym_draw(loop->plan.hot, member, member->rows != NULL ? member->rows : loop->batch.out + seat->first_out);
        return;
    }
    if (seat->is_folded)
        fold(&member->asked);
    if (!seat->is_reduced || member->error != 0)
        return;
    const int32_t first = member->num_computed - seat->num_wanted - (member->num_tokens - member->num_rows);
    for (int32_t k = 0; k < seat->num_wanted; k++) {
        const int rc =
            loop->plan.hot->reduce(member->asked.reducer, loop->batch.out[seat->first_out + k], (uint64_t)(first + k),
                                   member->asked.answer + (size_t)(first + k) * (size_t)member->asked.answer_row_bytes);
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
        if (seat->is_over)
            continue;
        member->in_step = 0;
        if (seat->is_drawn)
            sym_take_drawn(loop, seat->index, now_ns);
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
        const int is_whole = is_complete(member);
        if (is_whole)
            count_times(loop, member, now_ns);
        seat->is_drawn = 0;
        seat->is_reduced = asked_of(member)->reducer != NULL && seat->num_wanted > 0;
        seat->is_folded = asked_of(member)->folded != NULL && is_whole;
        if (member->kind == SYM_PROGRAM && is_whole)
            answer(loop, seat->index, now_ns);
        else if (member->kind == SYM_GENERATION && is_whole)
            seat->is_drawn = sym_complete_generation(loop, seat->index, now_ns);
        seat->is_over = member->kind != SYM_CALL && is_whole && !seat->is_drawn;
        if (seat->is_over)
            member->in_step = 0;
        num_digests += seat->is_drawn || seat->is_reduced || seat->is_folded;
    }
    pthread_mutex_unlock(&loop->lock);
    if (num_digests > 0)
        digest_all(loop, num_digests);
    pthread_mutex_lock(&loop->lock);
    end_seats(loop, sym_now_ns());
    pthread_mutex_unlock(&loop->lock);
}
