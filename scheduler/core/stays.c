/* Stays: how a branch joins the run, how its computed entries are committed, and how it leaves when it is closed. */
#include "stays.h"
#include "handles.h"

#include <string.h>

sym_stay *sym_stay_at(const sym_gate *gate, int32_t index) {
    return index >= 0 && index < gate->room ? gate->stays[index] : NULL;
}

sym_stay *sym_stay_of(const core_table *table) { return table->stay; }

int32_t sym_stays_next(const sym_gate *gate, const sym_connection *connection, int32_t from) {
    for (int32_t at = from < 0 ? 0 : from; at < gate->room; at++)
        if (gate->stays[at] && (!connection || gate->stays[at]->connection == connection))
            return at;
    return -1;
}

static void forget(sym_gate *gate, sym_stay *stay) {
    gate->stays[stay->index] = NULL;
    gate->num_stays--;
    stay->table->stay = NULL;
}

void sym_stay_adopted(sym_gate *gate, sym_stay *stay) { forget(gate, stay); }

/* ---- joining */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Return the number of entries to reserve after those of the call: the rest of the page, or a page if there is no
 * rest. `Room` in Python does the same for the loop of a program. `position`: position of the call's last token. */
static int64_t num_ahead(const sym_gate *gate, const core_table *table, int64_t num_tokens, int64_t position) {
    const int64_t num_entries = table->length + num_tokens, rest = -num_entries & (SYM_PAGE_ENTRIES - 1);
    int64_t ahead = rest ? rest : SYM_PAGE_ENTRIES;
    ahead = least(ahead, (table->pool->frames->num_pages - 1) * SYM_PAGE_ENTRIES - num_entries);
    ahead = least(ahead, gate->max_entries - num_entries);
    ahead = least(ahead, gate->max_positions - position - 1);
    return ahead > 0 ? ahead : 0;
}

/* Describe the call to the run. All memory belongs to the stay, which outlives the member. */
static void describe(sym_stay *stay, const sym_predicted *call, int64_t slot) {
    sym_connection *connection = stay->connection;
    core_table *table = stay->table;
    int64_t now_ns = sym_now_ns();
    stay->row = call->numbers ? NULL : connection->gate->hot->row(connection->server, slot);
    stay->counted = (sym_news){0};
    core_frames(table, table->num_reserved_pages, stay->pages);
    connection->gate->last_call += 2;
    stay->member = (sym_member){
        .number = connection->gate->last_call,
        .kind = SYM_PROGRAM,
        .since_ns = now_ns,
        .begun_ns = now_ns,
        .arrived_ns = now_ns,
        .asked_ns = now_ns,
        .deadline_ns = SYM_NO_DEADLINE,
        .share = connection->share,
        .program = connection->program,
        .connection = connection->in_run,
        .stream = call->stream,
        .num_rows = 1,
        .rows = call->numbers ? NULL : &stay->row,
        .server = connection->server,
        .call_id = call->id,
        .pages = stay->pages,
        .copies = stay->copy,
        .num_copies = core_copy(table, stay->copy),
        .tokens = stay->tokens,
        .positions = call->num_positions ? stay->positions : NULL,
        .num_tokens = call->num_tokens,
        .position = core_position(table, table->length),
        .first = (int32_t)table->start,
        .capacity = (int32_t)(table->start + table->num_entries),
        .slack = SYM_STAY_SLACK,
        .log = stay->log,
    };
    stay->member.decode.handle = stay->handle;
    stay->member.decode.slot = slot;
    stay->member.decode.numbers = call->numbers;
}

static void recycle(sym_gate *gate, sym_stay *stay) {
    stay->next = gate->free_stays;
    gate->free_stays = stay;
}

core_outcome sym_stay_begin(sym_connection *connection, const sym_predicted *call, int64_t slot, sym_stay **begun) {
    sym_gate *gate = connection->gate;
    core_table *table = call->file;
    sym_stay *stay = sym_stay_new(gate, table->num_pages + 3); /* at most two new pages, and a copy */
    if (!stay)
        return CORE_COLD;
    stay->connection = connection;
    stay->table = table;
    stay->handle = call->handle;
    memcpy(stay->tokens, call->tokens, sizeof(int32_t) * (size_t)call->num_tokens);
    memcpy(stay->positions, call->positions, sizeof(int32_t) * (size_t)call->num_positions);
    const int32_t *positions = call->num_positions ? stay->positions : NULL;
    core_outcome outcome = core_branch_reserve(table, stay->tokens, positions, call->num_tokens,
                                               num_ahead(gate, table, call->num_tokens, call->last_position));
    if (outcome) {
        recycle(gate, stay);
        return outcome;
    }
    describe(stay, call, slot);
    *begun = stay;
    return CORE_DONE;
}

void sym_stay_joined(sym_stay *stay, int32_t index) {
    sym_gate *gate = stay->connection->gate;
    stay->index = index;
    gate->stays[index] = stay;
    gate->num_stays++;
    stay->table->stay = stay;
    stay->table->place = index;
}

core_outcome sym_stay_undo(sym_stay *stay) {
    recycle(stay->connection->gate, stay);
    return core_abort(stay->table);
}

/* ---- computed entries */

static void count(sym_stay *stay, const sym_news *now) {
    sym_connection *connection = stay->connection;
    sym_usage *used = &connection->used;
    const sym_news *before = &stay->counted;
    if (!connection->is_used) {
        connection->is_used = 1;
        connection->next_used = connection->gate->used;
        connection->gate->used = connection;
    }
    used->calls += now->num_calls - before->num_calls;
    used->tokens_in += now->num_done - before->num_done;
    used->tokens += now->num_rows_computed - before->num_rows_computed;
    used->steps += now->num_steps - before->num_steps;
    used->compute_ns += now->compute_ns - before->compute_ns;
    used->queue_ns += now->queue_ns - before->queue_ns;
    stay->counted = *now;
}

int sym_stay_show(sym_gate *gate, sym_stay *stay) {
    sym_news now;
    core_table *table = stay->table;
    sym_loop_look(gate->loop, stay->index, &now);
    const int32_t before = stay->counted.num_done, num = now.num_done - before;
    if (num > 0) {
        const int32_t num_pages = table->num_pages;
        core_outcome outcome = core_commit(table, stay->log + before, num);
        if (outcome == CORE_NO_MEMORY)
            return 0;
        sym_must(outcome, "commit", table);
        core_branch_changed(table);
        if (table->num_pages != num_pages)
            sym_branches_grow(stay->connection, table->num_pages - num_pages);
    }
    count(stay, &now);
    return 1;
}

void sym_stays_show(sym_gate *gate, int copying) {
    for (int32_t at = 0; at < gate->room; at++)
        if (gate->stays[at] && (!copying || gate->stays[at]->table->target != CORE_NOBODY))
            sym_stay_show(gate, gate->stays[at]);
}

/* ---- the end */

core_outcome sym_stay_end(sym_stay *stay) {
    sym_gate *gate = stay->connection->gate;
    core_table *table = stay->table;
    if (!sym_loop_leave_waiting(gate->loop, stay->index) || !sym_stay_show(gate, stay))
        return CORE_COLD;
    sym_loop_take_back(gate->loop, stay->index, &stay->member);
    forget(gate, stay);
    table->place = CORE_NOBODY;
    recycle(gate, stay);
    core_outcome outcome = table->is_reserved ? core_abort(table) : CORE_DONE;
    return outcome == CORE_NO_MEMORY ? CORE_BROKEN : outcome; /* nothing would give the room back later */
}
