/* Arrays that grow, and arithmetic for their sizes. */

#ifndef SYMPHONY_ARRAYS_H
#define SYMPHONY_ARRAYS_H

#include <stddef.h>

static inline long at_most(long a, long b) { return a < b ? a : b; }
static inline long at_least(long a, long b) { return a > b ? a : b; }
static inline long divide_up(long a, long b) { return (a + b - 1) / b; }

/* Replace *memory by at least `bytes` zeroed bytes that begin on a cache line. The contents are lost. Return 0, or an
 * errno. */
int regrow(void *memory, size_t bytes);

/* If `count` items fill the array *items, enlarge it. Its contents stay. Return 0, or an errno. */
int grow(void *items, long count, long *room, size_t size);

#endif
