"""Attacks on files of others, of the machine, of the launcher and the daemon."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from attack import Attack, World, attack

USUAL_DEVICES = {
    *("null", "zero", "full", "random", "urandom", "tty", "ptmx"),
    *("pts", "shm", "fd", "stdin", "stdout", "stderr", "mqueue"),
}
MAX_LOOKED_AT = 20_000
ENOUGH = 3
"""Files that can be written, to be told of."""
OWN = frozenset({"self", "thread-self", "sys", "net"})


def _reads(name: str, tries: str, where: Callable[[World], str], no_control: str | None = None) -> Attack:
    def run(world: World) -> str:
        with open(where(world), "rb") as file:
            return file.read(60).decode(errors="replace")

    return Attack(name, tries, run, no_control)


def _opens(name: str, tries: str, path: str, flags: int, no_control: str | None = None) -> Attack:
    def run(_world: World) -> str:
        os.close(os.open(path, flags))
        return f"opened {path}"

    return Attack(name, tries, run, no_control)


def _writes(name: str, tries: str, where: Callable[[World], str]) -> Attack:
    """Makes a file there, and takes it away again."""

    def run(world: World) -> str:
        path = Path(where(world)) / f"escape-{os.getpid()}"
        path.write_text("escaped")
        path.unlink()
        return f"wrote {path}"

    return Attack(name, tries, run)


def _lists(name: str, tries: str, where: Callable[[World], str]) -> Attack:
    return Attack(name, tries, lambda world: os.listdir(where(world)))


def _dials(name: str, tries: str, where: Callable[[World], str], kind: socket.SocketKind) -> Attack:
    def run(world: World) -> str:
        with socket.socket(socket.AF_UNIX, kind) as connection:
            connection.settimeout(2)
            connection.connect(where(world))
            return "connected"

    return Attack(name, tries, run)


_NOT_HERE = "a machine need not have it"
_OF_THE_TEST = Path(__file__).parent

MANY = [
    _reads("secret", "Reads a file of the user outside of its directories", lambda world: world["secret"]),
    _reads("ssh_key", "Reads the user's ssh key", lambda world: world["ssh"]),
    _reads("ssh_key_by_home", "Reads the ssh key by $HOME", lambda _world: f"{os.environ['HOME']}/.ssh/id_rsa"),
    _reads("shadow", "Reads the machine's passwords", lambda _world: "/etc/shadow"),
    _reads("by_dots", "Reads a file by many ..", lambda world: "../" * 30 + world["secret"][1:]),
    _reads("kcore", "Reads the kernel's memory", lambda _world: "/proc/kcore", _NOT_HERE),
    _reads("kmsg", "Reads the kernel's messages", lambda _world: "/dev/kmsg"),
    _reads("vmcore", "Reads the memory of a kernel that crashed", lambda _world: "/proc/vmcore", _NOT_HERE),
    _reads("disk", "Reads the machine's disk", lambda world: world["disk"], _NOT_HERE),
    _reads("launcher_lock", "Reads the launcher's files", lambda world: f"{world['launcher']}/lock"),
    _reads("program_log", "Reads another program's output", lambda world: world["other_log"]),
    _opens("core_pattern", "Has a program run when one crashes", "/proc/sys/kernel/core_pattern", os.O_WRONLY),
    _opens("modprobe", "Has the kernel run another modprobe", "/proc/sys/kernel/modprobe", os.O_WRONLY, _NOT_HERE),
    _opens("sysrq", "Commands the machine by sysrq", "/proc/sysrq-trigger", os.O_WRONLY, _NOT_HERE),
    _opens("binfmt", "Has the kernel run programs with another one", "/proc/sys/fs/binfmt_misc/register", 1, _NOT_HERE),
    _opens("memory_device", "Opens the machine's memory", "/dev/mem", os.O_RDWR, _NOT_HERE),
    _opens("fuse", "Opens /dev/fuse", "/dev/fuse", os.O_RDWR),
    _opens("kvm", "Opens /dev/kvm", "/dev/kvm", os.O_RDWR, _NOT_HERE),
    _opens("loop_device", "Opens /dev/loop-control", "/dev/loop-control", os.O_RDWR, _NOT_HERE),
    _opens("tun", "Opens /dev/net/tun", "/dev/net/tun", os.O_RDWR, _NOT_HERE),
    _opens("uinput", "Types on the machine's keyboard", "/dev/uinput", os.O_WRONLY, _NOT_HERE),
    _opens("console", "Opens the console", "/dev/console", os.O_RDWR),
    _writes("write_outside", "Writes where others may write", lambda world: world["writable"]),
    _writes("write_root", "Writes to the root", lambda _world: "/"),
    _writes("write_etc", "Writes to /etc", lambda _world: "/etc"),
    _writes("write_usr", "Writes to /usr", lambda _world: "/usr"),
    _writes("write_home", "Writes beside the user's keys", lambda world: f"{world['home']}/.ssh"),
    _writes("write_code", "Writes beside the program's own code", lambda _world: str(_OF_THE_TEST)),
    _writes("write_libraries", "Writes beside Python's libraries", lambda _world: os.path.dirname(os.__file__)),
    _writes("write_libsym", "Writes beside libsym, which other programs load", lambda _world: _libsym()),
    _writes("write_dev", "Makes files in /dev", lambda _world: "/dev"),
    _lists("home_listing", "Lists the user's home", lambda world: world["home"]),
    _lists("runtime_listing", "Lists the user's runtime directory", lambda world: world["runtime"]),
    _lists("launcher_directory", "Lists the launcher's programs, sockets and logs", lambda world: world["launcher"]),
    _lists("sysfs_there", "Reads what /sys tells of the machine", lambda _world: "/sys/class/net"),
    _dials("daemon_socket", "Goes to the daemon past the launcher", lambda w: w["daemon"], socket.SOCK_STREAM),
    _dials("programs_socket", "Is a launcher", lambda w: w["daemon"] + ".programs", socket.SOCK_SEQPACKET),
    _dials("control_socket", "Commands the launcher", lambda w: f"{w['launcher']}/control", socket.SOCK_SEQPACKET),
    _dials("other_program_socket", "Is another program to the daemon", lambda w: w["other_socket"], socket.SOCK_STREAM),
]


def _libsym() -> str:
    import libsym

    assert libsym.__file__ is not None
    return os.path.dirname(libsym.__file__)


@attack()
def existence(world: World) -> str | None:
    """Finds out whether a file outside is there."""
    there, not_there = (_errno_of(path) for path in (world["secret"], world["secret"] + "-not"))
    return f"{there} against {not_there}" if there != not_there else None


def _errno_of(path: str) -> int:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno or 0
    return 0


@attack()
def sys_kernel_settings(_world: World) -> str | None:
    """Opens the kernel's settings in /proc/sys for writing."""
    return _writable(Path("/proc/sys").rglob("*"), leave=("/proc/sys/kernel/ns_last_pid",))


