/* Empty calls from C, through the library's own half of a channel: ping SOCKET THREADS CALLS
 *
 * Prints the median and the 99th percentile of a round trip in microseconds, and calls a second. */
#include "abi.h"
#include "client.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static sym_client *client;
static long num_calls;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec * 1e-3;
}

static void connect_to(const char *path) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    strncpy(name.sun_path, path, sizeof name.sun_path - 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    const struct sym_greeting greeting = {.magic = SYM_MAGIC, .version = SYM_ABI_VERSION};
    if (connect(fd, (struct sockaddr *)&name, sizeof name) != 0 || write(fd, &greeting, sizeof greeting) < 0)
        fail(path);
    struct sym_welcome welcome;
    char control[CMSG_SPACE(3 * sizeof(int))];
    struct iovec part = {.iov_base = &welcome, .iov_len = sizeof welcome};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (recvmsg(fd, &message, 0) != sizeof welcome || welcome.err != 0 || CMSG_FIRSTHDR(&message) == NULL)
        fail("the daemon's welcome");
    int fds[3];
    memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fds);
    struct stat status;
    fstat(fds[0], &status);
    client = sym_client_new(fds[0], (uint64_t)status.st_size, fd, fds[1], fds[2]);
    if (client == NULL)
        fail("the region");
}

static void *ping(void *times) {
    for (long i = 0; i < num_calls; i++) {
        const double began = now_us();
        sym_call *call = sym_call_new(client, SYM_PING, 0, 0, 0, 0, 0, 0);
        int rc;
        while ((rc = sym_call_run(call, NULL, 0)) == -EINTR)
            continue;
        if (rc != 0)
            exit(1);
        sym_call_drop(call);
        ((double *)times)[i] = now_us() - began;
    }
    return NULL;
}

static int ascending(const void *a, const void *b) {
    const double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: ping SOCKET THREADS CALLS\n");
        return 2;
    }
    const long num_threads = atol(argv[2]);
    num_calls = atol(argv[3]) / num_threads;
    const long total = num_threads * num_calls;
    connect_to(argv[1]);
    double *times = calloc((size_t)total, sizeof *times);
    pthread_t *threads = calloc((size_t)num_threads, sizeof *threads);
    if (times == NULL || threads == NULL)
        fail("room for the times");
    const double began = now_us();
    for (long i = 0; i < num_threads; i++)
        pthread_create(&threads[i], NULL, ping, times + i * num_calls);
    for (long i = 0; i < num_threads; i++)
        pthread_join(threads[i], NULL);
    const double elapsed = now_us() - began;
    qsort(times, (size_t)total, sizeof *times, ascending);
    printf("%.2f %.2f %.0f\n", times[total / 2], times[total * 99 / 100], total / elapsed * 1e6);
    return 0;
}
