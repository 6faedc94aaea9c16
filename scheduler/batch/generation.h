/* The state of one generate(), in the run and out of it: its sampler and limits, and its tokens. cffi reads this file:
 * declarations only. */
#ifndef SYM_GENERATION_H
#define SYM_GENERATION_H

#include "steps.h"

typedef struct sym_generation {
    /* The caller sets these fields before the call joins the run. The caller owns all memory that these fields point
     * to, and keeps that memory in place as long as the generation exists. */
    sym_sampler *sampler;
    sym_stops *stops; /* stop texts; null: none */
    sym_reducer *reducer; /* computes numbers of each drawn row, to send with the token; null: no numbers are wanted */
    const int32_t *stop_tokens;
    int32_t num_stop_tokens, score_bytes; /* bytes of the numbers of one row; 0 without a reducer */
    int32_t num_to_emit; /* tokens that may still be generated */
    int32_t max_draft, /* most guesses of a draft; 0: there are no drafts */
        min_match; /* number of equal tokens that a guess has to follow */
    int32_t max_sent; /* most tokens in one reply */
    int32_t is_guided; /* the generation has a grammar, so each draw waits for sym_loop_decide */
    /* The loop sets the fields below. A stretch has the generated tokens that are not in the file yet, and behind them
     * the draft's guesses. */
    int32_t *tokens; /* earlier tokens that drafts search, then all generated tokens, then guesses */
    int32_t num_tokens, /* tokens without the guesses */
        room_tokens; /* tokens that the array has room for */
    int32_t num_entries; /* leading tokens of `tokens` that are not pending: in the file, or only searched by drafts */
    int32_t num_guesses; /* guesses behind the tokens */
    int32_t num_draft, /* guesses that the present stretch takes */
        num_accepted, /* guesses of the present stretch that were drawn */
        num_rejected; /* guesses of all stretches that were computed and not drawn */
    int32_t has_begun; /* the tokens that the program gave are part of the file */
    int32_t begin; /* number of the file's entries when `has_begun` was set; part of the first reply */
    int32_t num_drawn_from; /* value of `num_tokens` before the latest draw */
    int32_t is_ahead; /* the latest token was guessed right, so the row behind it is computed already */
    int32_t num_unsent; /* tokens at the end that are not sent yet, because the ring had no room */
    char *scores; /* one answer of `reducer` for each unsent token; the first is at index `first_score` */
    int32_t first_score, room_scores, has_sent; /* the first reply was sent */
    int32_t finish, /* a sym_finish; 0: the generation is not over */
        stopped_by, /* the stop token, or the index of the stop text */
        error; /* errno of a failed draw; 0: none */
    uint64_t draw_index; /* index of the next draw in the sampler's sequence */
    /* The grammar's decision about the next draw: see sym_loop_decide. */
    int32_t is_asked, /* the draw waits for a decision, and `sym_loop_drawn` has not taken it yet */
        is_decided, is_over, num_forced;
    int32_t place, /* the member's place in the run; -1: the generation is not in the run */
        padding;
    const int32_t *forced;
    const void *allowed;
} sym_generation;

/* Make a generation. NULL: there is no memory. */
sym_generation *sym_generation_new(sym_sampler *sampler);
void sym_generation_free(sym_generation *generation);
/* Add tokens for the generation's drafts to search, before the generation first joins the run. Return 0, or -ENOMEM. */
int sym_generation_remember(sym_generation *generation, const int32_t *tokens, int32_t num_tokens);

/* Write at most `most` guesses at the next tokens, and return how many. The guesses are the tokens that followed an
 * earlier occurrence of the last `min_match` tokens. Among the latest occurrences the longest match is taken; of
 * equally long matches, the latest. */
int32_t sym_draft_propose(const int32_t *tokens, int32_t num_tokens, int32_t min_match, int32_t most, int32_t *guesses);

#endif
