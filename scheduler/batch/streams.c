/* Which calls are about to come, and how long a step waits for them.
 *
 * A *stream* is a thread or a task of a program: what its library says waits for an answer. From an answer to its next call
 * it thinks, whatever it closes, forks or cuts in between. How long that took it lately, and how far it was off, say when it
 * is due again. A new stream is not expected before it has come back once; and of a connection no more are expected than it
 * has had under way at once. So a program that gives false names gains nothing but waits of its own account. Where
 * calls name no stream, the answers of their connection that no call has followed are streams.
 *
 * Calls of one stream that are under way together are a batch, and so many are expected of it again.
 *
 * With k calls ready and others due at t1 <= t2 <= ..., a step that waits until tn computes those, too: k + n calls in
 * tn + step(k + n). The wait that gives most calls a second is chosen, and chosen anew as calls come and time passes. */
#include "streams.h"

#include "loop_state.h"

#include <stdlib.h>

#define MAX_STREAMS 256 /* of a connection; more share their places */
#define ANY_NS 200000   /* by which any stream may be off */
#define GONE 8          /* so many times later than usual: it is not expected any more */

struct stream {
    uint32_t name; /* 0: nobody's */
    int32_t num_under_way;
    int32_t num_calls; /* under way together lately */
    int64_t answered_ns; /* and it has not called again; 0: it has */
    int64_t think_ns, off_ns;
    int32_t has_returned;
    int32_t is_new; /* its answer, since the latest look at what has come */
};

struct connection {
    struct stream *streams; /* [room], each at its name modulo room */
    int32_t room, is_there;
    int32_t generation; /* how many there were at its place */
    int32_t share; /* of its latest call */
    int32_t num_under_way, most_under_way;
    int64_t due_ns; /* its first expected stream, at the latest decision; 0: none */
    int32_t is_waited; /* the wait that goes on is for it, too */
};

struct due {
    int64_t ns;
    int32_t num_calls;
};

struct sym_streams {
    struct connection *connections;
    int32_t num_connections, room_connections;
    struct due *due;
    int32_t room_due;
};

sym_streams *sym_streams_new(void) { return calloc(1, sizeof(sym_streams)); }

void sym_streams_free(sym_streams *streams) {
    for (int32_t i = 0; i < streams->num_connections; i++)
        free(streams->connections[i].streams);
    free(streams->connections);
    free(streams->due);
    free(streams);
}

int64_t sym_streams_connect(sym_streams *streams) {
    int32_t found = 0;
    while (found < streams->num_connections && streams->connections[found].is_there)
        found++;
    if (found == streams->num_connections) {
        if (sym_make_room(&streams->connections, &streams->room_connections, found + 1, sizeof *streams->connections) !=
            0)
            return -1;
        streams->connections[streams->num_connections++] = (struct connection){0};
    }
    streams->connections[found].is_there = 1;
    return (int64_t)streams->connections[found].generation << 32 | found;
}

/* Null: it has gone. */
static struct connection *connection_of(sym_streams *streams, int64_t number) {
    if (number < 0)
        return NULL;
    struct connection *found = &streams->connections[number & 0xffffffff];
    return found->generation == number >> 32 ? found : NULL;
}

void sym_streams_disconnect(sym_streams *streams, int64_t connection) {
    struct connection *gone = connection_of(streams, connection);
    if (gone == NULL)
        return;
    free(gone->streams);
    *gone = (struct connection){.generation = gone->generation + 1};
}

/* The place of a stream, which may have been another one's. Null: no memory. */
static struct stream *place_of(struct connection *connection, uint32_t name) {
    for (;;) {
        struct stream *place =
            connection->room == 0 ? NULL : &connection->streams[name & (uint32_t)(connection->room - 1)];
        if (place != NULL && (place->name == name || place->name == 0 || connection->room == MAX_STREAMS))
            return place;
        const int32_t room = connection->room == 0 ? 4 : 2 * connection->room;
        struct stream *streams = calloc((size_t)room, sizeof *streams);
        if (streams == NULL)
            return NULL;
        for (int32_t i = 0; i < connection->room; i++)
            if (connection->streams[i].name != 0) /* two cannot meet that did not meet before */
                streams[connection->streams[i].name & (uint32_t)(room - 1)] = connection->streams[i];
        free(connection->streams);
        connection->streams = streams;
        connection->room = room;
    }
}

/* So late that it is not expected any more. */
static int is_gone(const struct stream *stream, int64_t now_ns) {
    const int64_t late_ns = now_ns - stream->answered_ns - stream->think_ns;
    return stream->has_returned && late_ns > GONE * (stream->think_ns + stream->off_ns) + ANY_NS;
}

