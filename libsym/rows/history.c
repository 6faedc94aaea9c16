/* The history of a sampler, the tokens given and generated, and its effect on a row: three penalties and DRY.
 *
 * Penalties depend on how often a token occurs, in the whole history or in a window of the latest tokens. Each token is
 * counted when it is added, and uncounted when it leaves the window. So a draw takes as many steps as there are
 * different tokens.
 *
 * DRY penalises tokens that would continue a repetition. If the latest n tokens occurred before, the token that
 * followed that earlier occurrence loses multiplier * base^(n - allowed_length) of its logit. The Z algorithm runs over
 * the tokens from the latest backwards. For each place it finds the longest repetition that ends there. A draw takes as
 * many steps as the window has tokens, for any input. A separate comparison at each place would take quadratic time if
 * all tokens are equal.
 */
#include "rows_state.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PENALTY 1e30 /* finite, so that the only token that a grammar allows stays possible */

static int has_penalties(const struct history *history) {
    return history->repetition != 1.0f || history->presence != 0.0f || history->frequency != 0.0f;
}

static int has_window(const struct history *history) { return history->window > 0 && has_penalties(history); }

/* ---- counts of tokens */

/* Returns the index of the token in `places`. For a missing token, returns the index where the token belongs. */
static uint32_t place_of(const struct history *history, int32_t token) {
    uint32_t at = (uint32_t)token * 0x9e3779b1u & (history->num_places - 1);
    while (history->places[at] != 0 && history->counted[history->places[at] - 1].token != token)
        at = (at + 1) & (history->num_places - 1);
    return at;
}

/* Doubles the capacity for counted tokens. Returns 0, or -ENOMEM with the counts unchanged. */
static int grow_counted(struct history *history) {
    const uint32_t room = history->room_counted == 0 ? 64 : 2 * history->room_counted;
    struct counted *counted = realloc(history->counted, room * sizeof *counted);
    if (counted == NULL)
        return -ENOMEM;
    history->counted = counted;
    uint32_t *places = calloc(4 * (size_t)room, sizeof *places);
    if (places == NULL)
        return -ENOMEM;
    free(history->places);
    history->places = places;
    history->num_places = 4 * room;
    history->room_counted = room;
    for (uint32_t i = 0; i < history->num_counted; i++)
        places[place_of(history, counted[i].token)] = i + 1;
    return 0;
}

static int count_token(struct history *history, int32_t token, int is_generated) {
    if (history->num_counted == history->room_counted && grow_counted(history) != 0)
        return -ENOMEM;
    const uint32_t at = place_of(history, token);
    if (history->places[at] == 0) {
        history->counted[history->num_counted] = (struct counted){.token = token};
        history->places[at] = ++history->num_counted;
    }
    struct counted *counted = &history->counted[history->places[at] - 1];
    counted->num_seen++;
    counted->num_generated += is_generated != 0;
    return 0;
}

/* Uncounts the token that has left the window: the token `history->window` places before the latest one. */
static void leave_window(struct history *history) {
    const int64_t left = history->num_tokens - 1 - history->window;
    if (left < 0)
        return;
    struct counted *counted = &history->counted[history->places[place_of(history, history->tokens[left])] - 1];
    counted->num_seen--;
    counted->num_generated -= left >= history->num_before;
}

static int grow_tokens(struct history *history) {
    const int64_t room = history->room == 0 ? 256 : 2 * history->room;
    int32_t *tokens = realloc(history->tokens, (size_t)room * sizeof *tokens);
    if (tokens == NULL)
        return -ENOMEM;
    history->tokens = tokens;
    int32_t *repeated = realloc(history->repeated, (size_t)room * sizeof *repeated);
    if (repeated == NULL)
        return -ENOMEM;
    history->repeated = repeated;
    history->room = room;
    return 0;
}

