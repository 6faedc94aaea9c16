/* Handles of a connection, in a table of open addresses. Their numbers follow each other: taken as they are they would lie
 * in one long row, which whoever closes the first of them goes through. Multiplied they lie apart. */
#include "handles.h"

#include <stdlib.h>

enum { FIRST_ROOM = 16 };

void sym_connection_free(sym_connection *connection) {
    free(connection->handles);
    connection->handles = NULL;
    connection->room = connection->num_handles = connection->num_seen = 0;
}

static int64_t home_of(const sym_connection *connection, uint64_t number) {
    return (int64_t)(number * UINT64_C(0x9E3779B97F4A7C15) >> (64 - __builtin_ctzll((uint64_t)connection->room)));
}

/* The place of a number, or the free one where it would be. There is always a free one. */
static int64_t place_of(const sym_connection *connection, uint64_t number) {
    int64_t mask = connection->room - 1, at = home_of(connection, number);
    while (connection->handles[at].number && connection->handles[at].number != number)
        at = (at + 1) & mask;
    return at;
}

static sym_handle *find(const sym_connection *connection, uint64_t number) {
    if (!connection->room || !number)
        return NULL;
    sym_handle *found = connection->handles + place_of(connection, number);
    return found->number ? found : NULL;
}

/* At most half of the places are taken. */
int sym_handles_grow(sym_connection *connection) {
    int64_t before = connection->room;
    sym_handle *handles = connection->handles;
    if (2 * (connection->num_handles + 1) <= before)
        return 1;
    sym_handle *more = calloc(before ? 2 * before : FIRST_ROOM, sizeof *more);
    if (!more)
        return 0;
    connection->handles = more;
    connection->room = before ? 2 * before : FIRST_ROOM;
    for (int64_t at = 0; at < before; at++)
        if (handles[at].number)
            more[place_of(connection, handles[at].number)] = handles[at];
    free(handles);
    return 1;
}

uint64_t sym_handles_add(sym_connection *connection, core_table *table, int is_seen) {
    uint64_t number = ++connection->last_handle;
    connection->handles[place_of(connection, number)] = (sym_handle){number, table, is_seen};
    connection->num_handles++;
    connection->num_seen += is_seen;
    return number;
}

uint64_t sym_handle_new(sym_connection *connection, core_table *table) {
    return sym_handles_grow(connection) ? sym_handles_add(connection, table, 1) : 0;
}

core_table *sym_handle_find(const sym_connection *connection, uint64_t number) {
    const sym_handle *found = find(connection, number);
    return found ? found->table : NULL;
}

void sym_branches_grow(sym_connection *connection, int64_t num_pages) {
    double now_s = core_now_s();
    connection->page_seconds += connection->num_pages * (now_s - connection->since_s);
    connection->since_s = now_s;
    connection->num_pages += num_pages;
}

void sym_handle_seen(sym_connection *connection, uint64_t number) {
    sym_handle *found = find(connection, number);
    if (!found || found->is_seen)
        return;
    found->is_seen = 1;
    connection->num_seen++;
    sym_branches_grow(connection, -found->table->num_pages);
}

/* Handles behind it that a lookup would not find any more move up. */
void sym_handle_forget(sym_connection *connection, uint64_t number) {
    sym_handle *handles = connection->handles, *found = find(connection, number);
    if (!found)
        return;
    int64_t mask = connection->room - 1, gap = found - handles;
    connection->num_handles--;
    connection->num_seen -= found->is_seen;
    for (int64_t at = (gap + 1) & mask; handles[at].number; at = (at + 1) & mask) {
        if (((at - home_of(connection, handles[at].number)) & mask) >= ((at - gap) & mask)) {
            handles[gap] = handles[at];
            gap = at;
        }
    }
    handles[gap].number = 0;
}

static int is_among(const sym_handle *handle, int which) {
    return handle->number && (which == SYM_UNSEEN_HANDLES ? !handle->is_seen
                              : which == SYM_KNOWN_FILES  ? handle->is_seen || !handle->table->is_branch
                                                          : 1);
}

int64_t sym_handles_list(const sym_connection *connection, int which, uint64_t *numbers, int64_t max) {
    int64_t num = 0;
    for (int64_t at = 0; at < connection->room && num < max; at++)
        if (is_among(connection->handles + at, which))
            numbers[num++] = connection->handles[at].number;
    return num;
}

/* ---- branches */

static int is_branch(const sym_handle *handle) { return handle->number && !handle->is_seen; }

core_outcome sym_branch_close(sym_connection *connection, uint64_t number, core_table *branch) {
    if (branch->stay) {
        core_outcome left = sym_stay_end(branch->stay);
        if (left)
            return left;
    }
    int32_t num_pages = branch->num_pages;
    core_outcome outcome = core_branch_close(branch, connection->gate->files);
    if (outcome == CORE_COLD)
        return outcome;
    sym_branches_grow(connection, -num_pages);
    sym_handle_forget(connection, number);
    core_outcome held = core_hold(connection->holdings, CORE_HANDLE, -1, 0);
    return outcome ? outcome : held;
}

int64_t sym_branches_close(sym_connection *connection, int64_t max) {
    int64_t num_closed = 0;
    int64_t at = connection->num_swept;
    while (at < connection->room && num_closed < max) {
        const sym_handle handle = connection->handles[at];
        core_outcome outcome = is_branch(&handle) && handle.table->is_branch
                                   ? sym_branch_close(connection, handle.number, handle.table)
                                   : CORE_COLD;
        if (outcome == CORE_DONE)
            num_closed++; /* another one may have moved to its place */
        else if (outcome == CORE_COLD)
            at++;
        else
            return -1;
    }
    connection->num_swept = at;
    return num_closed;
}

double sym_branches_page_seconds(const sym_connection *connection) {
    return connection->page_seconds + connection->num_pages * (core_now_s() - connection->since_s);
}

void sym_branches_pages(const sym_connection *connection, int32_t *pages) {
    const int32_t *end = pages + connection->num_pages;
    for (int64_t at = 0; at < connection->room; at++)
        if (is_branch(connection->handles + at)) {
            const core_table *table = connection->handles[at].table;
            for (int32_t place = 0; place < table->num_pages && pages < end; place++)
                *pages++ = table->slots[place];
        }
}

static double last_use_s(const sym_connection *connection, uint64_t number) {
    const core_table *table = sym_handle_find(connection, number);
    return table ? table->pool->row.last_use_s[table->row] : 0;
}

int64_t sym_branches_idle(const sym_connection *connection, uint64_t *numbers, int64_t max) {
    int64_t num = 0;
    double newest_s = 0; /* of those that were found, when there are `max` */
    for (int64_t at = 0; at < connection->room && max > 0; at++) {
        const sym_handle *handle = connection->handles + at;
        if (!is_branch(handle) || !handle->table->is_branch)
            continue;
        double used_s = last_use_s(connection, handle->number);
        if (num == max && used_s >= newest_s)
            continue;
        int64_t place = num < max ? num++ : num - 1;
        for (; place > 0 && last_use_s(connection, numbers[place - 1]) > used_s; place--)
            numbers[place] = numbers[place - 1];
        numbers[place] = handle->number;
        newest_s = last_use_s(connection, numbers[num - 1]);
    }
    return num;
}
