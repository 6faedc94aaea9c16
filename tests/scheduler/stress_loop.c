/* The standing run under sanitizers, with all that it calls made up: the decoder, the rings, samplers and stop texts.
 *
 * One thread runs the loop, and is closed and run again. Programs come with calls by two rings. A scheduler has all kinds of
 * members join, leave, get room and settle, at random; a guide decides for grammars; an observer looks at everything. The
 * decoder's pages remember tokens, and a row is a hash of what it sees. So an entry that is lost, counted twice, or in the
 * wrong order gives another row, and every row, token and entry is compared with what a plain loop gives. Whoever sleeps
 * looks only at what it was woken for: a wake that is lost stops everything. scripts/sanitize runs it. */
#include "loop.h"

#include "abi.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { VOCAB = 64, FILE_PAGES = 8, MOST = FILE_PAGES * SYM_PAGE_ENTRIES };
enum { NUM_SERVERS = 2, NUM_PROGRAMS = 4, NUM_FILES = 12, NUM_SHARES = 4 };
enum { MASS_ROWS = 3 };
enum { MAX_CALLS = 6, MAX_TOKENS = 24, MAX_DIGESTED = 8, MOST_GIVEN = 60, MOST_GENERATED = 60, MOST_FORCED = 3 };
enum { NO_FINISH, FAILED = SYM_FINISH_DEADLINE + 1, CANCELLED, NUM_FINISHES };
#ifdef SHORT_RUN
enum { NUM_ROUNDS = 20000 };
#else
enum { NUM_ROUNDS = 600000 };
#endif
#define STALLED_MS 60000

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0xbf58476d1ce4e5b9u + 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Each thread has its own numbers. */
static int32_t below(uint64_t *state, int32_t end) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((*state >> 33) % (uint64_t)end);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void *room(size_t bytes) {
    void *found = calloc(1, bytes + (bytes == 0));
    CHECK(found != NULL);
    return found;
}

static void *copy_of(const void *from, size_t bytes) { return memcpy(room(bytes), from, bytes); }

/* -- the decoder: the thread that runs has it alone -- */

struct entry {
    int32_t token, position;
};

static uint64_t with_entry(uint64_t hash, int32_t index, struct entry entry) {
    return mix(mix(mix(hash, (uint64_t)index), (uint64_t)entry.token), (uint64_t)entry.position);
}

static void write_row(float *row, uint64_t hash) {
    row[0] = (float)(hash & 0xffffff);
    row[1] = (float)(hash >> 24 & 0xffffff);
}

static uint64_t read_row(const float *row) { return (uint64_t)row[0] | (uint64_t)row[1] << 24; }

static uint64_t in_row(uint64_t hash) { return hash & 0xffffffffffffu; }

struct sym_decoder {
    struct entry pages[NUM_FILES * (FILE_PAGES + 1)][SYM_PAGE_ENTRIES];
    uint64_t random;
    int is_careful; /* nothing fails */
    long num_failed;
};

static struct sym_decoder decoder = {.random = 7};

static uint64_t hash_of_row(const sym_batch *batch, int32_t chunk, int32_t k) {
    const int32_t *pages = batch->pages + batch->first_page[chunk];
    const int32_t num_pages = batch->first_page[chunk + 1] - batch->first_page[chunk];
    const uint32_t *mask = batch->masks[chunk] == NULL ? NULL : batch->masks[chunk] + (size_t)(k * num_pages);
    uint64_t hash = 0;
    for (int32_t e = 0; e <= batch->start[chunk] + k; e++)
        if (mask == NULL || mask[e / 32] >> e % 32 & 1)
            hash = with_entry(hash, e, decoder.pages[pages[e / SYM_PAGE_ENTRIES]][e % SYM_PAGE_ENTRIES]);
    return hash;
}

/* Each row gives every entry that it sees 1 in the first row of the mass, 2 in the second, ... */
static void add_mass(const sym_batch *batch, int32_t chunk) {
    const sym_mass *mass = &batch->masses[chunk];
    const int32_t num_pages = batch->first_page[chunk + 1] - batch->first_page[chunk];
    const int32_t num_rows = batch->first_row[chunk + 1] - batch->first_row[chunk];
    CHECK(batch->start[chunk] + num_rows <= mass->columns);
    for (int32_t k = 0; k < num_rows; k++)
        for (int32_t e = 0; e <= batch->start[chunk] + k; e++) {
            const uint32_t *mask = batch->masks[chunk];
            if (mask == NULL || mask[k * num_pages + e / 32] >> e % 32 & 1)
                for (int32_t row = 0; row < MASS_ROWS; row++)
                    mass->sums[row * mass->columns + e] += (float)(row + 1);
        }
}

static int step(sym_decoder *d, const sym_batch *batch) {
    if (!__atomic_load_n(&d->is_careful, __ATOMIC_RELAXED) && below(&d->random, 100) == 0) {
        d->num_failed++;
        return EIO;
    }
    CHECK(batch->num_chunks > 0 && batch->num_chunks <= MAX_CALLS);
    if (below(&d->random, 8) == 0)
        usleep(300);
    for (int32_t c = 0; c < batch->num_copies; c++)
        memcpy(d->pages[batch->copies[3 * c + 1]], d->pages[batch->copies[3 * c]], sizeof d->pages[0]);
    int32_t out = 0;
    unsigned seen = 0; /* files: a step has one chunk of each at most */
    for (int32_t c = 0; c < batch->num_chunks; c++) {
        const int32_t num_rows = batch->first_row[c + 1] - batch->first_row[c];
        const int32_t *pages = batch->pages + batch->first_page[c];
        const unsigned file = 1u << pages[0] / (FILE_PAGES + 1);
        CHECK(num_rows > 0 && (seen & file) == 0);
        seen |= file;
        for (int32_t k = 0; k < num_rows; k++) {
            const int32_t row = batch->first_row[c] + k, e = batch->start[c] + k;
            d->pages[pages[e / SYM_PAGE_ENTRIES]][e % SYM_PAGE_ENTRIES] =
                (struct entry){batch->tokens[row], batch->positions[row]};
        }
        if (batch->masses != NULL && batch->masses[c].sums != NULL)
            add_mass(batch, c);
        for (int32_t k = num_rows - batch->wanted[c]; k < num_rows; k++)
            write_row(batch->out[out++], hash_of_row(batch, c, k));
    }
    CHECK(out == batch->num_wanted);
    return 0;
}

static void parallel(sym_decoder *d, void (*work)(void *context, int32_t index), void *context, int32_t count) {
    (void)d;
    for (int32_t i = count; i-- > 0;)
        work(context, i);
}

/* -- samplers, stop texts, reducers -- */

struct sym_sampler {
    uint64_t seed;
    int32_t noted[MOST_GENERATED], num_noted;
    int32_t fails_at; /* the note before which there is no memory left */
};

static int32_t drawn_from(uint64_t row, uint64_t seed, uint64_t allowed, uint64_t index) {
    const uint64_t hash = mix(mix(row, seed), index);
    int32_t token = (int32_t)(hash % VOCAB);
    while ((allowed >> token & 1) == 0)
        token = (token + 1) % VOCAB;
    return token;
}

