/* Branches in the run that the core alone sees to, for sanitizers: their calls come by the gate, alone or in batches, and by a
 * ring, steps fail, result slots run out, and answers find no room. A thread runs the loop. Python's part is done in between: it
 * takes over a stay that has ended, that has little room, or whose file somebody else wants, and ends it. The decoder
 * remembers what it computed in each frame, which every file has to agree with. In the end nobody holds anything, and
 * all work is counted. */
#include "stress_calls.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

enum { VOCAB = 200, SLOTS = 3, POSITIONS = 1000, MOST_ENTRIES = 10000 };
#ifdef SHORT_RUN
enum { ROUNDS = 25000 };
#else
enum { ROUNDS = 3000000 };
#endif

/* Numbers for the run's thread. */
static unsigned chance(unsigned limit) {
    static uint64_t state = 7;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % limit;
}

/* ---- the decoder: its memory, which Python writes to as well */

typedef struct {
    int32_t token, position;
} entry;

static entry memory[FRAMES][PAGE_SLOTS];
static pthread_mutex_t computing = PTHREAD_MUTEX_INITIALIZER;

static void compute(const sym_batch *batch) {
    int32_t num_out = 0;
    pthread_mutex_lock(&computing);
    for (int32_t c = 0; c < batch->num_copies; c++) {
        const int32_t *copy = batch->copies + 3 * c;
        memcpy(memory[copy[1]], memory[copy[0]], (size_t)copy[2] * sizeof **memory);
    }
    for (int32_t c = 0; c < batch->num_chunks; c++) {
        int32_t at = batch->start[c];
        entry now = {0};
        HOLDS(batch->first_row[c + 1] > batch->first_row[c]);
        for (int32_t row = batch->first_row[c]; row < batch->first_row[c + 1]; row++, at++) {
            now = (entry){batch->tokens[row], batch->positions[row]};
            memory[batch->pages[batch->first_page[c] + at / PAGE_SLOTS]][at % PAGE_SLOTS] = now;
        }
        HOLDS(batch->wanted[c] == 0 || batch->wanted[c] == 1);
        if (batch->wanted[c]) {
            batch->out[num_out][0] = (float)now.token;
            batch->out[num_out++][1] = (float)(at - 1);
        }
    }
    pthread_mutex_unlock(&computing);
}

static int step(sym_decoder *decoder, const sym_batch *batch) {
    (void)decoder;
    unsigned fate = chance(64);
    if (fate == 0)
        return EIO;
    if (fate < 16)
        usleep(fate);
    compute(batch);
    return fate == 1 ? EIO : 0;
}

static entry *place_of(const core_table *file, int64_t at) {
    int32_t frame = ~pool.page.frame[file->slots[at / PAGE_SLOTS]].complement;
    return memory[frame] + at % PAGE_SLOTS;
}

static entry said_of(const core_table *file, int64_t at) {
    int32_t page = file->slots[at / PAGE_SLOTS], slot = at % PAGE_SLOTS;
    return (entry){pool.page.tokens[page][slot], pool.page.positions[page][slot]};
}

/* What Python had computed: entries from there on, and what lies before them in their page. */
static void remember(const core_table *file, int64_t from) {
    pthread_mutex_lock(&computing);
    for (int64_t at = from - from % PAGE_SLOTS; at < file->length; at++)
        *place_of(file, at) = said_of(file, at);
    pthread_mutex_unlock(&computing);
}

static void compare(const core_table *file) {
    for (int64_t at = 0; at < file->length; at++) {
        entry found = *place_of(file, at), said = said_of(file, at);
        HOLDS(found.token == said.token && found.position == said.position);
        HOLDS(pool.page.fill[file->slots[at / PAGE_SLOTS]] > at % PAGE_SLOTS);
    }
    HOLDS(!file->is_branch || file->changes || file->length == file->forked_length);
}

/* ---- channels: result slots, and a ring with room for one call */

typedef struct {
    int32_t is_taken, is_answered;
    uint64_t id; /* of a call that is answered: its handle and its token */
    int64_t num_entries;
    float row[2];
} result;

