/* Declarations that only the core includes. */
#ifndef KVFS_CORE_INSIDE_H
#define KVFS_CORE_INSIDE_H

#include "core.h"

static inline number_or_none core_some(int32_t number) { return (number_or_none){~number}; }
static inline int32_t core_number(number_or_none some) { return ~some.complement; }
static inline int32_t core_pages_for(int64_t num_entries) { return (num_entries + PAGE_SLOTS - 1) / PAGE_SLOTS; }

/* Return how many page numbers in `slots` the table refers to, including those of its reservation. */
static inline int32_t core_num_needed(const core_table *table) {
    return table->num_reserved_pages + (table->target != CORE_NOBODY);
}

/* Values of `bytes_in` that do not stand for one account. */
enum { CORE_ZEROS = 0, CORE_SEVERAL = -1 };
static inline int64_t core_mark(int64_t account) { return account + 1; }

/* Make room for 2 * `num` numbers in `scratch`, and for `num` more pages in `left`. False: there is no memory. */
_Bool core_has_memory(core_pool *pool, int64_t num);
/* Make room for `num` page numbers in the table. False: there is no memory. */
_Bool core_has_slots(core_table *table, int64_t num);
void core_has_pages(core_table *table, int32_t num_pages);
/* Put the table on the list of unused tables. */
void core_forget_table(core_table *table);
/* Report watched accounts in `core_pool.told`, after the charge of an account and its parents has changed. */
void core_note_charge(core_pool *pool, core_account *account);

#endif
