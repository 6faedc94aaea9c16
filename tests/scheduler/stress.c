/* A daemon without Python, under sanitizers: real steps of a small model, programs that loop over pred() by real rings, a
 * gate and a thread that runs steps, on every set of instructions that this machine has.
 *
 * The programs come in by the ring (hot), by the gate (cold, injected, or joining), and sometimes find the ring closed to
 * answers. Every token has to be the one that a plain loop of steps gives. What members may do besides is stress_loop.c's.
 * scripts/sanitize runs it. */
#include "client_state.h"
#include "loop.h"
#include "rows.h"
#include "server_state.h"
#include "step.h"

#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

enum { VOCAB = 1000, HIDDEN = 64, LAYERS = 2, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16, FFN = 128, WINDOW = 40 };
#ifdef SHORT_RUN
#define NUM_ENTRIES 48 /* more than a page, and than the window */
#else
#define NUM_ENTRIES 80
#endif
enum { NUM_FILES = 4, FILE_PAGES = (NUM_ENTRIES + SYM_PAGE_ENTRIES - 1) / SYM_PAGE_ENTRIES };
enum { NUM_THREADS = 3 };

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* What a connection keeps for ever is no leak: see client_unref(). */
const char *__lsan_default_suppressions(void) { return "leak:sym_client_new"; }

/* -- the model -- */

struct model {
    sym_model c;
    sym_layer layers[LAYERS];
    float norms[HIDDEN];
    double frequencies[HEAD_DIM / 2];
};

static uint32_t random_state = 1;

static float random_float(void) {
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / (float)(1 << 24) - 0.5f;
}

static void *room(size_t bytes) {
    void *found = aligned_alloc(64, (bytes + 127) / 64 * 64);
    CHECK(found != NULL);
    memset(found, 0, (bytes + 127) / 64 * 64);
    return found;
}

/* Features in `every` interleaved parts, as gate and up are. */
static sym_matrix random_matrix(int32_t format, int32_t n, int32_t k, int every) {
    sym_matrix m = {.format = format, .n = n, .k = k, .bits = 8, .group = SYM_BLOCK};
    m.data = room((size_t)sym_packed_bytes(&m));
    float *w = room(sizeof(float) * (size_t)n * (size_t)k);
    for (int part = 0; part < every; part++) {
        for (int i = 0; i < n / every * k; i++)
            w[i] = random_float();
        sym_pack(&m, w, n / every, k, part, every);
    }
    free(w);
    return m;
}

static void make_model(struct model *m, int32_t format) {
    random_state = 1;
    for (int i = 0; i < HIDDEN; i++)
        m->norms[i] = 1.0f;
    for (int i = 0; i < HEAD_DIM / 2; i++)
        m->frequencies[i] = pow(10000.0, -2.0 * i / HEAD_DIM);
    for (int i = 0; i < LAYERS; i++)
        m->layers[i] = (sym_layer){
            .attn_norm = m->norms,
            .ffn_norm = m->norms,
            .qkv = {random_matrix(format, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, 1)},
            .o = random_matrix(format, HIDDEN, HEADS * HEAD_DIM, 1),
            .gate_up = random_matrix(format, 2 * FFN, HIDDEN, 2),
            .down = random_matrix(format, HIDDEN, FFN, 1),
            .sliding = i % 2,
        };
    m->c = (sym_model){
        .shape = {.vocab = VOCAB,
                  .hidden = HIDDEN,
                  .layers = LAYERS,
                  .heads = HEADS,
                  .kv_heads = KV_HEADS,
                  .head_dim = HEAD_DIM,
                  .ffn = FFN,
                  .window = WINDOW,
                  .kv_format = format == SYM_FLOAT32 ? SYM_FLOAT32 : SYM_BFLOAT16,
                  .rms_eps = 1e-5f,
                  .embed_scale = 1.0f,
                  .attn_scale = 0.25f},
        .layers = m->layers,
        .final_norm = m->norms,
        .frequencies = {m->frequencies, m->frequencies},
        .rotation_factors = {1.0f, 1.0f},
        .arena = room(4u * NUM_FILES * FILE_PAGES * LAYERS * 2 * KV_HEADS * SYM_PAGE_ENTRIES * HEAD_DIM),
    };
    m->c.embed = m->c.head = random_matrix(format, VOCAB, HIDDEN, 1);
}

