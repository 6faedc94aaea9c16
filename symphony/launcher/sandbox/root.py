"""Building of a sandbox's root directory, with the mount of KV in it.

After `build`, the first process has a root with three directories. `/old` is the machine's tree, `/new` the program's
root, and `/own` the private files that the program may write to. `/new` and `/own` are in one tmpfs, so one size
limit covers both.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from symphony.launcher.sandbox.kernel import done, ffi, lib
from symphony.launcher.sandbox.lacks import step
from symphony.launcher.sandbox.view import Shown, ShownLink

PRIVATE = {"/tmp": "tmp", "/var/tmp": "var-tmp", "/dev/shm": "shm"}  # noqa: S108 - inside the sandbox
"""Private directories with mode 1777, and their names in `/own`."""
_MAX_INODES = 100_000
_MASKED = ("kcore", "keys", "sysrq-trigger", "timer_list")
"""Files of /proc that reveal facts about the machine, or can change it."""
_NAMES = "passwd: files\ngroup: files\nhosts: files\n"
"""Text of /etc/nsswitch.conf. Names are looked up in files, since a sandbox has no name service."""
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/ptmx": "pts/ptmx",
    "/var/run": "/run",
    "/etc/mtab": "/proc/self/mounts",
}


def build(
    spec: dict[str, Any], system: Iterable[Shown | ShownLink], wanted: Iterable[Shown | ShownLink], hosts: str
) -> None:
    """Build the root of a sandbox.

    `system`: files that all sandboxes show. `wanted`: further files that this sandbox shows. `hosts`: its /etc/hosts.
    The user's directories (`wanted`) are mounted after all files are made, so that no file is made in them.
    """
    base, own_bytes = spec["base"], spec["own_bytes"]
    with step("its root can't be made"):
        mount(
            "symphony",
            base,
            "tmpfs",
            lib.MS_NOSUID | lib.MS_NODEV,
            f"mode=0755,size={own_bytes},nr_inodes={_MAX_INODES}",
        )
        for name in ("old", "new", "own"):
            os.mkdir(f"{base}/{name}")
        done(lib.sym_pivot_root(os.fsencode(base), os.fsencode(f"{base}/old")))
        os.chdir("/")
        mount("/new", "/new", None, lib.MS_BIND)
        _make_private_directories(spec["home"])
    with step("/proc can't be mounted", "a container that hides parts of /proc does not allow it"):
        _make_proc(spec["tasks"])
    with step("its files can't be mounted"):
        for each in system:
            _show(each)
        _write("/etc/hosts", hosts)
        _write("/etc/nsswitch.conf", _NAMES)
        _make_terminals()
        for path, target in _LINKS.items():
            _link(path, target)
        for each in wanted:
            _show(each)
        for path in spec["empty"]:
            _make_directory(path)
        for path in spec["hidden"]:
            _hide(path)
        if spec["mount"]:
            _make_directory(spec["mount"])
        _restrict("/new", read_only=True, no_devices=True, below=False)
        mount(None, "/new", None, lib.MS_REC | lib.MS_PRIVATE)  # keeps out later, unrestricted mounts
        mount(None, "/", None, lib.MS_REC | lib.MS_SHARED)


def enter() -> None:
    """Make `/new` this process's root, and detach the rest.
    Later mounts below `/new` still propagate to this process.
    """
    with step("its root can't be entered"):
        done(lib.unshare(lib.CLONE_NEWNS))
        mount(None, "/", None, lib.MS_REC | lib.MS_SLAVE)
        os.chdir("/new")
        done(lib.sym_pivot_root(b".", b"."))
        done(lib.umount2(b".", lib.MNT_DETACH))
        os.chdir("/")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, or bind a path. OSError: the kernel refuses; the error names `target`."""
    words = [ffi.NULL if word is None else os.fsencode(word) for word in (source, target, kind)]
    done(lib.mount(*words, flags, ffi.NULL if options is None else options.encode()), target)


def _restrict(path: str, *, read_only: bool, no_devices: bool, below: bool = True) -> None:
    done(lib.sym_restrict_mount(os.fsencode(path), read_only, no_devices, below), path)


def _make_private_directories(home: Sequence[str] | None) -> None:
    for path, name in PRIVATE.items():
        _make_private(path, name, 0o1777)
    if home is not None:
        path, real = home
        _make_private(real, "home", 0o700)
        if path != real:
            _link(path, real)


def _make_private(path: str, name: str, mode: int) -> None:
    own = f"/own/{name}"
    os.mkdir(own)
    os.chmod(own, mode)
    os.makedirs(f"/new{path}", exist_ok=True)
    mount(own, f"/new{path}", None, lib.MS_BIND)


