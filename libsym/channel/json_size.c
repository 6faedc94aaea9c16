/* One pass over bytes, which need not be JSON. Up to the first error that a parser finds, the parser and this pass see
 * the same tokens. So a parser makes no more values than this pass counts. */
#include "json_size.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

enum kind { WORD, BETWEEN, OPENS, CLOSES, TEXT };

static const uint8_t kinds[256] = {
    [' '] = BETWEEN, ['\t'] = BETWEEN, ['\n'] = BETWEEN, ['\r'] = BETWEEN, [','] = BETWEEN, [':'] = BETWEEN,
    ['['] = OPENS,   ['{'] = OPENS,    [']'] = CLOSES,   ['}'] = CLOSES,   ['"'] = TEXT,
};

#define MOST_DIGITS 300 /* a number of at most this many bytes, without an exponent, is finite */

static uint64_t end_of_text(const char *text, uint64_t at, uint64_t end) {
    while (at < end && text[at] != '"')
        at += text[at] == '\\' ? 2 : 1;
    return at + 1;
}

static uint64_t end_of_word(const char *text, uint64_t at, uint64_t end, bool *is_large) {
    uint64_t begin = at;
    bool has_exponent = false, has_point = false;
    for (; at < end && kinds[(uint8_t)text[at]] == WORD; at++) {
        has_exponent |= (text[at] | 0x20) == 'e';
        has_point |= text[at] == '.';
    }
    bool may_be = has_exponent || (has_point && at - begin > MOST_DIGITS);
    *is_large = may_be && (text[begin] == '-' || (text[begin] >= '0' && text[begin] <= '9')) &&
                isinf(strtod(text + begin, NULL));
    return at;
}

void sym_json_measure(const char *text, uint64_t num_bytes, sym_json_size *size) {
    uint64_t depth = 0;
    *size = (sym_json_size){.too_large = -1};
    for (uint64_t at = 0; at < num_bytes;) {
        enum kind kind = kinds[(uint8_t)text[at]];
        size->num_values += kind == WORD || kind == OPENS || kind == TEXT;
        if (kind == TEXT) {
            at = end_of_text(text, at + 1, num_bytes);
        } else if (kind == WORD) {
            bool is_large;
            uint64_t end = end_of_word(text, at, num_bytes, &is_large);
            if (is_large && size->too_large < 0)
                size->too_large = (int64_t)at;
            at = end;
        } else {
            depth += kind == OPENS;
            depth -= kind == CLOSES && depth > 0;
            size->depth = depth > size->depth ? depth : size->depth;
            at++;
        }
    }
}
