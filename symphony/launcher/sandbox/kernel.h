/*
 * System calls for sandboxes that Python does not offer. Each function returns 0 or a documented value; on an error it
 * returns -1, and sets errno.
 */

#ifndef SYMPHONY_SANDBOX_KERNEL_H
#define SYMPHONY_SANDBOX_KERNEL_H

#include <stdbool.h>
#include <stdint.h>

enum { SYM_PATH_BYTES = 4096, SYM_DEVICE_BYTES = 32 };

/* The end of a program: the serial number of its launch, and its status as in waitpid(2). */
struct sym_end {
    uint64_t number;
    int32_t status;
};

/*
 * The mount of KV. `outside` and `inside` are its paths on the machine and in the sandbox, for the first process.
 * `listed` is the outside path as in mountinfo. `device` is the device that is mounted inside now; empty: there is no
 * mount.
 */
struct sym_kv {
    char outside[SYM_PATH_BYTES];
    char inside[SYM_PATH_BYTES];
    char listed[SYM_PATH_BYTES];
    char device[SYM_DEVICE_BYTES];
};

/*
 * Makes the first process in new namespaces, and its child. The caller gets the pid of the first process, or -errno.
 * The first process never returns. Its child returns 0; `orders` is then a pipe. The child writes one sym_kv to this
 * pipe, or closes it. When the child ends, the first process writes a sym_end to the pipe `statuses`, and ends. The
 * caller reads `said`, the other end of `statuses`. If `statuses` has no reader at the start, the first process ends.
 */
int sym_clone_sandbox(uint64_t number, int said, int statuses, int *orders);

int sym_pivot_root(const char *root, const char *put_old);

/* Opens `path` (O_PATH), and returns the descriptor. ELOOP: a part of the path is a symbolic link. */
int sym_open_path(const char *path);

/* Clones the mount at `what` to `place` (both are descriptors), without devices, and without the mounts below it. */
int sym_mount_beneath(int what, int place);

/* Binds `source`, with all mounts below it, to `place`, a descriptor from sym_open_path. */
int sym_show(const char *source, int place, bool read_only, bool no_devices);

/* Makes the mount at `path` nosuid and, on request, read-only or nodev, optionally with the mounts below it. */
int sym_restrict_mount(const char *path, bool read_only, bool no_devices, bool and_those_below);

/* Sets no_new_privs: no execve(2) gives this process or its descendants more rights. */
int sym_no_new_privileges(void);

/* Makes this process undumpable: processes of the same user can't inspect it, and root owns its files in /proc. */
int sym_hide(void);

/* Drops all capabilities for good, except those whose bits are in `kept`. */
int sym_drop_capabilities(uint64_t kept);

/* Returns the version of Landlock in this kernel: 1 or more. */
int sym_landlock_version(void);

/* Returns a ruleset's descriptor. The ruleset forbids all that this version covers. `network`: TCP stays allowed. */
int sym_landlock_new(int version, bool network);

/*
 * Adds a rule: files beneath a descriptor may be read and executed. `writable`: these files may be changed, too.
 * `sockets`: sockets may also be created beneath the descriptor.
 */
int sym_landlock_allow(int ruleset, int version, int beneath, bool writable, bool sockets);

int sym_landlock_enforce(int ruleset);

/* From now on, refuses system calls that programs do not need. `network`: Internet sockets are allowed. */
int sym_filter_calls(bool network);

#endif
