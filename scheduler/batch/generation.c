/* Generations in the run: C draws and sends their tokens, and begins their next stretches.
 *
 * After each stretch a token is drawn from its last row. With a draft, tokens are drawn from more rows of the stretch,
 * as long as they equal the guesses. An entry counts only after a token was drawn from its row, so the last generated
 * token is not an entry.
 *
 * A *guided* generation has a grammar, which decides what may be drawn: see sym_loop_decide. The thread `aside`
 * computes that decision while the step of the last token runs. Until then the entry of that token does not count,
 * because the decision may be that the text ended with the token.
 *
 * Tokens that find no room in the ring are sent with later tokens. At the end, the scheduler sends the tokens that are
 * left. */
#include "loop_state.h"

#include "abi.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

sym_generation *sym_generation_new(sym_sampler *sampler) {
    sym_generation *generation = calloc(1, sizeof *generation);
    if (generation != NULL)
        *generation = (sym_generation){.sampler = sampler, .place = -1};
    return generation;
}

void sym_generation_free(sym_generation *generation) {
    free(generation->tokens);
    free(generation->scores);
    free(generation);
}

int sym_generation_remember(sym_generation *generation, const int32_t *tokens, int32_t num_tokens) {
    if (sym_make_room(&generation->tokens, &generation->room_tokens, num_tokens, sizeof *tokens) != 0)
        return -ENOMEM;
    memcpy(generation->tokens, tokens, (size_t)num_tokens * sizeof *tokens);
    generation->num_tokens = generation->num_entries = num_tokens;
    return 0;
}

static void fail(sym_generation *g, int64_t rc) { g->error = (int32_t)-rc; }

static int is_over(const sym_generation *g) { return g->finish != 0 || g->error != 0; }

static int is_stop_token(const sym_generation *g, int32_t token) {
    for (int32_t i = 0; i < g->num_stop_tokens; i++)
        if (g->stop_tokens[i] == token)
            return 1;
    return 0;
}

static int32_t at_most(int32_t a, int32_t b) { return a < b ? a : b; }

/* Return how many rows the limit of the member's program still allows. */
static int32_t num_rows_left(const sym_member *member) {
    return member->max_rows == 0 ? INT32_MAX : member->max_rows - (int32_t)member->num_rows_computed;
}

/* Grow the array of tokens. The array may move, so the member's stretch gets the new address. */
static int make_room(sym_member *member, int32_t more) {
    sym_generation *g = member->generation;
    if (sym_make_room(&g->tokens, &g->room_tokens, g->num_tokens + more, sizeof *g->tokens) != 0) {
        fail(g, -ENOMEM);
        return -1;
    }
    if (g->has_begun)
        member->tokens = g->tokens + g->num_entries;
    return 0;
}

/* ---- generated tokens */

/* Append the reducer's numbers, which are sent with a token. `row` is null for a token that a grammar forced. */
static int score(const sym_hot_functions *hot, sym_generation *g, const float *row, int32_t token) {
    if (g->reducer == NULL)
        return 0;
    const size_t bytes = (size_t)g->score_bytes;
    if (g->first_score > g->num_unsent) { /* more than half of the numbers are sent: move the rest to the front */
        memcpy(g->scores, g->scores + (size_t)g->first_score * bytes, (size_t)g->num_unsent * bytes);
        g->first_score = 0;
    }
    const int32_t end = g->first_score + g->num_unsent;
    if (sym_make_room(&g->scores, &g->room_scores, end + 1, bytes) != 0)
        return -ENOMEM;
    char *numbers = g->scores + (size_t)end * bytes;
    struct sym_reduced head = {.entropy = -1}; /* marks a token without a row: entropies are not below 0 */
    if (row == NULL) {
        memset(numbers, 0, bytes);
    } else {
        const int rc = hot->reduce(g->reducer, row, 0, numbers);
        if (rc != 0)
            return rc;
        memcpy(&head, numbers, sizeof head);
        head.sampled_logprob = (float)((double)row[token] - (double)head.logsumexp);
    }
    head.sampled = token;
    memcpy(numbers, &head, sizeof head);
    return 0;
}

