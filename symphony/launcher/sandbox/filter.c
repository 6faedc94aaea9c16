/*
 * The filter of system calls, which refuses calls that programs do not need, or that have exposed kernel bugs.
 *
 * Namespaces hide objects outside. The filter protects the parts of the kernel that namespaces do not divide. The
 * filter also keeps a program from making namespaces, in which the program would have capabilities. Calls that are
 * newer than this list fail with ENOSYS, so that libraries fall back to older calls.
 */

#include "kernel.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define MACHINE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define MACHINE AUDIT_ARCH_AARCH64
#else
#error "the filter of system calls knows x86-64 and AArch64: add this machine's"
#endif

/* Headers may be older than the kernel. These numbers are the same on all machines. */
enum {
    NR_io_uring_setup = 425,
    NR_io_uring_enter = 426,
    NR_io_uring_register = 427,
    NR_open_tree = 428,
    NR_move_mount = 429,
    NR_fsopen = 430,
    NR_fsconfig = 431,
    NR_fsmount = 432,
    NR_fspick = 433,
    NR_clone3 = 435,
    NR_openat2 = 437,
    NR_pidfd_getfd = 438,
    NR_process_madvise = 440,
    NR_mount_setattr = 442,
    NR_quotactl_fd = 443,
    NR_memfd_secret = 447,
    NR_process_mrelease = 448,
    NR_fchmodat2 = 452,
    NR_statmount = 457,
    NR_listmount = 458,
    NR_newest = 466, /* removexattrat, of Linux 6.13 */
};

static const int never[] = {
    /* mounts */
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    NR_open_tree,
    NR_move_mount,
    NR_fsopen,
    NR_fsconfig,
    NR_fsmount,
    NR_fspick,
    NR_mount_setattr,
    NR_statmount,
    NR_listmount,
    SYS_swapon,
    SYS_swapoff,
    SYS_quotactl,
    NR_quotactl_fd,
    SYS_acct,
    SYS_name_to_handle_at,
    SYS_open_by_handle_at,
    SYS_fanotify_init,
    /* namespaces; clone(2) is below */
    SYS_unshare,
    SYS_setns,
    SYS_sethostname,
    SYS_setdomainname,
    /* other processes */
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    NR_process_madvise,
    NR_pidfd_getfd,
    SYS_kcmp,
    NR_process_mrelease,
    SYS_migrate_pages,
    SYS_move_pages,
    /* parts of the kernel that namespaces do not divide */
    NR_memfd_secret,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_keyctl,
    SYS_add_key,
    SYS_request_key,
    SYS_syslog,
    SYS_vhangup,
    SYS_reboot,
    SYS_kexec_load,
    SYS_kexec_file_load,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_settimeofday,
    SYS_clock_settime,
    SYS_adjtimex,
    SYS_clock_adjtime,
#ifdef __x86_64__
    SYS_iopl,
    SYS_ioperm,
    SYS_modify_ldt,
    SYS_create_module,
    SYS_get_kernel_syms,
    SYS_query_module,
    SYS_uselib,
    SYS__sysctl,
    SYS_ustat,
    SYS_sysfs,
#endif
    SYS_lookup_dcookie,
};

/*
 * Libraries try these calls, and have a fallback for ENOSYS. The first two allocate memory that limits on processes do
 * not count. The number of io_setup(2)'s contexts is limited for the whole machine.
 */
static const int unknown[] = {SYS_memfd_create, SYS_shmget,        SYS_io_setup,      NR_clone3,
                              NR_openat2,       NR_io_uring_setup, NR_io_uring_enter, NR_io_uring_register};

/* Calls that set the mode of a file, and the index of that argument. The bits setuid and setgid are refused. */
static const struct {
    int call;
    unsigned mode;
} set_modes[] = {
    {SYS_fchmod, 1}, {SYS_fchmodat, 2}, {NR_fchmodat2, 2}, {SYS_mkdirat, 2}, {SYS_mknodat, 2},
#ifdef __x86_64__
    {SYS_chmod, 1},  {SYS_mkdir, 1},    {SYS_mknod, 1},    {SYS_creat, 1},
#endif
};