/* The name of a call that has none: of such streams the one that was answered first, if it is not gone; or a new one. */
static uint32_t name_of_nameless(const struct connection *connection, int64_t now_ns) {
    const struct stream *found = NULL;
    uint32_t num = 0;
    for (int32_t i = 0; i < connection->room; i++) {
        const struct stream *stream = &connection->streams[i];
        if (stream->name < SYM_NAMELESS)
            continue;
        num++;
        if (stream->num_under_way > 0)
            continue;
        const int is_older = found != NULL && stream->answered_ns < found->answered_ns;
        if (found == NULL || (is_gone(found, now_ns) == is_gone(stream, now_ns) ? is_older : is_gone(found, now_ns)))
            found = stream;
    }
    return found != NULL ? found->name : SYM_NAMELESS + num;
}

/* A call came between two times. Where it may have come when it was due, nothing is learned: a call that came while a step
 * ran would else seem to have come at its end. A long pause is no reason to take a stream for slow for long, and a short one
 * none to take it for quick. */
static void came_back(struct stream *stream, int64_t earliest_ns, int64_t latest_ns) {
    const int64_t least_ns = earliest_ns > stream->answered_ns ? earliest_ns - stream->answered_ns : 0;
    const int64_t most_ns = latest_ns - stream->answered_ns;
    int64_t took_ns = least_ns + (most_ns - least_ns) / 2;
    if (!stream->has_returned) {
        stream->think_ns = took_ns;
        stream->off_ns = took_ns / 4;
    } else if (stream->think_ns < least_ns || stream->think_ns > most_ns || most_ns - least_ns < ANY_NS) {
        const int64_t longest_ns = 4 * stream->think_ns + ANY_NS;
        took_ns = took_ns < longest_ns ? took_ns : longest_ns;
        const int64_t before_ns = stream->think_ns < 4 * took_ns ? stream->think_ns : 4 * took_ns;
        const int64_t off_ns = took_ns > before_ns ? took_ns - before_ns : before_ns - took_ns;
        stream->think_ns = before_ns + (took_ns - before_ns) / 4;
        stream->off_ns += (off_ns - stream->off_ns) / 4;
    }
    stream->has_returned = 1;
    stream->answered_ns = 0;
}

uint32_t sym_streams_called(sym_streams *streams, int64_t connection, uint32_t stream, int32_t share,
                            int64_t earliest_ns, int64_t latest_ns) {
    struct connection *its = connection_of(streams, connection);
    if (its == NULL || stream == SYM_NO_STREAM)
        return stream;
    if (stream == 0)
        stream = name_of_nameless(its, latest_ns);
    its->share = share;
    its->num_under_way++;
    struct stream *place = place_of(its, stream);
    if (place == NULL)
        return stream;
    if (place->name != stream) {
        its->num_under_way -= place->is_new;
        *place = (struct stream){.name = stream};
    }
    if (place->answered_ns != 0) {
        came_back(place, earliest_ns, latest_ns);
        its->num_under_way -= place->is_new; /* it is not under way twice */
        place->is_new = 0;
    }
    if (place->num_under_way++ == 0)
        place->num_calls = 0;
    place->num_calls = place->num_under_way > place->num_calls ? place->num_under_way : place->num_calls;
    its->most_under_way = its->most_under_way > its->num_under_way ? its->most_under_way : its->num_under_way;
    return stream;
}

void sym_streams_over(sym_streams *streams, int64_t connection, uint32_t stream, int is_answered, int64_t now_ns) {
    struct connection *its = connection_of(streams, connection);
    if (its == NULL || stream == SYM_NO_STREAM)
        return;
    struct stream *place = place_of(its, stream);
    const int is_its =
        place != NULL && place->name == stream && place->num_under_way > 0; /* not another one's by now */
    if (is_its && --place->num_under_way == 0 && is_answered) {
        place->answered_ns = now_ns;
        place->is_new = 1; /* calls that came meanwhile were under way beside it, and are seen only later */
    } else {
        its->num_under_way--;
    }
}

/* When a stream that has been answered is likely to be back: the later it is, the later. 0: nobody knows. */
static int64_t due_of(const struct stream *stream, int64_t now_ns) {
    if (stream->answered_ns == 0 || !stream->has_returned || is_gone(stream, now_ns))
        return 0;
    const int64_t due_ns = stream->answered_ns + stream->think_ns, late_ns = now_ns - due_ns;
    const int64_t off_ns = stream->off_ns / 2;
    if (late_ns < 0)
        return due_ns + off_ns;
    return now_ns + (late_ns / 2 > off_ns ? late_ns / 2 : off_ns);
}

static int by_time(const void *one, const void *other) {
    const int64_t first = ((const struct due *)one)->ns, second = ((const struct due *)other)->ns;
    return (first > second) - (first < second);
}

