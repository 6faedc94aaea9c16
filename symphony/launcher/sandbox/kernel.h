/* System calls of a sandbox for which Python has no names. Each gives 0, or what it says; -1 with errno. */

#ifndef SYMPHONY_SANDBOX_KERNEL_H
#define SYMPHONY_SANDBOX_KERNEL_H

#include <stdbool.h>
#include <stdint.h>

enum { SYM_PATH_BYTES = 4096, SYM_DEVICE_BYTES = 32 };

/* How a program ended, as waitpid(2) has it, and the number of its launch. */
struct sym_end {
    uint64_t number;
    int32_t status;
};

/* Where KV is: outside and inside, as the first process of a sandbox sees it; as the kernel lists it; on which device
 * it is mounted now, if it is. */
struct sym_kv {
    char outside[SYM_PATH_BYTES];
    char inside[SYM_PATH_BYTES];
    char listed[SYM_PATH_BYTES];
    char device[SYM_DEVICE_BYTES];
};

/*
 * Makes a process in namespaces of its own. It never returns; a child of it does, with 0 and a pipe that takes one
 * sym_kv, or is closed without. The first process writes a sym_end to `statuses` when that child has ended, and ends:
 * at once, where nobody reads them; `said` is where the caller does. -errno: there can be none.
 */
int sym_clone_sandbox(uint64_t number, int said, int statuses, int *orders);

int sym_pivot_root(const char *root, const char *put_old);

/* A descriptor of what is at `path`, no part of which is a symbolic link: whoever changed it meanwhile gets ELOOP. */
int sym_open_path(const char *path);

/* What is mounted at one descriptor is mounted at another, too, without devices and without what is below. */
int sym_mount_beneath(int what, int place);

/* What is at `source` is at `place`, too, with all that is mounted below. `place` is of sym_open_path. */
int sym_show(const char *source, int place, bool read_only, bool no_devices);

/* Nothing in the mount at `path` runs as its owner; it is read-only, or has no devices, where that is asked for. */
int sym_restrict_mount(const char *path, bool read_only, bool no_devices, bool and_those_below);

/* No execve(2) gives this process, or one that it makes, more rights than it has. */
int sym_no_new_privileges(void);

/* Nobody of the same user may look into this process; its files in /proc are root's. */
int sym_hide(void);

/* All capabilities go, for good, but for those whose bits are in `kept`. */
int sym_drop_capabilities(uint64_t kept);

/* The version of Landlock that this kernel has: 1 or more. */
int sym_landlock_version(void);

/* A ruleset: it forbids all that this version can forbid; TCP, too, unless there is a network. A descriptor. */
int sym_landlock_new(int version, bool network);

/* What lies beneath a descriptor may be read and executed, and changed if `writable`; sockets may be made there, too. */
int sym_landlock_allow(int ruleset, int version, int beneath, bool writable, bool sockets);

int sym_landlock_enforce(int ruleset);

/* System calls that a program does not need are refused from now on. `network`: sockets of the Internet are made. */
int sym_filter_calls(bool network);

#endif
