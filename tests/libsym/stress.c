/* Both halves in one process, under sanitizers: eight client threads, a daemon thread, and no Python.
 *
 * Each thread sends payloads of all sizes, gives up on some calls while they wait, and checks that every reply and every
 * row is its own. At the end no slot is held and no call is under way. By hand also with -fsanitize=thread. */
#include "server.c"

#include "client.c"

#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>

#define NUM_THREADS 8
#define NUM_CALLS 4000
#define ROWS 2

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

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
    while (sym_server_push(server, request->id, 0, slot, num_rows, request->args[2], request->args[3], payload,
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

static void check_reply(sym_call *call, int number, int thread, const char *payload, uint32_t bytes) {
    CHECK(call->args[2] == number && call->args[3] == thread && call->payload_bytes == bytes);
    CHECK(bytes == 0 || memcmp(call->payload, payload, bytes) == 0);
    if (call->op == SYM_PRED)
        CHECK(*(const int64_t *)(const void *)sym_call_rows(call) == number);
}

static void *call_often(void *argument) {
    const int thread = (int)(intptr_t)argument;
    char *payload = malloc(70000);
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
        if (rc == 0)
            check_reply(call, number, thread, payload, bytes);
        sym_call_drop(call); /* a quarter of the interrupted ones while they wait */
        if ((random >> 9) % 50 == 0)
            sym_client_close_later(client, 99);
    }
    free(payload);
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
    server = sym_server_new(base, &plan);
    doorbell = eventfd(0, EFD_NONBLOCK);
    client = sym_client_new(memfd, plan.region_bytes, sockets[0], dup(doorbell));
    CHECK(client != NULL);
    const struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGUSR1, &action, NULL);

    pthread_t daemon_thread, threads[NUM_THREADS];
    pthread_create(&daemon_thread, NULL, serve, NULL);
    for (intptr_t i = 0; i < NUM_THREADS; i++)
        pthread_create(&threads[i], NULL, call_often, (void *)i);
    for (int i = 0; i < 2000; i++) {
        pthread_kill(threads[i % 2], SIGUSR1); /* as many Ctrl-C; threads 0 and 1 are joined last */
        usleep(100);
    }
    for (int i = NUM_THREADS - 1; i >= 0; i--)
        pthread_join(threads[i], NULL);
    stop = 1;
    pthread_join(daemon_thread, NULL);
    while (try_lead(client) == 0)
        continue;
    drain(client); /* replies to calls that were given up last */
    CHECK(sym_server_held_rows(server) == 0);
    CHECK(client->num_free == MAX_CALLS);
    sym_server_close(server);
    sym_client_drop(client);
    sym_server_free(server);
    return 0;
}
