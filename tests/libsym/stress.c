/* Both halves in one process, under sanitizers: eight client threads, two event loops, a daemon thread, and no Python.
 *
 * Each thread sends payloads of all sizes, gives up on some calls while they wait, and checks that every reply and every
 * row is its own. At the end no slot is held and no call is under way. scripts/sanitize runs it. */
#include "client_state.h"
#include "server_state.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define NUM_THREADS 8
#ifdef SHORT_RUN
#define NUM_CALLS 1000
#else
#define NUM_CALLS 4000
#endif
#define ROWS 2
#define NUM_LOOPS 2
#define NUM_IN_FLIGHT 24
#define NUM_REPLIES 3

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* What a connection keeps for ever is no leak: see client_unref(). */
const char *__lsan_default_suppressions(void) { return "leak:sym_client_new"; }

static sym_server *server;
static sym_client *client;
static int doorbell;
static _Atomic int stop;

static int64_t *row_start(int64_t slot) {
    return (int64_t *)(void *)(server->base + server->plan.slots_offset + (uint64_t)slot * server->plan.slot_bytes);
}

static void answer(const struct sym_request *request, const char *payload) {
    int64_t slot = 0, num_rows = 0;
    if (request->op == SYM_PRED) {
        slot = sym_server_take_rows(server, ROWS);
        num_rows = ROWS;
        CHECK(slot >= 0);
        for (int row = 0; row < ROWS; row++)
            *row_start(slot + row) = request->args[2];
    }
    for (int i = 1; request->op == SYM_GENERATE && i < NUM_REPLIES; i++)
        while (sym_server_push(server, request->id, 0, SYM_MORE, 0, 0, request->args[2], request->args[3], NULL, 0) ==
               1)
            sym_server_set_backlog(server, 1);
    while (sym_server_push(server, request->id, 0, 0, slot, num_rows, request->args[2], request->args[3], payload,
                           request->frame_bytes - (uint32_t)sizeof *request) == 1)
        sym_server_set_backlog(server, 1);
}

static void *serve(void *unused) {
    for (;;) {
        const int64_t bytes = sym_server_receive(server);
        CHECK(bytes >= 0);
        for (int64_t at = 0; at < bytes;) {
            struct sym_request request;
            memcpy(&request, server->inbox + at, sizeof request);
            answer(&request, server->inbox + at + sizeof request);
            at += (int64_t)padded(request.frame_bytes);
        }
        if (bytes == 0 && stop)
            return unused;
        if (bytes == 0 && sym_server_arm(server, 0)) {
            struct pollfd waiting = {.fd = doorbell, .events = POLLIN};
            poll(&waiting, 1, 50);
            CHECK(sym_server_clear_doorbell(doorbell) == 0);
        }
    }
}

static void check_reply(uint16_t op, sym_answer *call, int number, int thread, const char *payload, uint32_t bytes) {
    CHECK(call->args[2] == number && call->args[3] == thread && call->payload_bytes == bytes);
    CHECK(bytes == 0 || memcmp(call->payload, payload, bytes) == 0);
    if (op == SYM_PRED)
        CHECK(*(const int64_t *)(const void *)call->rows == number);
}

static void *call_often(void *argument) {
    const int thread = (int)(intptr_t)argument;
    char *payload = malloc(70000);
    CHECK(payload != NULL);
    unsigned random = (unsigned)thread * 7919u;
    for (int number = 0; number < NUM_CALLS; number++) {
        random = random * 1103515245u + 12345u;
        const uint32_t bytes = (random >> 16) % 100 < 3 ? (random >> 8) % 70000 : (random >> 8) % 200;
        const uint16_t op = random >> 20 & 1 ? SYM_PRED : SYM_PING;
        memset(payload, number + thread, bytes);
        sym_call *call = sym_call_new(client, op, 0, 0, 0, 0, number, thread);
        int rc = sym_call_run(call, payload, bytes);
        while (rc == -EINTR && (random >> 5) % 4 != 0)
            rc = sym_call_run(call, payload, bytes);
        if (rc == 0) {
            sym_answer *answer = sym_call_take(call);
            check_reply(op, answer, number, thread, payload, bytes);
            sym_answer_drop(answer);
        }
        sym_call_drop(call); /* a quarter of the interrupted ones while they wait */
        if ((random >> 9) % 50 == 0)
            sym_client_tell(client, SYM_KV_CLOSE, 99, 0);
    }
    free(payload);
    return NULL;
}

