/* Pages: allocation, references, and release. */

#include "inside.h"

#include <stdlib.h>
#include <string.h>

static void *grown(void *memory, int64_t *room, int64_t num, size_t item) {
    if (num <= *room)
        return memory;
    num = num > 2 * *room ? num : 2 * *room;
    void *found = realloc(memory, num * item);
    if (found)
        *room = num;
    return found;
}

_Bool core_has_memory(core_pool *pool, int64_t num) {
    int32_t *scratch = grown(pool->scratch, &pool->scratch_room, 2 * num, sizeof *scratch);
    pool->scratch = scratch ? scratch : pool->scratch;
    core_left *left = grown(pool->left, &pool->left_room, pool->num_left + num, sizeof *left);
    pool->left = left ? left : pool->left;
    return (scratch && left) || !num;
}

_Bool core_has_slots(core_table *table, int64_t num) {
    if (num <= table->room)
        return 1;
    int64_t room = num > 2 * (int64_t)table->room ? num : 2 * (int64_t)table->room;
    int32_t *slots = realloc(table->slots, room * (sizeof *slots + 1));
    if (!slots)
        return 0;
    memmove(slots + room, slots + table->room, table->room);
    table->slots = slots;
    table->stale = (uint8_t *)(slots + room);
    table->room = room;
    return 1;
}

void core_note_charge(core_pool *pool, core_account *account) {
    for (; account; account = account->parent) {
        if (!account->has_news || account->is_told)
            continue;
        account->is_told = 1;
        account->next_told = pool->told;
        pool->told = account;
        pool->news |= CORE_CHARGED;
    }
}

void core_bind(core_pool *pool, int64_t owner, const int32_t *pages, int64_t num, const int32_t *frames,
               uint8_t *stale) {
    int64_t *bytes_in = pool->frame.bytes_in, mark = core_mark(owner);
    for (int64_t i = 0; i < num; i++) {
        pool->page.frame[pages[i]] = core_some(frames[i]);
        pool->frame.page[frames[i]] = core_some(pages[i]);
        stale[i] = bytes_in[frames[i]] != mark && bytes_in[frames[i]] != CORE_ZEROS;
        bytes_in[frames[i]] = stale[i] ? CORE_SEVERAL : mark;
    }
}

core_outcome core_allocate(core_pool *pool, core_account *account, int64_t num, const int32_t *frames, _Bool may_wait,
                           int32_t *pages, uint8_t *stale) {
    pool->num_wanted = num;
    if (!core_has_room(account, num, pool->page_bytes))
        return CORE_OVER_QUOTA;
    if (num > pool->numbers->num_free)
        return CORE_NO_PAGES;
    _Bool has_frames = frames || num <= pool->frames->num_free - pool->num_promised;
    if (!has_frames && !may_wait)
        return CORE_NO_FRAMES;
    if (!core_has_memory(pool, num))
        return CORE_NO_MEMORY;
    if (num)
        free_list_take(pool->numbers, num, pages);
    core_charge(account, pool->base, pages, num);
    core_note_charge(pool, account);
    counts_add(&pool->references, 0, pages, num);
    if (frames) {
        pool->num_coming -= num;
    } else if (has_frames && num) {
        free_list_take(pool->frames, num, pool->scratch);
        frames = pool->scratch;
    }
    if (frames)
        core_bind(pool, account->number, pages, num, frames, stale);
    for (int64_t i = 0; i < num; i++) {
        pool->page.row[pages[i]] = core_some(CORE_NOBODY);
        pool->page.kept_until[pages[i]] = 0;
        if (!frames || stale[i]) {
            memset(pool->page.tokens[pages[i]], 0, sizeof *pool->page.tokens);
            memset(pool->page.positions[pages[i]], 0, sizeof *pool->page.positions);
        }
        stale[i] = frames && stale[i];
    }
    if (pool->frames->num_free - pool->num_promised < pool->low_water)
        pool->news |= CORE_RING;
    return CORE_DONE;
}