def _make_proc(tasks: int) -> None:
    """Mount a read-only /proc that shows only the sandbox's processes."""
    os.mkdir("/new/proc")
    mount("proc", "/new/proc", "proc", lib.MS_NOSUID | lib.MS_NODEV | lib.MS_NOEXEC)
    if _numbers_of_processes_are_divided():
        Path("/new/proc/sys/kernel/pid_max").write_text(f"{tasks}\n", encoding="ascii")
    for name in _MASKED:
        if os.path.exists(f"/new/proc/{name}"):
            mount("/old/dev/null", f"/new/proc/{name}", None, lib.MS_BIND)
    _restrict("/new/proc", read_only=True, no_devices=False)


def _numbers_of_processes_are_divided() -> bool:
    """Return whether each PID namespace has its own pid_max, as since Linux 6.14.
    In earlier kernels, all namespaces share the machine's pid_max, and root could change it from inside a sandbox.
    """
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 14)


def _make_terminals() -> None:
    """Mount a devpts, for pseudo-terminals that the program opens."""
    os.mkdir("/new/dev/pts")
    options = "newinstance,ptmxmode=0666,mode=0620"
    mount("devpts", "/new/dev/pts", "devpts", lib.MS_NOSUID | lib.MS_NOEXEC, options)


def _show(each: Shown | ShownLink) -> None:
    if isinstance(each, ShownLink):
        _link(each.path, each.target)
        return
    with _place(each.path, is_directory=each.is_directory) as place:
        done(lib.sym_show(os.fsencode(each.source), place, not each.writable, not each.has_devices), each.path)


@contextmanager
def _place(path: str, *, is_directory: bool) -> Iterator[int]:
    """Open the mount point `path`. If it does not exist, make it, but only in a directory of the sandbox's own.

    A mount point in a shown directory exists already. A program that may write to that directory can replace anything
    in it by a link at any time. So no link is followed, and nothing is made there.
    """
    place = _opened(path)
    if place is None:
        outer = _own_directory(os.path.dirname(path))
        if outer is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        name = os.path.basename(path)
        if is_directory:
            os.mkdir(name, 0o755, dir_fd=outer)
        else:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=outer))
        os.close(outer)
        place = done(lib.sym_open_path(os.fsencode(f"/new{path}")), path)
    try:
        yield place
    finally:
        os.close(place)


def _own_directory(path: str) -> int | None:
    """Open a directory of the sandbox's own, and make it if it is missing. None: `path` is shown, or behind a link."""
    try:
        found = _opened(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    if found is None:
        outer = _own_directory(os.path.dirname(path))
        if outer is None:
            return None
        os.mkdir(os.path.basename(path), 0o755, dir_fd=outer)
        os.close(outer)
        return _own_directory(path)
    if os.fstat(found).st_dev == os.stat("/").st_dev:
        return found
    os.close(found)
    return None


def _opened(path: str) -> int | None:
    """Open a path in the sandbox without following links. None: the path does not exist."""
    fd: int = lib.sym_open_path(os.fsencode(f"/new{path}"))
    if fd < 0 and ffi.errno == errno.ENOENT:
        return None
    return done(fd, path)


def _link(path: str, target: str) -> None:
    """Make a symbolic link. If its directory is shown, or behind a link, the link exists already."""
    outer = _own_directory(os.path.dirname(path))
    if outer is not None:
        with suppress(FileExistsError):
            os.symlink(target, os.path.basename(path), dir_fd=outer)
        os.close(outer)


def _make_directory(path: str) -> None:
    with _place(path, is_directory=True):
        pass


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)
    Path(f"/new{path}").write_text(text, encoding="ascii")


def _hide(path: str) -> None:
    """Cover a path that programs may not see, although its directory is shown."""
    place = f"/new{path}"
    if os.path.isdir(place):
        Path("/own/nothing").mkdir(mode=0o755, exist_ok=True)
        mount("/own/nothing", place, None, lib.MS_BIND)
        _restrict(place, read_only=True, no_devices=True)
    elif os.path.lexists(place):
        mount("/old/dev/null", place, None, lib.MS_BIND)
        _restrict(place, read_only=True, no_devices=False)


def mount_kv(path: str) -> bytes:
    """Mount KV in the built root, if KV is mounted on the machine.
    Return a `struct sym_kv`, with which the first process mounts KV again later.
    """
    kv = ffi.new("struct sym_kv *")
    kv.outside, kv.inside = os.fsencode(f"/old{path}"), os.fsencode(f"/new{path}")
    kv.listed = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], os.fsencode(f"/old{path}"))
    with step(f"{path} can't be shown"):
        kv.device = _device_of(bytes(ffi.string(kv.listed)))
        if kv.device[0] != b"\0":
            mount(f"/old{path}", f"/new{path}", None, lib.MS_BIND)
            _restrict(f"/new{path}", read_only=False, no_devices=True)
    return bytes(ffi.buffer(kv))


def _device_of(listed: bytes) -> bytes:
    """Return the device of the topmost mount at a path, from the kernel's list. b"": there is no mount."""
    with open("/old/proc/self/mountinfo", "rb") as file:
        fields = [line.split() for line in file]
    devices = [each[2] for each in fields if each[4] == listed]
    return devices[-1] if devices else b""
