/* Arrays that grow. The address of the caller's pointer, which may have any type, is passed as void *, and memcpy reads
 * and writes the pointer. Otherwise C would need a cast between unrelated pointer types. */

#include "arrays.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

int regrow(void *memory, size_t bytes) {
    void *old, *new = NULL;
    memcpy(&old, memory, sizeof old);
    free(old);
    /* Rows of activations are about a page apart, so small pages would cost a page walk for each row. */
    const size_t unit = bytes > HUGE_PAGE / 2 ? HUGE_PAGE : 64;
    bytes = (bytes + 64 + unit - 1) / unit * unit;
    int error = posix_memalign(&new, unit, bytes);
    if (error) {
        new = NULL;
    } else {
        if (unit == HUGE_PAGE)
            madvise(new, bytes, MADV_HUGEPAGE); /* advice: a kernel without huge pages refuses it */
        memset(new, 0, bytes);
    }
    memcpy(memory, &new, sizeof new);
    return error;
}

int grow(void *items, long count, long *room, size_t size) {
    if (count < *room)
        return 0;
    void *old, *new;
    memcpy(&old, items, sizeof old);
    long more = *room ? 2 * *room : 64;
    new = realloc(old, (size_t)more * size);
    if (!new)
        return ENOMEM;
    memcpy(items, &new, sizeof new);
    *room = more;
    return 0;
}
