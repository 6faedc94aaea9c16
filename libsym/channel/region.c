#include "region.h"

#include "abi.h"

#include <errno.h>

int sym_region_plan(uint32_t vocab_size, uint64_t limit_bytes, sym_plan *plan) {
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
