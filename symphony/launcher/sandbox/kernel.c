/* System calls of a sandbox, apart from their filter. */

#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/securebits.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Headers may be older than the kernel. These numbers are the same on all machines. */
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
enum { OPEN_TREE = 428, MOVE_MOUNT = 429 };
enum { LANDLOCK_CREATE = 444, LANDLOCK_ADD = 445, LANDLOCK_RESTRICT = 446 };

int sym_pivot_root(const char *root, const char *put_old) { return (int)syscall(SYS_pivot_root, root, put_old); }

static int restrict_mount_at(int at, const char *path, bool read_only, bool no_devices, unsigned flags) {
    const uint64_t set = 0x2 /* nosuid */ | (read_only ? 0x1 : 0) | (no_devices ? 0x4 : 0);
    const struct {
        uint64_t attr_set, attr_clr, propagation, userns_fd;
    } attributes = {.attr_set = set};
    return (int)syscall(SYS_mount_setattr, at, path, flags, &attributes, sizeof attributes);
}

int sym_restrict_mount(const char *path, bool read_only, bool no_devices, bool and_those_below) {
    return restrict_mount_at(AT_FDCWD, path, read_only, no_devices, and_those_below ? 0x8000 : 0);
}

int sym_open_path(const char *path) {
    const struct {
        uint64_t flags, mode, resolve;
    } how = {.flags = O_PATH | O_CLOEXEC, .resolve = 0x4 /* no symlinks */ | 0x2 /* no magic links */};
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

static int place_tree(int tree, int place) {
    return (int)syscall(MOVE_MOUNT, tree, "", place, "", 0x04 | 0x40 /* the source and target paths are empty */);
}

int sym_mount_beneath(int what, int place) {
    const int tree = (int)syscall(OPEN_TREE, what, "", 0x1 /* clone the mount */ | AT_EMPTY_PATH | O_CLOEXEC);
    if (tree < 0)
        return -1;
    int failed = restrict_mount_at(tree, "", false, true, AT_EMPTY_PATH);
    if (!failed)
        failed = place_tree(tree, place);
    close(tree);
    return failed;
}

int sym_show(const char *source, int place, bool read_only, bool no_devices) {
    const unsigned below = 0x8000;
    const int tree = (int)syscall(OPEN_TREE, AT_FDCWD, source, 0x1 /* clone the mounts */ | below | O_CLOEXEC);
    if (tree < 0)
        return -1;
    int failed = restrict_mount_at(tree, "", read_only, no_devices, AT_EMPTY_PATH | below);
    if (!failed)
        failed = place_tree(tree, place);
    close(tree);
    return failed;
}

int sym_no_new_privileges(void) { return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); }

int sym_hide(void) { return prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); }

int sym_drop_capabilities(uint64_t kept) {
    /* With these bits, uid 0 of a user namespace regains no capabilities by execve(2). */
    const unsigned long locked = SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP |
                                 SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_KEEP_CAPS_LOCKED | SECBIT_NO_CAP_AMBIENT_RAISE |
                                 SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;
    if (prctl(PR_SET_SECUREBITS, locked, 0, 0, 0) != 0)
        return -1;
    for (unsigned long number = 0; number < 64; number++) {
        if (!(kept >> number & 1) && prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0) {
            if (errno == EINVAL)
                break; /* this kernel has no higher capability */
            return -1;
        }
    }
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)kept, .permitted = (uint32_t)kept},
        {.effective = (uint32_t)(kept >> 32), .permitted = (uint32_t)(kept >> 32)},
    };
    return (int)syscall(SYS_capset, &header, data);
}

/* Landlock. The numbers are from linux/landlock.h, which may be older than the kernel, too. */

enum {
    EXECUTE = 1 << 0,
    WRITE_FILE = 1 << 1,
    READ_FILE = 1 << 2,
    READ_DIR = 1 << 3,
    MAKE_SOCKET = 1 << 9,
    NUM_RIGHTS_1 = 13,
    REFER = 1 << 13,    /* from version 2 of Landlock on */
    TRUNCATE = 1 << 14, /* from version 3 on */
    IOCTL_DEV = 1 << 15, /* from version 5 on */
    SCOPE_ABSTRACT_SOCKETS = 1 << 0,
    SCOPE_SIGNALS = 1 << 1,
    TCP_BOTH_WAYS = 3,
    PATH_BENEATH = 1,
};

static uint64_t all_rights(int version) {
    const uint64_t first = (1 << NUM_RIGHTS_1) - 1;
    return first | (version >= 2 ? REFER : 0) | (version >= 3 ? TRUNCATE : 0) | (version >= 5 ? IOCTL_DEV : 0);
}

int sym_landlock_version(void) { return (int)syscall(LANDLOCK_CREATE, NULL, 0, 1); }

int sym_landlock_new(int version, bool network) {
    const struct {
        uint64_t files, network, scopes;
    } handled = {
        .files = all_rights(version),
        .network = version >= 4 && !network ? TCP_BOTH_WAYS : 0,
        .scopes = version >= 6 ? SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS : 0,
    };
    const size_t size = version >= 6 ? sizeof handled : version >= 4 ? 2 * sizeof(uint64_t) : sizeof(uint64_t);
    return (int)syscall(LANDLOCK_CREATE, &handled, size, 0);
}

int sym_landlock_allow(int ruleset, int version, int beneath, bool writable, bool sockets) {
    struct stat found;
    if (fstat(beneath, &found) != 0)
        return -1;
    const uint64_t of_files = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
    uint64_t allowed = writable ? all_rights(version) : EXECUTE | READ_FILE | READ_DIR;
    if (!sockets)
        allowed &= ~(uint64_t)MAKE_SOCKET;
    if (!S_ISDIR(found.st_mode))
        allowed &= of_files;
    const struct {
        uint64_t allowed;
        int32_t parent_fd;
    } __attribute__((packed)) rule = {
        .allowed = allowed,
        .parent_fd = beneath,
    };
    return (int)syscall(LANDLOCK_ADD, ruleset, PATH_BENEATH, &rule, 0);
}

int sym_landlock_enforce(int ruleset) { return (int)syscall(LANDLOCK_RESTRICT, ruleset, 0); }
