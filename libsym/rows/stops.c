/* Search for stop texts in the bytes of a generation, token by token. A text may begin and end inside a token.
 *
 * Each text uses the algorithm of Knuth, Morris and Pratt. The state of a search is how many bytes of the text the
 * latest bytes match. When the next byte differs, a table gives the longest shorter match to continue with. So a token
 * costs its own bytes times the number of texts. Searching the last bytes anew would cost their length with each token.
 */
#include "rows.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct watched {
    const char *text;
    const int32_t *shorter; /* [length]: if byte i differs, continue with this many matched bytes; -1: skip the byte */
    int32_t length, matched;
};

struct sym_stops {
    const sym_token_texts *tokens;
    int32_t num_texts, found;
    struct watched texts[];
};

/* Computes, for each place in the text, how many bytes still match if the byte at this place differs: the length of a
 * beginning of the text. The bytes before the place end with this beginning. The byte after this beginning is another
 * byte than the byte at the place. Of all such beginnings, the longest counts. */
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

/* Makes a search for texts, which lie one after the other in `texts`. No text is empty, and all together have less than
 * 2^31 bytes. The caller owns `tokens`, and keeps it alive. NULL: no memory. */
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

/* The number of bytes after which the text is complete for the first time; -1: the text is not complete. */
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

/* Takes the next token. Returns the index of the complete stop text, or -1 if no text is complete. Once a text is
 * complete, further calls return the same index. If one token completes several texts, the text that began first
 * counts; among equals, the text with the lowest index. -EINVAL: the token is not in the vocabulary. */
int sym_stops_add(sym_stops *stops, int32_t token) {
    const sym_token_texts *tokens = stops->tokens;
    if (token < 0 || token >= tokens->num_tokens)
        return -EINVAL;
    if (stops->found >= 0)
        return stops->found;
    const char *bytes = tokens->bytes + tokens->begins[token];
    const int64_t num_bytes = (int64_t)(tokens->begins[token + 1] - tokens->begins[token]);
    int64_t first = INT64_MAX; /* offset of the found text from the token's first byte; may be negative */
    for (int32_t i = 0; i < stops->num_texts; i++) {
        const int64_t end = complete_after(&stops->texts[i], bytes, num_bytes);
        if (end < 0 || end - stops->texts[i].length >= first)
            continue;
        first = end - stops->texts[i].length;
        stops->found = i;
    }
    return stops->found;
}

/* Returns the last result of sym_stops_add. */
int sym_stops_found(const sym_stops *stops) { return stops->found; }

/* Sets the bit of every token whose bytes contain a text, which is not empty. Returns the number of such tokens. `bits`
 * has whole words of 32 bits. The search goes through the bytes of all tokens in one pass, and ignores matches that
 * cross from one token into the next. */
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
