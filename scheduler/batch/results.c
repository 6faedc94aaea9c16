/* Results of a step: entries count, programs are answered, rows are reduced or drawn from (see generation.c), and each
 * member goes on or ends.
 *
 * Programs are answered first, so that they think while tokens of generations are drawn. The threads of the decoder
 * draw and reduce. If the decoder lends no threads, the run's crew does so. These threads hold no lock, because no
 * other thread changes a member that is in a step. */
#include "loop_state.h"

#include <string.h>

static int is_complete(const sym_member *member) { return member->num_computed == member->num_tokens; }

/* Count the time from the request for a stretch until now, and the part of it in which no step held the member. */
static void count_times(sym_loop *loop, sym_member *member, int64_t now_ns) {
    const int64_t took_ns = now_ns - member->asked_ns;
    sym_count_time(&loop->counts.stretches, took_ns);
    sym_count_time(&loop->counts.waits, took_ns - (member->compute_ns - member->told_ns));
    member->told_ns = member->compute_ns;
}

/* ---- programs */

/* Answer a program's call that is computed. The member then waits for the next call. */
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
    if (sym_answer_program(loop, member) != 0)
        sym_end_member(loop, index, SYM_END_UNSENT);
    else if (member->leave == SYM_LEAVE_ANSWERED)
        sym_end_member(loop, index, SYM_END_ASKED);
    else
        member->state = SYM_WAITING;
    member->decode.answered_ns = now_ns;
}

/* ---- long work, on all threads */

/* Add one row of attention sums to `to`, entry by entry or page by page. */
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

/* Fold a call's attention sums to the requested answer. */
static void fold(const sym_asked *asked) {
    const int32_t columns = asked->mass.columns, width = asked->is_mass_by_page ? pages_for(columns) : columns;
    for (int32_t row = 0; row < asked->mass.layers * asked->mass.kv_heads; row++)
        fold_row(asked->mass.sums + (size_t)row * (size_t)columns, columns, asked->is_mass_by_page,
                 asked->folded + (asked->is_mass_summed ? 0 : (size_t)row * (size_t)width));
}

/* Reduce the row of a program's call to numbers. Return 0, or an errno. */
static int reduce(const sym_loop *loop, const struct seat *seat, const sym_numbers *numbers) {
    return -loop->plan.hot->reduce(numbers->reducer, loop->batch.out[seat->first_out], 0, numbers->answer);
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
    if (member->kind == SYM_PROGRAM) {
        member->error = reduce(loop, seat, member->decode.numbers);
        return;
    }
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

/* ---- the end of a step */

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

/* Take the members out of the step: handle drawn tokens, reduced rows, and requests to leave that arrived meanwhile.
 * Under the lock. */
static void end_seats(sym_loop *loop, int64_t now_ns) {
    for (int32_t n = 0; n < loop->num_seats; n++) {
        const struct seat *seat = &loop->seats[n];
        sym_member *member = seat->member;
        if (seat->is_over)
            continue;
        member->in_step = 0;
        if (seat->is_drawn)
            sym_take_drawn(loop, seat->index, now_ns);
        else if (seat->is_reduced && member->kind == SYM_PROGRAM)
            answer(loop, seat->index, now_ns);
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
        const int has_numbers = member->kind == SYM_PROGRAM && member->decode.numbers != NULL;
        seat->is_reduced = (asked_of(member)->reducer != NULL || has_numbers) && seat->num_wanted > 0;
        seat->is_folded = asked_of(member)->folded != NULL && is_whole;
        if (member->kind == SYM_PROGRAM && is_whole && !has_numbers)
            answer(loop, seat->index, now_ns);
        else if (member->kind == SYM_GENERATION && is_whole)
            seat->is_drawn = sym_complete_generation(loop, seat->index, now_ns);
        seat->is_over = member->kind != SYM_CALL && is_whole && !seat->is_drawn && !has_numbers;
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
