"""Attacks on other processes: their memory, their descriptors, signals to them, and their files in /proc."""

import ctypes
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

from attack import LIBC, Attack, World, attack, syscall

PTRACE_ATTACH, PTRACE_DETACH = 16, 17
F_SETSIG, RLIMIT_NOFILE, WALL = 10, 7, 0x40000000
GETFD, READV, WRITEV = 438, 310, 311
NICE = 5
OF_THE_MACHINE = "process 1 outside is the machine's"


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _moved(number: int, pid: int, address: int, room: ctypes.Array[ctypes.c_char], size: int) -> int:
    """The bytes that process_vm_readv or its twin moves between here and another process."""
    mine, theirs = _Vector(ctypes.addressof(room), size), _Vector(address, size)
    return syscall(number, pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)


@attack()
def namespaces(world: World) -> str | None:
    """Shares namespaces with what is outside."""
    ours = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "mnt", "net", "ipc", "uts")}
    shared = [kind for kind, name in ours.items() if world["namespaces"][kind] == name]
    return f"{shared}" if shared else None


@attack()
def process_vm_readv(world: World) -> str:
    """Reads another program's memory by process_vm_readv."""
    room = ctypes.create_string_buffer(len(world["canary"]))
    _moved(READV, world["victim"], world["victim_address"], room, len(room))
    return room.raw.decode()


@attack()
def process_vm_writev(world: World) -> str:
    """Writes to another program's memory by process_vm_writev."""
    room = ctypes.create_string_buffer(world["canary"].encode(), len(world["canary"]))
    return f"wrote {_moved(WRITEV, world['victim'], world['victim_address'], room, len(room))} bytes"


@attack()
def proc_mem(world: World) -> str:
    """Reads another program's memory by /proc/PID/mem."""
    with open(f"/proc/{world['victim']}/mem", "rb") as memory:
        return os.pread(memory.fileno(), len(world["canary"]), world["victim_address"]).decode()


@attack()
def process_list(world: World) -> str | None:
    """Finds programs of others in /proc."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if b"symphony\0serve" in command or world["mark"].encode() in command:
            found.append(int(name))
    return f"{len(found)} processes of others: {found}" if found else None


def _ptraced(pid: int) -> str:
    LIBC.ptrace.restype = ctypes.c_long
    if LIBC.ptrace(PTRACE_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, WALL)
    LIBC.ptrace(PTRACE_DETACH, pid, None, None)
    return f"stopped process {pid}"


@attack()
def ptrace_a_child(_world: World) -> str:
    """Is a debugger of its own child: a way around a filter that looks at calls."""
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        return _ptraced(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _signals(name: str, tries: str, send: Callable[[int], object]) -> Attack:
    def run(world: World) -> str:
        send(world["victim"])
        return "sent SIGUSR1"

    return Attack(name, tries, run)


def _with_information(pid: int) -> None:
    information = ctypes.create_string_buffer(128)
    ctypes.memmove(ctypes.addressof(information) + 8, (-1).to_bytes(4, "little", signed=True), 4)
    syscall(129, pid, int(signal.SIGUSR1), information)


def _as_owner(pid: int) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)
    fcntl.fcntl(reading, F_SETSIG, int(signal.SIGUSR1))
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writing, b"x")


def _reads(name: str, tries: str, path: str) -> Attack:
    return Attack(name, tries, lambda world: Path(f"/proc/{world['victim']}/{path}".format(**world)).read_text())


def _to_victim(name: str, tries: str, do: Callable[[int], object]) -> Attack:
    return Attack(name, tries, lambda world: f"done: {do(world['victim'])}")


def _to_init(name: str, tries: str, do: Callable[[], object]) -> Attack:
    return Attack(name, tries, lambda _world: f"done: {do()}", OF_THE_MACHINE)


def _limits(pid: int, new: object = None) -> list[int]:
    room = (ctypes.c_uint64 * 2)()
    syscall(302, pid, RLIMIT_NOFILE, new, room)
    return list(room)


MANY = [
    _reads("proc_environ", "Reads another program's environment", "environ"),
    _reads("proc_fd", "Opens a file again that another program has open, by /proc/PID/fd", "fd/{victim_fd}"),
    _reads("proc_root", "Goes through /proc/PID/root of another program to a file", "root{secret}"),
    _to_victim("proc_cwd", "Goes through /proc/PID/cwd of another program", lambda pid: os.listdir(f"/proc/{pid}/cwd")),
    _to_victim("ptrace", "Attaches to another program as a debugger", _ptraced),
    _signals("signal_by_kill", "Sends another program a signal", lambda pid: os.kill(pid, signal.SIGUSR1)),
    _signals("signal_by_tgkill", "Signals a thread", lambda pid: syscall(234, pid, pid, int(signal.SIGUSR1))),
    _signals("signal_by_sigqueue", "Sends another program a signal with forged information", _with_information),
    _signals(
        "signal_by_pidfd",
        "Sends another program a signal by a pidfd",
        lambda pid: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGUSR1),
    ),
    _signals("signal_by_socket_owner", "Has the kernel signal another program, as the owner of a pipe", _as_owner),
    _to_victim("pidfd_open", "Gets a pidfd of another program", os.pidfd_open),
    _to_victim("kcmp", "Compares kernel objects with another program", lambda p: syscall(312, os.getpid(), p, 1, 0, 0)),
    _to_victim("limits_of_another", "Reads another program's resource limits", _limits),
    _to_victim("priority_of_another", "Changes its priority", lambda p: os.setpriority(os.PRIO_PROCESS, p, NICE)),
    _to_victim(
        "affinity_of_another", "Changes its processors", lambda p: os.sched_setaffinity(p, os.sched_getaffinity(0))
    ),
    _to_init("init_environ", "Reads the environment of process 1", lambda: Path("/proc/1/environ").read_bytes()[:40]),
    _to_init("init_memory", "Opens the memory of process 1", lambda: os.close(os.open("/proc/1/mem", os.O_RDWR))),
    Attack(
        "init_root",
        "Goes through /proc/1/root to a file outside",
        lambda world: Path(f"/proc/1/root{world['secret']}").read_text(),
        OF_THE_MACHINE,
    ),
    _to_init(
        "init_limits", "Limits process 1", lambda: syscall(302, 1, RLIMIT_NOFILE, (ctypes.c_uint64 * 2)(3, 3), None)
    ),
    _to_init("init_oom_score", "Has process 1 killed first", lambda: Path("/proc/1/oom_score_adj").write_text("1000")),
]


@attack(no_control="outside it would reach every process of the user")
def signal_to_all(_world: World) -> None:
    """Sends a signal to all that it can reach; the test looks whom that reached."""
    os.kill(-1, signal.SIGUSR1)


@attack()
def pidfd_getfd(world: World) -> str:
    """Takes a descriptor out of another program."""
    taken = syscall(GETFD, os.pidfd_open(world["victim"]), world["victim_fd"], 0)
    return os.pread(taken, 100, 0).decode()


@attack()
def process_madvise(world: World) -> str:
    """Has another program's pages swapped out."""
    theirs = _Vector(world["victim_address"] & ~4095, 4096)
    return f"{syscall(440, os.pidfd_open(world['victim']), ctypes.byref(theirs), 1, 20, 0)} bytes"
