/* Reservations: room behind a table's last entry. Entries become part of the file when they are committed. */

#include "inside.h"

#include <stdlib.h>
#include <string.h>

static int32_t page_at(const core_table *table, int64_t place) {
    return place == table->num_pages - 1 && table->target != CORE_NOBODY ? table->target : table->slots[place];
}

static _Bool is_in_memory(const core_pool *pool, int32_t page) {
    return core_number(pool->page.frame[page]) != CORE_NOBODY;
}

/* Mark the page's frame as holding bytes of several owners. */
static void mix(core_pool *pool, int32_t page) {
    if (is_in_memory(pool, page))
        pool->frame.bytes_in[core_number(pool->page.frame[page])] = CORE_SEVERAL;
}

/* Set the page's fill after an append by an account, or after the append was aborted. */
static void set_fill(core_pool *pool, int32_t page, int fill, const core_account *account) {
    int32_t frame = core_number(pool->page.frame[page]);
    pool->page.fill[page] = fill;
    pool->page.has_digest[page] = 0;
    if (frame != CORE_NOBODY && pool->frame.bytes_in[frame] != core_mark(account->number))
        pool->frame.bytes_in[frame] = CORE_SEVERAL;
}

int32_t core_position(const core_table *table, int64_t entry) {
    return entry < 0 ? -1 : table->pool->page.positions[page_at(table, entry / PAGE_SLOTS)][entry % PAGE_SLOTS];
}

/* Write entries `first` to `stop` - 1 into reserved pages. Without tokens, write zeros. Without positions, continue
 * from the position of the last entry. */
static void write(core_table *table, int64_t first, int64_t stop, const int32_t *tokens, const int32_t *positions) {
    core_pool *pool = table->pool;
    int32_t position = core_position(table, first - 1);
    for (int64_t at = first, end; at < stop; at = end) {
        int32_t page = page_at(table, at / PAGE_SLOTS), slot = at % PAGE_SLOTS;
        end = at - slot + PAGE_SLOTS < stop ? at - slot + PAGE_SLOTS : stop;
        for (int64_t i = at - first; i < end - first; i++, slot++) {
            pool->page.tokens[page][slot] = tokens ? tokens[i] : 0;
            pool->page.positions[page][slot] = positions ? positions[i] : ++position;
        }
        set_fill(pool, page, slot, table->account);
    }
}

/* Append entries in place from `slot` on. */
static void append_in_place(core_table *table, int32_t page, int slot) {
    page_columns *of = &table->pool->page;
    table->tail_page = table->marked_page = page;
    of->num_on_disk[page] = of->num_on_disk[page] < slot ? of->num_on_disk[page] : slot;
    of->num_written[page] = of->num_written[page] < slot ? of->num_written[page] : slot;
    of->num_reserved[page] = PAGE_SLOTS - slot;
}

/* Put the number of the copy behind the other page numbers in `slots`. */
static void put_target(core_table *table) {
    if (table->target != CORE_NOBODY)
        table->slots[table->num_reserved_pages] = table->target;
}

/* Make the first new page the copy of the last page. The whole page is copied if the new page holds another account's
 * bytes. */
static void append_to_copy(core_table *table, int slot) {
    page_columns *of = &table->pool->page;
    int32_t place = table->num_pages, num_others = table->num_reserved_pages - place - 1;
    int32_t source = table->slots[place - 1], target = table->slots[place];
    table->target = target;
    table->num_copied = table->stale[place] ? PAGE_SLOTS : slot;
    memmove(table->slots + place, table->slots + place + 1, num_others * sizeof *table->slots);
    memmove(table->stale + place, table->stale + place + 1, num_others);
    table->num_reserved_pages--;
    put_target(table);
    memcpy(of->tokens[target], of->tokens[source], slot * sizeof(int32_t));
    memcpy(of->positions[target], of->positions[source], slot * sizeof(int32_t));
    mix(table->pool, target);
}

core_outcome core_reserve(core_table *table, const int32_t *tokens, const int32_t *positions, int64_t num,
                          int64_t num_ahead) {
    core_pool *pool = table->pool;
    int64_t all = num + num_ahead;
    if (table->is_reserved)
        return CORE_BROKEN;
    int slot = table->length % PAGE_SLOTS;
    int32_t place = table->num_pages, last = slot ? table->slots[place - 1] : CORE_NOBODY;
    _Bool is_copying = slot && pool->page.fill[last] != slot && pool->page.refcount[last] != 1;
    int32_t num_new = core_pages_for(table->length + all) - place + is_copying;
    if (num_new) {
        if (!core_has_slots(table, (int64_t)place + num_new))
            return CORE_NO_MEMORY;
        core_outcome outcome =
            core_allocate(pool, table->account, num_new, NULL, 1, table->slots + place, table->stale + place);
        if (outcome)
            return outcome;
    }
    table->is_reserved = 1;
    table->start = table->length;
    table->num_entries = all;
    table->owner = table->account->number;
    table->num_reserved_pages = place + num_new;
    table->num_zeroed = place;
    table->target = table->tail_page = table->marked_page = CORE_NOBODY;
    if (is_copying)
        append_to_copy(table, slot);
    else if (slot)
        append_in_place(table, last, slot);
    write(table, table->start, table->start + num, tokens, positions);
    write(table, table->start + num, table->start + all, NULL, NULL);
    return CORE_DONE;
}

