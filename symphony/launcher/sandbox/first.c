/*
 * The first process of a sandbox, with pid 1 in its PID namespace. This process waits for the end of the program, reaps
 * orphans, and mounts KV again. The process never returns to Python, so it takes hardly any memory.
 *
 * The first process keeps one capability, to mount, and its mount namespace still has the machine's tree. So the
 * process makes itself undumpable.
 */

#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NAMESPACES (CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | SIGCHLD)
#define MAY_MOUNT (UINT64_C(1) << 21) /* CAP_SYS_ADMIN */

static void close_all_but(int first, int second, int third) {
    int kept[] = {first, second, third};
    for (int i = 0; i < 3; i++) {
        kept[i] = fcntl(kept[i], F_DUPFD, 3);
        if (kept[i] < 0)
            _exit(1);
    }
    for (int i = 0; i < 3; i++)
        dup2(kept[i], i);
    syscall(SYS_close_range, 3, ~0U, 0);
}

enum { STATUSES, ORDERS, ENDED }; /* descriptors of the first process */

static void reap(pid_t program, uint64_t number) {
    struct signalfd_siginfo told;
    while (read(ENDED, &told, sizeof told) > 0) {
    }
    for (;;) {
        int status;
        const pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid <= 0)
            return;
        if (pid == program) {
            const struct sym_end end = {.number = number, .status = status};
            _exit(write(STATUSES, &end, sizeof end) != sizeof end);
        }
    }
}

/* Finds the device of the topmost mount at `path` in the kernel's list, so that a hanging daemon can't block. */
static void find_device(int mounts, const char *path, char device[SYM_DEVICE_BYTES]) {
    device[0] = 0;
    lseek(mounts, 0, SEEK_SET);
    FILE *lines = fdopen(dup(mounts), "r");
    char *line = NULL;
    size_t room = 0;
    while (lines && getline(&line, &room, lines) > 0) {
        char *rest = NULL, *words[5] = {NULL};
        int count = 0;
        for (char *word = strtok_r(line, " ", &rest); word && count < 5; word = strtok_r(NULL, " ", &rest))
            words[count++] = word;
        if (words[4] && strcmp(words[4], path) == 0)
            snprintf(device, SYM_DEVICE_BYTES, "%s", words[2]);
    }
    free(line);
    if (lines)
        fclose(lines);
}

/* Mounts KV inside. No links are followed: the program may have put links into directories above the mount. */
static int show_kv(const struct sym_kv *kv) {
    const int outside = sym_open_path(kv->outside), inside = sym_open_path(kv->inside);
    const int shown = sym_mount_beneath(outside, inside);
    close(outside);
    close(inside);
    return shown;
}

static void follow(int mounts, struct sym_kv *kv) {
    char found[SYM_DEVICE_BYTES];
    find_device(mounts, kv->listed, found);
    if (strcmp(found, kv->device) == 0)
        return;
    if (kv->device[0])
        umount2(kv->inside, MNT_DETACH | UMOUNT_NOFOLLOW); /* it may be unmounted already */
    kv->device[0] = 0;
    if (found[0] && show_kv(kv) == 0)
        strcpy(kv->device, found);
}

static bool read_whole(int fd, void *into, size_t size) {
    size_t done = 0;
    while (done < size) {
        const ssize_t more = read(fd, (char *)into + done, size - done);
        if (more <= 0)
            return false;
        done += (size_t)more;
    }
    return true;
}

static _Noreturn void be_first(pid_t program, uint64_t number) {
    struct pollfd waits[] = {{ENDED, POLLIN, 0}, {ORDERS, POLLIN, 0}, {-1, POLLPRI, 0}};
    static struct sym_kv kv;
    for (;;) {
        if (poll(waits, 3, -1) < 0 && errno != EINTR)
            _exit(1);
        if (waits[0].revents)
            reap(program, number);
        if (waits[1].revents) { /* read once: either a sym_kv, or the end of the pipe */
            waits[1].fd = -1;
            if (read_whole(ORDERS, &kv, sizeof kv))
                waits[2].fd = open("/old/proc/self/mountinfo", O_RDONLY | O_CLOEXEC);
        }
        if (waits[2].fd >= 0)
            follow(waits[2].fd, &kv);
    }
}

static _Noreturn void start(uint64_t number, int statuses, pid_t program, int orders, int ended) {
    signal(SIGINT, SIG_IGN);
    close_all_but(statuses, orders, ended);
    if (sym_drop_capabilities(MAY_MOUNT) != 0 || sym_no_new_privileges() != 0 || sym_hide() != 0)
        _exit(1);
    be_first(program, number);
}

int sym_clone_sandbox(uint64_t number, int said, int statuses, int *orders) {
    const long pid = syscall(SYS_clone, NAMESPACES, 0, 0, 0, 0);
    if (pid != 0)
        return pid < 0 ? -errno : (int)pid;

    /*
     * If the zygote ended before PR_SET_PDEATHSIG, no signal arrives. Then `statuses` has no reader, and poll() reports
     * an error.
     */
    struct pollfd zygote = {.fd = statuses};
    close(said);
    sigset_t children, before;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    int ends[2];
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || poll(&zygote, 1, 0) != 0 || pipe2(ends, O_CLOEXEC) != 0 ||
        sigprocmask(SIG_BLOCK, &children, &before) != 0)
        _exit(1);
    const int ended = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    const pid_t program = fork();
    if (program != 0) {
        if (program < 0 || ended < 0)
            _exit(1);
        start(number, statuses, program, ends[0], ended);
    }
    close(ends[0]);
    close(ended);
    sigprocmask(SIG_SETMASK, &before, NULL);
    *orders = ends[1];
    return 0;
}
