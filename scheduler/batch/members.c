/* Who is in the standing run: members join and leave, and the scheduler is told what has become of them. */
#include "loop_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int64_t sym_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

int sym_make_room(void *array, int32_t *room, int32_t wanted, size_t size) {
    if (wanted <= *room)
        return 0;
    int32_t more = *room < 16 ? 16 : *room;
    while (more < wanted)
        more *= 2;
    void *longer;
    memcpy(&longer, array, sizeof longer); /* a pointer of whatever type */
    longer = realloc(longer, (size_t)more * size);
    if (longer == NULL)
        return -1;
    memcpy(array, &longer, sizeof longer);
    *room = more;
    return 0;
}

void sym_ring(int fd) {
    if (fd < 0)
        return; /* nobody is there yet */
    const uint64_t one = 1;
    const ssize_t written = write(fd, &one, sizeof one);
    (void)written; /* EAGAIN: it is ringing already */
}

/* Once for all that there is to act on until somebody asks for it. */
void sym_tell(sym_loop *loop) {
    if (loop->is_told || !loop->must_tell || loop->engine.wake_fd < 0)
        return;
    loop->is_told = 1;
    loop->counts.num_wakes++;
    sym_ring(loop->engine.wake_fd);
}

void sym_news_of(sym_loop *loop, int32_t index) {
    sym_member *member = loop->members[index];
    if (!member->has_news) {
        member->has_news = 1;
        loop->news[loop->num_news++] = index; /* has room for every place */
    }
}

void sym_act_on(sym_loop *loop, int32_t index) {
    sym_news_of(loop, index);
    loop->must_tell = 1;
}

void sym_called(sym_loop *loop, sym_member *member, int64_t earliest_ns, int64_t latest_ns) {
    member->stream =
        sym_streams_called(loop->streams, member->connection, member->stream, member->share, earliest_ns, latest_ns);
    member->is_under_way = 1;
}

void sym_over(sym_loop *loop, sym_member *member, int is_answered, int64_t now_ns) {
    if (member->is_under_way)
        sym_streams_over(loop->streams, member->connection, member->stream, is_answered, now_ns);
    member->is_under_way = 0;
}

void sym_end_member(sym_loop *loop, int32_t index, int32_t why) {
    sym_member *member = loop->members[index];
    sym_over(loop, member, why != SYM_END_ASKED && why != SYM_END_STEP && why != SYM_END_ROOM, sym_now_ns());
    member->state = SYM_ENDED;
    member->end = why;
    sym_act_on(loop, index);
}

/* ---- servers */

static int32_t watched_at(sym_loop *loop, sym_server *server) {
    for (int32_t i = 0; i < loop->num_servers; i++)
        if (loop->servers[i].server == server)
            return i;
    if (sym_make_room(&loop->servers, &loop->room_servers, loop->num_servers + 1, sizeof *loop->servers) != 0)
        return -1;
    loop->servers[loop->num_servers] = (struct watched){.server = server};
    return loop->num_servers++;
}

/* The last one takes the place of one that nobody needs any more. */
static void unwatch_member(sym_loop *loop, const sym_member *member) {
    const int32_t at = member->decode.server_index, last = loop->num_servers - 1;
    if (--loop->servers[at].num_members > 0)
        return;
    if (loop->servers[at].slept) /* the loop is looking at its ring right now: it will not any more */
        loop->plan.hot->unwatch(loop->servers[at].server, 1);
    loop->servers[at] = loop->servers[last];
    loop->num_servers--;
    for (int32_t i = 0; i < loop->num_places; i++)
        if (loop->members[i]->state != SYM_GONE && loop->members[i]->kind == SYM_PROGRAM &&
            loop->members[i]->decode.server_index == last)
            loop->members[i]->decode.server_index = at;
}

/* ---- joining and leaving */

static int32_t free_place(sym_loop *loop) {
    if (loop->num_free_places > 0)
        return loop->free_places[--loop->num_free_places];
    const int32_t index = loop->num_places;
    int32_t room[3] = {loop->room_places, loop->room_places, loop->room_places};
    if (sym_make_room(&loop->members, &room[0], index + 1, sizeof(sym_member *)) != 0 ||
        sym_make_room(&loop->free_places, &room[1], index + 1, sizeof(int32_t)) != 0 ||
        sym_make_room(&loop->news, &room[2], index + 1, sizeof(int32_t)) != 0)
        return -1;
    loop->room_places = room[0];
    sym_member *place = calloc(1, sizeof *place);
    if (place == NULL)
        return -1;
    loop->members[index] = place;
    loop->num_places++;
    return index;
}

void sym_wake_loop(sym_loop *loop) {
    if (loop->is_asleep)
        pthread_cond_signal(&loop->has_work);
}

