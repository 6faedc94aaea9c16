/* How much a text of JSON makes of a parser, before there is one. cffi reads this file: declarations only. */
#ifndef SYM_JSON_SIZE_H
#define SYM_JSON_SIZE_H

#include <stdint.h>

typedef struct sym_json_size {
    uint64_t num_values; /* objects, lists, texts, names, numbers and words */
    uint64_t depth;      /* of lists and objects in each other */
    int64_t too_large;   /* where a number begins that no double holds, or -1 */
} sym_json_size;

/* `text` ends in a NUL that is not among its bytes. */
void sym_json_measure(const char *text, uint64_t num_bytes, sym_json_size *size);

#endif
