"""Attacks on other processes: their memory, their descriptors, signals to them, and their files in /proc."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from attack import LIBC, World, attack, syscall

PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE, PTRACE_PEEKDATA = 16, 17, 0x4206, 2
NICE = 5
RLIMIT_NOFILE = 7


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _vectors(world: World, room: ctypes.Array[ctypes.c_char]) -> tuple[_Vector, _Vector]:
    return _Vector(ctypes.addressof(room), len(room)), _Vector(world["victim_address"], len(room))


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
    mine, theirs = _vectors(world, room)
    syscall(310, world["victim"], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    return room.raw.decode()


@attack()
def process_vm_writev(world: World) -> str:
    """Writes to another program's memory by process_vm_writev."""
    room = ctypes.create_string_buffer(world["canary"].encode(), len(world["canary"]))
    mine, theirs = _vectors(world, room)
    return f"wrote {syscall(311, world['victim'], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)} bytes"


def _read_at(path: str, address: int, size: int) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, address).decode()
    finally:
        os.close(fd)


@attack()
def proc_mem(world: World) -> str:
    """Reads another program's memory by /proc/PID/mem."""
    return _read_at(f"/proc/{world['victim']}/mem", world["victim_address"], len(world["canary"]))


@attack()
def proc_environ(world: World) -> str:
    """Reads another program's environment."""
    raw = Path(f"/proc/{world['victim']}/environ").read_bytes().split(b"\0")
    return next(each.decode() for each in raw if world["canary"].encode() in each)


@attack()
def proc_fd(world: World) -> str:
    """Opens a file again that another program has open, by /proc/PID/fd."""
    return Path(f"/proc/{world['victim']}/fd/{world['victim_fd']}").read_text()


@attack()
def proc_root(world: World) -> str:
    """Goes through /proc/PID/root of another program to a file."""
    return Path(f"/proc/{world['victim']}/root{world['secret']}").read_text()


@attack()
def proc_cwd(world: World) -> list[str]:
    """Goes through /proc/PID/cwd of another program."""
    return sorted(each.name for each in Path(f"/proc/{world['victim']}/cwd").iterdir())[:4]


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
    request = PTRACE_ATTACH
    LIBC.ptrace.restype = ctypes.c_long
    if LIBC.ptrace(request, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)  # __WALL
    LIBC.ptrace(PTRACE_DETACH, pid, None, None)
    return f"stopped process {pid}"


@attack()
def ptrace(world: World) -> str:
    """Attaches to another program as a debugger."""
    return _ptraced(world["victim"])


@attack()
def ptrace_a_child(_world: World) -> str:
    """Is a debugger of a child of its own: a way around a filter that looks at calls."""
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        return _ptraced(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@attack()
def read_a_child(world: World) -> str:
    """Reads the memory of a child of its own by process_vm_readv."""
    secret = ctypes.create_string_buffer(b"child")
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        room = ctypes.create_string_buffer(5)
        mine, theirs = _Vector(ctypes.addressof(room), 5), _Vector(ctypes.addressof(secret), 5)
        syscall(310, child, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        return room.raw.decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@attack()
def signal_by_kill(world: World) -> str:
    """Sends another program a signal."""
    os.kill(world["victim"], signal.SIGUSR1)
    return "sent SIGUSR1"


@attack()
def signal_by_tgkill(world: World) -> str:
    """Sends another program's thread a signal."""
    syscall(234, world["victim"], world["victim"], int(signal.SIGUSR1))
    return "sent SIGUSR1"


@attack()
def signal_by_sigqueue(world: World) -> str:
    """Sends another program a signal with forged information."""
    information = ctypes.create_string_buffer(128)
    ctypes.memmove(ctypes.addressof(information) + 8, (-1).to_bytes(4, "little", signed=True), 4)
    syscall(129, world["victim"], int(signal.SIGUSR1), information)
    return "sent SIGUSR1"


@attack()
def signal_by_pidfd(world: World) -> str:
    """Sends another program a signal by a pidfd."""
    signal.pidfd_send_signal(os.pidfd_open(world["victim"]), signal.SIGUSR1)
    return "sent SIGUSR1"


@attack()
def signal_by_socket_owner(world: World) -> str:
    """Has the kernel send another program SIGIO-like signals, as the owner of a pipe."""
    import fcntl

    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, world["victim"])
    fcntl.fcntl(reading, 10, int(signal.SIGUSR1))  # F_SETSIG
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writing, b"x")
    return "it owns a pipe"


@attack(no_control="outside it would reach every process of the user")
def signal_to_all(world: World) -> str | None:
    """Sends a signal to all that it can reach; the test looks whom that reached."""
    os.kill(-1, signal.SIGUSR1)
    return None


