/* A greedy loop over Symphony in plain C, which needs only the header:
 *
 *     cc -std=gnu11 -I libsym libsym/examples/greedy.c -o greedy && ./greedy SOCKET "Once upon a time" 32
 *
 * One thread makes one call at a time. So a ring never has more than one frame, and always has space. */
#include "abi.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static struct sym_region *region;
static int doorbell;
static uint64_t next_id = 1, submit_tail, complete_head;
static union {
    struct sym_reply head;
    char bytes[SYM_MAX_FRAME_BYTES + 1];
} reply;

static void die(const char *what) {
    fprintf(stderr, "greedy: %s\n", what);
    exit(1);
}

/* Copies `bytes` between memory and `position` of a ring. The position may wrap around the end. */
static void copy(int into_ring, uint64_t ring_offset, uint64_t position, char *data, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i++) {
        char *at = (char *)region + ring_offset + (position + i) % SYM_RING_BYTES;
        if (into_ring)
            *at = data[i];
        else
            data[i] = *at;
    }
}

/* Makes one system call. `reply` gets the reply. Returns the reply's payload, which is followed by a NUL. */
static char *call(uint16_t op, uint32_t flags, uint64_t handle, int64_t a0, const void *payload, uint32_t bytes) {
    struct sym_request request = {.frame_bytes = (uint32_t)sizeof request + bytes,
                                  .op = op,
                                  .flags = flags,
                                  .id = next_id++,
                                  .handle = handle,
                                  .args = {a0}};
    const uint64_t one = 1;
    copy(1, region->submit_offset, submit_tail, (char *)&request, sizeof request);
    copy(1, region->submit_offset, submit_tail + sizeof request, (char *)(uintptr_t)payload, bytes);
    submit_tail += (request.frame_bytes + SYM_FRAME_ALIGN - 1) / SYM_FRAME_ALIGN * SYM_FRAME_ALIGN;
    atomic_store(&region->submit_tail, submit_tail);
    if (atomic_exchange(&region->daemon_asleep, 0) != 0 && write(doorbell, &one, sizeof one) < 0)
        die("the doorbell can't be rung");
    for (;;) { /* announce, look again, sleep: either this thread sees the reply, or the daemon sees the sleeper */
        const uint32_t seen = atomic_load(&region->complete_seq);
        atomic_store(&region->complete_waiters, 1);
        if (atomic_load(&region->gone))
            die("the daemon has gone");
        if (atomic_load(&region->complete_tail) != complete_head)
            break;
        const struct timespec tick = {.tv_sec = 1};
        syscall(SYS_futex, (uint32_t *)&region->complete_seq, FUTEX_WAIT, seen, &tick, NULL, 0);
    }
    atomic_store(&region->complete_waiters, 0);
    copy(0, region->complete_offset, complete_head, reply.bytes, sizeof reply.head);
    if (reply.head.frame_bytes < sizeof reply.head || reply.head.frame_bytes > SYM_MAX_FRAME_BYTES)
        die("the daemon sent no frame");
    copy(0, region->complete_offset, complete_head, reply.bytes, reply.head.frame_bytes);
    complete_head += (reply.head.frame_bytes + SYM_FRAME_ALIGN - 1) / SYM_FRAME_ALIGN * SYM_FRAME_ALIGN;
    atomic_store(&region->complete_head, complete_head);
    reply.bytes[reply.head.frame_bytes] = 0;
    if (reply.head.err != 0)
        die(reply.bytes + sizeof reply.head); /* the message is the payload */
    return reply.bytes + sizeof reply.head;
}

static void dial(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct sym_greeting greeting = {.magic = SYM_MAGIC, .version = SYM_ABI_VERSION};
    struct {
        struct sym_welcome head;
        char text[4097];
    } welcome = {0};
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(3 * sizeof(int))];
    } rights = {0};
    struct iovec iov = {.iov_base = &welcome, .iov_len = sizeof welcome - 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); /* stays open until the process ends */
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) != 0)
        die("no daemon listens there");
    (void)send(connection, &greeting, sizeof greeting,
               MSG_NOSIGNAL); /* may fail after a refusal, whose reason is read next */
    if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) < (ssize_t)sizeof welcome.head)
        die("the daemon hung up");
    if (welcome.head.magic != SYM_MAGIC || welcome.head.version != SYM_ABI_VERSION)
        die("the daemon speaks another version");
    if (welcome.head.err != 0)
        die(welcome.text);
    int fds[3]; /* the region, the doorbell, and the bell, which only event loops need */
    if (CMSG_FIRSTHDR(&message) == NULL || CMSG_FIRSTHDR(&message)->cmsg_len != CMSG_LEN(sizeof fds))
        die("the daemon sent no descriptors");
    memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fds);
    doorbell = fds[1];
    region = mmap(NULL, SYM_HEADER_BYTES, PROT_READ, MAP_SHARED, fds[0], 0);
    if (region == MAP_FAILED)
        die("the region can't be mapped");
    region = mmap(NULL, region->region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    if (region == MAP_FAILED)
        die("the region can't be mapped");
}

int main(int argc, char **argv) {
    if (argc != 4)
        die("usage: greedy SOCKET PROMPT TOKENS");
    dial(argv[1]);
    static int32_t tokens[SYM_MAX_FRAME_BYTES / sizeof(int32_t)];
    char *payload = call(SYM_TOKENIZE, SYM_TOKENIZE_SPECIAL, 0, 0, argv[2], (uint32_t)strlen(argv[2]));
    int64_t num_tokens = reply.head.args[0];
    memcpy(tokens, payload, (size_t)num_tokens * sizeof *tokens);
    call(SYM_KV_CREATE, 0, 0, 0600, NULL, 0);
    const uint64_t kv = (uint64_t)reply.head.args[0];
    for (int left = atoi(argv[3]); left > 0; left--) {
        call(SYM_PRED, SYM_ROWS_LAST, kv, num_tokens, tokens, (uint32_t)num_tokens * (uint32_t)sizeof *tokens);
        const uint64_t slot = (uint64_t)reply.head.args[0];
        const float *row = (float *)(void *)((char *)region + region->slots_offset + slot * region->slot_bytes);
        int32_t best = 0;
        for (int32_t i = 1; i < (int32_t)region->vocab_size; i++)
            best = row[i] > row[best] ? i : best;
        _Atomic uint32_t *states = (_Atomic uint32_t *)(void *)((char *)region + region->states_offset);
        atomic_store(&states[slot], SYM_SLOT_FREE); /* frees the row; no call waits for slots, so no need to ring */
        tokens[0] = best;
        num_tokens = 1;
        fputs(call(SYM_DETOKENIZE, 0, 0, 0, tokens, sizeof *tokens), stdout);
        fflush(stdout);
    }
    putchar('\n');
}
