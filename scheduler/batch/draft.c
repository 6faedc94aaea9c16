/* Drafts: guesses at the next tokens, taken from earlier tokens. Every guess is checked by a draw.
 *
 * `sym_draft_propose` looks for an earlier occurrence of the last few tokens, and proposes the tokens that followed it.
 * Code, quotations, lists and tables repeat themselves, and each right guess saves a step. A draft never changes the
 * generated text. */
#include "generation.h"

#define MAX_MATCH 16 /* longest match that is compared, in tokens: MAX_MATCH of libsym */
#define NUM_PLACES 4 /* occurrences that are compared, the latest first */
#define MAX_SEARCHED 65536 /* most tokens that a search reads: it takes some 20 us, at worst 0.4 ms */

/* Return how many tokens right before `place` equal the tokens right before `end`. */
static int32_t match(const int32_t *tokens, int32_t place, int32_t end) {
    int32_t length = 0;
    while (length < MAX_MATCH && length < place && tokens[place - 1 - length] == tokens[end - 1 - length])
        length++;
    return length;
}

int32_t sym_draft_propose(const int32_t *tokens, int32_t num_tokens, int32_t min_match, int32_t most,
                          int32_t *guesses) {
    const int32_t first = num_tokens > MAX_SEARCHED ? num_tokens - MAX_SEARCHED : 0;
    int32_t best = -1, best_match = min_match - 1;
    if (most < 1 || num_tokens < 1)
        return 0;
    for (int32_t place = num_tokens - 1, found = 0; place > first && found < NUM_PLACES; place--) {
        if (tokens[place - 1] != tokens[num_tokens - 1])
            continue;
        const int32_t length = match(tokens, place, num_tokens);
        found += length >= min_match;
        if (length > best_match) {
            best = place;
            best_match = length;
        }
    }
    if (best < 0)
        return 0;
    const int32_t period = num_tokens - best; /* a longer guess repeats its first `period` tokens */
    for (int32_t i = 0; i < most; i++)
        guesses[i] = tokens[best + i % period];
    return most;
}
