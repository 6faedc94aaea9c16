"""Attacks by system calls that programs have no need of, each by its number: what the kernel does with them is told.

A call counts as blocked when it is not permitted or not there. Any other error is the kernel's own code at work on what
the attacker gave it, which is what the sandbox keeps from it.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

from attack import Attack, World, attack, syscall

BLOCKED = frozenset({errno.EPERM, errno.ENOSYS, errno.EACCES})
CLONE_NEWUSER = 0x10000000
NULL = None


def reached(number: int, *args: object) -> str:
    """Make a system call, and return the kernel's answer. OSError: the call was blocked."""
    try:
        return f"it returned {syscall(number, *args)}"
    except OSError as error:
        if error.errno in BLOCKED:
            raise
        return f"the kernel looked at it: {errno.errorcode.get(error.errno or 0)}"


def _call(name: str, tries: str, number: int, *args: object, no_control: str | None = None) -> Attack:
    return Attack(name, tries, lambda _world: reached(number, *args), no_control)


def _does(name: str, tries: str, change: Callable[[], object]) -> Attack:
    return Attack(name, tries, lambda _world: f"done: {change()}")


def _perf_event() -> bytes:
    """The processor time of this process, counted by software."""
    return struct.pack("<IIQQQQQ", 1, 112, 1, 0, 0, 0, 0b1100000).ljust(112, b"\0")


def _bpf_map() -> bytes:
    """An array of one number."""
    return struct.pack("<IIIII", 2, 4, 8, 1, 0).ljust(72, b"\0")


_PARAMETERS = ctypes.create_string_buffer(120)
_MACHINE = "it would change the machine"

MANY = [
    _call("io_uring_setup", "Makes an io_uring, whose work no filter sees", 425, 4, _PARAMETERS),
    _call("io_uring_enter", "Enters an io_uring", 426, 9999, 0, 0, 0, NULL, 0),
    _call("io_uring_register", "Registers with an io_uring", 427, 9999, 0, NULL, 0),
    _call("bpf_map", "Makes a BPF map", 321, 0, _bpf_map(), 72),
    _call("keyctl", "Joins a session keyring of its own", 250, 1, NULL),
    _call("add_key", "Adds a key to a keyring", 248, b"user", b"escape", b"x", 1, -1),
    _call("request_key", "Asks for a key, which may start a program outside", 249, b"user", b"escape-none", NULL, -1),
    _call("perf_event_open", "Counts what the processor does", 298, _perf_event(), 0, -1, -1, 0),
    _call("userfaultfd", "Handles page faults, which holds the kernel up in the middle of its work", 323, 1),
    _call("ptrace_traceme", "Has its parent be its debugger", 101, 0, 0, NULL, NULL),
    _call("fsopen", "Begins a mount by fsopen", 430, b"tmpfs", 0),
    _call("fsmount", "Goes on with a mount by fsmount", 432, -1, 0, 0),
    _call("fsconfig", "Configures a mount", 431, -1, 0, NULL, NULL, 0),
    _call("fspick", "Takes up a mount to change it", 433, -100, b"/", 0),
    _call("open_tree", "Takes a tree of mounts", 428, -100, b"/", 1),
    _call("move_mount", "Moves a mount", 429, -1, b"", -1, b"", 0),
    _call("mount_setattr", "Makes a mount writable", 442, -100, b"/nowhere", 0, bytes(32), 32),
    _call("statmount", "Asks what mounts there are", 458, bytes(24), NULL, 0, 0),
    _call("chroot", "Changes its root", 161, b"/usr"),
    _call("pivot_root", "Exchanges its root", 155, b"/nowhere", b"/nowhere/old"),
    _call("setns", "Enters a namespace", 308, 0, 0),
    _call("init_module", "Loads code into the kernel", 175, NULL, 0, b""),
    _call("finit_module", "Loads code into the kernel from a file", 313, 0, b"", 0),
    _call("delete_module", "Removes code from the kernel", 176, b"no_such_module", 0x800),
    _call("kexec_load", "Loads another kernel", 246, 0, 0, NULL, 0, no_control=_MACHINE),
    _call("kexec_file_load", "Loads another kernel from a file", 320, -1, -1, 0, NULL, 0),
    _call("reboot", "Starts the machine again (with a wrong magic)", 169, 1, 2, 3, NULL),
    _call("swapon", "Gives the kernel swap space", 167, b"/nowhere", 0),
    _call("swapoff", "Takes swap space from the kernel", 168, b"/nowhere"),
    _call("acct", "Has the kernel write down what all processes do", 163, b"/nowhere/file"),
    _call("settimeofday", "Sets the clock's zone", 164, NULL, bytes(8), no_control=_MACHINE),
    _call("clock_settime", "Sets the clock", 227, 99, bytes(16)),
    _call("adjtimex", "Turns the clock's speed", 159, struct.pack("<I", 0x8000).ljust(208, b"\0"), no_control=_MACHINE),
    _call("sethostname", "Gives the machine a name", 170, b"", 65),
    _call("iopl", "Speaks to devices directly", 172, 3),
    _call("ioperm", "Speaks to one port directly", 173, 0x80, 1, 1),
    _call("syslog", "Reads the kernel's messages", 103, 10, NULL, 0),
    _call("quotactl", "Changes disk quotas", 179, 0x800007 << 8, b"/nowhere", 0, NULL),
    _call("modify_ldt", "Changes the processor's descriptor table", 154, 0, bytes(64), 64),
    _call("personality", "Has the kernel behave otherwise (no address randomization)", 135, 0x0040000),
    _call("fanotify_init", "Listens to what others do with files", 300, 0, 0),
    _call("open_by_handle", "Opens a file by a made-up handle", 304, -100, struct.pack("<Ii", 8, 1) + bytes(8), 0),
    _call("lookup_dcookie", "Finds paths by cookies", 212, 1, bytes(100), 100, no_control="the kernel may have none"),
    _call("vhangup", "Hangs the terminal up", 153, no_control="it would hang up the test's terminal"),
    _call("migrate_pages", "Moves its memory to other nodes", 256, 0, 0, NULL, NULL),
    _call("move_pages", "Moves pages between memories", 279, 0, 0, NULL, NULL, NULL, 0),
    _call("memfd_secret", "Hides memory from the kernel", 447, 0, no_control="the kernel may have none"),
    _call("nfsservctl", "Speaks to the NFS server of old", 180, 0, NULL, NULL, no_control="kernels have none any more"),
    _call("uselib", "Maps a library of old", 134, b"/nowhere", no_control="kernels have none any more"),
    _call("sysfs", "Asks for the kernel's file systems", 139, 3),
    _call("ustat", "Asks for a file system by its device", 136, 0, bytes(32)),
    _call("pidfd_getfd_own", "Takes descriptors by pidfd_getfd", 438, -1, 0, 0),
    _call("process_vm_readv_own", "Reads memory of another process", 310, 1, NULL, 0, NULL, 0, 0),
    _call("process_vm_writev_own", "Writes to memory of another process", 311, 1, NULL, 0, NULL, 0, 0),
    _call("process_madvise_own", "Has pages swapped out", 440, -1, NULL, 0, 20, 0),
    _call("process_mrelease", "Asks for the memory of a dying process", 448, -1, 0),
    _call("memfd_create", "Makes a file in memory that no limit counts", 319, b"escape", 0),
    _call("shmget", "Makes memory that no limit counts", 29, 0x53594E, 0, 0),
    _call("openat2", "Opens by a structure, whose flags no filter sees", 437, -100, b"/", NULL, 0),
    _call("unshare", "Makes a namespace, in which it would have capabilities", 272, CLONE_NEWUSER),
    _call("mount", "Mounts a tmpfs", 165, b"none", b"/nowhere", b"tmpfs", 0, NULL),
    _does("setuid", "Becomes another user", lambda: os.setresuid(4242, 4242, 4242)),
    _does("setgroups", "Takes other groups", lambda: os.setgroups([4242, 0])),
    _does("kcmp_own", "Compares its objects, as addresses", lambda: reached(312, os.getpid(), os.getpid(), 0, 0, 1)),
    Attack("posix_shared_memory", "Reads another's shared memory", lambda world: Path(world["dev_shm"]).read_text()),
    Attack("dumpable_keys", "Reads which keys there are", lambda _world: Path("/proc/keys").read_text()[:60]),
]