int history_add(struct history *history, int32_t token, int is_generated) {
    const int is_kept = has_window(history) || history->dry_multiplier > 0.0;
    if (is_kept && history->num_tokens == history->room && grow_tokens(history) != 0)
        return -ENOMEM;
    if (has_penalties(history) && count_token(history, token, is_generated) != 0)
        return -ENOMEM;
    if (is_kept)
        history->tokens[history->num_tokens++] = token;
    history->num_before += !is_generated;
    if (has_window(history))
        leave_window(history);
    return 0;
}

int history_is_due(const struct history *history) { return history->num_counted > 0 || history->num_tokens > 1; }

void history_free(struct history *history) {
    free(history->breakers);
    free(history->counted);
    free(history->places);
    free(history->tokens);
    free(history->repeated);
}

/* ---- changes of a row */

static void penalize_counted(const struct history *history, float *row) {
    for (uint32_t i = 0; i < history->num_counted; i++) {
        const struct counted each = history->counted[i];
        if (each.num_seen == 0)
            continue;
        float logit = row[each.token];
        logit = logit < 0.0f ? logit * history->repetition : logit / history->repetition;
        if (each.num_generated > 0)
            logit = logit - history->frequency * (float)each.num_generated - history->presence;
        row[each.token] = logit;
    }
}

static int is_breaker(const struct history *history, int32_t token) {
    return history->breakers != NULL && (history->breakers[token >> 3] >> (token & 7) & 1) != 0;
}

/* Sets `repeated[k]` to the number of latest tokens, at most `most`, that equal the tokens `k` places earlier. `latest`
 * points to the last of `count` tokens. The tokens from `left` to `right` repeat the latest tokens. So if k lies in
 * that range, the result for k - left holds for k, too, up to `right`. */
static void find_repeated(const int32_t *latest, int64_t count, int64_t most, int32_t *repeated) {
    int64_t left = 0, right = 0;
    for (int64_t k = 1; k < count; k++) {
        int64_t length = 0;
        if (k < right)
            length = right - k < repeated[k - left] ? right - k : repeated[k - left];
        while (length < most && k + length < count && latest[-length] == latest[-k - length])
            length++;
        if (k + length > right) {
            left = k;
            right = k + length;
        }
        repeated[k] = (int32_t)length;
    }
}

static void penalize_repetitions(const struct history *history, float *row, int64_t n, struct scratch *scratch) {
    const int64_t window = history->dry_window, allowed = history->dry_allowed_length;
    const int64_t count = window > 0 && window < history->num_tokens ? window : history->num_tokens;
    const int32_t *latest = history->tokens + history->num_tokens - 1;
    int64_t most = 0; /* number of tokens after the last breaker */
    while (most < count && !is_breaker(history, latest[-most]))
        most++;
    if (most < allowed)
        return;
    find_repeated(latest, count, most, history->repeated);
    int32_t *longest = scratch->other.indices; /* for each token, 1 + the longest repetition that it followed */
    int32_t *followers = scratch->list.indices, num_followers = 0;
    memset(longest, 0, (size_t)n * sizeof *longest);
    for (int64_t k = 1; k < count; k++) {
        const int32_t length = history->repeated[k], token = latest[1 - k];
        if (length < allowed || longest[token] > length)
            continue;
        if (longest[token] == 0)
            followers[num_followers++] = token;
        longest[token] = length + 1;
    }
    for (int32_t i = 0; i < num_followers; i++) {
        const int32_t token = followers[i];
        const double penalty = history->dry_multiplier * pow(history->dry_base, (double)(longest[token] - 1 - allowed));
        row[token] -= (float)(penalty < MOST_PENALTY ? penalty : MOST_PENALTY);
    }
}

void history_adjust(const struct history *history, float *row, int64_t n, struct scratch *scratch) {
    penalize_counted(history, row);
    if (history->dry_multiplier > 0.0 && history->num_tokens > 1)
        penalize_repetitions(history, row, n, scratch);
}