/* Append a generated token. `row`: the row that it was drawn from; null: a grammar forced it. */
static void generate(const sym_hot_functions *hot, sym_member *member, const float *row, int32_t token) {
    sym_generation *g = member->generation;
    int rc = make_room(member, 1) == 0 ? score(hot, g, row, token) : -ENOMEM;
    if (rc == 0)
        rc = hot->note(g->sampler, token);
    if (rc < 0) {
        fail(g, rc);
        return;
    }
    g->tokens[g->num_tokens++] = token;
    g->num_unsent++;
    g->num_to_emit--;
    const int stop_text = g->stops == NULL ? -1 : hot->stops_add(g->stops, token);
    if (stop_text >= 0) {
        g->finish = SYM_FINISH_STOP_TEXT;
        g->stopped_by = stop_text;
    } else if (g->num_to_emit == 0) {
        g->finish = SYM_FINISH_LENGTH;
    }
}

/* Send the unsent tokens that the ring has room for. The first token has a reply of its own, which tells the file's
 * length before this token. */
static void send(sym_loop *loop, sym_member *member) {
    sym_generation *g = member->generation;
    while (g->num_unsent > 0) {
        const int32_t most = g->has_sent ? g->max_sent : 1, count = g->num_unsent < most ? g->num_unsent : most;
        const size_t bytes = (size_t)g->score_bytes;
        if (loop->plan.hot->push(member->server, member->call_id, SYM_MORE, count,
                                 g->has_sent ? entries(member) : g->begin, 0,
                                 (const char *)(g->tokens + g->num_tokens - g->num_unsent),
                                 (uint32_t)((size_t)count * sizeof *g->tokens),
                                 g->scores + (size_t)g->first_score * bytes, (uint32_t)((size_t)count * bytes)) != 0)
            return;
        g->num_unsent -= count;
        g->has_sent = 1;
        g->first_score += count;
    }
    g->first_score = 0;
}

/* Count the first `num_tokens` tokens of a generation as entries of the file. */
static void count_tokens(sym_loop *loop, int32_t index, int32_t num_tokens, int64_t now_ns) {
    sym_member *member = loop->members[index];
    sym_generation *g = member->generation;
    if (!g->has_begun) {
        sym_count_entries(loop, index, member->num_tokens, now_ns);
        g->has_begun = 1;
        g->begin = entries(member);
    }
    if (num_tokens > g->num_entries)
        sym_count_entries(loop, index, num_tokens - g->num_entries, now_ns);
    g->num_entries = num_tokens;
    member->tokens = g->tokens + num_tokens;
}

/* ---- stretches */

/* Write the draft's guesses behind the tokens. */
static void propose(sym_member *member) {
    sym_generation *g = member->generation;
    g->num_guesses = 0;
    if (g->max_draft > 0 && make_room(member, g->max_draft) == 0)
        g->num_guesses =
            sym_draft_propose(g->tokens, g->num_tokens, g->min_match, g->max_draft, g->tokens + g->num_tokens);
}

/* Begin the next stretch: the tokens that are not entries yet, and guesses behind them. */
static void begin_stretch(sym_member *member) {
    sym_generation *g = member->generation;
    const int32_t num_pending = g->num_tokens - g->num_entries;
    const int32_t room = at_most(member->capacity - entries(member), num_rows_left(member)) - num_pending;
    const int32_t most = at_most(at_most(g->num_to_emit - 1, room), g->num_guesses);
    g->num_draft = most > 0 ? most : 0;
    member->tokens = g->tokens + g->num_entries;
    member->num_tokens = num_pending + g->num_draft;
    member->num_computed = 0;
    member->num_rows = g->num_draft + 1;
}

void sym_end_draft(sym_generation *g) {
    g->num_rejected += g->num_draft - g->num_accepted;
    g->num_draft = g->num_accepted = 0;
}