/* Of half of the samplers few tokens come, so that drafts are right at times. */
static uint64_t often(uint64_t seed, uint64_t allowed) {
    const uint64_t few = (uint64_t)7 << (seed >> 1 & 31);
    return (seed & 1) != 0 && (allowed & few) != 0 ? allowed & few : allowed;
}

static int64_t draw(sym_sampler *sampler, const float *row, const void *allowed, uint64_t index) {
    uint64_t may_come = UINT64_MAX;
    if (allowed != NULL)
        memcpy(&may_come, allowed, sizeof may_come);
    may_come = often(sampler->seed, may_come);
    return may_come == 0 ? -EINVAL : drawn_from(read_row(row), sampler->seed, may_come, index);
}

static int note(sym_sampler *sampler, int32_t token) {
    if (sampler->num_noted == sampler->fails_at)
        return -ENOMEM;
    CHECK(sampler->num_noted < MOST_GENERATED);
    sampler->noted[sampler->num_noted++] = token;
    return 0;
}

struct sym_stops {
    int32_t last, found;
};

static int stops_add(sym_stops *stops, int32_t token) {
    if (stops->last % 8 == 3 && token % 4 == 1)
        stops->found = 0;
    stops->last = token;
    return stops->found;
}

struct sym_reducer {
    uint64_t fails_at;
};

static int reduce(sym_reducer *reducer, const float *row, uint64_t index, char *answer) {
    if (index == reducer->fails_at)
        return -EINVAL;
    const uint64_t value = mix(read_row(row), index);
    memcpy(answer, &value, sizeof value);
    return 0;
}

/* -- rings -- */

struct request {
    uint64_t id; /* its program's number + 1 */
    int32_t tokens[MOST_GIVEN], num_tokens; /* none: the program begins its file anew */
    int32_t position;                       /* -1: not said */
};

struct sym_server {
    pthread_mutex_t lock;
    /* under lock: */
    struct request ring[NUM_PROGRAMS];
    int num_requests;
    int receiver_has;
    int is_rung;
    _Atomic int is_asleep; /* its receiver, or that of a program that would have to ring */
    _Atomic int backlog;   /* no reply finds room */
    int must_look;         /* the scheduler's: it was woken for this one */
};

static struct sym_server servers[NUM_SERVERS];
static int gate_fd, wake_fd, guide_fd;
static _Atomic int over;
/* At times little goes on, so that nothing else wakes who was not woken for what there is. */
enum { MUCH, ONE_PROGRAM, TWO_PROGRAMS, ONE_GENERATION, NUM_TIMES };
static _Atomic int goes_on;

static void ring(int fd) {
    const uint64_t one = 1;
    CHECK(write(fd, &one, sizeof one) == sizeof one);
}

/* Under the lock. */
static void take_out(sym_server *server, int at) {
    server->num_requests--;
    memmove(&server->ring[at], &server->ring[at + 1], sizeof server->ring[0] * (size_t)(server->num_requests - at));
}

struct program {
    pthread_mutex_t lock;
    pthread_cond_t is_answered;
    /* under lock: */
    int answers, error;
    int64_t num_entries;
    /* the caller's of the call under way: */
    float row[VOCAB];
};

static struct program programs[NUM_PROGRAMS];

static void answer_program(uint64_t id, int error, int64_t num_entries) {
    CHECK(id >= 1 && id <= NUM_PROGRAMS);
    struct program *program = &programs[id - 1];
    pthread_mutex_lock(&program->lock);
    CHECK(program->answers == 0);
    program->answers++;
    program->error = error;
    program->num_entries = num_entries;
    pthread_cond_signal(&program->is_answered);
    pthread_mutex_unlock(&program->lock);
}

static int take(sym_server *server, uint64_t handle, int32_t position, const int *stop, sym_hot_call *call) {
    int outcome = SYM_HOT_NONE;
    pthread_mutex_lock(&server->lock);
    const struct request *next = &server->ring[0];
    if (server->num_requests == 0 || server->receiver_has || __atomic_load_n(stop, __ATOMIC_ACQUIRE)) {
        outcome = SYM_HOT_NONE;
    } else if (next->num_tokens != 1) {
        outcome = SYM_HOT_COLD;
    } else if (next->id == handle) {
        outcome = next->position >= 0 && next->position != position ? SYM_HOT_COLD : SYM_HOT_TAKEN;
        if (outcome == SYM_HOT_TAKEN) {
            *call = (sym_hot_call){next->id, (int64_t)next->id, programs[handle - 1].row, next->tokens[0],
                                   (uint32_t)handle};
            take_out(server, 0);
        }
    }
    pthread_mutex_unlock(&server->lock);
    return outcome;
}

/* Whether a reply finds no room; by the thread that runs alone. */
static int is_full(const sym_server *server) {
    static uint64_t random = 13;
    return server->backlog || below(&random, 30) == 0;
}

static int answer(sym_server *server, uint64_t id, int64_t slot, int64_t num_entries) {
    CHECK(slot == (int64_t)id);
    if (is_full(server))
        return 1;
    answer_program(id, 0, num_entries);
    return 0;
}

static int watch(sym_server *server) { return atomic_exchange(&server->is_asleep, 0) != 0; }

static int unwatch(sym_server *server, int slept) {
    if (!slept)
        return 0;
    atomic_store(&server->is_asleep, 1);
    pthread_mutex_lock(&server->lock);
    const int waits = server->num_requests > 0;
    pthread_mutex_unlock(&server->lock);
    return waits && atomic_exchange(&server->is_asleep, 0) != 0;
}

static void submit(sym_server *server, const struct request *request) {
    pthread_mutex_lock(&server->lock);
    CHECK(server->num_requests < NUM_PROGRAMS);
    server->ring[server->num_requests++] = *request;
    const int must_ring = atomic_exchange(&server->is_asleep, 0) != 0;
    server->is_rung |= must_ring;
    pthread_mutex_unlock(&server->lock);
    if (must_ring)
        ring(gate_fd);
}

/* -- programs: each has a file and loops over pred() -- */

static int call_and_wait(int number, const struct request *request) {
    struct program *program = &programs[number];
    submit(&servers[number % NUM_SERVERS], request);
    pthread_mutex_lock(&program->lock);
    while (program->answers == 0)
        pthread_cond_wait(&program->is_answered, &program->lock);
    program->answers = 0;
    const int error = program->error;
    pthread_mutex_unlock(&program->lock);
    return error;
}

static void *loop_over_pred(void *argument) {
    const int number = (int)(intptr_t)argument;
    uint64_t random = 100 + (uint64_t)number, hash = 0;
    int32_t length = 0;
    while (!over) {
        const int is_quiet = goes_on != MUCH;
        if (is_quiet && !(number == 0 && goes_on != ONE_GENERATION) && !(number == 2 && goes_on == TWO_PROGRAMS)) {
            usleep(500); /* 0 and 2 have one ring */
            continue;
        }
        struct request request = {.id = (uint64_t)number + 1, .position = below(&random, 3) == 0 ? length : -1};
        const int32_t num_tokens = below(&random, 12) > 0 ? 1 : below(&random, MOST_GIVEN) + 1;
        if (length + num_tokens > MOST || below(&random, 200) == 0) {
            CHECK(call_and_wait(number, &request) == 0);
            hash = 0;
            length = 0;
            continue;
        }
        request.num_tokens = num_tokens;
        uint64_t then = hash;
        for (int32_t i = 0; i < num_tokens; i++) {
            request.tokens[i] = below(&random, VOCAB);
            then = with_entry(then, length + i, (struct entry){request.tokens[i], length + i});
        }
        const int error = call_and_wait(number, &request);
        if (error == 0) {
            length += num_tokens;
            hash = then;
            CHECK(programs[number].num_entries == length && read_row(programs[number].row) == in_row(hash));
        } else {
            CHECK(error == EIO || error == ECANCELED);
        }
        if (below(&random, 10) == 0)
            usleep((useconds_t)below(&random, is_quiet ? 5000 : 1500));
    }
    return NULL;
}