int32_t sym_loop_join(sym_loop *loop, const sym_member *member) {
    pthread_mutex_lock(&loop->lock);
    int32_t index = free_place(loop);
    if (index >= 0) {
        sym_member *place = loop->members[index];
        *place = *member;
        place->state = SYM_COMPUTING;
        if (member->kind == SYM_PROGRAM) {
            place->decode.server_index = watched_at(loop, member->server);
            if (place->decode.server_index < 0) {
                place->state = SYM_GONE;
                loop->free_places[loop->num_free_places++] = index;
                index = -1;
            } else {
                loop->servers[place->decode.server_index].num_members++;
            }
        }
        if (index >= 0) {
            const int64_t now_ns = sym_now_ns();
            sym_called(loop, place, now_ns, now_ns);
            if (member->kind == SYM_GENERATION)
                sym_join_generation(loop, index);
        }
        sym_wake_loop(loop);
    }
    pthread_mutex_unlock(&loop->lock);
    return index < 0 ? -ENOMEM : index;
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
            loop->must_tell = must_tell; /* whoever asks is told by this */
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
    loop->must_tell = must_tell; /* whoever asks is told by this */
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

int sym_loop_inject(sym_loop *loop, int32_t index, const sym_server *server, uint64_t handle, const sym_hot_call *call,
                    int32_t position) {
    pthread_mutex_lock(&loop->lock);
    sym_member *member = loop->members[index];
    const int continues = position < 0 || position == member->position;
    const int is_its = member->state == SYM_WAITING && member->server == server && member->decode.handle == handle;
    const int waits = is_its && continues && entries(member) < member->capacity;
    if (waits) {
        const int64_t now_ns = sym_now_ns();
        sym_continue_with(loop, index, call, now_ns, now_ns);
        sym_wake_loop(loop);
    }
    pthread_mutex_unlock(&loop->lock);
    return waits;
}

int32_t sym_loop_find(sym_loop *loop, const sym_server *server, uint64_t call_id) {
    int32_t found = -1;
    pthread_mutex_lock(&loop->lock);
    for (int32_t i = 0; i < loop->num_places && found < 0; i++) {
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

/* ---- what the scheduler is told */

static int is_rung(const sym_member *member) { return member->kind == SYM_PROGRAM && member->decode.is_rung; }

/* The scheduler has something to do for it. */
static int is_urgent(const sym_member *member) {
    return member->state == SYM_ENDED || is_rung(member) || (member->is_low && !member->was_told_low);
}

static sym_news news_of(const sym_member *member, int32_t index) {
    const sym_decode nothing = {0}, *decode = member->kind == SYM_PROGRAM ? &member->decode : &nothing;
    return (sym_news){.index = index,
                      .state = member->state,
                      .num_done = member->num_done,
                      .is_low = member->is_low && !member->was_told_low,
                      .is_rung = is_rung(member),
                      .has_ended = member->state == SYM_ENDED && !member->in_step,
                      .answered_ns = member->state == SYM_WAITING ? decode->answered_ns : 0,
                      .num_entries = entries(member),
                      .num_calls = decode->num_calls,
                      .compute_ns = member->compute_ns,
                      .queue_ns = member->queue_ns,
                      .num_steps = member->num_steps,
                      .num_rows_computed = member->num_rows_computed};
}

void sym_loop_look(sym_loop *loop, int32_t index, sym_news *news) {
    pthread_mutex_lock(&loop->lock);
    *news = news_of(loop->members[index], index);
    pthread_mutex_unlock(&loop->lock);
}

int32_t sym_loop_news(sym_loop *loop, sym_news *news, int32_t max, int all) {
    int32_t n = 0, num_kept = 0, num_missed = 0;
    pthread_mutex_lock(&loop->lock);
    loop->is_told = loop->must_tell = 0;
    for (int32_t at = 0; at < loop->num_news; at++) {
        const int32_t index = loop->news[at];
        sym_member *member = loop->members[index];
        const int is_wanted = all || is_urgent(member), is_looked_at = member->in_step && member->state == SYM_ENDED;
        if (n == max || !is_wanted || is_looked_at) {
            loop->news[num_kept++] = index;
            num_missed += is_wanted;
            continue;
        }
        news[n] = news_of(member, index);
        member->has_news = 0;
        if (news[n].is_rung)
            member->decode.is_rung = 0;
        member->was_told_low |= news[n++].is_low;
    }
    loop->num_news = num_kept;
    loop->must_tell = num_missed > 0;
    if (n == max) /* else it is told of those that are looked at when their step is over */
        sym_tell(loop);
    pthread_mutex_unlock(&loop->lock);
    return n;
}

void *sym_loop_take_rung(sym_loop *loop) {
    void *found = NULL;
    pthread_mutex_lock(&loop->lock);
    for (int32_t at = 0; at < loop->num_news && !found; at++) {
        sym_member *member = loop->members[loop->news[at]];
        if (is_rung(member) && (found = loop->plan.hot->served_by(member->server)))
            member->decode.is_rung = 0;
    }
    pthread_mutex_unlock(&loop->lock);
    return found;
}

int sym_loop_is_quiet(sym_loop *loop) {
    int is_quiet = 1;
    pthread_mutex_lock(&loop->lock);
    for (int32_t at = 0; at < loop->num_news && is_quiet; at++)
        is_quiet = !is_urgent(loop->members[loop->news[at]]);
    if (is_quiet)
        loop->is_told = loop->must_tell = 0;
    pthread_mutex_unlock(&loop->lock);
    return is_quiet;
}

int32_t sym_loop_num_places(const sym_loop *loop) { return loop->num_places; }

int64_t sym_loop_progress(const sym_loop *loop) { return atomic_load(&loop->progress); }

void sym_loop_expect(sym_loop *loop, int32_t more) {
    int32_t before = loop->num_expected, after;
    do
        after = before + more < 0 ? 0 : before + more; /* they were waited for in vain, and are not expected any more */
    while (!atomic_compare_exchange_weak(&loop->num_expected, &before, after));
}