/* One reply to the call in `place`, all of them if it has several; a new call when it is over, or is given up. */
static void advance(sym_event_loop *loop, sym_call **place, int *left, int thread) {
    sym_call *call = *place;
    for (sym_answer *answer; call != NULL && (answer = sym_call_take(call)) != NULL;) {
        const int over = (answer->flags & SYM_MORE) == 0;
        CHECK(answer->args[3] == thread && answer->args[2] == (int64_t)call->tag);
        sym_answer_drop(answer);
        if (over || *left % 7 == 0) {
            sym_call_drop(call);
            *place = call = NULL;
        }
    }
    if (*place == NULL && *left > 0) {
        const uint16_t ops[] = {SYM_PING, SYM_PRED, SYM_GENERATE, SYM_KV_CREATE};
        const int number = (*left)--;
        *place = sym_call_new(client, ops[number % 4], 0, 0, 0, 0, number, thread);
        const int rc = sym_event_loop_submit(loop, *place, (uint64_t)number, (uint16_t)number, NULL, 0);
        CHECK(rc == 0 || rc == -EAGAIN);
        if (rc == -EAGAIN) {
            sym_call_drop(*place);
            *place = NULL;
        }
    }
}

static void *loop_often(void *argument) {
    const int thread = 100 + (int)(intptr_t)argument;
    sym_event_loop *loop = sym_event_loop_new(client);
    CHECK(loop != NULL);
    sym_call *calls[NUM_IN_FLIGHT] = {0};
    uint64_t tags[8];
    int left = NUM_CALLS, in_flight = 0;
    do {
        in_flight = 0;
        for (int i = 0; i < NUM_IN_FLIGHT; i++) {
            advance(loop, &calls[i], &left, thread);
            in_flight += calls[i] != NULL;
        }
        if (sym_event_loop_take(loop, tags, 8) == 0 && in_flight > 0 && sym_event_loop_arm(loop)) {
            struct pollfd waiting = {.fd = sym_event_loop_fd(loop), .events = POLLIN};
            CHECK(poll(&waiting, 1, 20000) != 0); /* nothing in 20 s: a wake was lost */
        }
    } while (in_flight > 0 || left > 0);
    sym_event_loop_drop(loop);
    return NULL;
}

static void on_signal(int unused) { (void)unused; }

int main(void) {
    sym_plan plan;
    CHECK(sym_region_plan(1000, 64u << 20, &plan) == 0);
    const int memfd = memfd_create("stress", MFD_CLOEXEC);
    CHECK(ftruncate(memfd, (off_t)plan.region_bytes) == 0);
    char *base = mmap(NULL, plan.region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    int bell[2];
    CHECK(pipe2(bell, O_NONBLOCK) == 0);
    server = sym_server_new(base, &plan, bell[1], SYM_ABI_VERSION);
    doorbell = eventfd(0, EFD_NONBLOCK);
    client = sym_client_new(memfd, plan.region_bytes, sockets[0], dup(doorbell), bell[0]);
    CHECK(client != NULL);
    const struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGUSR1, &action, NULL);

    pthread_t daemon_thread, threads[NUM_THREADS], loops[NUM_LOOPS];
    pthread_create(&daemon_thread, NULL, serve, NULL);
    for (intptr_t i = 0; i < NUM_THREADS; i++)
        pthread_create(&threads[i], NULL, call_often, (void *)i);
    for (intptr_t i = 0; i < NUM_LOOPS; i++)
        pthread_create(&loops[i], NULL, loop_often, (void *)i);
    for (int i = 0; i < 2000; i++) {
        pthread_kill(threads[i % 2], SIGUSR1); /* as many Ctrl-C; threads 0 and 1 are joined last */
        usleep(100);
    }
    for (int i = NUM_THREADS - 1; i >= 0; i--)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < NUM_LOOPS; i++)
        pthread_join(loops[i], NULL);
    stop = 1;
    pthread_join(daemon_thread, NULL);
    while (client_try_lead(client) == 0)
        continue;
    client_drain(client); /* replies to calls that were given up last */
    CHECK(sym_server_held_rows(server) == 0);
    CHECK(client->num_free == MAX_CALLS);
    sym_server_close(server);
    sym_client_drop(client);
    sym_server_free(server);
    return 0;
}