struct sym_server {
    pthread_mutex_t lock;
    result results[SLOTS];
    uint64_t handle; /* of the call in the ring; 0: none */
    int32_t token, position;
    int64_t num_answers;
};

static sym_server servers[CONNECTIONS];
static sym_loop *loop;
static sym_usage used;
static int32_t most_stays; /* at a time */
static int num_batches;

static uint64_t id_of(uint64_t handle, int32_t token) { return handle << 8 | (uint64_t)token; }

static int64_t take_some(sym_server *server, int num) {
    for (int slot = 0, run = 0; slot < SLOTS; slot++) {
        run = server->results[slot].is_taken ? 0 : run + 1;
        if (run == num) {
            for (int at = slot + 1 - num; at <= slot; at++)
                server->results[at].is_taken = 1;
            return slot + 1 - num;
        }
    }
    return -1;
}

static int64_t take_one(sym_server *server) { return take_some(server, 1); }

static int64_t take_rows(sym_server *server, uint32_t num_rows) {
    HOLDS(num_rows > 0);
    pthread_mutex_lock(&server->lock);
    int64_t slot = take_some(server, (int)num_rows);
    pthread_mutex_unlock(&server->lock);
    return slot;
}

static void free_rows(sym_server *server, uint32_t first, uint32_t num_rows) {
    pthread_mutex_lock(&server->lock);
    for (uint32_t slot = first; slot < first + num_rows; slot++) {
        HOLDS(slot < SLOTS && server->results[slot].is_taken && !server->results[slot].is_answered);
        server->results[slot].is_taken = 0;
    }
    pthread_mutex_unlock(&server->lock);
}

static float *row(sym_server *server, int64_t slot) { return server->results[slot].row; }

static int take(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call) {
    int outcome = SYM_HOT_NONE;
    (void)stop;
    pthread_mutex_lock(&server->lock);
    if (server->handle && server->handle != handle) {
        outcome = SYM_HOT_OTHER;
    } else if (server->handle) {
        int64_t slot = server->position < 0 || server->position == position ? take_one(server) : -1;
        outcome = slot < 0 ? SYM_HOT_COLD : SYM_HOT_TAKEN;
        if (slot >= 0) {
            *call = (sym_hot_call){id_of(handle, server->token), slot, row(server, slot), server->token, 0};
            server->handle = 0;
        }
    }
    pthread_mutex_unlock(&server->lock);
    return outcome;
}

static int answer(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries) {
    result *found = server->results + slot;
    pthread_mutex_lock(&server->lock);
    HOLDS(found->is_taken && !found->is_answered);
    HOLDS(found->row[0] == (float)(id & 255) && found->row[1] == (float)(num_entries - 1));
    int has_room = chance(16) != 0;
    if (has_room) {
        found->is_answered = 1;
        found->id = id;
        found->num_entries = num_entries;
    }
    server->num_answers++;
    pthread_mutex_unlock(&server->lock);
    return !has_room;
}

/* ---- numbers in place of a row, and answers of batches */

struct sym_reducer {
    uint32_t num_floats; /* of the answer */
};

static int num_reducers;

static sym_reducer *read_reducer(const char *block, uint32_t bytes, uint32_t vocab_size) {
    struct sym_reduction asked;
    HOLDS(vocab_size == VOCAB);
    if (bytes < sizeof asked)
        return NULL;
    memcpy(&asked, block, sizeof asked);
    sym_reducer *reducer = zeros(1, sizeof *reducer);
    reducer->num_floats = 2 + asked.top_k;
    __atomic_fetch_add(&num_reducers, 1, __ATOMIC_RELAXED);
    return reducer;
}

static void free_reducer(sym_reducer *reducer) {
    __atomic_fetch_sub(&num_reducers, 1, __ATOMIC_RELAXED);
    free(reducer);
}

static int64_t reduced_bytes(const sym_reducer *reducer) { return (int64_t)sizeof(float) * reducer->num_floats; }

