/* Helpers of both halves of a channel: futexes, and copies into and out of a ring. */
#ifndef SYM_RING_H
#define SYM_RING_H

#include "abi.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline long futex_op(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, (uint32_t *)word, op, value, timeout, NULL, 0);
}

static inline uint64_t padded(uint64_t frame_bytes) {
    return (frame_bytes + SYM_FRAME_ALIGN - 1) & ~(uint64_t)(SYM_FRAME_ALIGN - 1);
}

static inline void ring_write(char *ring, uint64_t ring_bytes, uint64_t position, const void *data, uint64_t bytes) {
    if (bytes == 0)
        return; /* memcpy must not get NULL, and `data` may be NULL here */
    const uint64_t at = position & (ring_bytes - 1);
    const uint64_t first = bytes < ring_bytes - at ? bytes : ring_bytes - at;
    memcpy(ring + at, data, first);
    memcpy(ring, (const char *)data + first, bytes - first);
}

static inline void ring_read(const char *ring, uint64_t ring_bytes, uint64_t position, void *data, uint64_t bytes) {
    const uint64_t at = position & (ring_bytes - 1);
    const uint64_t first = bytes < ring_bytes - at ? bytes : ring_bytes - at;
    memcpy(data, ring + at, first);
    memcpy((char *)data + first, ring, bytes - first);
}

#endif
