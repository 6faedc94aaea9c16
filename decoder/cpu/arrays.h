/* Arrays that grow, and numbers to size them by. */

#ifndef SYMPHONY_ARRAYS_H
#define SYMPHONY_ARRAYS_H

#include <stddef.h>

static inline long at_most(long a, long b) { return a < b ? a : b; }
static inline long at_least(long a, long b) { return a > b ? a : b; }
static inline long divide_up(long a, long b) { return (a + b - 1) / b; }

/* Exchanges *memory for at least `bytes` bytes on a cache line's boundary, zeroed; its contents are lost. 0, or an errno. */
int regrow(void *memory, size_t bytes);

/* Room for one more of *items, whose contents stay. 0, or an errno. */
int grow(void *items, long count, long *room, size_t size);

#endif
