/* For the core alone. */
#ifndef KVFS_CORE_INSIDE_H
#define KVFS_CORE_INSIDE_H

#include "core.h"

static inline number_or_none core_some(int32_t number) { return (number_or_none){~number}; }
static inline int32_t core_number(number_or_none some) { return ~some.complement; }
static inline int32_t core_pages_for(int64_t num_entries) { return (num_entries + PAGE_SLOTS - 1) / PAGE_SLOTS; }

/* Pages that a table refers to, those of its reservation included: the first so many of `slots`. */
static inline int32_t core_num_needed(const core_table *table) {
    return table->num_reserved_pages + (table->target != CORE_NOBODY);
}

/* Of `bytes_in`, beside an account's mark. */
enum { CORE_ZEROS = 0, CORE_SEVERAL = -1 };
static inline int64_t core_mark(int64_t account) { return account + 1; }

/* Room in `scratch` for twice so many numbers, and in `left` for so many pages. */
_Bool core_has_memory(core_pool *pool, int64_t num);
/* Room in a table for so many page numbers. */
_Bool core_has_slots(core_table *table, int64_t num);
void core_has_pages(core_table *table, int32_t num_pages);
/* The table is nobody's any more. */
void core_forget_table(core_table *table);
void core_tables_close(core_pool *pool);
/* An account and its parents were charged, or got something back: those that are watched are news. */
void core_note_charge(core_pool *pool, core_account *account);

#endif
