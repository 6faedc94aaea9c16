/* The size that a JSON text will have when it is parsed. cffi reads this file: declarations only. */
#ifndef SYM_JSON_SIZE_H
#define SYM_JSON_SIZE_H

#include <stdint.h>

typedef struct sym_json_size {
    uint64_t num_values; /* number of objects, lists, texts, names, numbers and words */
    uint64_t depth;      /* greatest nesting depth of lists and objects */
    int64_t too_large;   /* offset of the first number that is too large for a double, or -1 */
} sym_json_size;

/* Measures `text`. A NUL follows its `num_bytes` bytes. */
void sym_json_measure(const char *text, uint64_t num_bytes, sym_json_size *size);

#endif