void sym_trim_draft(sym_member *member, int32_t most) {
    sym_generation *g = member->generation;
    if (g->num_draft <= most)
        return;
    member->num_tokens -= g->num_draft - most;
    member->num_rows = most + 1;
    g->num_draft = most;
}

/* Send tokens and begin the next stretch, or end the member: it is over, lacks room, or was asked to leave. */
static void go_on(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    sym_generation *g = member->generation;
    sym_end_draft(g);
    send(loop, member);
    if (!is_over(g))
        begin_stretch(member);
    member->since_ns = member->asked_ns = now_ns;
    if (is_over(g))
        sym_end_member(loop, index, SYM_END_DONE);
    else if (entries(member) + member->num_tokens > member->capacity || member->num_tokens > num_rows_left(member))
        sym_end_member(loop, index, SYM_END_ROOM);
    else if (member->leave != SYM_STAY)
        sym_end_member(loop, index, SYM_END_ASKED);
}

/* Append the decision's forced tokens, or end the text. 0: the decision has no forced tokens and no end, so the next
 * token is drawn. */
static int take_forced(sym_loop *loop, sym_member *member) {
    sym_generation *g = member->generation;
    const int32_t num_forced = g->num_forced;
    g->num_forced = 0;
    for (int32_t i = 0; i < num_forced && !is_over(g); i++)
        generate(loop->plan.hot, member, NULL, g->forced[i]);
    if (!is_over(g) && g->is_over)
        g->finish = SYM_FINISH_GRAMMAR;
    if (num_forced > 0)
        propose(member);
    return num_forced > 0 || is_over(g);
}

int sym_complete_generation(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    sym_generation *g = member->generation;
    if (!g->is_guided)
        return 1;
    if (!g->is_decided) {
        if (member->leave == SYM_LEAVE_NOW)
            sym_end_member(loop, index, SYM_END_ASKED);
        else
            member->state = SYM_UNDECIDED;
        return 0;
    }
    const int32_t num_computed = g->num_tokens;
    count_tokens(loop, index, g->num_entries, now_ns); /* the program's own tokens count, whatever is decided */
    if (take_forced(loop, member) == 0)
        return 1;
    if (!is_over(g))
        count_tokens(loop, index, num_computed, now_ns);
    go_on(loop, index, now_ns);
    return 0;
}

void sym_draw(const sym_hot_functions *hot, sym_member *member, float *const *rows) {
    sym_generation *g = member->generation;
    do {
        const float *row = rows[g->num_accepted];
        g->num_drawn_from = g->num_tokens;
        g->is_ahead = 0;
        const int64_t drawn = hot->draw(g->sampler, row, g->is_guided ? g->allowed : NULL, g->draw_index);
        if (drawn < 0) {
            fail(g, drawn);
            return;
        }
        g->draw_index++;
        g->is_decided = 0;
        if (is_stop_token(g, (int32_t)drawn)) {
            g->finish = SYM_FINISH_STOP_TOKEN;
            g->stopped_by = (int32_t)drawn;
            return;
        }
        g->is_ahead = g->num_accepted < g->num_draft && g->tokens[g->num_tokens] == drawn;
        generate(hot, member, row, (int32_t)drawn);
        if (is_over(g))
            return;
        g->num_accepted += g->is_ahead;
    } while (g->is_ahead && !g->is_guided);
    if (!g->is_ahead)
        propose(member);
}

void sym_take_drawn(sym_loop *loop, int32_t index, int64_t now_ns) {
    sym_member *member = loop->members[index];
    sym_generation *g = member->generation;
    count_tokens(loop, index, g->num_drawn_from, now_ns);
    g->is_asked = g->is_guided && !is_over(g);
    if (!g->is_ahead || is_over(g) || member->leave != SYM_STAY) {
        go_on(loop, index, now_ns);
        return;
    }
    send(loop, member);
    member->state = SYM_UNDECIDED;
}

/* ---- decisions of grammars */

static int is_asked(const sym_member *member) {
    return member->kind == SYM_GENERATION && member->state != SYM_GONE && member->state != SYM_ENDED &&
           member->generation->is_asked;
}