enum {
    MAKES_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID |
        CLONE_NEWNET,
    RUNS_AS_OWNER = 06000,
    CREATES = 0100,           /* O_CREAT */
    WITHOUT_NAME = 020000000, /* O_TMPFILE without O_DIRECTORY */
    KIND_OF_SOCKET = 0xf,
    SET_LEASE = 1024,
    NOTIFY = 1026,
    SET_LINE_DISCIPLINE = 0x5423, /* TIOCSETD */
    TYPE_FOR_USER = 0x5412,       /* TIOCSTI */
    CONSOLE = 0x541c,             /* TIOCLINUX */
    MAX_LENGTH = 512,
};

struct filter {
    struct sock_filter code[MAX_LENGTH];
    unsigned length;
};

#define ALLOWED SECCOMP_RET_ALLOW
#define REFUSED(code) (SECCOMP_RET_ERRNO | (code))

static void add(struct filter *filter, uint16_t what, uint32_t value, uint8_t otherwise) {
    filter->code[filter->length++] = (struct sock_filter){what, 0, otherwise, value};
}

static void finish(struct filter *filter, uint32_t action) { add(filter, BPF_RET | BPF_K, action, 0); }

static void load(struct filter *filter, size_t offset) { add(filter, BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0); }

/* Loads the lower half of an argument: the kernel reads all arguments that this filter checks as ints. */
static void load_argument(struct filter *filter, unsigned number) {
    load(filter, offsetof(struct seccomp_data, args) + number * sizeof(uint64_t));
}

static void if_equal(struct filter *filter, uint32_t value, uint32_t action) {
    add(filter, BPF_JMP | BPF_JEQ | BPF_K, value, 1);
    finish(filter, action);
}

static void if_any_bit(struct filter *filter, uint32_t bits, uint32_t action) {
    add(filter, BPF_JMP | BPF_JSET | BPF_K, bits, 1);
    finish(filter, action);
}

static void unless_any(struct filter *filter, const uint32_t *values, unsigned count, uint32_t action) {
    for (unsigned i = 0; i < count; i++) {
        add(filter, BPF_JMP | BPF_JEQ | BPF_K, values[i], 0);
        filter->code[filter->length - 1].jt = (uint8_t)(count - i);
    }
    finish(filter, action);
}

/* Begins a block, up to `end`, that runs only if the loaded value equals `value`. The block must end with an action. */
static unsigned begin(struct filter *filter, uint32_t value) {
    add(filter, BPF_JMP | BPF_JEQ | BPF_K, value, 0);
    return filter->length;
}

static void end(struct filter *filter, unsigned begun, uint32_t action) {
    finish(filter, action);
    filter->code[begun - 1].jf = (uint8_t)(filter->length - begun);
}

static void add_sockets(struct filter *filter, bool network) {
    unsigned call = begin(filter, SYS_socket);
    load_argument(filter, 0);
    if_equal(filter, AF_UNIX, ALLOWED);
    const uint32_t families[] = {AF_INET, AF_INET6};
    const uint32_t protocols[] = {0, IPPROTO_TCP, IPPROTO_UDP}; /* other protocols load rarely used kernel code */
    for (unsigned i = 0; i < 2; i++) {
        if (!network) {
            if_equal(filter, families[i], REFUSED(EACCES));
            continue;
        }
        const unsigned family = begin(filter, families[i]);
        load_argument(filter, 2);
        unless_any(filter, protocols, sizeof protocols / sizeof *protocols, REFUSED(EPERM));
        load_argument(filter, 1);
        add(filter, BPF_ALU | BPF_AND | BPF_K, KIND_OF_SOCKET, 0);
        if_equal(filter, SOCK_STREAM, ALLOWED);
        if_equal(filter, SOCK_DGRAM, ALLOWED);
        end(filter, family, REFUSED(EPERM));
    }
    end(filter, call, REFUSED(EAFNOSUPPORT));

    call = begin(filter, SYS_socketpair);
    load_argument(filter, 0);
    if_equal(filter, AF_UNIX, ALLOWED);
    end(filter, call, REFUSED(EAFNOSUPPORT));
}