/* -- generations -- */

struct decision {
    int32_t forced[MOST_FORCED], num_forced, is_over;
    uint64_t allowed;
};

/* What a guide gave C. */
struct kept_decision {
    int32_t *forced;
    uint64_t *allowed;
};

struct generation {
    sym_generation *state;
    int64_t number;
    uint64_t seed;
    int finish;
    int32_t stop_token;
    int32_t begin; /* entries before it */
    int32_t prompt[MOST_GIVEN], num_given;
    sym_sampler sampler;
    sym_stops stops;
    sym_reducer reducer;
    int32_t received[MOST_GENERATED], num_received, num_to_emit;
    struct kept_decision kept; /* under `guiding` */
};

static pthread_mutex_t guiding = PTHREAD_MUTEX_INITIALIZER;
static struct generation *guided[NUM_FILES]; /* under `guiding` */

static struct decision decide(uint64_t seed, int32_t token, uint64_t draw_index) {
    const uint64_t hash = mix(mix(seed, (uint64_t)token), draw_index);
    struct decision decision = {.num_forced = (int32_t)(hash >> 8 & 7) - MOST_FORCED - 1,
                                .is_over = draw_index > 0 && (hash >> 16 & 31) == 0,
                                .allowed = mix(hash, 1) | (uint64_t)1 << (hash & 63)};
    if (decision.num_forced < 0)
        decision.num_forced = 0;
    for (int32_t i = 0; i < decision.num_forced; i++)
        decision.forced[i] = (int32_t)(hash >> (20 + 8 * i) & (VOCAB - 1));
    return decision;
}

static void receive(struct generation *g, const char *tokens, const char *scores, int32_t count) {
    CHECK(g->num_received + count <= MOST_GENERATED);
    memcpy(g->received + g->num_received, tokens, (size_t)count * sizeof(int32_t));
    for (int32_t i = 0; i < count && g->state->score_bytes > 0; i++)
        CHECK(memcmp(scores + i * g->state->score_bytes, tokens + i * (int32_t)sizeof(int32_t), sizeof(int32_t)) == 0);
    g->num_received += count;
}

static int push(sym_server *server, uint64_t id, uint32_t flags, int64_t a0, int64_t a1, int64_t a2,
                const char *payload, uint32_t payload_bytes, const char *more, uint32_t more_bytes) {
    struct generation *g = (struct generation *)(uintptr_t)id;
    CHECK(flags == SYM_MORE && a0 > 0 && a0 <= g->state->max_sent && a2 == 0);
    CHECK(payload_bytes == a0 * sizeof(int32_t) && more_bytes == a0 * g->state->score_bytes);
    if (is_full(server))
        return 1;
    if (g->num_received == 0)
        CHECK(a0 == 1 && a1 == g->begin + g->num_given);
    CHECK(a1 >= g->begin + g->num_given && a1 <= g->begin + g->num_given + g->num_to_emit - g->state->num_to_emit);
    receive(g, payload, more, (int32_t)a0);
    return 0;
}

/* What a plain loop gives: as far as it was received, and if it is over, all of it. */
struct plain {
    int32_t tokens[MOST_GENERATED], num_tokens, num_left, finish, has_stops;
    sym_stops stops;
};

static void plain_emit(struct plain *plain, int32_t token) {
    if (plain->finish != NO_FINISH)
        return;
    plain->tokens[plain->num_tokens++] = token;
    if (plain->has_stops && stops_add(&plain->stops, token) >= 0)
        plain->finish = SYM_FINISH_STOP_TEXT;
    else if (--plain->num_left == 0)
        plain->finish = SYM_FINISH_LENGTH;
}

static struct plain plain_loop(const struct generation *g, const struct entry *entries) {
    struct plain plain = {.num_left = g->num_to_emit, .has_stops = g->state->stops != NULL, .stops = {.found = -1}};
    uint64_t hash = 0;
    int32_t length = 0, token = -1;
    for (; length < g->begin; length++)
        hash = with_entry(hash, length, entries[length]);
    int32_t next = length > 0 ? entries[length - 1].position + 1 : 0;
    for (int32_t i = 0; i < g->num_given; i++)
        hash = with_entry(hash, length++, (struct entry){g->prompt[i], next++});
    for (uint64_t index = 0; plain.finish == NO_FINISH; index++) {
        uint64_t allowed = UINT64_MAX;
        if (token >= 0)
            hash = with_entry(hash, length++, (struct entry){token, next++});
        if (g->state->is_guided) {
            const struct decision decision = decide(g->seed, token, index);
            for (int32_t i = 0; i < decision.num_forced; i++) {
                plain_emit(&plain, decision.forced[i]);
                hash = with_entry(hash, length++, (struct entry){decision.forced[i], next++});
            }
            if (plain.finish == NO_FINISH && decision.is_over)
                plain.finish = SYM_FINISH_GRAMMAR;
            allowed = decision.allowed;
        }
        if (plain.finish != NO_FINISH)
            break;
        token = drawn_from(in_row(hash), g->seed, often(g->seed, allowed), index);
        if (token == g->stop_token)
            plain.finish = SYM_FINISH_STOP_TOKEN;
        else
            plain_emit(&plain, token);
    }
    return plain;
}

/* -- the scheduler -- */

struct share {
    int32_t number, num_members;
};

struct file {
    struct entry entries[MOST]; /* that count */
    int32_t length;
    int32_t pages[FILE_PAGES], spare_page;
    int32_t index; /* of its member; -1 */
    int was_told, was_told_low; /* that it has ended; that it has little room left */
    int is_cancelled;
    sym_member asked; /* as it joined */
    struct share *share;
    int32_t num_committed, copied_page; /* -1: none */
    int64_t num_steps, num_rows;        /* of its member, as far as it was told of */
    int32_t *log;
    int32_t capacity;
    void *memory[256]; /* C's, until it is taken back */
    int num_memory;
    /* of a program: */
    struct request call; /* that came last */
    int has_call;        /* no member has it */
    /* of a call: */
    float *own_rows;
    uint64_t *answers;
    int32_t given[MOST_GIVEN], given_positions[MOST_GIVEN];
    struct generation *generation;
};

static sym_loop *loop;
static int64_t connections[3];
static struct file files[NUM_FILES];
static struct share shares[NUM_SHARES];
static int32_t account;
static uint64_t chance = 1; /* the scheduler's */
static int64_t next_number = 1;
static int wants_settling[NUM_FILES]; /* they have ended, and are taken back later */
static long num_ends[16], num_finishes[NUM_FINISHES], num_accepted, num_injected, num_retired;
static int64_t num_steps_of_all, num_rows_of_all; /* members */

