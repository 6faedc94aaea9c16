/* What both halves of a channel need: futexes, copies into and out of a ring, and the geometry of a region. */
#ifndef SYM_RING_H
#define SYM_RING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
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
        return; /* data may be NULL then */
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

typedef struct sym_plan {
    uint64_t region_bytes, states_offset, submit_offset, complete_offset, slots_offset, slot_bytes;
    uint32_t slot_count, vocab_size;
} sym_plan;

/* -EINVAL: no region can hold rows of this size. Memory is committed as it is touched, not here. */
static inline int sym_region_plan(uint32_t vocab_size, uint64_t limit_bytes, sym_plan *plan) {
    if (vocab_size == 0 || vocab_size > 1u << 24)
        return -EINVAL;
    const uint64_t row_bytes = (uint64_t)vocab_size * sizeof(float);
    const uint64_t align = row_bytes < 4096 ? 64 : 4096;
    const uint64_t fixed = 2 * SYM_HEADER_BYTES + 2 * (uint64_t)SYM_RING_BYTES;
    plan->vocab_size = vocab_size;
    plan->slot_bytes = (row_bytes + align - 1) / align * align;
    uint64_t count = limit_bytes > fixed ? (limit_bytes - fixed) / plan->slot_bytes : 0;
    if (count < SYM_MIN_SLOTS)
        count = SYM_MIN_SLOTS;
    if (count > SYM_MAX_SLOTS)
        count = SYM_MAX_SLOTS;
    plan->slot_count = (uint32_t)count;
    plan->states_offset = SYM_HEADER_BYTES; /* SYM_MAX_SLOTS states of 4 bytes: one page */
    plan->submit_offset = 2 * SYM_HEADER_BYTES;
    plan->complete_offset = plan->submit_offset + SYM_RING_BYTES;
    plan->slots_offset = plan->complete_offset + SYM_RING_BYTES;
    plan->region_bytes = (plan->slots_offset + count * plan->slot_bytes + 4095) / 4096 * 4096;
    return 0;
}

#endif
