/* Drafts: guesses at what comes next, from what was there before. A guess is only ever checked, never believed.
 *
 * The tokens so far are searched for the last few of them; what followed there is proposed here. Code, quotations, lists
 * and tables repeat themselves, and each guess that is right saves a step. What the model says is never changed by it. */
#include "generation.h"

#define MAX_MATCH 16 /* equal tokens that are looked at; MAX_MATCH of libsym is the most that may be asked for */
#define NUM_PLACES 4 /* the latest that are compared */
#define MAX_SEARCHED 65536 /* tokens: some 20 us, and 0.4 ms at worst */

/* How many tokens before two places are equal. */
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
    const int32_t period = num_tokens - best; /* a guess that runs into its own beginning goes on repeating itself */
    for (int32_t i = 0; i < most; i++)
        guesses[i] = tokens[best + i % period];
    return most;
}