static void free_model(struct model *m) {
    for (int i = 0; i < LAYERS; i++) {
        char *owned[] = {m->layers[i].qkv[0].data, m->layers[i].o.data, m->layers[i].gate_up.data,
                         m->layers[i].down.data};
        for (size_t j = 0; j < sizeof owned / sizeof *owned; j++)
            free(owned[j]);
    }
    free(m->c.embed.data);
    free(m->c.arena);
}

/* -- what the tokens have to be -- */

static int32_t expected[NUM_FILES][NUM_ENTRIES + 1]; /* [file][0] is its first token */
static int32_t pages[NUM_FILES][FILE_PAGES];

static void expect(const struct model *m, const char *isa, int file) {
    sym_decoder *alone = sym_decoder_new(&m->c, 1, isa, 0);
    CHECK(alone != NULL);
    float row[VOCAB], *out = row;
    const uint32_t *no_mask = NULL;
    expected[file][0] = file + 1;
    for (int32_t i = 0; i < NUM_ENTRIES; i++) {
        const int32_t first_row[] = {0, 1}, first_page[] = {0, i / SYM_PAGE_ENTRIES + 1}, wanted = 1;
        const sym_batch batch = {.num_rows = 1,
                                 .num_chunks = 1,
                                 .num_wanted = 1,
                                 .tokens = &expected[file][i],
                                 .positions = &i,
                                 .first_row = first_row,
                                 .start = &i,
                                 .first_page = first_page,
                                 .pages = pages[file],
                                 .wanted = &wanted,
                                 .masks = &no_mask,
                                 .out = &out};
        CHECK(sym_step(alone, &batch) == 0);
        expected[file][i + 1] = (int32_t)sym_row_argmax(row, VOCAB, NULL);
    }
    sym_decoder_free(alone);
}

/* -- the daemon: a gate, which looks after the files, and a thread that runs steps -- */

/* The gate's, but for rows and for what its member has. */
struct file {
    int is_pending; /* a call that no member has */
    int32_t index; /* of its member; -1 */
    uint64_t call_id;
    int64_t slot;
    float *row;
    int32_t token, num_entries, share;
    int32_t logs[NUM_ENTRIES]; /* of its member */
};

static struct file files[NUM_FILES];
static sym_loop *loop;
static int64_t connection;
static _Atomic int over;

static sym_server *server;
static sym_client *client;
static sym_decoder *decoder;
static int doorbell, wake_fd;
static long num_injected, num_taken, num_steps;

static void push(uint64_t id, int32_t err, uint32_t flags, int64_t a0, int64_t a1, const void *data, uint32_t bytes) {
    while (sym_server_push(server, id, err, flags, a0, a1, 0, 0, data, bytes) == 1)
        sched_yield();
}

static void *run_steps(void *unused) {
    while (!over) {
        sym_engine engine = {sym_step, decoder, sym_parallel, decoder, wake_fd, -1};
        sym_loop_run(loop, &engine);
        engine.crew = sym_crew_new(NUM_THREADS); /* and once by others */
        CHECK(engine.crew != NULL);
        if (!over)
            sym_loop_run(loop, &engine);
        sym_decoder_free(engine.crew);
    }
    return unused;
}

static void join(struct file *file) {
    sym_member member = {.number = file - files,
                         .kind = SYM_PROGRAM,
                         .deadline_ns = SYM_NO_DEADLINE,
                         .share = file->share,
                         .program = (int32_t)(file - files),
                         .connection = connection,
                         .stream = (uint32_t)(file - files) + 1,
                         .server = server,
                         .call_id = file->call_id,
                         .pages = pages[file - files],
                         .tokens = &file->token,
                         .num_tokens = 1,
                         .position = file->num_entries,
                         .first = file->num_entries,
                         .capacity = NUM_ENTRIES,
                         .log = file->logs,
                         .num_rows = 1,
                         .rows = &file->row,
                         .decode = {.handle = (uint64_t)(file - files) + 1, .slot = file->slot}};
    file->is_pending = 0;
    file->index = sym_loop_join(loop, &member);
    CHECK(file->index >= 0);
}