core_outcome core_retain(core_pool *pool, core_account *account, const int32_t *pages, int64_t num) {
    if (!core_has_room_for(account, pool->base, pages, num, 0, 0))
        return CORE_OVER_QUOTA;
    core_outcome outcome = core_charge(account, pool->base, pages, num);
    if (!outcome && counts_add(&pool->references, 0, pages, num) < 0)
        outcome = CORE_BROKEN;
    core_note_charge(pool, account);
    return outcome;
}

core_outcome core_move(core_pool *pool, core_account *account, core_account *to, const int32_t *pages, int64_t num) {
    if (!core_has_room_for(to, pool->base, pages, num, 0, 0))
        return CORE_OVER_QUOTA;
    core_outcome outcome = core_charge(to, pool->base, pages, num);
    if (!outcome)
        outcome = core_refund(account, pool->base, pages, num);
    core_note_charge(pool, account);
    core_note_charge(pool, to);
    return outcome;
}

/* Free the frames of these pages; `frames` is scratch memory for `num` numbers. */
static void free_frames(core_pool *pool, const int32_t *pages, int64_t num, int32_t *frames) {
    int64_t num_frames = 0;
    for (int64_t i = 0; i < num; i++) {
        int32_t frame = core_number(pool->page.frame[pages[i]]);
        if (frame == CORE_NOBODY)
            continue;
        pool->page.frame[pages[i]] = pool->frame.page[frame] = core_some(CORE_NOBODY);
        pool->frame.generation[frame]++;
        frames[num_frames++] = frame;
    }
    free_list_set(pool->frames, frames, num_frames, 1);
}

core_outcome core_give_frames(core_pool *pool, const int32_t *pages, int64_t num) {
    if (!core_has_memory(pool, num))
        return CORE_NO_MEMORY;
    free_frames(pool, pages, num, pool->scratch);
    return CORE_DONE;
}

/* Reset the columns of a page without references, and report its slot and advice in `left`. */
static void forget(core_pool *pool, int32_t page) {
    page_columns *of = &pool->page;
    core_left left = {page, core_number(of->slot[page]), of->kept_until[page]};
    if (left.slot != CORE_NOBODY || left.kept_until > 0) {
        pool->left[pool->num_left++] = left;
        pool->news |= CORE_LEFT;
    }
    of->slot[page] = core_some(CORE_NOBODY);
    of->kept_until[page] = 0;
    of->fill[page] = of->num_reserved[page] = of->num_on_disk[page] = of->num_written[page] = 0;
    of->has_digest[page] = of->is_suspect[page] = 0;
    of->generation[page]++;
}

core_outcome core_release(core_pool *pool, core_account *account, const int32_t *pages, int64_t num) {
    if (!num)
        return CORE_DONE;
    if (!core_has_memory(pool, num))
        return CORE_NO_MEMORY;
    core_outcome outcome = core_refund(account, pool->base, pages, num);
    core_note_charge(pool, account);
    if (outcome || counts_subtract(&pool->references, 0, pages, num) < 0)
        return CORE_BROKEN;
    int32_t *unused = pool->scratch, *refcount = pool->page.refcount;
    int64_t num_unused = 0;
    for (int64_t i = 0; i < num; i++)
        if (!refcount[pages[i]]) {
            refcount[pages[i]] = -1; /* so that a second mention of the page is skipped */
            unused[num_unused++] = pages[i];
            forget(pool, pages[i]);
        }
    if (!num_unused)
        return CORE_DONE;
    for (int64_t i = 0; i < num_unused; i++)
        refcount[unused[i]] = 0;
    free_frames(pool, unused, num_unused, unused + num);
    /* All pages of a file belong to one arena. Page numbers without an arena are never used again. */
    if (pool->page.arena[unused[0]] != CORE_NO_ARENA)
        free_list_set(pool->numbers, unused, num_unused, 1);
    if (pool->is_awaited)
        pool->news |= CORE_RING;
    return CORE_DONE;
}