static void add_open(struct filter *filter, int number, unsigned flags) {
    const unsigned call = begin(filter, (uint32_t)number);
    load_argument(filter, flags + 1);
    add(filter, BPF_JMP | BPF_JSET | BPF_K, RUNS_AS_OWNER, 3);
    load_argument(filter, flags);
    if_any_bit(filter, CREATES | WITHOUT_NAME, REFUSED(EPERM));
    end(filter, call, ALLOWED);
}

int sym_filter_calls(bool network) {
    struct filter filter = {.length = 0};
    load(&filter, offsetof(struct seccomp_data, arch));
    add(&filter, BPF_JMP | BPF_JEQ | BPF_K, MACHINE, 0);
    filter.code[filter.length - 1].jt = 1;
    finish(&filter, SECCOMP_RET_KILL_PROCESS);
    load(&filter, offsetof(struct seccomp_data, nr));
    add(&filter, BPF_JMP | BPF_JGT | BPF_K, NR_newest, 1);
    finish(&filter, REFUSED(ENOSYS)); /* also refuses the calls of x32, whose numbers begin at 2^30 */

    for (unsigned i = 0; i < sizeof never / sizeof *never; i++)
        if_equal(&filter, (uint32_t)never[i], REFUSED(EPERM));
    for (unsigned i = 0; i < sizeof unknown / sizeof *unknown; i++)
        if_equal(&filter, (uint32_t)unknown[i], REFUSED(ENOSYS));
    for (unsigned i = 0; i < sizeof set_modes / sizeof *set_modes; i++) {
        const unsigned call = begin(&filter, (uint32_t)set_modes[i].call);
        load_argument(&filter, set_modes[i].mode);
        if_any_bit(&filter, RUNS_AS_OWNER, REFUSED(EPERM));
        end(&filter, call, ALLOWED);
    }
    add_open(&filter, SYS_openat, 2);
#ifdef __x86_64__
    add_open(&filter, SYS_open, 1);
#endif
    add_sockets(&filter, network);

    unsigned call = begin(&filter, SYS_clone);
    load_argument(&filter, 0);
    if_any_bit(&filter, MAKES_NAMESPACES, REFUSED(EPERM));
    end(&filter, call, ALLOWED);

    call = begin(&filter, SYS_ioctl);
    load_argument(&filter, 1);
    if_equal(&filter, TYPE_FOR_USER, REFUSED(EPERM));
    if_equal(&filter, CONSOLE, REFUSED(EPERM));
    if_equal(&filter, SET_LINE_DISCIPLINE, REFUSED(EPERM));
    end(&filter, call, ALLOWED);

    /* Leases and notifications can delay processes outside the sandbox that use the file. */
    call = begin(&filter, SYS_fcntl);
    load_argument(&filter, 1);
    if_equal(&filter, SET_LEASE, REFUSED(EPERM));
    if_equal(&filter, NOTIFY, REFUSED(EPERM));
    end(&filter, call, ALLOWED);

    /* A process may set only its own limits, and not those of the sandbox's first process, which has the same user. */
    call = begin(&filter, SYS_prlimit64);
    load_argument(&filter, 0);
    if_equal(&filter, 0, ALLOWED);
    end(&filter, call, REFUSED(EPERM));

    call = begin(&filter, SYS_personality);
    load_argument(&filter, 0);
    if_equal(&filter, 0, ALLOWED);
    if_equal(&filter, UINT32_MAX, ALLOWED); /* only queries the personality */
    end(&filter, call, REFUSED(EPERM));

    finish(&filter, ALLOWED);
    const struct sock_fprog program = {.len = (unsigned short)filter.length, .filter = filter.code};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}