/* Sometimes the row is no distribution. */
static int reduce(sym_reducer *reducer, const float *row, uint64_t index, char *answer) {
    HOLDS(index == 0);
    for (uint32_t i = 0; i < reducer->num_floats; i++)
        memcpy(answer + i * sizeof(float), row + i % 2, sizeof(float));
    return chance(16) ? 0 : -EDOM;
}

static int push(sym_server *server, uint64_t id, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                const char *payload, uint32_t payload_bytes, const char *more, uint32_t more_bytes) {
    float row[2];
    memcpy(row, payload, sizeof row);
    HOLDS(!flags && a0 == -1 && a1 == 1 && payload_bytes >= sizeof row && !more && !more_bytes);
    HOLDS(row[0] == (float)(id & 255) && row[1] == (float)(a2 - 1));
    pthread_mutex_lock(&server->lock);
    server->num_answers++;
    pthread_mutex_unlock(&server->lock);
    return chance(16) == 0;
}

/* Each call has its row, its numbers, or an error. */
static void take_answers(sym_server *server, int64_t num, const char *payload, uint32_t payload_bytes) {
    uint32_t at = 0;
    pthread_mutex_lock(&server->lock);
    for (int64_t number = 0; number < num; number++) {
        struct sym_reply reply;
        memcpy(&reply, payload + at, sizeof reply);
        HOLDS(reply.id == (uint64_t)number && reply.frame_bytes >= sizeof reply);
        result *found = reply.err || reply.args[0] < 0 ? NULL : server->results + reply.args[0];
        if (found) {
            HOLDS(found->is_taken && !found->is_answered && found->row[1] == (float)(reply.args[2] - 1));
            *found = (result){.is_taken = 1, .is_answered = 1};
        }
        HOLDS(!reply.err || reply.frame_bytes == sizeof reply + 4);
        server->num_answers += !reply.err || reply.err == EDOM;
        at += (reply.frame_bytes + 63) & ~63u;
    }
    HOLDS(at == payload_bytes);
    pthread_mutex_unlock(&server->lock);
}

static int answer_all(sym_server *server, uint64_t id, int64_t num, const char *payload, uint32_t payload_bytes,
                      uint32_t num_rows) {
    HOLDS(id == 0 && num_rows <= SLOTS);
    if (chance(16) == 0)
        return 1;
    take_answers(server, num, payload, payload_bytes);
    return 0;
}

static int watch(sym_server *server) {
    (void)server;
    return chance(2) == 0;
}

static int unwatch(sym_server *server, int slept) {
    pthread_mutex_lock(&server->lock);
    int waits = slept && server->handle;
    pthread_mutex_unlock(&server->lock);
    return waits;
}

static const sym_hot_functions hot = {.take = take,
                                      .answer = answer,
                                      .answer_all = answer_all,
                                      .push = push,
                                      .read_reducer = read_reducer,
                                      .free_reducer = free_reducer,
                                      .reduced_bytes = reduced_bytes,
                                      .reduce = reduce,
                                      .watch = watch,
                                      .unwatch = unwatch,
                                      .take_rows = take_rows,
                                      .free_rows = free_rows,
                                      .row = row};

static int num_taken(sym_server *server) {
    int num = 0;
    pthread_mutex_lock(&server->lock);
    for (int slot = 0; slot < SLOTS; slot++)
        num += server->results[slot].is_taken;
    pthread_mutex_unlock(&server->lock);
    return num;
}

/* Programs read what they are answered. Their files have it as soon as they ask. */
static void read_answers(sym_connection *connection) {
    sym_server *server = connection->server;
    for (int slot = 0; slot < SLOTS; slot++) {
        pthread_mutex_lock(&server->lock);
        result *at = server->results + slot, found = {0};
        if (at->is_answered) {
            found = *at;
            at->is_taken = at->is_answered = 0;
        }
        pthread_mutex_unlock(&server->lock);
        int64_t told[4] = {0};
        sym_taken asked = {.handle = found.id >> 8, .op = SYM_KV_READ, .args = {INT64_MAX}};
        if (found.is_answered && sym_connection_serve(connection, &asked, NULL, told))
            HOLDS(told[1] >= found.num_entries);
    }
}