/* What a member that has ended has computed is its file's, and what it could not do is done here. */
static void settle(struct file *file) {
    sym_member member;
    sym_loop_take_back(loop, file->index, &member);
    file->index = -1;
    CHECK(member.first == file->num_entries && member.first + member.num_done <= member.capacity);
    for (int32_t i = 0; i < member.num_done; i++)
        CHECK(member.log[i] == expected[file - files][member.first + i]);
    file->num_entries = member.first + member.num_done;
    if (member.end == SYM_END_UNSENT) {
        push(member.call_id, 0, 0, member.decode.slot, 1, NULL, 0);
        sym_server_settle_rows(server, 1);
    } else if (member.num_tokens == 1) {
        CHECK(!file->is_pending);
        file->is_pending = 1;
        file->call_id = member.call_id;
        file->slot = member.decode.slot;
        file->row = member.decode.row == NULL ? file->row : member.decode.row;
        file->token = member.tokens[0];
    }
    if (file->is_pending)
        join(file);
}

/* The run goes on with it, or the file's member leaves and joins again. */
static void submit(struct file *file, int32_t position) {
    sym_beginning begins = {
        .index = file->index, .server = server, .handle = (uint64_t)(file - files) + 1, .position = position};
    begins.call = (sym_hot_call){.id = file->call_id, .slot = file->slot, .row = file->row, .token = file->token};
    if (file->index < 0) {
        join(file);
    } else if (sym_loop_begin(loop, &begins, 1)) {
        num_injected++;
    } else {
        file->is_pending = 1;
        if (sym_loop_leave(loop, file->index, SYM_LEAVE_ANSWERED))
            settle(file);
    }
}

static void accept_request(const struct sym_taken *request) {
    const char *payload = server->inbox + request->payload_at;
    if (request->op == SYM_PING) {
        push(request->id, 0, 0, 0, 0, NULL, 0);
        return;
    }
    CHECK(request->handle >= 1 && request->handle <= NUM_FILES);
    struct file *file = &files[request->handle - 1];
    file->slot = sym_server_take_rows(server, 1);
    CHECK(file->slot >= 0);
    file->row =
        (float *)(void *)(server->base + server->plan.slots_offset + (uint64_t)file->slot * server->plan.slot_bytes);
    file->call_id = request->id;
    memcpy(&file->token, payload, sizeof file->token);
    submit(file, -1);
}

static void take_news(void) {
    sym_news news[2]; /* fewer than there may be */
    const int32_t count = sym_loop_news(loop, news, 2, 1);
    for (int32_t i = 0; i < count; i++)
        for (int f = 0; f < NUM_FILES; f++)
            if (files[f].index == news[i].index && news[i].state == SYM_ENDED) {
                settle(&files[f]);
                break;
            }
}

static void *keep_gate(void *unused) {
    for (unsigned round = 0; !over; round++) {
        const int count = sym_server_take(server, SYM_MAX_TAKEN, 0);
        CHECK(count >= 0);
        for (int i = 0; i < count; i++)
            accept_request(&server->taken[i]);
        take_news();
        if (round % 5 == 0) { /* as if replies waited at the gate */
            sym_server_set_backlog(server, 1);
            usleep(300);
            sym_server_set_backlog(server, 0);
        }
        if (round % 64 == 0)
            sym_loop_close(loop); /* its thread runs it again */
        if (count == 0 && sym_server_arm(server, 0)) {
            struct pollfd waiting[] = {{.fd = doorbell, .events = POLLIN}, {.fd = wake_fd, .events = POLLIN}};
            poll(waiting, 2, 2);
            uint64_t rings;
            CHECK(sym_server_clear_doorbell(doorbell) == 0);
            CHECK(read(wake_fd, &rings, sizeof rings) > 0 || errno == EAGAIN);
        }
    }
    return unused;
}

/* -- the programs -- */

static sym_answer *wait_answer(sym_call *call, const void *payload, uint32_t bytes) {
    int rc;
    while ((rc = sym_call_run(call, payload, bytes)) == -EINTR)
        continue;
    CHECK(rc == 0);
    sym_answer *answer = sym_call_take(call);
    CHECK(answer != NULL && answer->err == 0);
    return answer;
}

static void *loop_over_pred(void *argument) {
    const int file = (int)(intptr_t)argument;
    int32_t token = expected[file][0];
    for (int32_t i = 0; i < NUM_ENTRIES; i++) {
        const int says_position = (i + file) % 3 == 0;
        const int32_t payload[2] = {token, i};
        sym_call *call = sym_call_new(client, SYM_PRED, SYM_ROWS_LAST, (uint64_t)file + 1, 1, says_position, 0, 0);
        sym_answer *answer = wait_answer(call, payload, says_position ? 8 : 4);
        token = (int32_t)sym_row_argmax(answer->rows, VOCAB, NULL);
        CHECK(token == expected[file][i + 1]);
        sym_answer_drop(answer);
        sym_call_drop(call);
        if (i % 7 == file) { /* something cold in between, and a program that thinks */
            call = sym_call_new(client, SYM_PING, 0, 0, 0, 0, 0, 0);
            sym_answer_drop(wait_answer(call, NULL, 0));
            sym_call_drop(call);
            usleep(500u * (unsigned)file);
        }
    }
    return NULL;
}