core_outcome core_extend(core_table *table, int64_t num_ahead) {
    core_pool *pool = table->pool;
    int64_t first = table->start + table->num_entries;
    int32_t place = table->num_reserved_pages, num_new = core_pages_for(first + num_ahead) - place;
    if (num_new) {
        if (!core_has_slots(table, (int64_t)place + num_new + 1))
            return CORE_NO_MEMORY;
        int32_t *pages = table->slots + place;
        core_outcome outcome = core_allocate(pool, table->account, num_new, NULL, 0, pages, table->stale + place);
        if (outcome) {
            put_target(table);
            return outcome;
        }
        number_or_none row = pool->page.row[page_at(table, place - 1)];
        if (table->is_pinned)
            counts_add(&pool->pins, 0, pages, num_new);
        for (int32_t i = 0; table->is_pinned && i < num_new; i++)
            pool->page.row[pages[i]] = row;
        table->num_reserved_pages += num_new;
        put_target(table);
    }
    table->num_entries += num_ahead;
    write(table, first, first + num_ahead, NULL, NULL);
    return CORE_DONE;
}

int32_t core_num_there(const core_table *table) {
    int32_t place = 0, num = core_num_needed(table);
    while (place < num && is_in_memory(table->pool, table->slots[place]))
        place++;
    return place;
}

void core_pin(core_table *table) {
    core_pool *pool = table->pool;
    int32_t num = core_num_needed(table);
    counts_add(&pool->pins, 0, table->slots, num);
    for (int32_t place = 0; place < num; place++)
        pool->page.row[table->slots[place]] = core_some(table->row);
    table->is_pinned = 1;
}

/* Unpin pages after the last computation with them. */
static core_outcome unpin(core_pool *pool, const int32_t *pages, int32_t num) {
    double now = core_now_s();
    if (counts_subtract(&pool->pins, 0, pages, num) < 0)
        return CORE_BROKEN;
    for (int32_t i = 0; i < num; i++)
        pool->page.last_use[pages[i]] = now;
    if (pool->is_awaited)
        pool->news |= CORE_RING;
    return CORE_DONE;
}

core_outcome core_unpin(core_table *table) {
    if (table->marked_page != CORE_NOBODY)
        table->pool->page.num_reserved[table->marked_page] = 0;
    table->marked_page = CORE_NOBODY;
    if (!table->is_pinned)
        return CORE_DONE;
    table->is_pinned = 0;
    if (table->row != CORE_NOBODY)
        table->pool->row.last_use_s[table->row] = core_now_s();
    return unpin(table->pool, table->slots, core_num_needed(table));
}

/* Mark the new pages before place `stop`, which were overwritten, as holding only bytes of the account. If the file has
 * a new owner by now, leave the marks as they are. */
static void claim(core_table *table, int32_t stop) {
    core_pool *pool = table->pool;
    int64_t mark = core_mark(table->owner), *bytes_in = pool->frame.bytes_in;
    if (table->owner != table->account->number)
        return;
    for (int32_t place = table->num_pages; place < stop; place++)
        if (table->stale[place])
            bytes_in[core_number(pool->page.frame[table->slots[place]])] = mark;
    if (table->target == CORE_NOBODY)
        return;
    int32_t source = core_number(pool->page.frame[table->slots[table->num_pages - 1]]);
    if (source != CORE_NOBODY && bytes_in[source] == mark)
        bytes_in[core_number(pool->page.frame[table->target])] = mark;
}

/* Put the copy in the place of its source page. */
static core_outcome replace_tail(core_table *table) {
    core_pool *pool = table->pool;
    int32_t *last = table->slots + table->num_pages - 1, source = *last;
    core_outcome outcome = table->is_pinned ? unpin(pool, &source, 1) : CORE_DONE;
    *last = table->target;
    table->target = CORE_NOBODY;
    core_leave(table, &source, 1);
    return outcome ? outcome : core_release(pool, table->account, &source, 1);
}

