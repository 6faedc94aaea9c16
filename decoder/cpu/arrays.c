/* Arrays that grow. The address of the caller's pointer, which may have any type, is passed as void *, and memcpy reads
 * and writes the pointer. Otherwise C would need a cast between unrelated pointer types. */

#include "arrays.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int regrow(void *memory, size_t bytes) {
    void *old, *new = NULL;
    memcpy(&old, memory, sizeof old);
    free(old);
    bytes = (bytes + 63) / 64 * 64 + 64;
    int error = posix_memalign(&new, 64, bytes);
    if (error)
        new = NULL;
    else
        memset(new, 0, bytes);
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