/* ---- Python's part */

static void add(sym_usage *to, const sym_usage *more) {
    to->calls += more->calls;
    to->tokens_in += more->tokens_in;
    to->tokens += more->tokens;
    to->steps += more->steps;
    to->compute_ns += more->compute_ns;
    to->queue_ns += more->queue_ns;
}

static void count_used(void) {
    for (sym_connection *told = gate.used; told; told = told->next_used) {
        add(&used, &told->used);
        told->used = (sym_usage){0};
        told->is_used = 0;
    }
    gate.used = NULL;
}

/* Python ends the call of a batch that the run did not answer. */
static void note(sym_server *server, const sym_decode *decode, const sym_member *ended, int64_t num_entries) {
    sym_group *group = decode->group;
    const int is_computed = ended->end == SYM_END_UNSENT;
    sym_noted noted = {
        .number = decode->number, .err = is_computed ? ended->error : ECANCELED, .num_entries = num_entries};
    noted.slot = decode->slot;
    noted.payload = noted.err ? "gone" : decode->numbers ? decode->numbers->answer : NULL;
    noted.bytes = noted.err ? 4 : decode->numbers ? decode->numbers->answer_bytes : 0;
    if (noted.err && decode->slot >= 0)
        free_rows(server, (uint32_t)decode->slot, 1);
    if (sym_loop_note(loop, group, &noted)) {
        take_answers(server, group->num, group->payload, group->num_bytes);
        sym_group_abandon(group);
    }
}

/* The rest is committed, unused room goes back, and so does the slot of a call that the run did not answer. */
static void settle(sym_stay *stay) {
    sym_news now, before = stay->counted;
    core_table *file = stay->table;
    const sym_member *ended = &stay->member;
    sym_loop_look(loop, stay->index, &now);
    sym_loop_take_back(loop, stay->index, &stay->member);
    file->place = CORE_NOBODY;
    if (now.num_done > before.num_done)
        HOLDS(core_commit(file, stay->log + before.num_done, now.num_done - before.num_done) == CORE_DONE);
    add(&used, &(sym_usage){now.num_calls - before.num_calls, now.num_done - before.num_done,
                            now.num_rows_computed - before.num_rows_computed, now.num_steps - before.num_steps,
                            now.compute_ns - before.compute_ns, now.queue_ns - before.queue_ns});
    HOLDS(file->is_reserved == (file->num_entries > 0));
    HOLDS(!file->is_reserved || core_abort(file) == CORE_DONE);
    if (ended->decode.group)
        note(stay->connection->server, &ended->decode, ended, file->length);
    else if (ended->decode.slot >= 0 && (ended->num_tokens || ended->end == SYM_END_UNSENT))
        free_rows(stay->connection->server, (uint32_t)ended->decode.slot, 1);
    sym_numbers_free(&hot, ended->decode.numbers);
}

static void take_over(sym_stay *stay) {
    sym_connection *connection = stay->connection;
    if (below(2))
        HOLDS(sym_stay_show(&gate, stay));
    sym_stay_adopted(&gate, stay);
    HOLDS(!sym_stay_at(&gate, stay->index) && !sym_stay_of(stay->table));
    see(connection, stay->handle, stay->table);
    sym_news now = {0};
    if (!sym_loop_leave(loop, stay->index, below(2) ? SYM_LEAVE_NOW : SYM_LEAVE_ANSWERED))
        while (sym_loop_look(loop, stay->index, &now), !now.has_ended)
            usleep(10);
    settle(stay);
    compare(stay->table);
    sym_stay_free(stay);
    read_answers(connection);
}

static void take_over_all(const sym_connection *connection) {
    for (int32_t at = -1; (at = sym_stays_next(&gate, connection, at + 1)) >= 0;)
        take_over(sym_stay_at(&gate, at));
}

