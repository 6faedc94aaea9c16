"""Starts a command as a service manager does whose unit has no rights: `python as_service.py UID SOCKET COMMAND ...`.

It gets a mount namespace of its own, the daemon's two sockets at SOCKET, another user, no capabilities, no memory that
is written and executed, and nothing of root's but Python itself.
"""

import ctypes
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_BIND, MS_MOVE, MS_REC, MS_SLAVE = 4096, 8192, 16384, 1 << 19
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 24, 38, 65

libc = ctypes.CDLL(None, use_errno=True)


def call(function, *words):
    if function(*words) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), repr(words))


def mount(source, target, kind, flags, options=None):
    call(libc.mount, *(str(each).encode() for each in (source, target, kind)), ctypes.c_ulong(flags), options)


def open_python_to_all() -> None:
    """Open the interpreter's directories to all users, where they lie below a directory of root's alone. Nothing else
    is in that from here on.
    """
    base = Path(sys.base_prefix).resolve()
    closed = [each for each in base.parents if not each.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return
    with tempfile.TemporaryDirectory() as place:
        mount(base, place, "none", MS_BIND | MS_REC)
        mount("none", closed[-1], "tmpfs", 0, b"mode=755")
        base.mkdir(parents=True)
        mount(place, base, "none", MS_MOVE)


def listen(path: str) -> None:
    """Listen as symphony.socket does, on descriptors from 3 on."""
    kinds = ((socket.SOCK_STREAM, path), (socket.SOCK_SEQPACKET, f"{path}.programs"))
    listening = list[int]()
    for kind, where in kinds:
        each = socket.socket(socket.AF_UNIX, kind)
        Path(where).unlink(missing_ok=True)
        each.bind(where)
        Path(where).chmod(0o666)
        each.listen(1024)
        listening.append(os.dup2(each.detach(), 100 + len(listening)))
    for number, descriptor in enumerate(listening):
        os.dup2(descriptor, 3 + number)
    os.environ.update(LISTEN_FDS=str(len(listening)), LISTEN_PID=str(os.getpid()))


def give_all_up(uid: int) -> None:
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # those that this kernel has
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_MDWE, 1, 0, 0, 0)  # from Linux 6.3 on


def main() -> None:
    uid, path, *command = sys.argv[1:]
    call(libc.unshare, CLONE_NEWNS)
    mount("none", "/", "none", MS_REC | MS_SLAVE)
    open_python_to_all()
    listen(path)
    give_all_up(int(uid))
    os.execvp(command[0], command)


main()
