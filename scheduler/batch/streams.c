/* Streams predict which calls are due, and how long a step should wait for them.
 *
 * A *stream* is a thread or a task of a program. Each call names the stream that waits for its answer: libsym numbers
 * the streams. A stream *thinks* from an answer until its next call, whatever files it closes, forks or truncates in
 * between. Its mean think time, and the mean error of this time, predict when its next call is due.
 *
 * No call is expected of a stream that has never called again after an answer. A connection is not expected to make
 * more calls than it has had under way together. So a program that gives false names of streams gains nothing: only
 * calls of its own account wait longer. If calls name no stream, each answer counts as a stream until a call of the
 * same connection follows it.
 *
 * Calls of one stream that are under way together are a batch, and the stream is expected to make as many calls next
 * time.
 *
 * Let k calls be ready, and others be due at t1 <= t2 <= ... A step that waits until tn computes k + n calls in tn +
 * step(k + n). The loop chooses the wait that gives the most calls a second, and chooses again as calls arrive and time
 * passes. */
#include "streams.h"

#include "loop_state.h"

#include <stdlib.h>

#define MAX_STREAMS 256 /* places of a connection; if the connection has more streams, some share a place */
#define ANY_NS 200000   /* tolerance for every think time, however regular the stream is */
#define GONE 8          /* a stream is gone once it is late by this many times its think time and error */

struct stream {
    uint32_t name;         /* number of the stream in its calls, or SYM_NAMELESS or higher; 0: the place is free */
    int32_t num_under_way; /* calls that are not answered */
    int32_t num_calls;     /* most calls that were under way together since the stream last had no call */
    int64_t answered_ns;   /* time of the latest answer; 0: the stream has called again */
    int64_t think_ns,      /* mean time from an answer to the next call */
        off_ns;            /* mean error of `think_ns` */
    int32_t has_returned;  /* the stream has called again after an answer at least once */
    int32_t is_new;        /* the answer came after the latest decision: see sym_streams_over */
};

struct connection {
    struct stream *streams; /* [room] a stream is at its name modulo `room` */
    int32_t room, is_there;
    int32_t generation;     /* connections that had this place before */
    int32_t share;          /* share of its latest call */
    int32_t num_under_way,  /* calls of all its streams under way, and answers that are new */
        most_under_way;     /* largest `num_under_way` so far */
    int64_t due_ns; /* time of the first expected call, by the latest decision; 0: none is expected */
    int32_t is_waited; /* the present wait is for this connection, maybe among others */
};

/* A time at which calls of a stream are due, and their number. */
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

/* Return a connection by its number. NULL: the connection has gone. */
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

/* Return the place of a stream; another stream may be there. NULL: there is no memory. */
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
            if (connection->streams[i].name != 0) /* with twice the places, streams only collide if they did before */
                streams[connection->streams[i].name & (uint32_t)(room - 1)] = connection->streams[i];
        free(connection->streams);
        connection->streams = streams;
        connection->room = room;
    }
}

/* Return whether a stream is so late that no call of it is expected. */
static int is_gone(const struct stream *stream, int64_t now_ns) {
    const int64_t late_ns = now_ns - stream->answered_ns - stream->think_ns;
    return stream->has_returned && late_ns > GONE * (stream->think_ns + stream->off_ns) + ANY_NS;
}

/* Choose the stream of a call that names no stream: among nameless streams without a call under way, the one that was
 * answered first. A stream that is gone is chosen only if all are gone. If all nameless streams have a call under way,
 * a new stream is chosen. */
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

/* Learn from a call that arrived between two times. A call that arrives during a step is seen only at the step's end.
 * So if the call was due between the two times, it may have been punctual, and nothing is learned. A single long or
 * short pause changes the mean only within limits. */
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
        its->num_under_way -= place->is_new; /* its answer no longer counts as under way: the new call does */
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
        place != NULL && place->name == stream && place->num_under_way > 0; /* no other stream has taken the place */
    if (is_its && --place->num_under_way == 0 && is_answered) {
        place->answered_ns = now_ns;
        place->is_new = 1; /* counts as under way until the next poll, which finds calls that arrived meanwhile */
    } else {
        its->num_under_way--;
    }
}

/* Predict when a stream will call again; 0: unknown. The longer the stream is overdue, the later is the predicted
 * time. */
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

/* Append the expected streams of a connection to `due`, whose `num` elements are sorted by time. Return the new number
 * of elements. */
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

/* Return whether calls of another account are ready. Such calls wait less for the streams of this connection. */
static int is_strange(const struct connection *each, const sym_ready *ready, const sym_share *shares) {
    return ready->account != SYM_NOBODY && shares[each->share].parent != ready->account;
}

/* Estimate the time of a step of `num_calls` calls that are like the calls of the latest step. */
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