static void take_news_of_run(void) {
    sym_news news[4];
    int32_t num = sym_loop_news(loop, news, 4, below(4) == 0);
    for (int32_t i = 0; i < num; i++) {
        sym_stay *stay = sym_stay_at(&gate, news[i].index);
        if (stay && (news[i].state == SYM_ENDED || news[i].is_low))
            take_over(stay);
    }
}

static void zero_free_frames(void) {
    for (int frame = 0; frame < FRAMES; frame++)
        if (!pool.frame.page[frame].complement)
            pool.frame.bytes_in[frame] = 0;
}

static void in_python(sym_connection *connection) {
    uint64_t number = any_handle(connection);
    core_table *file = sym_handle_find(connection, number);
    if (!file || connection->num_handles < 2) {
        create(connection);
        return;
    }
    int64_t length = (see(connection, number, file), file->length);
    append(file);
    remember(file, length);
}

/* ---- the core's part */

static uint64_t any_branch(const sym_connection *connection) {
    uint64_t found[4 * ROWS];
    int64_t num = sym_handles_list(connection, SYM_UNSEEN_HANDLES, found, 4 * ROWS);
    return num ? found[below((int)num)] : 0;
}

/* Often the next one of a program that has its answer. */
static uint64_t handle_for_call(const sym_connection *connection) {
    sym_news now;
    const sym_stay *stay = sym_stay_at(&gate, sym_stays_next(&gate, connection, below(8)));
    HOLDS(!stay || stay->connection == connection);
    if (!stay || below(4) == 0)
        return below(8) ? any_branch(connection) : any_handle(connection);
    sym_loop_look(loop, stay->index, &now);
    return now.state == SYM_WAITING || below(64) == 0 ? stay->handle : 0;
}

/* Calls of several tokens, with a row or numbers, in one request or a batch: whether all begin, or nothing has changed. */
static void predict_together(sym_connection *connection) {
    static char payload[1 << 14];
    int num_slots = num_taken(connection->server), num_stays = gate.num_stays, num = 1 + below(SLOTS);
    int64_t answer[4] = {0}, lengths[SLOTS];
    core_table *files_of[SLOTS];
    sym_taken call = {.op = SYM_PRED_BATCH, .args = {below(32) ? num : below(4) - 1}};
    for (int n = 0; n < num; n++) {
        int32_t body[3 * PAGE_SLOTS + 8] = {0}, num_tokens = below(2) ? 1 : 1 + below(PAGE_SLOTS + (below(16) == 0));
        int32_t num_positions = below(4) ? 0 : below(2) ? 1 : num_tokens;
        uint32_t is_reduced = below(3) == 0, num_bytes = 4 * (uint32_t)(num_tokens + num_positions) + 16 * is_reduced;
        uint64_t handle = handle_for_call(connection);
        files_of[n] = sym_handle_find(connection, handle);
        lengths[n] = files_of[n] ? files_of[n]->length : 0;
        for (int32_t i = 0; i < num_tokens + num_positions; i++)
            body[i] = i < num_tokens ? below(VOCAB) : num_positions == 1 ? below(POSITIONS) : i;
        body[num_tokens + num_positions] = is_reduced ? below(3) : 0; /* top_k */
        struct sym_request frame = {.frame_bytes = (uint32_t)sizeof frame + num_bytes - (below(32) == 0),
                                    .op = below(64) ? SYM_PRED : SYM_PING,
                                    .flags = SYM_ROWS_LAST | (is_reduced ? SYM_REDUCED : 0),
                                    .handle = handle,
                                    .args = {num_tokens, num_positions}};
        memcpy(payload + call.payload_bytes, &frame, sizeof frame);
        memcpy(payload + call.payload_bytes + sizeof frame, body, num_bytes);
        call.payload_bytes += ((uint32_t)sizeof frame + num_bytes + 63) & ~63u;
    }
    gate.max_positions = POSITIONS;
    gate.max_entries = MOST_ENTRIES;
    gate.is_closed = connection->waits_for_slots = 0;
    char *copy = zeros(call.payload_bytes, 1); /* whoever reads behind it is seen */
    memcpy(copy, payload, call.payload_bytes);
    int is_served = sym_connection_serve(connection, &call, copy, answer);
    free(copy);
    most_stays = gate.num_stays > most_stays ? gate.num_stays : most_stays;
    for (int n = 0; n < num && is_served; n++)
        HOLDS(files_of[n] && files_of[n]->stay && files_of[n]->length >= lengths[n]);
    HOLDS(is_served || (gate.num_stays == num_stays &&
                        num_taken(connection->server) <= num_slots + 1)); /* a ring may have had one */
    num_batches += is_served != SYM_COLD;
}

