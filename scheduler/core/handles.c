/* Handles of a connection, in a hash table with open addressing. Handle numbers are consecutive. Unhashed, they would
 * form one long run of places, and closing the first handle would walk through all of it. A multiplicative hash spreads
 * the handles. */
#include "handles.h"

#include <inttypes.h>
#include <stdio.h>
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

/* Return the place of a number, or the free place for this number. There is always a free place. */
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

int sym_handles_grow(sym_connection *connection, int64_t num) {
    int64_t before = connection->room, room = before ? before : FIRST_ROOM;
    sym_handle *handles = connection->handles;
    while (2 * (connection->num_handles + num) > room)
        room *= 2;
    if (room == before)
        return 1;
    sym_handle *more = calloc(room, sizeof *more);
    if (!more)
        return 0;
    connection->handles = more;
    connection->room = room;
    for (int64_t at = 0; at < before; at++)
        if (handles[at].number)
            more[place_of(connection, handles[at].number)] = handles[at];
    free(handles);
    return 1;
}

uint64_t sym_handles_add(sym_connection *connection, core_table *table, int is_seen, int is_writable) {
    uint64_t number = ++connection->last_handle;
    connection->handles[place_of(connection, number)] = (sym_handle){number, table, is_seen};
    connection->num_handles++;
    connection->num_seen += is_seen;
    if (is_writable && table->program != connection->program_id) {
        table->program = connection->program_id;
        core_changed(table);
    }
    return number;
}

uint64_t sym_handle_new(sym_connection *connection, core_table *table, int is_writable) {
    return sym_handles_grow(connection, 1) ? sym_handles_add(connection, table, 1, is_writable) : 0;
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

/* Handles behind the gap move into it if a lookup would otherwise stop before them. */
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

void sym_must(core_outcome outcome, const char *what, const core_table *file) {
    if (!outcome)
        return;
    fprintf(stderr, "symphony: %s of inode %" PRId64 " (%" PRId64 " entries): outcome %d of the core\n", what,
            file->number, file->length, outcome);
    abort();
}

/* ---- branches */

static int is_branch(const sym_handle *handle) { return handle->number && !handle->is_seen; }

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
    double newest_s = 0; /* last use of the newest branch in `numbers` */
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
