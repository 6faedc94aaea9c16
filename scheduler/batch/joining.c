/* Joining and leaving: how members enter the standing run, leave it, and are taken back. */
#include "loop_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- programs' channels */

/* Return the index of a channel in `servers`, and add the channel if it is new. -1: there is no memory. */

static int32_t watched_at(sym_loop *loop, sym_server *server) {
    for (int32_t i = 0; i < loop->num_servers; i++)
        if (loop->servers[i].server == server)
            return i;
    if (sym_make_room(&loop->servers, &loop->room_servers, loop->num_servers + 1, sizeof *loop->servers) != 0)
        return -1;
    loop->servers[loop->num_servers] = (struct watched){.server = server};
    return loop->num_servers++;
}

/* Subtract one member of a channel. When no member is left, the last channel of the array takes the channel's place. */
static void unwatch_member(sym_loop *loop, const sym_member *member) {
    const int32_t at = member->decode.server_index, last = loop->num_servers - 1;
    if (--loop->servers[at].num_members > 0)
        return;
    if (loop->servers[at].slept) /* from here on, the loop no longer watches the ring */
        loop->plan.hot->unwatch(loop->servers[at].server, 1);
    loop->servers[at] = loop->servers[last];
    loop->num_servers--;
    for (int32_t i = 0; i < loop->num_places; i++)
        if (loop->members[i]->state != SYM_GONE && loop->members[i]->kind == SYM_PROGRAM &&
            loop->members[i]->decode.server_index == last)
            loop->members[i]->decode.server_index = at;
}

/* ---- joining and leaving */

/* Take a place for a member that joins, and register its program's channel. Return the place; -1: there is no
 * memory. */
static int32_t take_place(sym_loop *loop, const sym_member *member) {
    const int32_t index = sym_free_place(loop);
    if (index < 0 || member->kind != SYM_PROGRAM)
        return index;
    const int32_t server = watched_at(loop, member->server);
    if (server < 0) {
        loop->free_places[loop->num_free_places++] = index;
        return -1;
    }
    loop->servers[server].num_members++;
    loop->members[index]->decode.server_index = server;
    return index;
}

static void give_place(sym_loop *loop, int32_t index, const sym_member *member) {
    if (member->kind == SYM_PROGRAM)
        unwatch_member(loop, loop->members[index]);
    loop->free_places[loop->num_free_places++] = index;
}

static void join(sym_loop *loop, int32_t index, const sym_member *member, int64_t now_ns) {
    sym_member *place = loop->members[index];
    const int32_t server = place->decode.server_index;
    *place = *member;
    place->state = SYM_COMPUTING;
    if (member->kind == SYM_PROGRAM)
        place->decode.server_index = server;
    sym_called(loop, place, now_ns, now_ns);
    if (member->kind == SYM_GENERATION)
        sym_join_generation(loop, index);
}

static int waits_for(const sym_member *member, const sym_beginning *call) {
    const int continues = call->position < 0 || call->position == member->position;
    const int is_its =
        member->state == SYM_WAITING && member->server == call->server && member->decode.handle == call->handle;
    return is_its && continues && entries(member) < member->capacity;
}

static void begin(sym_loop *loop, const sym_beginning *call, int64_t now_ns) {
    sym_member *member = loop->members[call->index];
    if (call->member != NULL) {
        join(loop, call->index, call->member, now_ns);
        return;
    }
    sym_continue_with(loop, call->index, &call->call, now_ns, now_ns);
    member->decode.group = call->group;
    member->decode.number = call->number;
    member->decode.numbers = call->numbers;
}

int sym_loop_begin(sym_loop *loop, sym_beginning *calls, int32_t num) {
    int32_t n = 0;
    pthread_mutex_lock(&loop->lock);
    for (int may_begin = 1; may_begin && n < num; n += may_begin) {
        sym_beginning *call = &calls[n];
        if (call->member != NULL)
            call->index = take_place(loop, call->member);
        may_begin = call->index >= 0 && (call->member != NULL || waits_for(loop->members[call->index], call));
    }
    const int64_t now_ns = sym_now_ns();
    for (int32_t i = 0; i < n; i++) {
        if (n == num)
            begin(loop, &calls[i], now_ns);
        else if (calls[i].member != NULL)
            give_place(loop, calls[i].index, calls[i].member);
    }
    sym_wake_loop(loop);
    pthread_mutex_unlock(&loop->lock);
    return n == num;
}