/* Whether the gate may begin it. */
static int is_well_formed(const sym_taken *call, const int32_t *payload) {
    return call->flags == SYM_ROWS_LAST && call->args[0] == 1 && (call->args[1] == 0 || call->args[1] == 1) &&
           !call->args[2] && !call->args[3] && call->payload_bytes == 4 + 4 * call->args[1] && payload[0] >= 0 &&
           payload[0] < VOCAB && (!call->args[1] || (payload[1] >= 0 && payload[1] < gate.max_positions));
}

/* `before`: the stay that there was, and that goes on. */
static void require_begun(const sym_connection *connection, const core_table *file, const sym_stay *before,
                          int num_before, int32_t position) {
    int64_t length = file->length, next = core_position(file, length - 1) + 1;
    HOLDS(!gate.is_closed && !connection->waits_for_slots && file->is_branch);
    most_stays = gate.num_stays > most_stays ? gate.num_stays : most_stays;
    if (before) {
        HOLDS(file->stay == before && gate.num_stays == num_before);
        return;
    }
    HOLDS(file->is_pinned && length < gate.max_entries);
    HOLDS(core_position(file, length) == (position < 0 ? next : position));
    HOLDS(file->stay && gate.num_stays == num_before + 1 && file->num_entries <= 1 + PAGE_SLOTS);
    HOLDS(length + file->num_entries <= gate.max_entries);
    HOLDS(core_position(file, length + file->num_entries - 1) < gate.max_positions);
}

static void predict(sym_connection *connection, uint64_t handle, int32_t token, int32_t position) {
    core_table *file = sym_handle_find(connection, handle);
    sym_taken call = {.id = id_of(handle, token), .handle = handle, .op = SYM_PRED, .flags = SYM_ROWS_LAST};
    call.args[0] = 1;
    call.args[1] = position >= 0;
    if (below(16) == 0)
        call.flags = (uint32_t)below(4);
    if (below(16) == 0)
        call.args[below(4)] = below(3) - 1;
    call.payload_bytes = below(16) ? 4 + 4 * (uint32_t)(position >= 0) : 4 * (uint32_t)below(4);
    int32_t all[] = {token, position, 0, 0}, *payload = zeros(call.payload_bytes, 1);
    memcpy(payload, all, call.payload_bytes);
    gate.max_positions = below(8) ? POSITIONS : 1 + below(POSITIONS);
    gate.max_entries = below(8) || !file ? MOST_ENTRIES : file->length + below(4);
    gate.is_closed = below(32) == 0;
    connection->waits_for_slots = below(32) == 0;
    sym_stay *stay = file ? file->stay : NULL;
    int num_slots = num_taken(connection->server), num_stays = gate.num_stays, was_reserved = file && file->is_reserved;
    int64_t length = file ? file->length : 0, answer[4] = {0};
    int is_served = sym_connection_serve(connection, &call, (char *)payload, answer);
    num_slots = num_taken(connection->server) - num_slots;
    if (is_served) {
        HOLDS(is_served == SYM_LATER && is_well_formed(&call, payload) && file);
        require_begun(connection, file, stay, num_stays, call.args[1] ? position : -1);
        HOLDS(num_slots == 1);
    } else {
        HOLDS(!num_slots && gate.num_stays == num_stays && (!file || file->stay == stay));
        HOLDS(stay || !file || (file->length == length && file->is_reserved == was_reserved));
        if (stay && below(2))
            take_over(stay);
    }
    free(payload);
}