@attack()
def proc_files(_world: World) -> str | None:
    """Opens the kernel's other files in /proc for writing."""
    tops = [path for path in Path("/proc").iterdir() if not path.name.isdigit() and path.name not in OWN]
    return _writable(each for top in tops for each in (top.rglob("*") if top.is_dir() else [top]))


def _writable(paths: Iterable[Path], leave: tuple[str, ...] = ()) -> str | None:
    found: list[str] = []
    for number, path in enumerate(paths):
        if number == MAX_LOOKED_AT or len(found) == ENOUGH:
            break
        if str(path) in leave:
            continue
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            os.close(os.open(path, os.O_WRONLY))
        except OSError:
            continue
        found.append(str(path))
    return f"{found}" if found else None


@attack()
def sysfs_tree(_world: World) -> str | None:
    """Opens files of /sys for writing, control groups among them."""
    return _writable(path for top in ("/sys/fs/cgroup", "/sys/kernel") for path in Path(top).rglob("*"))


@attack()
def devices(_world: World) -> str | None:
    """Finds devices beyond the harmless ones in /dev."""
    found = sorted(path.name for path in Path("/dev").iterdir() if path.name not in USUAL_DEVICES)
    return f"{len(found)}: {found[:8]}" if found else None


@attack(no_control="root of the machine may do so")
def uid_map(_world: World) -> str:
    """Maps other users into its user namespace."""
    Path("/proc/self/uid_map").write_text("0 0 4294967295")
    return "mapped"


@attack()
def set_uid_bit(_world: World) -> str:
    """Makes a program of its own that runs as its user for others."""
    path = Path(f"/tmp/suid-{os.getpid()}")
    path.write_bytes(b"#!/bin/sh\n")
    try:
        path.chmod(0o4755)
        return "has the bit" if path.stat().st_mode & stat.S_ISUID else ""
    finally:
        path.unlink()


def _makes(name: str, tries: str, kind: int, number: int) -> Attack:
    def run(_world: World) -> str:
        path = f"/tmp/{name}-{os.getpid()}"
        os.mknod(path, kind | 0o600, os.makedev(1, number))
        os.unlink(path)
        return "a device node"

    return Attack(name, tries, run)


MANY += [
    _makes("device_node", "Makes a device: the machine's disk", stat.S_IFBLK, 0),
    _makes("character_node", "Makes a device: the machine's memory", stat.S_IFCHR, 5),
]


@attack(no_control="there is no such socket outside")
def own_directory(world: World) -> str | None:
    """Finds more beside its own socket than that socket."""
    own = Path(os.environ["SYMPHONY_SOCKET"])
    found = [each.name for each in own.parent.iterdir() if each.name != own.name]
    return f"{found}" if found else None


@attack(no_control="there is no such socket outside")
def own_socket_removed(world: World) -> str:
    """Puts a socket of its own in the place of its socket to the daemon."""
    own = os.environ["SYMPHONY_SOCKET"]
    os.rename(own, own + "-old")
    os.rename(own + "-old", own)
    return "renamed it"