core_outcome core_commit(core_table *table, const int32_t *tokens, int64_t num) {
    core_pool *pool = table->pool;
    int64_t start = table->start;
    int32_t num_pages = core_pages_for(start + num);
    if (!table->is_reserved || num < 1 || num > table->num_entries)
        return CORE_BROKEN;
    for (int32_t place = table->num_pages; place < num_pages; place++)
        if (!is_in_memory(pool, table->slots[place]) || (place >= table->num_zeroed && table->stale[place]))
            return CORE_BROKEN; /* the entry can't have been computed, or another account's bytes were not zeroed */
    if (table->target != CORE_NOBODY && !is_in_memory(pool, table->target))
        return CORE_BROKEN;
    if (!core_has_memory(pool, 1))
        return CORE_NO_MEMORY;
    for (int64_t at = start, end; at < start + num; at = end) {
        end = at - at % PAGE_SLOTS + PAGE_SLOTS < start + num ? at - at % PAGE_SLOTS + PAGE_SLOTS : start + num;
        int32_t *where = pool->page.tokens[page_at(table, at / PAGE_SLOTS)] + at % PAGE_SLOTS;
        memcpy(where, tokens + (at - start), (end - at) * sizeof *tokens);
    }
    claim(table, num_pages);
    core_outcome outcome = table->target == CORE_NOBODY ? CORE_DONE : replace_tail(table);
    core_has_pages(table, num_pages);
    table->length = table->start += num;
    table->num_entries -= num;
    core_changed(table);
    if (!table->num_entries) {
        core_outcome unpinned = core_unpin(table);
        table->is_reserved = 0;
        return outcome ? outcome : unpinned;
    }
    table->num_zeroed = table->num_zeroed > num_pages ? table->num_zeroed : num_pages;
    table->tail_page = table->start % PAGE_SLOTS ? table->slots[num_pages - 1] : CORE_NOBODY;
    return outcome;
}

core_outcome core_abort(core_table *table) {
    core_pool *pool = table->pool;
    int32_t *new = table->slots + table->num_pages, num_new = core_num_needed(table) - table->num_pages;
    if (!core_has_memory(pool, num_new))
        return CORE_NO_MEMORY;
    core_outcome unpinned = core_unpin(table);
    if (table->tail_page != CORE_NOBODY)
        set_fill(pool, table->tail_page, table->start % PAGE_SLOTS, table->account);
    core_outcome outcome = core_release(pool, table->account, new, num_new);
    table->num_reserved_pages = table->num_pages;
    table->target = CORE_NOBODY;
    table->is_reserved = 0;
    return outcome ? outcome : unpinned;
}

void core_give_room(core_table *table, const int32_t *frames) {
    core_pool *pool = table->pool;
    table->num_zeroed = table->num_pages; /* the new frame may hold another account's bytes */
    if (table->target != CORE_NOBODY && !is_in_memory(pool, table->target)) {
        uint8_t is_stale;
        core_bind(pool, table->owner, &table->target, 1, frames++, &is_stale);
        table->num_copied = is_stale ? PAGE_SLOTS : table->start % PAGE_SLOTS;
        mix(pool, table->target);
    }
    for (int32_t place = table->num_pages; place < table->num_reserved_pages; place++)
        if (!is_in_memory(pool, table->slots[place]))
            core_bind(pool, table->owner, table->slots + place, 1, frames++, table->stale + place);
}

core_outcome core_forget_room(core_table *table) {
    int32_t num_new = core_num_needed(table) - table->num_pages;
    core_outcome outcome = core_give_frames(table->pool, table->slots + table->num_pages, num_new);
    if (!outcome)
        memset(table->stale + table->num_pages, 0, num_new);
    return outcome;
}

int64_t core_pages_to_zero(core_table *table, int64_t num, int32_t *pages) {
    int32_t stop = core_pages_for(table->start + num);
    int64_t num_due = 0;
    for (; table->num_zeroed < stop; table->num_zeroed++)
        if (table->stale[table->num_zeroed])
            pages[num_due++] = table->slots[table->num_zeroed];
    return num_due;
}

void core_reserved_pages(const core_table *table, int32_t *pages) {
    memcpy(pages, table->slots, table->num_reserved_pages * sizeof *pages);
    if (table->target != CORE_NOBODY)
        pages[table->num_pages - 1] = table->target;
}

_Bool core_copy(const core_table *table, int32_t copy[3]) {
    if (table->target == CORE_NOBODY)
        return 0;
    copy[0] = core_number(table->pool->page.frame[table->slots[table->num_pages - 1]]);
    copy[1] = core_number(table->pool->page.frame[table->target]);
    copy[2] = table->num_copied;
    return 1;
}

_Bool core_frames(const core_table *table, int64_t num_pages, int32_t *frames) {
    for (int64_t place = 0; place < num_pages; place++)
        if ((frames[place] = core_number(table->pool->page.frame[page_at(table, place)])) == CORE_NOBODY)
            return 0;
    return 1;
}