static int32_t next_position(const struct file *file) {
    return file->length > 0 ? file->entries[file->length - 1].position + 1 : 0;
}

static void *keep(struct file *file, void *memory) {
    CHECK(file->num_memory < 256);
    return file->memory[file->num_memory++] = memory;
}

static const int32_t *pages_of(struct file *file, int32_t capacity) {
    const size_t count = (size_t)(capacity + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES;
    return keep(file, copy_of(file->pages, count * sizeof(int32_t)));
}

static struct share *join_share(void) {
    struct share *share = &shares[below(&chance, NUM_SHARES)];
    if (share->num_members++ == 0)
        share->number = sym_loop_new_share(loop, account, 1 + below(&chance, 3));
    CHECK(share->number > account);
    return share;
}

/* With what is the same for all kinds. */
static void join(struct file *file, sym_member *member, const int32_t *tokens, int32_t num_tokens, int32_t ahead) {
    const int32_t last = file->length + num_tokens + ahead;
    file->capacity = last < MOST ? last : MOST;
    file->share = join_share();
    member->number = next_number++;
    member->since_ns = member->arrived_ns = member->asked_ns = now_ns();
    if (member->deadline_ns == 0)
        member->deadline_ns = SYM_NO_DEADLINE;
    member->share = file->share->number;
    member->priority = below(&chance, 3);
    member->program = (int32_t)(file - files);
    int64_t *connection = &connections[below(&chance, 3)];
    if (below(&chance, 8) == 0) { /* its calls may still be under way */
        sym_loop_disconnect(loop, *connection);
        *connection = sym_loop_connect(loop);
    }
    member->connection = *connection;
    member->stream = (uint32_t)below(&chance, 300);
    member->tokens = keep(file, copy_of(tokens, (size_t)num_tokens * sizeof *tokens));
    member->num_tokens = num_tokens;
    member->position = next_position(file);
    member->first = file->length;
    member->max_rows = below(&chance, 4) == 0 ? num_tokens + ahead : 0;
    member->capacity = file->capacity;
    file->copied_page = -1;
    if (file->length % SYM_PAGE_ENTRIES != 0 && below(&chance, 3) == 0) { /* as of a page that others share */
        file->copied_page = file->length / SYM_PAGE_ENTRIES;
        const int32_t copies[3] = {file->pages[file->copied_page], file->spare_page, SYM_PAGE_ENTRIES};
        member->copies = keep(file, copy_of(copies, sizeof copies));
        member->num_copies = 1;
        file->spare_page = copies[0];
        file->pages[file->copied_page] = copies[1];
    }
    member->pages = pages_of(file, file->capacity);
    if (member->kind != SYM_CALL)
        member->log = file->log = keep(file, room((size_t)(file->capacity - file->length) * sizeof(int32_t)));
    file->num_committed = file->was_told = file->was_told_low = file->is_cancelled = 0;
    file->num_steps = file->num_rows = 0;
    file->asked = *member;
    file->index = sym_loop_join(loop, member);
    CHECK(file->index >= 0);
    for (int i = 0; i < NUM_FILES; i++)
        CHECK(&files[i] == file || files[i].index != file->index);
}

static void append(struct file *file, int32_t token, int32_t position) {
    CHECK(file->length < MOST);
    file->entries[file->length++] = (struct entry){token, position};
}

static void commit(struct file *file, int32_t num_done) {
    CHECK(num_done >= file->num_committed && file->asked.first + num_done <= file->capacity);
    for (; file->num_committed < num_done; file->num_committed++)
        append(file, file->log[file->num_committed], next_position(file));
}

static void settle(struct file *file);

static void leave(struct file *file, int how) {
    if (!sym_loop_leave(loop, file->index, how))
        return;
    if (below(&chance, 3) == 0)
        wants_settling[file - files] = 1;
    else
        settle(file);
}

/* -- its programs -- */

static void join_program(struct file *file) {
    const struct request *call = &file->call;
    struct program *program = &programs[file - files];
    float *const rows[1] = {program->row};
    sym_member member = {.kind = SYM_PROGRAM,
                         .server = &servers[(file - files) % NUM_SERVERS],
                         .decode = {.handle = call->id, .slot = (int64_t)call->id},
                         .call_id = call->id,
                         .num_rows = 1,
                         .rows = keep(file, copy_of(rows, sizeof rows))};
    file->has_call = 0;
    join(file, &member, call->tokens, call->num_tokens, below(&chance, 80));
}

static void settle_program(struct file *file, const sym_member *ended) {
    servers[(file - files) % NUM_SERVERS].must_look = 1; /* the run looks at its ring no more */
    CHECK(ended->end == SYM_END_UNSENT || ended->end == SYM_END_ASKED || ended->end == SYM_END_STEP);
    if (ended->end == SYM_END_UNSENT)
        answer_program(ended->call_id, 0, file->length);
    if (ended->num_tokens > 0) {
        CHECK(!file->has_call && ended->end != SYM_END_UNSENT);
        file->has_call = 1;
        if (ended->num_done > 0 || ended->decode.num_calls > 0) {
            CHECK(ended->num_tokens == 1);
            file->call = (struct request){.id = ended->call_id, .tokens = {ended->tokens[0]}, .num_tokens = 1};
        }
        if (ended->end == SYM_END_STEP || file->is_cancelled) {
            file->has_call = 0;
            answer_program(ended->call_id, ended->end == SYM_END_STEP ? ended->error : ECANCELED, 0);
        }
    }
    if (file->has_call)
        join_program(file);
}

static void accept(const struct request *request) {
    struct file *file = &files[request->id - 1];
    if (request->num_tokens == 0) {
        if (file->index >= 0) { /* it is answered and thinks: it leaves at once */
            CHECK(sym_loop_leave(loop, file->index, SYM_LEAVE_ANSWERED) == 1);
            settle(file);
        }
        CHECK(file->index < 0);
        file->length = 0;
        answer_program(request->id, 0, 0);
        return;
    }
    CHECK(!file->has_call);
    sym_beginning begins = {.index = file->index,
                            .server = &servers[(file - files) % NUM_SERVERS],
                            .handle = request->id,
                            .position = request->position};
    begins.call =
        (sym_hot_call){request->id, (int64_t)request->id, programs[request->id - 1].row, request->tokens[0], 1};
    if (request->num_tokens == 1 && file->index >= 0 && sym_loop_begin(loop, &begins, 1)) {
        num_injected++;
        return;
    }
    file->call = *request;
    file->has_call = 1;
    if (file->index < 0) {
        join_program(file);
    } else {
        num_retired++;
        leave(file, SYM_LEAVE_ANSWERED);
    }
}

/* -- its generations -- */

static void join_generation(struct file *file) {
    struct generation *g = file->generation;
    const sym_generation *state = g->state;
    sym_member member = {.kind = SYM_GENERATION,
                         .server = &servers[0],
                         .call_id = (uint64_t)(uintptr_t)g,
                         .num_rows = 1,
                         .generation = g->state};
    if (below(&chance, 20) == 0)
        member.deadline_ns = now_ns() + below(&chance, 2000000);
    if (state->is_guided) {
        float **rows = keep(file, room((size_t)(1 + state->max_draft) * sizeof *rows));
        for (int32_t i = 0; i <= state->max_draft; i++)
            rows[i] = keep(file, room(VOCAB * sizeof(float)));
        member.rows = rows;
        pthread_mutex_lock(&guiding);
        g->number = next_number;
        guided[file - files] = g;
        pthread_mutex_unlock(&guiding);
    }
    const int32_t ahead = below(&chance, 2) == 0 ? 0 : below(&chance, 50);
    if (state->has_begun)
        join(file, &member, state->tokens + state->num_entries, state->num_tokens - state->num_entries, ahead);
    else
        join(file, &member, g->prompt, g->num_given, ahead);
}

static void begin_generation(struct file *file) {
    struct generation *g = file->generation = room(sizeof *g);
    sym_generation *state = g->state = sym_generation_new(&g->sampler);
    CHECK(state != NULL);
    g->seed = (uint64_t)below(&chance, 1 << 30);
    g->stop_token = below(&chance, VOCAB);
    g->begin = file->length;
    g->num_given = below(&chance, 4) == 0 ? 1 : 1 + below(&chance, MOST_GIVEN);
    for (int32_t i = 0; i < g->num_given; i++)
        g->prompt[i] = below(&chance, VOCAB);
    g->stops.found = -1;
    g->reducer.fails_at = below(&chance, 40) == 0 ? 0 : UINT64_MAX;
    g->sampler = (sym_sampler){.seed = g->seed, .fails_at = below(&chance, 10) == 0 ? below(&chance, 20) : -1};
    state->stops = below(&chance, 2) == 0 ? &g->stops : NULL;
    state->stop_tokens = &g->stop_token;
    state->num_stop_tokens = 1;
    state->num_to_emit = g->num_to_emit = 1 + below(&chance, MOST_GENERATED);
    state->is_guided = below(&chance, 2);
    state->max_sent = 1 + below(&chance, 5);
    if (below(&chance, 2) == 0) {
        state->reducer = &g->reducer;
        state->score_bytes = sizeof(struct sym_reduced);
    }
    if (below(&chance, 2) == 0) {
        state->max_draft = 1 + below(&chance, 4);
        state->min_match = 1 + below(&chance, 2);
        CHECK(sym_generation_remember(state, g->prompt, g->num_given) == 0);
    }
    join_generation(file);
}

static void end_generation(struct file *file) {
    struct generation *g = file->generation;
    sym_generation *state = g->state;
    const int32_t num_unsent = state->num_unsent;
    if (num_unsent > 0)
        receive(g, (const char *)(state->tokens + state->num_tokens - num_unsent),
                state->scores + state->first_score * state->score_bytes, num_unsent);
    const struct plain plain = plain_loop(g, file->entries);
    num_finishes[g->finish]++;
    CHECK(g->sampler.num_noted == g->num_received && g->num_received <= plain.num_tokens);
    CHECK(state->num_to_emit == g->num_to_emit - g->num_received);
    if (state->error != 0)
        CHECK(state->error == EINVAL ? g->reducer.fails_at == 0 && state->reducer != NULL
                                     : state->error == ENOMEM && g->sampler.fails_at == g->num_received);
    for (int32_t i = 0; i < g->num_received; i++)
        CHECK(g->received[i] == plain.tokens[i] && g->sampler.noted[i] == plain.tokens[i]);
    if (g->finish < SYM_FINISH_CANCELLED)
        CHECK(g->finish == plain.finish && g->num_received == plain.num_tokens);
    const int32_t num_entries = file->length - g->begin;
    CHECK(num_entries == 0 || (num_entries >= g->num_given && num_entries <= g->num_given + g->num_received));
    for (int32_t i = 0; i < num_entries; i++)
        CHECK(file->entries[g->begin + i].token == (i < g->num_given ? g->prompt[i] : plain.tokens[i - g->num_given]));
    if (g->finish == SYM_FINISH_STOP_TOKEN)
        CHECK(num_entries == g->num_given + g->num_received && state->stopped_by == g->stop_token);
    if (!state->is_guided && (g->finish == SYM_FINISH_STOP_TEXT || g->finish == SYM_FINISH_LENGTH))
        CHECK(num_entries == g->num_given + g->num_received - 1);
    sym_generation_free(state);
    free(g->kept.forced);
    free(g->kept.allowed);
    free(g);
    file->generation = NULL;
}

static void settle_generation(struct file *file, const sym_member *ended) {
    struct generation *g = file->generation;
    const sym_generation *state = g->state;
    num_accepted += !state->is_guided && ended->num_done - file->asked.num_tokens > ended->num_steps; /* by one */
    pthread_mutex_lock(&guiding);
    guided[file - files] = NULL;
    pthread_mutex_unlock(&guiding);
    if (ended->end == SYM_END_DONE)
        g->finish = state->error != 0 ? FAILED : state->finish;
    else if (ended->end == SYM_END_STEP)
        g->finish = FAILED;
    else if (ended->end == SYM_END_DEADLINE || file->is_cancelled ||
             file->length + state->num_tokens - state->num_entries > MOST) /* no more room at all */
        g->finish = CANCELLED;
    else
        CHECK(ended->end == SYM_END_ASKED || ended->end == SYM_END_ROOM);
    if (g->finish == NO_FINISH)
        join_generation(file);
    else
        end_generation(file);
}

/* -- its calls -- */

static int sees(const sym_member *asked, int32_t row, int32_t entry) {
    if (asked->asked.mask == NULL || (entry >= asked->asked.mask_columns && entry >= asked->first))
        return 1;
    const int32_t mask_row = asked->asked.mask_rows == 1 && asked->asked.mask_columns <= asked->first ? 0 : row;
    return asked->asked.mask[mask_row * asked->asked.mask_row_bytes + entry / 8] >> entry % 8 & 1;
}

static void ask_for_mass(struct file *file, sym_member *member, int32_t columns) {
    member->asked.mass =
        (sym_mass){keep(file, room((size_t)(MASS_ROWS * columns) * sizeof(float))), MASS_ROWS, 1, columns};
    member->asked.is_mass_summed = below(&chance, 2);
    member->asked.is_mass_by_page = below(&chance, 2);
    if (below(&chance, 4) > 0)
        member->asked.folded = keep(file, room((size_t)(MASS_ROWS * columns) * sizeof(float)));
}

static void begin_call(struct file *file) {
    sym_member member = {.kind = SYM_CALL};
    int32_t n = below(&chance, 4) == 0 ? 1 : 1 + below(&chance, MOST_GIVEN);
    n = n < MOST - file->length ? n : MOST - file->length;
    const int has_positions = below(&chance, 3) == 0;
    for (int32_t i = 0; i < n; i++) {
        file->given[i] = below(&chance, VOCAB);
        file->given_positions[i] = has_positions ? 3 * i + below(&chance, 3) : next_position(file) + i;
    }
    if (has_positions)
        member.positions = keep(file, copy_of(file->given_positions, (size_t)n * sizeof(int32_t)));
    if (below(&chance, 3) == 0) {
        const int has_own = below(&chance, 2);
        member.asked.mask_rows = has_own ? n : 1;
        member.asked.mask_columns = file->length + (has_own ? n : 0);
        member.asked.mask_row_bytes = (member.asked.mask_columns + 31) / 32 * 4;
        uint8_t *mask = keep(file, room((size_t)(member.asked.mask_rows * member.asked.mask_row_bytes)));
        for (int32_t i = 0; i < member.asked.mask_rows * member.asked.mask_row_bytes; i++)
            mask[i] = (uint8_t)below(&chance, 256);
        for (int32_t k = 0; has_own && k < n; k++)
            mask[k * member.asked.mask_row_bytes + (file->length + k) / 8] |= (uint8_t)(1 << (file->length + k) % 8);
        member.asked.mask = mask;
    }
    const int what = below(&chance, 5);
    member.num_rows = what == 0 ? 0 : what % 2 == 1 ? 1 : n;
    if (what == 1 || what == 2) {
        file->own_rows = keep(file, room((size_t)member.num_rows * VOCAB * sizeof(float)));
        float **rows = keep(file, room((size_t)member.num_rows * sizeof *rows));
        for (int32_t k = 0; k < member.num_rows; k++)
            rows[k] = file->own_rows + k * VOCAB;
        member.rows = rows;
    } else if (what > 2) {
        sym_reducer *reducer = keep(file, room(sizeof *reducer));
        reducer->fails_at = below(&chance, 8) == 0 ? (uint64_t)below(&chance, member.num_rows) : UINT64_MAX;
        file->answers = keep(file, room((size_t)member.num_rows * sizeof *file->answers));
        member.asked.reducer = reducer;
        member.asked.answer = (char *)file->answers;
        member.asked.answer_row_bytes = sizeof *file->answers;
    }
    if (below(&chance, 3) == 0)
        ask_for_mass(file, &member, file->length + n);
    if (below(&chance, 10) == 0)
        member.deadline_ns = now_ns() + below(&chance, 1000000);
    join(file, &member, file->given, n, 0);
}

static void check_rows(const struct file *file) {
    const sym_member *asked = &file->asked;
    for (int32_t k = asked->num_tokens - asked->num_rows; k < asked->num_tokens; k++) {
        uint64_t hash = 0;
        for (int32_t e = 0; e < file->length; e++)
            if (sees(asked, k, e))
                hash = with_entry(hash, e, file->entries[e]);
        for (int32_t i = 0; i <= k; i++)
            if (sees(asked, k, file->length + i))
                hash = with_entry(hash, file->length + i, (struct entry){file->given[i], file->given_positions[i]});
        const int32_t at = k - (asked->num_tokens - asked->num_rows);
        if (asked->asked.reducer == NULL)
            CHECK(read_row(file->own_rows + at * VOCAB) == in_row(hash));
        else
            CHECK(file->answers[at] == mix(in_row(hash), (uint64_t)at));
    }
}

/* How many rows saw each entry, or all of a page: a whole number, exactly. */
static void check_mass(const struct file *file) {
    const sym_member *asked = &file->asked;
    const int32_t columns = asked->asked.mass.columns, per_column = asked->asked.is_mass_by_page ? SYM_PAGE_ENTRIES : 1;
    const int32_t width = (columns + per_column - 1) / per_column;
    int32_t seen[MOST] = {0}, wide[MOST] = {0};
    for (int32_t e = 0; e < columns; e++)
        for (int32_t k = e < file->length ? 0 : e - file->length; k < asked->num_tokens; k++)
            seen[e] += e == file->length + k || sees(asked, k, e);
    for (int32_t e = 0; e < columns; e++)
        wide[e / per_column] += seen[e];
    for (int32_t i = 0; i < MASS_ROWS * columns; i++)
        CHECK(asked->asked.mass.sums[i] == (float)((i / columns + 1) * seen[i % columns]));
    for (int32_t i = 0; asked->asked.folded != NULL && i < (asked->asked.is_mass_summed ? 1 : MASS_ROWS) * width; i++)
        CHECK(
            asked->asked.folded[i] ==
            (float)((asked->asked.is_mass_summed ? MASS_ROWS * (MASS_ROWS + 1) / 2 : i / width + 1) * wide[i % width]));
}

static void settle_call(struct file *file, const sym_member *ended) {
    CHECK(ended->num_done == 0);
    if (ended->end == SYM_END_DONE) {
        CHECK(ended->num_computed == file->asked.num_tokens);
        if (ended->error != 0)
            CHECK(ended->error == EINVAL && file->asked.asked.reducer != NULL);
        else
            check_rows(file);
        if (file->asked.asked.mass.sums != NULL)
            check_mass(file);
        const int32_t num_kept = below(&chance, 2) == 0 ? ended->num_tokens : below(&chance, ended->num_tokens + 1);
        for (int32_t i = 0; i < num_kept; i++)
            append(file, file->given[i], file->given_positions[i]);
    } else {
        CHECK(ended->end == SYM_END_STEP || ended->end == SYM_END_ASKED || ended->end == SYM_END_DEADLINE);
    }
}

/* Of a member, until now; entries that count were computed, and each step that it was in computed some. */
static void count_rows(struct file *file, int64_t num_steps, int64_t num_rows, int32_t num_done) {
    CHECK(num_steps >= file->num_steps && num_rows - file->num_rows >= num_steps - file->num_steps);
    CHECK(num_rows >= num_done);
    num_steps_of_all += num_steps - file->num_steps;
    num_rows_of_all += num_rows - file->num_rows;
    file->num_steps = num_steps;
    file->num_rows = num_rows;
}

static void settle(struct file *file) {
    sym_member ended;
    sym_loop_take_back(loop, file->index, &ended);
    wants_settling[file - files] = 0;
    num_ends[ended.end]++;
    CHECK(ended.state == SYM_ENDED && ended.number == file->asked.number && ended.in_step == 0);
    CHECK((ended.end == SYM_END_ASKED) <= (ended.leave != SYM_STAY));
    CHECK(ended.queue_ns >= 0 && ended.queue_ns + ended.compute_ns <= now_ns() - file->asked.since_ns);
    file->index = -1;
    commit(file, ended.num_done);
    count_rows(file, ended.num_steps, ended.num_rows_computed, ended.num_done);
    if (file->copied_page >= 0 && ended.num_copies > 0) { /* it was in no step */
        const int32_t unused = file->pages[file->copied_page];
        CHECK(ended.num_done == 0);
        file->pages[file->copied_page] = file->spare_page;
        file->spare_page = unused;
    }
    if (--file->share->num_members == 0)
        sym_loop_free_share(loop, file->share->number);
    void *memory[256];
    const int num_memory = file->num_memory;
    memcpy(memory, file->memory, sizeof memory);
    file->num_memory = 0;
    if (ended.kind == SYM_PROGRAM)
        settle_program(file, &ended);
    else if (ended.kind == SYM_GENERATION)
        settle_generation(file, &ended);
    else
        settle_call(file, &ended);
    for (int i = 0; i < num_memory; i++)
        free(memory[i]);
}

static void extend(struct file *file) {
    const int32_t more = file->capacity + 1 + below(&chance, 64);
    file->capacity = more < MOST ? more : MOST;
    file->was_told_low = 0;
    const size_t bytes = (size_t)(file->capacity - file->asked.first) * sizeof(int32_t);
    file->log = keep(file, room(bytes));
    sym_loop_extend(loop, file->index, pages_of(file, file->capacity), file->log, file->capacity);
}

static int take_news(void) {
    sym_news news[5];
    const int32_t count = sym_loop_news(loop, news, 5, (int)below(&chance, 2));
    for (int32_t i = 0; i < count; i++) {
        struct file *file = files;
        while (file < files + NUM_FILES && file->index != news[i].index)
            file++;
        CHECK(file < files + NUM_FILES); /* nobody tells of places that nobody has */
        CHECK(news[i].state != SYM_GONE && !file->was_told);
        commit(file, news[i].num_done);
        count_rows(file, news[i].num_steps, news[i].num_rows_computed, news[i].num_done);
        if (news[i].is_rung) {
            CHECK(file->asked.kind == SYM_PROGRAM);
            servers[(file - files) % NUM_SERVERS].must_look = 1;
        }
        if (news[i].state == SYM_ENDED) {
            file->was_told = 1;
            wants_settling[file - files] = 1;
        } else if (news[i].is_low) {
            CHECK(!file->was_told_low);
            file->was_told_low = 1;
            if (file->capacity < MOST && below(&chance, 4) > 0)
                extend(file);
        }
    }
    return count > 0;
}

static int settle_ended(void) {
    int any = 0;
    for (int i = 0; i < NUM_FILES; i++)
        if (wants_settling[i] && below(&chance, 3) > 0) {
            settle(&files[i]);
            any = 1;
        }
    for (int i = 0; i < NUM_FILES; i++)
        any |= wants_settling[i];
    return any;
}

static int begin_and_leave(void) {
    int any = 0;
    for (int i = NUM_PROGRAMS; i < NUM_FILES; i++) {
        struct file *file = &files[i];
        if (file->index >= 0 || (goes_on != MUCH && !(goes_on == ONE_GENERATION && i == NUM_PROGRAMS)))
            continue;
        if (goes_on == MUCH && below(&chance, 4) > 0)
            continue;
        if (file->length > MOST - MOST_GIVEN - 40)
            file->length = 0;
        if (below(&chance, 2) == 0)
            begin_call(file);
        else
            begin_generation(file);
        any = 1;
    }
    struct file *file = &files[below(&chance, NUM_FILES)];
    if (goes_on == MUCH && file->index >= 0 && below(&chance, 8) == 0) {
        const int how = below(&chance, 2) == 0 ? SYM_LEAVE_NOW : SYM_LEAVE_ANSWERED;
        file->is_cancelled |= how == SYM_LEAVE_NOW && below(&chance, 2) == 0;
        leave(file, how);
    }
    return any;
}

/* Whether it found anything. */
static int look(sym_server *server) {
    struct request found[NUM_PROGRAMS];
    pthread_mutex_lock(&server->lock);
    const int count = server->num_requests;
    memcpy(found, server->ring, sizeof found);
    server->num_requests = 0;
    server->receiver_has = count > 0;
    pthread_mutex_unlock(&server->lock);
    for (int i = 0; i < count; i++)
        accept(&found[i]);
    return count > 0;
}

/* Before it sleeps: then programs ring. */
static int arm(sym_server *server) {
    atomic_store(&server->is_asleep, 1);
    pthread_mutex_lock(&server->lock);
    const int is_empty = server->num_requests == 0;
    pthread_mutex_unlock(&server->lock);
    if (!is_empty)
        atomic_store(&server->is_asleep, 0);
    return is_empty;
}

static void read_bell(int fd) {
    uint64_t rings;
    CHECK(read(fd, &rings, sizeof rings) == sizeof rings || errno == EAGAIN);
}

static void sleep_until_rung(void) {
    struct pollfd waiting[] = {{.fd = gate_fd, .events = POLLIN}, {.fd = wake_fd, .events = POLLIN}};
    CHECK(poll(waiting, 2, STALLED_MS) > 0); /* a wake was lost */
    if (waiting[0].revents != 0) {
        read_bell(gate_fd);
        for (int s = 0; s < NUM_SERVERS; s++) {
            pthread_mutex_lock(&servers[s].lock);
            servers[s].must_look |= servers[s].is_rung;
            servers[s].is_rung = 0;
            pthread_mutex_unlock(&servers[s].lock);
        }
    }
    if (waiting[1].revents != 0) {
        read_bell(wake_fd);
        take_news();
    }
}

/* What there is to do; then, if that was nothing, it sleeps. */
static void schedule(void) {
    static int64_t synced;
    int any = 0;
    for (int s = 0; s < NUM_SERVERS; s++)
        if (servers[s].must_look) {
            servers[s].must_look = look(&servers[s]) || !arm(&servers[s]);
            any |= servers[s].must_look;
        }
    const int64_t progress = sym_loop_progress(loop);
    if (progress != synced) {
        synced = progress;
        any |= take_news();
    }
    any |= settle_ended();
    any |= begin_and_leave();
    if (!any)
        sleep_until_rung();
}

/* When no step is under way. Return whether any was there. */
static int all_leave(void) {
    int any = 0;
    for (struct file *file = files; file < files + NUM_FILES; file++)
        if (file->index >= 0) {
            file->is_cancelled = any = 1;
            CHECK(sym_loop_leave(loop, file->index, SYM_LEAVE_NOW) == 1);
            settle(file);
        }
    return any;
}

/* -- the other threads -- */

static void *run_steps(void *unused) {
    const sym_engine alone = {step, &decoder, NULL, NULL, wake_fd, guide_fd};
    const sym_engine together = {step, &decoder, parallel, &decoder, wake_fd, guide_fd};
    for (int i = 0; !over; i++)
        sym_loop_run(loop, i % 2 == 0 ? &alone : &together);
    return unused;
}

static void decide_for(const int64_t *drawn) {
    pthread_mutex_lock(&guiding);
    for (int i = 0; i < NUM_FILES; i++) {
        struct generation *g = guided[i];
        if (g == NULL || g->number != drawn[0])
            continue;
        const struct decision decision = decide(g->seed, (int32_t)drawn[1], g->state->draw_index);
        const struct kept_decision next = {copy_of(decision.forced, sizeof(int32_t) * (size_t)decision.num_forced),
                                           copy_of(&decision.allowed, sizeof decision.allowed)};
        sym_loop_decide(loop, g->state, next.forced, decision.num_forced, next.allowed, decision.is_over);
        free(g->kept.forced);
        free(g->kept.allowed);
        g->kept = next;
    }
    pthread_mutex_unlock(&guiding);
}

static void *guide(void *unused) {
    uint64_t random = 11;
    int64_t drawn[2 * 3];
    while (!over) {
        struct pollfd waiting = {.fd = guide_fd, .events = POLLIN};
        CHECK(poll(&waiting, 1, -1) > 0 || errno == EINTR);
        read_bell(guide_fd);
        int32_t count;
        while ((count = sym_loop_drawn(loop, drawn, 3)) > 0)
            for (int32_t i = 0; i < count; i++) {
                if (below(&random, 4) == 0)
                    usleep((useconds_t)below(&random, 1000));
                decide_for(drawn + 2 * (size_t)i);
            }
    }
    return unused;
}

static void look_at_steps(int64_t *number) {
    static sym_step_record records[64];
    static sym_seat seats[128];
    const int32_t count = sym_loop_steps(loop, *number, records, 64, *number % 3 == 0 ? NULL : seats, 128);
    for (int32_t i = 0; i < count; i++) {
        CHECK(records[i].began_ns <= records[i].ended_ns && records[i].num_calls > 0);
        CHECK(i == 0 || records[i - 1].ended_ns <= records[i].began_ns);
        CHECK(records[i].num_prefill_rows <= MAX_TOKENS && records[i].predicted_ns > 0);
        for (int32_t s = 0; *number % 3 != 0 && records[i].first_seat >= 0 && s < records[i].num_calls; s++)
            CHECK(seats[records[i].first_seat + s].call > 0 && seats[records[i].first_seat + s].num_now > 0);
    }
    const sym_counts counts = sym_loop_counts(loop);
    CHECK(counts.num_steps >= *number + count && counts.max_calls <= MAX_CALLS);
    *number = counts.num_steps;
}

static void set_cost(uint64_t *random) {
    sym_cost cost = {.head_ns = 1000, .wanted_ns = 100, .entry_ns = 1, .seen_ns = 1, .pair_ns = 1};
    for (int k = 0; k < SYM_COST_KNOTS; k++)
        cost.rows_ns[k] = (double)(1000 + below(random, 100000) + (1000 << k));
    sym_loop_set_cost(loop, &cost);
}

static void *observe(void *unused) {
    uint64_t random = 5;
    int64_t number = 0, progress = 0;
    int32_t index[MAX_CALLS], count;
    for (long round = 0; !over; round++) {
        const int64_t now = sym_loop_progress(loop);
        CHECK(now >= progress);
        progress = now;
        look_at_steps(&number);
        sym_loop_trace(loop, below(&random, 2));
        const int64_t since_ns = sym_loop_stepping_since(loop, index, MAX_CALLS, &count);
        CHECK((since_ns == 0) == (count == 0));
        for (int32_t i = 0; i < count; i++)
            CHECK(index[i] >= 0 && index[i] < NUM_FILES);
        sym_loop_is_stepping(loop);
        for (int s = 0; s < NUM_SERVERS; s++)
            CHECK(sym_loop_find(loop, &servers[s], (uint64_t)below(&random, NUM_PROGRAMS) + 1, 0) < NUM_FILES);
        sym_loop_expect(loop, 1);
        set_cost(&random);
        const int32_t share = sym_loop_new_share(loop, account, 1);
        sym_loop_set_weight(loop, account, 1 + below(&random, 3));
        servers[round % NUM_SERVERS].backlog = below(&random, 4) == 0;
        usleep((useconds_t)below(&random, 500));
        servers[round % NUM_SERVERS].backlog = 0;
        sym_loop_free_share(loop, share);
        sym_loop_expect(loop, -1);
        if (goes_on == MUCH && below(&random, 16) == 0)
            sym_loop_close(loop); /* its thread runs it again */
    }
    return unused;
}

int main(void) {
    const sym_hot_functions hot = {
        .take = take,
        .answer = answer,
        .push = push,
        .watch = watch,
        .unwatch = unwatch,
        .draw = draw,
        .note = note,
        .reduce = reduce,
        .stops_add = stops_add,
    };
    const sym_loop_plan plan = {
        .hot = &hot,
        .vocab_size = VOCAB,
        .num_pages = NUM_FILES * (FILE_PAGES + 1),
        .limits = {MAX_CALLS, MAX_TOKENS, 6, MAX_DIGESTED, 500000},
        .wait = {.share_percent = 10, .min_ns = 50000, .max_ns = 1000000},
    };
    loop = sym_loop_new(&plan);
    CHECK(loop != NULL);
    CHECK(sym_loop_new_share(loop, -1, 1) == 0);
    account = sym_loop_new_share(loop, 0, 1);
    for (int c = 0; c < 3; c++)
        connections[c] = sym_loop_connect(loop);
    uint64_t random = 3;
    set_cost(&random);
    gate_fd = eventfd(0, EFD_NONBLOCK);
    wake_fd = eventfd(0, EFD_NONBLOCK);
    guide_fd = eventfd(0, EFD_NONBLOCK);
    for (int s = 0; s < NUM_SERVERS; s++) {
        pthread_mutex_init(&servers[s].lock, NULL);
        servers[s].must_look = 1;
    }
    for (int i = 0; i < NUM_PROGRAMS; i++) {
        pthread_mutex_init(&programs[i].lock, NULL);
        pthread_cond_init(&programs[i].is_answered, NULL);
    }
    for (int32_t i = 0; i < NUM_FILES; i++) {
        files[i].index = -1;
        for (int32_t p = 0; p < FILE_PAGES; p++)
            files[i].pages[p] = i * (FILE_PAGES + 1) + p;
        files[i].spare_page = i * (FILE_PAGES + 1) + FILE_PAGES;
    }

    pthread_t threads[3], running[NUM_PROGRAMS];
    void *(*const functions[3])(void *) = {run_steps, guide, observe};
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, functions[i], NULL) == 0);
    for (intptr_t i = 0; i < NUM_PROGRAMS; i++)
        CHECK(pthread_create(&running[i], NULL, loop_over_pred, (void *)i) == 0);
    for (int round = 0; round < NUM_ROUNDS; round++) {
        goes_on = round % 4096 < 3072 ? MUCH : round / 4096 % NUM_TIMES;
        schedule();
    }

    /* All leave; programs come to their ends. */
    struct timespec now;
    over = 1;
    ring(guide_fd);
    sym_loop_close(loop);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    sym_loop_close(loop); /* so that it does not begin */
    for (int i = 0; i < NUM_PROGRAMS; i++)
        for (;;) {
            clock_gettime(CLOCK_REALTIME, &now);
            now.tv_nsec += 1000000;
            now.tv_sec += now.tv_nsec / 1000000000;
            now.tv_nsec %= 1000000000;
            if (pthread_timedjoin_np(running[i], NULL, &now) == 0)
                break;
            all_leave();
            for (int s = 0; s < NUM_SERVERS; s++)
                look(&servers[s]);
        }
    while (all_leave())
        continue;
    sym_news none[1];
    CHECK(sym_loop_news(loop, none, 1, 1) == 0);
    const sym_counts counts = sym_loop_counts(loop);
    CHECK(counts.num_tokens == num_rows_of_all && counts.num_calls_in_steps == num_steps_of_all);
    sym_loop_free(loop);
    close(gate_fd);
    close(wake_fd);
    close(guide_fd);

    fprintf(stdout, "%ld steps, %ld failed, %ld calls out of the ring, %ld injected, %ld retired, %ld slept\n",
            (long)counts.num_steps, decoder.num_failed, (long)counts.num_taken, num_injected, num_retired,
            (long)counts.num_sleeps);
    for (int end = SYM_END_DONE; end <= SYM_END_DEADLINE; end++) {
        fprintf(stdout, "end %d: %ld\n", end, num_ends[end]);
        CHECK(num_ends[end] > 0); /* or it is not tested */
    }
    for (int finish = SYM_FINISH_LENGTH; finish <= SYM_FINISH_GRAMMAR; finish++)
        CHECK(num_finishes[finish] > 0);
    CHECK(num_finishes[FAILED] > 0 && num_finishes[CANCELLED] > 0 && num_accepted > 0);
    CHECK(counts.num_taken > 0 && num_injected > 0 && num_retired > 0);
    return 0;
}