@attack()
def user_namespace_by_clone(_world: World) -> str:
    """Makes a child in a user namespace by clone."""
    pid = syscall(56, CLONE_NEWUSER | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return f"child {pid}"


@attack(no_control="programs may have it where nothing filters")
def clone3(_world: World) -> str | None:
    """Calls clone3, whose flags no filter can see; glibc goes on with clone when it is not there."""
    try:
        pid = syscall(435, struct.pack("<QQQQQQQQ", CLONE_NEWUSER, 0, 0, 0, 17, 0, 0, 0), 64)
    except OSError as error:
        return None if error.errno == errno.ENOSYS else f"not ENOSYS but {errno.errorcode[error.errno or 0]}"
    if pid == 0:
        os._exit(0)
    return f"child {pid}"


@attack(no_control="outside it would be the machine's root")
def remount_root(_world: World) -> str:
    """Makes its root writable by a remount."""
    syscall(165, NULL, b"/", NULL, 32 | 4096, NULL)
    return "remounted"


@attack(no_control="outside it would be the machine's mounts")
def umount(_world: World) -> str:
    """Takes away what is mounted over /proc, /tmp, /dev, and the root."""
    done = []
    for path in (b"/proc", b"/tmp", b"/dev", b"/"):
        try:
            syscall(166, path, 2)
            done.append(path)
        except OSError as error:
            refusal = error
    if not done:
        raise refusal
    return f"{done}"


@attack()
def shared_memory(world: World) -> str:
    """Reads a System V memory segment of another program by its key."""
    number = syscall(29, world["shm_key"], 0, 0o600)
    address = syscall(30, number, NULL, 0)
    return ctypes.string_at(address, len(world["canary"])).decode()


@attack()
def capabilities(_world: World) -> str | None:
    """Has capabilities, or takes them."""
    syscall(126, struct.pack("<Ii", 0x20080522, 0), struct.pack("<IIIIII", *[0x1FFFFF] * 2, 0, 0, 0, 0))
    held = Path("/proc/self/status").read_text().partition("CapEff:\t")[2].split()[0]
    return f"capabilities {held}" if int(held, 16) else None
