/* The geometry of a region. cffi reads this file: declarations only. */
#ifndef SYM_REGION_H
#define SYM_REGION_H

#include <stdint.h>

typedef struct sym_plan {
    uint64_t region_bytes, states_offset, submit_offset, complete_offset, slots_offset, slot_bytes;
    uint32_t slot_count, vocab_size;
} sym_plan;

/* Computes the layout of a region. The region has as many slots as fit `limit_bytes`, but at least SYM_MIN_SLOTS and at
 * most SYM_MAX_SLOTS. -EINVAL: no region can hold rows of this size. Allocates no memory. */
int sym_region_plan(uint32_t vocab_size, uint64_t limit_bytes, sym_plan *plan);

#endif