/* A call comes by the ring: the run takes it, or the gate. */
static void call(sym_connection *connection) {
    sym_server *server = connection->server;
    pthread_mutex_lock(&server->lock);
    uint64_t handle = server->handle;
    int32_t token = server->token, position = server->position;
    server->handle = 0;
    pthread_mutex_unlock(&server->lock);
    if (!handle) {
        handle = handle_for_call(connection);
        const core_table *file = sym_handle_find(connection, handle);
        if (!file) {
            sched_yield(); /* programs think */
            return;
        }
        token = below(16) ? below(VOCAB) : below(2) ? -1 : VOCAB;
        position = below(2) ? -1 : below(4) ? core_position(file, file->length - 1) + 1 : below(POSITIONS + 10);
        if (token >= 0 && token < VOCAB && below(2)) {
            pthread_mutex_lock(&server->lock);
            server->handle = handle;
            server->token = token;
            server->position = position;
            pthread_mutex_unlock(&server->lock);
            return;
        }
    }
    predict(connection, handle, token, position);
}

/* Its program has its answer, and no call is in the ring. */
static int is_idle(const sym_stay *stay) {
    sym_server *server = stay->connection->server;
    sym_news now;
    pthread_mutex_lock(&server->lock);
    int is_empty = !server->handle;
    pthread_mutex_unlock(&server->lock);
    sym_loop_look(loop, stay->index, &now);
    return is_empty && now.state == SYM_WAITING;
}

static void request(sym_connection *connection) {
    const uint32_t ops[] = {SYM_KV_FORK, SYM_KV_FORK, SYM_KV_FORK, SYM_KV_CLOSE, SYM_KV_TRUNCATE, SYM_KV_READ};
    sym_taken taken = {.handle = any_handle(connection), .op = ops[below(6)]};
    core_table *file = sym_handle_find(connection, taken.handle);
    taken.args[0] = taken.op == SYM_KV_FORK ? 0600 : any_argument(file);
    taken.args[1] = taken.op == SYM_KV_FORK ? below(4) : 0;
    files.num_names = 4;
    sym_stay *stay = file ? file->stay : NULL;
    int64_t answer[4] = {0};
    int is_closed_here = stay && taken.op == SYM_KV_CLOSE && is_idle(stay);
    if (file && taken.op == SYM_KV_CLOSE)
        compare(file);
    int is_served = sym_connection_serve(connection, &taken, NULL, answer);
    HOLDS(is_served || !is_closed_here);
    if (is_served && taken.op == SYM_KV_FORK) {
        for (int i = 0; i == 0 || i < taken.args[1]; i++) {
            core_table *branch = sym_handle_find(connection, (uint64_t)answer[0] + i);
            payers[branch->row] = connection->maker.account;
            HOLDS(branch && file && branch->length == file->length && !branch->stay && !branch->is_reserved);
            compare(branch);
        }
    } else if (is_served && taken.op == SYM_KV_CLOSE) {
        HOLDS(!sym_handle_find(connection, taken.handle));
    } else if (is_served && taken.op == SYM_KV_TRUNCATE) {
        HOLDS(!file->is_reserved && file->length == taken.args[0]); /* a stay may have used up its room */
    } else if (!is_served && file && taken.op == SYM_KV_CLOSE) {
        close_handle(connection, taken.handle, file);
    } else if (!is_served && stay) {
        take_over(stay);
    }
}

/* ---- all together, and the end */

static void look_at_stays(void) {
    int32_t num = 0;
    uint64_t are_copied = 0; /* by place: what was copied is computed with */
    sym_news now;
    for (int32_t at = -1; (at = sym_stays_next(&gate, NULL, at + 1)) >= 0; num++) {
        const sym_stay *stay = sym_stay_at(&gate, at);
        HOLDS(stay->index == at && stay->table->stay == stay && stay->table->is_branch);
        HOLDS(sym_handle_find(stay->connection, stay->handle) == stay->table);
        sym_loop_look(loop, at, &now);
        are_copied |= (uint64_t)(now.num_done > 0) << at;
    }
    HOLDS(num == gate.num_stays && !sym_stay_at(&gate, -1) && !sym_stay_at(&gate, gate.room));
    sym_stays_show(&gate, below(2));
    for (int32_t at = -1; (at = sym_stays_next(&gate, NULL, at + 1)) >= 0;) {
        const core_table *file = sym_stay_at(&gate, at)->table;
        HOLDS(file->target == CORE_NOBODY || !(are_copied >> at & 1));
        compare(file);
    }
}

