"""Attacks on files of others, of the machine, of the launcher and the daemon."""

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attack import Attack, World, attack, syscall

USUAL_DEVICES = {
    *("null", "zero", "full", "random", "urandom", "tty", "ptmx"),
    *("pts", "shm", "fd", "stdin", "stdout", "stderr", "mqueue"),
}
ENOUGH = 3
"""Files that can be written, to be told of."""
OWN = frozenset({"self", "thread-self", "net"})


def _reads(name: str, tries: str, where: Callable[[World], str], no_control: str | None = None) -> Attack:
    def run(world: World) -> str:
        with open(where(world), "rb") as file:
            return file.read(60).decode(errors="replace")

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

MANY = [
    _reads("secret", "Reads a file of the user outside of its directories", lambda world: world["secret"]),
    _reads("kcore", "Reads the kernel's memory", lambda _world: "/proc/kcore", _NOT_HERE),
    _reads("launcher_lock", "Reads the launcher's files", lambda world: f"{world['launcher']}/lock"),
    _writes("write_outside", "Writes where others may write", lambda world: world["writable"]),
    _writes("write_usr", "Writes to /usr", lambda _world: "/usr"),
    _writes("write_libsym", "Writes beside libsym, which other programs load", lambda _world: _libsym()),
    _writes("write_dev", "Makes files in /dev", lambda _world: "/dev"),
    _lists("launcher_directory", "Lists the launcher's programs, sockets and logs", lambda world: world["launcher"]),
    _lists("sysfs_there", "Reads what /sys tells of the machine", lambda _world: "/sys/class/net"),
    _dials("daemon_socket", "Goes to the daemon past the launcher", lambda w: w["daemon"], socket.SOCK_STREAM),
    _dials("other_program_socket", "Is another program to the daemon", lambda w: w["other_socket"], socket.SOCK_STREAM),
]


def _libsym() -> str:
    import libsym

    assert libsym.__file__ is not None
    return os.path.dirname(libsym.__file__)


@attack()
def proc_files(_world: World) -> str | None:
    """Opens the kernel's settings and other files in /proc for writing."""
    tops = [path for path in Path("/proc").iterdir() if not path.name.isdigit() and path.name not in OWN]
    found: list[str] = []
    for path in (each for top in tops for each in (top.rglob("*") if top.is_dir() else [top])):
        if str(path) == "/proc/sys/kernel/ns_last_pid" or len(found) == ENOUGH:
            continue
        with suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                os.close(os.open(path, os.O_WRONLY))
                found.append(str(path))
    return f"{found}" if found else None


@attack()
def devices(_world: World) -> str | None:
    """Finds devices beyond the harmless ones in /dev, or a terminal."""
    found = sorted(path.name for path in Path("/dev").iterdir() if path.name not in USUAL_DEVICES)
    found += [path.name for path in Path("/dev/pts").iterdir() if path.name != "ptmx"]
    return f"{len(found)}: {found[:8]}" if found else None


@attack()
def set_uid_bit(_world: World) -> str | None:
    """Makes a program of its own that runs as its user for others, or a directory whose files do."""
    path, made = f"/tmp/suid-{os.getpid()}", []
    Path(path).touch()
    file = os.open(path, os.O_RDONLY)
    ways: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (os.chmod, (path, 0o4755)),
        (os.fchmod, (file, 0o4755)),
        (syscall, (268, -100, os.fsencode(path), 0o4755)),  # fchmodat
        (syscall, (85, os.fsencode(f"{path}-creat"), 0o4755)),
        (os.open, (f"{path}-open", os.O_CREAT, 0o4755)),
        (syscall, (2, os.fsencode(f"{path}-open2"), os.O_CREAT, 0o4755)),
        (os.mknod, (f"{path}-node", stat.S_IFREG | 0o4755)),
        (syscall, (259, -100, os.fsencode(f"{path}-node2"), stat.S_IFREG | 0o4755, 0)),
    ]
    for way, words in ways:
        with suppress(OSError):
            way(*words)
            made.append(str(words))
    for each in Path("/tmp").glob(f"suid-{os.getpid()}*"):
        each.unlink()
    return f"{made}" if made else None


@attack()
def device_node(_world: World) -> str:
    """Makes a device: the machine's disk."""
    path = f"/tmp/node-{os.getpid()}"
    os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(1, 0))
    os.unlink(path)
    return "a device node"


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