/* Streams of a connection that are expected, the earliest first, from `num` on: how many in all. */
static int32_t add_due(sym_streams *streams, struct connection *each, int32_t num, int64_t now_ns) {
    int32_t more = num;
    for (int32_t n = 0; n < each->room; n++) {
        struct stream *stream = &each->streams[n];
        each->num_under_way -= stream->is_new;
        stream->is_new = 0;
        const int64_t due_ns = due_of(stream, now_ns);
        if (due_ns != 0 && sym_make_room(&streams->due, &streams->room_due, more + 1, sizeof *streams->due) == 0)
            streams->due[more++] = (struct due){due_ns, stream->num_calls};
    }
    if (more - num > 1)
        qsort(streams->due + num, (size_t)(more - num), sizeof *streams->due, by_time);
    int32_t left = each->most_under_way - each->num_under_way;
    for (; num < more && left > 0; num++) {
        struct due *due = &streams->due[num];
        due->num_calls = due->num_calls < left ? due->num_calls : left;
        left -= due->num_calls;
    }
    return num;
}

/* Whether calls of another account are ready, which wait less for these streams. */
static int is_strange(const struct connection *each, const sym_ready *ready, const sym_share *shares) {
    return ready->account != SYM_NOBODY && shares[each->share].parent != ready->account;
}

/* What a step of so many calls takes, if each takes what one of the latest step took. */
static int64_t step_ns(const sym_cost *cost, const sym_work *latest, int32_t num_latest, int32_t num_calls) {
    const double share = (double)num_calls / (double)(num_latest > 0 ? num_latest : 1);
    const sym_work work = {.num_rows = num_calls,
                           .num_wanted = num_calls,
                           .num_entries = (int64_t)(share * (double)latest->num_entries),
                           .num_seen = (int64_t)(share * (double)latest->num_seen)};
    const double found_ns = sym_cost_of(cost, &work);
    return found_ns > 1 ? (int64_t)found_ns : 1;
}

int64_t sym_streams_wait_until(sym_streams *streams, const sym_ready *ready, const sym_wait *wait,
                               const sym_limits *limits, const sym_cost *cost, const sym_work *latest,
                               int32_t num_calls, const sym_share *shares, int64_t now_ns) {
    const int32_t k = ready->num_calls;
    const int64_t alone_ns = step_ns(cost, latest, num_calls, k > 0 ? k : 1);
    const int64_t strange_until_ns = ready->began_ns + sym_policy_wait_ns(wait, alone_ns);
    const int64_t most_ns = k == 0 ? ready->began_ns + wait->max_ns : ready->began_ns + alone_ns;
    int32_t m = 0;
    for (int32_t i = 0; i < streams->num_connections; i++) {
        struct connection *each = &streams->connections[i];
        const int32_t before = m;
        if (each->is_there)
            m = add_due(streams, each, m, now_ns);
        if (ready->is_hurried || is_strange(each, ready, shares))
            while (m > before && streams->due[m - 1].ns > strange_until_ns)
                m--;
        each->due_ns = m > before ? streams->due[before].ns : 0;
    }
    if (m > 1)
        qsort(streams->due, (size_t)m, sizeof *streams->due, by_time);
    double best = k == 0 ? 0 : (double)k / (double)alone_ns;
    int64_t until_ns = now_ns;
    int32_t num = k;
    for (int32_t n = 0; n < m && num < limits->max_calls && streams->due[n].ns <= most_ns; n++) {
        num = num + streams->due[n].num_calls < limits->max_calls ? num + streams->due[n].num_calls : limits->max_calls;
        const int64_t takes_ns = streams->due[n].ns - now_ns + step_ns(cost, latest, num_calls, num);
        if ((double)num / (double)takes_ns > best) {
            best = (double)num / (double)takes_ns;
            until_ns = streams->due[n].ns;
        }
    }
    for (int32_t i = 0; until_ns > now_ns && i < streams->num_connections; i++) {
        struct connection *each = &streams->connections[i];
        each->is_waited = each->due_ns != 0 && each->due_ns <= until_ns;
    }
    return until_ns;
}

void sym_streams_charge(sym_streams *streams, const sym_ready *ready, sym_share *shares, int64_t now_ns) {
    for (int32_t i = 0; i < streams->num_connections; i++) {
        struct connection *each = &streams->connections[i];
        const int may_pay = each->is_waited && ready->num_calls > 0 && is_strange(each, ready, shares);
        int64_t in_vain_ns = 0;
        each->is_waited = 0;
        for (int32_t n = 0; may_pay && n < each->room; n++) {
            const int64_t late_ns = now_ns - each->streams[n].answered_ns - each->streams[n].think_ns;
            if (due_of(&each->streams[n], now_ns) != 0 && late_ns > in_vain_ns)
                in_vain_ns = late_ns;
        }
        if (in_vain_ns > now_ns - ready->began_ns)
            in_vain_ns = now_ns - ready->began_ns;
        for (int32_t share = each->share; share > 0; share = shares[share].parent)
            shares[share].used += (double)in_vain_ns / shares[share].weight;
    }
}