@attack()
def pidfd_getfd(world: World) -> str:
    """Takes a descriptor out of another program."""
    taken = syscall(438, os.pidfd_open(world["victim"]), world["victim_fd"], 0)
    return os.pread(taken, 100, 0).decode()


@attack()
def pidfd_open(world: World) -> str:
    """Gets a pidfd of another program."""
    return f"descriptor {os.pidfd_open(world['victim'])}"


@attack()
def kcmp(world: World) -> str:
    """Compares the kernel's objects of another program with its own."""
    return f"order {syscall(312, os.getpid(), world['victim'], 1, 0, 0)}"


@attack()
def process_madvise(world: World) -> str:
    """Has another program's pages swapped out."""
    theirs = _Vector(world["victim_address"] & ~4095, 4096)
    return f"{syscall(440, os.pidfd_open(world['victim']), ctypes.byref(theirs), 1, 20, 0)} bytes"


@attack()
def process_mrelease(world: World) -> str:
    """Asks for the memory of a dying process."""
    try:
        syscall(448, os.pidfd_open(os.getpid()), 0)
    except OSError as error:
        if error.errno != 22:
            raise
    return "the kernel looked at it"


@attack()
def limits_of_another(world: World) -> str:
    """Reads and sets another program's resource limits."""
    room = (ctypes.c_uint64 * 2)()
    syscall(302, world["victim"], RLIMIT_NOFILE, None, room)
    return f"{list(room)} descriptors"


@attack()
def priority_of_another(world: World) -> str:
    """Changes another program's priority."""
    os.setpriority(os.PRIO_PROCESS, world["victim"], NICE)
    return f"nice {NICE}"


@attack()
def affinity_of_another(world: World) -> str:
    """Changes another program's processors."""
    os.sched_setaffinity(world["victim"], os.sched_getaffinity(0))
    return "set"


@attack()
def real_time(_world: World) -> str:
    """Takes a real-time priority, before all others."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "SCHED_FIFO"


@attack()
def raised_priority(_world: World) -> str:
    """Takes more of the processor by its nice value."""
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"


@attack(no_control="process 1 outside is the machine's")
def init_environ(_world: World) -> str:
    """Reads the environment of process 1."""
    return Path("/proc/1/environ").read_bytes()[:40].decode(errors="replace")


@attack(no_control="process 1 outside is the machine's")
def init_memory(_world: World) -> str:
    """Opens the memory of process 1."""
    os.close(os.open("/proc/1/mem", os.O_RDWR))
    return "opened /proc/1/mem"


@attack(no_control="process 1 outside is the machine's")
def init_maps(_world: World) -> str:
    """Reads where process 1 has its memory."""
    return Path("/proc/1/maps").read_text().splitlines()[0]


@attack(no_control="process 1 outside is the machine's")
def init_descriptors(_world: World) -> list[str]:
    """Reads which descriptors process 1 has."""
    return [os.readlink(each) for each in Path("/proc/1/fd").iterdir()][:4]


@attack(no_control="process 1 outside is the machine's")
def init_root(world: World) -> str:
    """Goes through /proc/1/root to a file outside."""
    return Path(f"/proc/1/root{world['secret']}").read_text()


@attack(no_control="process 1 outside is the machine's")
def init_ptrace(_world: World) -> str:
    """Attaches to process 1 as a debugger."""
    return _ptraced(1)


@attack(no_control="process 1 outside is the machine's")
def init_process_vm(_world: World) -> str:
    """Reads the memory of process 1."""
    room = ctypes.create_string_buffer(16)
    mine = _Vector(ctypes.addressof(room), 16)
    theirs = _Vector(ctypes.addressof(room), 16)  # the zygote's fork has much at the same addresses
    return f"{syscall(310, 1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)} bytes"


@attack(no_control="process 1 outside is the machine's")
def init_pidfd_getfd(_world: World) -> str:
    """Takes a descriptor out of process 1."""
    last: OSError | None = None
    pidfd = os.pidfd_open(1)
    for number in range(32):
        try:
            return os.readlink(f"/proc/self/fd/{syscall(438, pidfd, number, 0)}")
        except OSError as error:
            last = error
    assert last is not None
    raise last


@attack(no_control="process 1 outside is the machine's")
def init_limits(_world: World) -> str:
    """Sets the resource limits of process 1, which holds the sandbox."""
    room = (ctypes.c_uint64 * 2)(3, 3)
    syscall(302, 1, RLIMIT_NOFILE, room, None)
    return "it has three descriptors at most now"


@attack(no_control="process 1 outside is the machine's")
def init_oom_score(_world: World) -> str:
    """Has the kernel kill process 1 first when memory is short."""
    Path("/proc/1/oom_score_adj").write_text("1000")
    return "written"