int32_t sym_loop_join(sym_loop *loop, const sym_member *member) {
    sym_beginning call = {.index = -1, .member = member};
    return sym_loop_begin(loop, &call, 1) ? call.index : -ENOMEM;
}

int64_t sym_loop_connect(sym_loop *loop) {
    pthread_mutex_lock(&loop->lock);
    const int64_t connection = sym_streams_connect(loop->streams);
    pthread_mutex_unlock(&loop->lock);
    return connection;
}

void sym_loop_disconnect(sym_loop *loop, int64_t connection) {
    pthread_mutex_lock(&loop->lock);
    sym_streams_disconnect(loop->streams, connection);
    pthread_mutex_unlock(&loop->lock);
}

int sym_loop_leave(sym_loop *loop, int32_t index, int how) {
    pthread_mutex_lock(&loop->lock);
    sym_member *member = loop->members[index];
    if (member->state != SYM_ENDED) {
        if (how > member->leave)
            member->leave = how;
        const int has_begun = member->kind != SYM_GENERATION || member->state != SYM_COMPUTING ||
                              !member->generation->has_begun || member->num_computed > 0;
        if (!member->in_step && (how == SYM_LEAVE_NOW || member->state == SYM_WAITING || !has_begun)) {
            const int must_tell = loop->must_tell;
            sym_end_member(loop, index, SYM_END_ASKED);
            loop->must_tell = must_tell; /* the return value tells the scheduler: no need to wake it */
        }
    }
    const int has_ended = member->state == SYM_ENDED && !member->in_step;
    pthread_mutex_unlock(&loop->lock);
    return has_ended;
}

int sym_loop_leave_waiting(sym_loop *loop, int32_t index) {
    pthread_mutex_lock(&loop->lock);
    const int waits = loop->members[index]->state == SYM_WAITING, must_tell = loop->must_tell;
    if (waits)
        sym_end_member(loop, index, SYM_END_ASKED);
    loop->must_tell = must_tell; /* the return value tells the caller */
    pthread_mutex_unlock(&loop->lock);
    return waits;
}

void sym_loop_take_back(sym_loop *loop, int32_t index, sym_member *member) {
    pthread_mutex_lock(&loop->lock);
    sym_member *place = loop->members[index];
    *member = *place;
    if (place->kind == SYM_PROGRAM) {
        if (place->tokens == &place->decode.token)
            member->tokens = &member->decode.token;
        unwatch_member(loop, place);
    }
    if (place->kind == SYM_GENERATION) {
        if (place->num_computed == place->num_tokens)
            sym_end_draft(place->generation);
        place->generation->num_draft = 0;
        place->generation->place = -1;
    }
    if (place->has_news) {
        int32_t n = 0;
        while (loop->news[n] != index)
            n++;
        loop->news[n] = loop->news[--loop->num_news];
    }
    memset(place, 0, sizeof *place);
    loop->free_places[loop->num_free_places++] = index;
    pthread_mutex_unlock(&loop->lock);
}

int32_t sym_loop_find(sym_loop *loop, const sym_server *server, uint64_t call_id, int32_t from) {
    int32_t found = -1;
    pthread_mutex_lock(&loop->lock);
    for (int32_t i = from; i < loop->num_places && found < 0; i++) {
        const sym_member *member = loop->members[i];
        if (member->state == SYM_COMPUTING && member->kind == SYM_PROGRAM && member->server == server &&
            member->call_id == call_id)
            found = i;
    }
    pthread_mutex_unlock(&loop->lock);
    return found;
}

void sym_loop_extend(sym_loop *loop, int32_t index, const int32_t *pages, int32_t *log, int32_t capacity) {
    pthread_mutex_lock(&loop->lock);
    sym_member *member = loop->members[index];
    memcpy(log, member->log, (size_t)member->num_done * sizeof *log);
    member->pages = pages;
    member->log = log;
    member->capacity = capacity;
    member->is_low = member->was_told_low = 0;
    pthread_mutex_unlock(&loop->lock);
}
