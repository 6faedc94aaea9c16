/* Stays: how a branch comes into the run, what is committed of it there, and how it leaves when it is closed. */
#include "stays.h"
#include "handles.h"

#include <stddef.h>

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

/* Entries to reserve behind one that is appended: the rest of its page, or a page. As `Room` has it, of a file that goes on
 * by itself. */
static int64_t num_ahead(const sym_gate *gate, const core_table *table, int32_t position) {
    int64_t num_entries = table->length + 1, ahead = -num_entries & (SYM_PAGE_ENTRIES - 1);
    ahead = ahead ? ahead : SYM_PAGE_ENTRIES;
    const int64_t most[] = {(table->pool->frames->num_pages - 1) * SYM_PAGE_ENTRIES - num_entries,
                            gate->max_entries - num_entries, gate->max_positions - position - 1};
    for (int i = 0; i < 3; i++)
        ahead = ahead < most[i] ? ahead : most[i];
    return ahead > 0 ? ahead : 0;
}

/* The call, as the run has it. Its memory is the stay's, which outlives the member. */
static void describe(sym_stay *stay, const sym_taken *request, int64_t slot) {
    sym_connection *connection = stay->connection;
    core_table *table = stay->table;
    int64_t now_ns = sym_now_ns();
    stay->row = connection->gate->hot->row(connection->server, slot);
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
        .stream = request->stream,
        .num_rows = 1,
        .rows = &stay->row,
        .server = connection->server,
        .call_id = request->id,
        .pages = stay->pages,
        .copies = stay->copy,
        .num_copies = core_copy(table, stay->copy),
        .tokens = &stay->token,
        .num_tokens = 1,
        .position = core_position(table, table->length),
        .first = (int32_t)table->start,
        .capacity = (int32_t)(table->start + table->num_entries),
        .slack = SYM_STAY_SLACK,
        .log = stay->log,
    };
    stay->member.decode.handle = stay->handle;
    stay->member.decode.slot = slot;
}

static core_outcome join(sym_stay *stay, const sym_taken *request, int64_t slot) {
    sym_gate *gate = stay->connection->gate;
    describe(stay, request, slot);
    stay->index = sym_loop_join(gate->loop, &stay->member);
    if (stay->index < 0)
        return CORE_NO_MEMORY;
    gate->stays[stay->index] = stay;
    gate->num_stays++;
    stay->table->stay = stay;
    stay->table->place = stay->index;
    return CORE_DONE;
}

core_outcome sym_stay_begin(sym_connection *connection, core_table *table, const sym_taken *request, int32_t token,
                            int32_t position, int is_position_given) {
    sym_gate *gate = connection->gate;
    int32_t num_pages = table->num_pages + 3; /* the entry's, one ahead, and a copy */
    sym_stay *stay = sym_gate_has_place(gate, sym_loop_num_places(gate->loop)) ? sym_stay_new(gate, num_pages) : NULL;
    if (!stay)
        return CORE_COLD;
    stay->connection = connection;
    stay->table = table;
    stay->handle = request->handle;
    stay->token = token;
    int64_t slot = gate->hot->take_rows(connection->server, 1);
    core_outcome outcome = slot < 0 ? CORE_COLD
                                    : core_branch_reserve(table, token, is_position_given ? &position : NULL,
                                                          num_ahead(gate, table, position));
    if (!outcome && (outcome = join(stay, request, slot)) == CORE_NO_MEMORY) {
        core_outcome aborted = core_abort(table);
        outcome = aborted ? aborted : CORE_COLD;
    }
    if (!outcome)
        return CORE_DONE;
    if (slot >= 0)
        gate->hot->free_rows(connection->server, (uint32_t)slot, 1);
    stay->next = gate->free_stays;
    gate->free_stays = stay;
    return outcome;
}

core_outcome sym_go_on(sym_connection *connection, core_table *table, const sym_taken *request, int32_t token,
                       int32_t position) {
    sym_gate *gate = connection->gate;
    int64_t slot = gate->hot->take_rows(connection->server, 1);
    if (slot < 0)
        return CORE_COLD;
    const sym_hot_call call = {.id = request->id,
                               .slot = slot,
                               .row = gate->hot->row(connection->server, slot),
                               .token = token,
                               .stream = request->stream};
    if (sym_loop_inject(gate->loop, table->place, connection->server, request->handle, &call, position))
        return CORE_DONE;
    gate->hot->free_rows(connection->server, (uint32_t)slot, 1);
    return CORE_COLD;
}

/* ---- what is computed */

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
    stay->next = gate->free_stays;
    gate->free_stays = stay;
    core_outcome outcome = table->is_reserved ? core_abort(table) : CORE_DONE;
    return outcome == CORE_NO_MEMORY ? CORE_BROKEN
                                     : outcome; /* the branch is in no run, and has room that nobody uses */
}
