/* Branches: unnamed files, each open by one handle. Most branches exist for one or two calls, and Python has no
 * objects for them. */

#include "inside.h"

#include <math.h>
#include <time.h>

/* The same values as in kvfs/volume/heat.py. */
static const double HALF_LIFE_S = 60, USE_S = 1;
/* While at most 1 frame in MEMORY_PART is free, Python decides what may be reserved: see scheduler/batch/room.py. */
enum { MEMORY_PART = 16, MOST_AHEAD = 64 };

static int64_t real_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void core_note_use(core_table *table, double now_s) {
    double heat = now_s / HALF_LIFE_S;
    if (table->used_s && now_s - table->used_s < USE_S)
        return;
    table->heat = table->used_s ? fmax(table->heat, heat) + log2(1 + exp2(-fabs(table->heat - heat))) : heat;
    table->used_s = now_s;
}

/* Put a file on the list of used files, for Python to read. Branches are left out. */
static void tell_use(core_table *table) {
    core_pool *pool = table->pool;
    if (table->is_branch || table->is_used)
        return;
    table->is_used = 1;
    table->next_used = pool->used;
    pool->used = table;
}

/* Return whether the name of one more file needs space on disk. The first CORE_FREE_NAMES files of all users need no
 * space. */
static _Bool takes_names(const core_account *account) {
    int64_t num_files = account->total->num_files;
    return core_names_bytes(num_files + 1) != core_names_bytes(num_files);
}

static void note_gap(core_pool *pool, double gap_s) {
    if (gap_s && pool->num_gaps < CORE_GAPS)
        pool->gaps_s[pool->num_gaps++] = gap_s;
}

/* Note a fork, which counts as a use of its source. */
static void note_fork(core_table *source, double now_s) {
    core_pool *pool = source->pool;
    source->hits++;
    core_note_use(source, now_s);
    tell_use(source);
    if (source->row == CORE_NOBODY)
        return;
    note_gap(pool, core_begin_use(pool, source->row, now_s));
    pool->row.last_use_s[source->row] = now_s;
}

static core_outcome add_row(core_table *branch, double now_s) {
    core_outcome outcome = core_row_new(branch, now_s);
    if (!outcome)
        branch->pool->row.num_users[branch->row] = 1;
    return outcome;
}

core_outcome core_branch(core_table *source, core_files *files, const core_maker *maker, uint32_t mode,
                         core_table **at) {
    core_pool *pool = source->pool;
    double now_s = core_now_s();
    _Bool is_named = takes_names(maker->account);
    if (source->is_odd || (is_named && !files->num_names) || !core_has_memory(pool, source->num_pages))
        return CORE_COLD;
    core_outcome forked = core_fork(source, maker->account, at);
    if (forked)
        return forked == CORE_BROKEN ? CORE_BROKEN : CORE_COLD;
    core_table *branch = *at;
    /* The pages are charged already, because pages and name have to fit into the quota together. */
    if (!core_has_room_for_files(maker->account, 1, 0) || add_row(branch, now_s))
        return core_table_close(branch) ? CORE_BROKEN : CORE_COLD;
    files->num_names -= is_named;
    files->num_branches++;
    branch->number = files->next_number++;
    branch->is_branch = 1;
    branch->mode = mode;
    branch->uid = maker->uid;
    branch->gid = maker->gid;
    branch->forked_length = branch->fewest = branch->length;
    branch->changes = 0;
    branch->made_ns = branch->changed_ns = real_ns();
    core_note_use(branch, now_s);
    note_fork(source, now_s);
    core_outcome outcome = core_charge_files(maker->account, 1);
    core_note_charge(pool, maker->account);
    return outcome;
}

core_outcome core_branch_reserve(core_table *branch, const int32_t *tokens, const int32_t *positions, int64_t num,
                                 int64_t num_ahead) {
    core_pool *pool = branch->pool;
    int32_t stale[MOST_AHEAD / PAGE_SLOTS + 3];
    if (pool->is_awaited || pool->row.went_down[branch->row] || num + num_ahead > MOST_AHEAD ||
        (pool->frames->num_free - pool->num_promised) * MEMORY_PART <= pool->frames->num_pages ||
        core_reserve(branch, tokens, positions, num, num_ahead))
        return CORE_COLD;
    if (core_num_there(branch) != core_num_needed(branch) || core_pages_to_zero(branch, num + num_ahead, stale)) {
        core_outcome outcome = core_abort(branch);
        return outcome ? outcome : CORE_COLD;
    }
    note_gap(pool, core_begin_use(pool, branch->row, core_now_s()));
    core_pin(branch);
    return CORE_DONE;
}

void core_branch_changed(core_table *branch) {
    branch->changes++;
    branch->changed_ns = real_ns();
    core_note_use(branch, core_now_s());
}

core_outcome core_branch_truncate(core_table *branch, int64_t length) {
    if (!branch->is_branch || branch->is_reserved || length < 0 || length > branch->length)
        return CORE_COLD;
    if (length != branch->length) {
        core_outcome outcome = core_truncate(branch, length);
        if (outcome)
            return outcome == CORE_NO_MEMORY ? CORE_COLD : outcome;
        branch->changes++;
        branch->fewest = length < branch->fewest ? length : branch->fewest;
    }
    branch->changed_ns = real_ns();
    return CORE_DONE;
}

core_outcome core_branch_close(core_table *branch, core_files *files) {
    core_account *account = branch->account;
    if (!branch->is_branch || branch->is_reserved || !core_has_memory(branch->pool, branch->num_pages))
        return CORE_COLD;
    core_row_remove(branch);
    core_outcome outcome = core_table_close(branch);
    if (outcome)
        return outcome;
    branch->is_branch = 0;
    files->num_branches--;
    outcome = core_charge_files(account, -1);
    core_note_charge(branch->pool, account);
    return outcome;
}

void core_branch_seen(core_table *branch, core_files *files) {
    branch->is_branch = 0;
    files->num_branches--;
}

core_table *core_next_branch(const core_pool *pool, const core_table *table) {
    core_table *next = table ? table->older : pool->tables;
    while (next && !next->is_branch)
        next = next->older;
    return next;
}
