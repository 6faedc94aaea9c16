/* Texts that end a generation, found in bytes as tokens add them: a text may begin and end in the middle of a token.
 *
 * Each text goes through the bytes once, by the algorithm of Knuth, Morris and Pratt: it keeps how much of it the latest
 * bytes are, and where a byte differs, a table says how much of it they still are. So a token costs its own bytes times
 * the number of texts, whatever came before; to search the last bytes anew costs their length each time.
 */
#include "rows.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct watched {
    const char *text;
    const int32_t *shorter; /* [length]: where byte i differs, go on with this many that are matched; -1: with none */
    int32_t length, matched;
};

struct sym_stops {
    const sym_token_texts *tokens;
    int32_t num_texts, found;
    struct watched texts[];
};

/* For each place in the text how much of it is matched when its byte there differs: the longest beginning of the text
 * that the bytes before end with, and that goes on with another byte. */
static void fill_shorter(int32_t *shorter, const char *text, int32_t length) {
    int32_t matched = -1;
    shorter[0] = -1;
    for (int32_t i = 0; i + 1 < length;) {
        while (matched >= 0 && text[i] != text[matched])
            matched = shorter[matched];
        i++;
        matched++;
        shorter[i] = text[i] == text[matched] ? shorter[matched] : matched;
    }
}

/* Watches for texts, which lie one after the other; none is empty, and 2^31 bytes are more than all of them have.
 * `tokens` stays the caller's, and where it is. NULL: no memory. */
sym_stops *sym_stops_new(const sym_token_texts *tokens, const char *texts, const uint32_t *lengths,
                         uint32_t num_texts) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < num_texts; i++)
        bytes += lengths[i];
    sym_stops *stops = malloc(sizeof *stops + num_texts * sizeof *stops->texts + bytes * (sizeof(int32_t) + 1));
    if (stops == NULL)
        return NULL;
    *stops = (sym_stops){.tokens = tokens, .num_texts = (int32_t)num_texts, .found = -1};
    int32_t *shorter = (int32_t *)(void *)(stops->texts + num_texts);
    char *copy = (char *)(shorter + bytes);
    if (bytes > 0)
        memcpy(copy, texts, bytes);
    for (uint32_t i = 0; i < num_texts; i++) {
        stops->texts[i] = (struct watched){.text = copy, .shorter = shorter, .length = (int32_t)lengths[i]};
        fill_shorter(shorter, copy, (int32_t)lengths[i]);
        copy += lengths[i];
        shorter += lengths[i];
    }
    return stops;
}

void sym_stops_free(sym_stops *stops) { free(stops); }

/* After how many of the bytes the text is complete for the first time; -1: it is not. */
static int64_t complete_after(struct watched *watched, const char *bytes, int64_t num_bytes) {
    int32_t matched = watched->matched;
    for (int64_t i = 0; i < num_bytes; i++) {
        while (matched >= 0 && watched->text[matched] != bytes[i])
            matched = watched->shorter[matched];
        if (++matched == watched->length)
            return i + 1;
    }
    watched->matched = matched;
    return -1;
}

/* Takes one more token. The number of the stop text that is complete: of several the one that began first, then the one
 * with the lowest number; from then on it stays that one. -1: none is. -EINVAL: no such token. */
int sym_stops_add(sym_stops *stops, int32_t token) {
    const sym_token_texts *tokens = stops->tokens;
    if (token < 0 || token >= tokens->num_tokens)
        return -EINVAL;
    if (stops->found >= 0)
        return stops->found;
    const char *bytes = tokens->bytes + tokens->begins[token];
    const int64_t num_bytes = (int64_t)(tokens->begins[token + 1] - tokens->begins[token]);
    int64_t first = INT64_MAX; /* where the text began that is found; before the token's bytes it is negative */
    for (int32_t i = 0; i < stops->num_texts; i++) {
        const int64_t end = complete_after(&stops->texts[i], bytes, num_bytes);
        if (end < 0 || end - stops->texts[i].length >= first)
            continue;
        first = end - stops->texts[i].length;
        stops->found = i;
    }
    return stops->found;
}

/* What sym_stops_add said last. */
int sym_stops_found(const sym_stops *stops) { return stops->found; }

/* Sets the bit of every token whose bytes have this text in them, which is not empty: how many. `bits` has whole words of 32
 * bits. One pass over the bytes of all tokens; a find that begins in one token and ends in another is none. */
int32_t sym_tokens_with(const sym_token_texts *tokens, const char *text, uint64_t bytes, char *bits) {
    const char *end = tokens->bytes + tokens->begins[tokens->num_tokens];
    int32_t token = 0, count = 0;
    for (const char *at = tokens->bytes; (at = memmem(at, (size_t)(end - at), text, bytes)) != NULL;) {
        const uint64_t begin = (uint64_t)(at - tokens->bytes);
        while (tokens->begins[token + 1] <= begin)
            token++;
        if (begin + bytes > tokens->begins[token + 1]) {
            at++;
            continue;
        }
        bits[token >> 3] |= (char)(1 << (token & 7));
        count++;
        at = tokens->bytes + tokens->begins[token + 1];
    }
    return count;
}