static void serve_programs(const struct model *m, const char *isa) {
    sym_plan plan;
    CHECK(sym_region_plan(VOCAB, 1u << 20, &plan) == 0);
    const int memfd = memfd_create("stress", MFD_CLOEXEC);
    CHECK(ftruncate(memfd, (off_t)plan.region_bytes) == 0);
    char *base = mmap(NULL, plan.region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    int sockets[2], bell[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0 && pipe2(bell, O_NONBLOCK) == 0);
    server = sym_server_new(base, &plan, bell[1], SYM_ABI_VERSION);
    doorbell = eventfd(0, EFD_NONBLOCK);
    wake_fd = eventfd(0, EFD_NONBLOCK);
    client = sym_client_new(memfd, plan.region_bytes, sockets[0], dup(doorbell), bell[0]);
    decoder = sym_decoder_new(&m->c, NUM_THREADS, isa, 0);
    CHECK(server != NULL && client != NULL && decoder != NULL);
    const sym_loop_plan loop_plan = {
        .hot = sym_hot(),
        .vocab_size = VOCAB,
        .num_pages = NUM_FILES * FILE_PAGES,
        .limits = {.max_calls = 5, .max_tokens = 8, .min_chunk = 4, .max_digested = 4, .step_ns = 1000000},
        .wait = {.share_percent = 10, .min_ns = 300000, .max_ns = 3000000}};
    loop = sym_loop_new(&loop_plan);
    CHECK(loop != NULL);
    memset(files, 0, sizeof files);
    connection = sym_loop_connect(loop);
    const int32_t root = sym_loop_new_share(loop, -1, 1), account = sym_loop_new_share(loop, root, 1);
    for (int i = 0; i < NUM_FILES; i++) {
        files[i].index = -1;
        files[i].share = sym_loop_new_share(loop, account, 1);
    }
    over = 0;

    pthread_t gate, runner, programs[NUM_FILES];
    pthread_create(&gate, NULL, keep_gate, NULL);
    pthread_create(&runner, NULL, run_steps, NULL);
    for (intptr_t i = 0; i < NUM_FILES; i++)
        pthread_create(&programs[i], NULL, loop_over_pred, (void *)i);
    for (int i = 0; i < NUM_FILES; i++)
        pthread_join(programs[i], NULL);
    over = 1;
    sym_loop_close(loop);
    pthread_join(runner, NULL);
    pthread_join(gate, NULL);
    const sym_counts counts = sym_loop_counts(loop);
    num_steps += counts.num_steps;
    num_taken += counts.num_taken;
    sym_loop_free(loop);

    CHECK(sym_server_held_rows(server) == 0 && sym_server_lent_rows(server) == 0 && sym_server_num_open(server) == 0);
    sym_decoder_free(decoder);
    sym_server_close(server);
    sym_client_drop(client);
    sym_server_free(server);
    munmap(base, plan.region_bytes);
    const int fds[] = {memfd, sockets[1], bell[1], doorbell, wake_fd};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        close(fds[i]);
}

int main(void) {
    const char *const isas[] = {"plain", "avx2", "avx512", "avx512-bf16", "amx-emulated", "amx"};
#ifdef SHORT_RUN
    const int32_t formats[] = {SYM_FLOAT32};
#else
    const int32_t formats[] = {SYM_FLOAT32, SYM_BFLOAT16, SYM_CODES, SYM_ROTATED8};
#endif
    for (int i = 0; i < NUM_FILES; i++)
        for (int j = 0; j < FILE_PAGES; j++)
            pages[i][j] = j * NUM_FILES + i;
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        struct model m;
        make_model(&m, formats[f]);
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            if (sym_isa(isas[i]) == NULL)
                continue;
            for (int file = 0; file < NUM_FILES; file++)
                expect(&m, isas[i], file);
            serve_programs(&m, isas[i]);
        }
        free_model(&m);
    }
    fprintf(stdout, "%ld steps, %ld calls out of the ring, %ld injected\n", num_steps, num_taken, num_injected);
    CHECK(num_taken + num_injected > 0);
    return 0;
}