static void *run(void *unused) {
    const sym_engine engine = {.step = step, .wake_fd = -1, .guide_fd = -1};
    sym_loop_run(loop, &engine);
    return unused;
}

static void open_run(void) {
    const sym_loop_plan plan = {.hot = &hot,
                                .vocab_size = VOCAB,
                                .num_pages = FRAMES,
                                .limits = {4, 8, 2, 1, 500000},
                                .wait = {.share_percent = 10, .min_ns = 5000, .max_ns = 20000}};
    loop = gate.loop = sym_loop_new(&plan);
    HOLDS(loop);
    gate.hot = &hot;
    gate.vocab_size = VOCAB;
    gate.last_call = -1;
    adopt = take_over;
    const int32_t account = sym_loop_new_share(loop, sym_loop_new_share(loop, -1, 1), 1);
    for (int i = 0; i < CONNECTIONS; i++) {
        pthread_mutex_init(&servers[i].lock, NULL);
        connections[i].server = servers + i;
        connections[i].in_run = sym_loop_connect(loop);
        connections[i].share = sym_loop_new_share(loop, account, 1);
        connections[i].program = i;
    }
    for (int i = 0; i < MOST; i++)
        numbers[i] = i;
}

static void close_run(void) {
    int64_t num_answers = 0;
    count_used();
    const sym_counts counts = sym_loop_counts(loop);
    for (int i = 0; i < CONNECTIONS; i++) {
        read_answers(connections + i);
        HOLDS(num_taken(servers + i) == 0);
        num_answers += servers[i].num_answers;
    }
    sym_news none[1];
    HOLDS(sym_loop_num_places(loop) <=
          most_stays + SLOTS); /* each was the next one's, but for batches that did not begin */
    HOLDS(num_reducers == 0);
    HOLDS(sym_loop_news(loop, none, 1, 1) == 0 && gate.num_stays == 0 && sym_stays_next(&gate, NULL, 0) < 0);
    HOLDS(used.calls == num_answers && used.tokens_in <= used.tokens && used.tokens == counts.num_tokens &&
          used.steps == counts.num_calls_in_steps);
    HOLDS(used.compute_ns > 0 && used.queue_ns > 0 && counts.num_taken > 0);
    printf("stays: %d rounds, the gate began %d calls and %d batches, the run took %d more, %d were answered\n", ROUNDS,
           (int)gate.num_calls[SYM_PRED], num_batches, (int)counts.num_taken, (int)num_answers);
    sym_gate_free(&gate);
    sym_loop_free(loop);
}

int main(void) {
    pthread_t thread;
    open_connections();
    open_run();
    HOLDS(pthread_create(&thread, NULL, run, NULL) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        sym_connection *connection = connections + below(CONNECTIONS);
        read_answers(connection);
        if (below(16) == 0)
            predict_together(connection);
        else if (below(4))
            call(connection);
        else if (below(16))
            request(connection);
        else
            in_python(connection);
        take_news();
        if (below(16) == 0)
            take_news_of_run();
        if (below(64) == 0)
            look_at_stays();
        if (below(64) == 0)
            look(connection);
        if (below(64) == 0)
            count_used();
        if (below(64) == 0)
            zero_free_frames();
        if (below(1000) == 0)
            take_over_all(below(2) ? connection : NULL);
        if (below(1000) == 0)
            HOLDS(sym_branches_close(connection, below(4)) >= 0);
        if (below(5000) == 0)
            leave(connection);
    }
    for (int i = 0; i < CONNECTIONS; i++)
        leave(connections + i);
    sym_loop_close(loop);
    pthread_join(thread, NULL);
    close_run();
    close_pool();
    return 0;
}
