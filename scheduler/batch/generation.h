/* A generate(): what it draws by, and its tokens so far, in the run and out of it. cffi reads this file: declarations only. */
#ifndef SYM_GENERATION_H
#define SYM_GENERATION_H

#include "steps.h"

typedef struct sym_generation {
    /* Set before its call joins the run. What is pointed to stays the caller's, and where it is, as long as this is. */
    sym_sampler *sampler;
    sym_stops *stops; /* or null */
    sym_reducer *reducer; /* or null; else the numbers of the row that a token was drawn from are sent beside it */
    const int32_t *stop_tokens;
    int32_t num_stop_tokens, score_bytes; /* of one row's numbers; without a reducer 0 */
    int32_t num_to_emit; /* still */
    int32_t max_draft, min_match; /* guesses at a time, and equal tokens that they follow; without a draft 0 */
    int32_t max_sent; /* tokens in a reply */
    int32_t is_guided; /* each draw waits for what is decided: see sym_loop_decide */
    /* Set by the loop. A stretch is the tokens that are no entries yet, and behind them guesses at what is drawn. */
    int32_t *tokens; /* what came before, as far as a draft looks at it; then all that was generated */
    int32_t num_tokens, room_tokens;
    int32_t num_entries; /* of `tokens`, those that are part of the file */
    int32_t num_guesses; /* behind the tokens */
    int32_t num_draft, num_accepted,
        num_rejected; /* of them in the stretch; that were right; wrong, of all stretches */
    int32_t has_begun; /* what was given is part of the file */
    int32_t begin; /* entries of the file then: the first reply says it */
    int32_t num_drawn_from; /* of `tokens`, those before the latest draw */
    int32_t is_ahead; /* the row behind the last token is there already: it was guessed */
    int32_t num_unsent; /* of the tokens generated last: the ring had no room for them */
    char *scores; /* of these, from number `first_score` on */
    int32_t first_score, room_scores, has_sent;
    int32_t finish, stopped_by, error; /* a sym_finish, and its token or the number of its text; an errno */
    uint64_t draw_index; /* of the next draw */
    /* What is decided for the next draw. */
    int32_t is_asked, is_decided, is_over, num_forced;
    int32_t place, padding; /* of its member; -1: none */
    const int32_t *forced;
    const void *allowed;
} sym_generation;

/* Null: no memory. */
sym_generation *sym_generation_new(sym_sampler *sampler);
void sym_generation_free(sym_generation *generation);
/* Before it joins first: tokens that a draft looks through. 0, or -ENOMEM. */
int sym_generation_remember(sym_generation *generation, const int32_t *tokens, int32_t num_tokens);

/* At most `most` tokens that may follow, to `guesses`: what followed the longest, then latest, of the latest places where the
 * last `min_match` tokens came before. */
int32_t sym_draft_propose(const int32_t *tokens, int32_t num_tokens, int32_t min_match, int32_t most, int32_t *guesses);

#endif