void sym_call_guides(sym_loop *loop) {
    for (int32_t i = 0; i < loop->num_places; i++)
        if (is_asked(loop->members[i])) { /* false for a member that has ended */
            sym_ring(loop->engine.guide_fd);
            return;
        }
}

void sym_join_generation(sym_loop *loop, int32_t index) {
    sym_member *member = loop->members[index];
    sym_generation *g = member->generation;
    g->place = index;
    if (g->has_begun) {
        propose(member);
        begin_stretch(member);
    }
    if (is_over(g))
        sym_end_member(loop, index, SYM_END_DONE);
    g->is_asked = g->is_guided && !g->is_decided;
    if (is_asked(member))
        sym_ring(loop->engine.guide_fd);
}

int32_t sym_loop_drawn(sym_loop *loop, int64_t *drawn, int32_t max) {
    int32_t n = 0;
    pthread_mutex_lock(&loop->lock);
    for (int32_t i = 0; i < loop->num_places && n < max; i++) {
        if (!is_asked(loop->members[i]))
            continue;
        sym_generation *g = loop->members[i]->generation;
        g->is_asked = 0;
        drawn[2 * n] = loop->members[i]->number;
        drawn[2 * n + 1] = g->draw_index == 0 ? -1 : g->tokens[g->num_tokens - 1];
        n++;
    }
    pthread_mutex_unlock(&loop->lock);
    return n;
}

/* Draw from a row that has waited for the decision. The thread `aside` draws here, while the loop goes on. */
static void draw_now(sym_loop *loop, sym_member *member, int32_t index) {
    member->state = SYM_COMPUTING;
    if (sym_complete_generation(loop, index, sym_now_ns())) {
        member->in_step = 1; /* keeps other threads from the member while the lock is free */
        pthread_mutex_unlock(&loop->lock);
        sym_draw(loop->plan.hot, member, member->rows);
        pthread_mutex_lock(&loop->lock);
        member->in_step = 0;
        sym_take_drawn(loop, index, sym_now_ns());
    }
    sym_tell(loop);
    sym_wake_loop(loop);
}

/* Return whether the member has a stretch of generated tokens that no step has begun. */
static int has_stretch_ahead(const sym_member *member) {
    return member->state == SYM_COMPUTING && !member->in_step && member->num_computed == 0 &&
           member->generation->has_begun;
}

/* Apply a decision to a stretch that no step has begun: forced tokens join it, and a text that is over needs no
 * step. */
static void begin_anew(sym_loop *loop, sym_member *member, int32_t index) {
    const int64_t since_ns = member->since_ns;
    member->generation->num_draft = 0;
    if (take_forced(loop, member))
        go_on(loop, index, since_ns);
    else
        begin_stretch(member);
    sym_tell(loop);
    sym_wake_loop(loop);
}

void sym_loop_decide(sym_loop *loop, sym_generation *g, const int32_t *forced, int32_t num_forced, const void *allowed,
                     int is_over) {
    pthread_mutex_lock(&loop->lock);
    g->forced = forced;
    g->num_forced = num_forced;
    g->allowed = allowed;
    g->is_over = is_over;
    g->is_decided = 1;
    g->is_asked = 0; /* the call may have left the run, come back and asked again */
    sym_member *member = g->place < 0 ? NULL : loop->members[g->place];
    if (member != NULL && member->state == SYM_UNDECIDED)
        draw_now(loop, member, g->place);
    else if (member != NULL && has_stretch_ahead(member))
        begin_anew(loop, member, g->place);
    pthread_mutex_unlock(&loop->lock);
}

int sym_waits_for_decisions(const sym_loop *loop) {
    for (int32_t i = 0; i < loop->num_places; i++) {
        const sym_member *member = loop->members[i];
        if (member->kind == SYM_GENERATION && has_stretch_ahead(member) && member->generation->max_draft > 0 &&
            member->generation->is_guided && !member->generation->is_decided)
            return 1;
    }
    return 0;
}
