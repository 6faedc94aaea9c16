"""Mounts a KV file system, serves it, and unmounts it, so that no stale mount stays behind.

The trio thread must never touch the daemon's own mount: the daemon would wait for itself. So paths are checked before
mounting, in a worker.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import trio

from kvfs.control.directory import ControlTree
from kvfs.fs import FileSystem
from kvfs.mount import shim
from kvfs.mount.bindings import bind
from kvfs.mount.control_handlers import ControlHandlers
from kvfs.mount.eager import Eager
from kvfs.mount.grants import Grants
from kvfs.mount.handlers import FileHandlers
from kvfs.mount.pace import Pace
from kvfs.mount.requests import Requests
from kvfs.mount.shim import pyfuse3
from kvfs.mount.waiting_changes import Exclusive, WaitingChanges, at_once
from kvfs.mount.wire import Answers
from kvfs.names.tree import Tree
from libsym.errors import Busy, NoAccess, NotConnected, NotDirectory, NotEmpty, NotFound, NotPermitted, SymError

log = logging.getLogger(__name__)

READ_AHEAD_KB = 512

_MOUNTS = Path("/proc/self/mountinfo")
_STATUS = Path("/proc/self/status")
_CAP_SYS_ADMIN = 21
_FUSE_CONF = Path("/etc/fuse.conf")
_FUSE_DEVICE = Path("/dev/fuse")


class Mounter(Protocol):
    """Protocol of a helper that mounts for a daemon that may not mount by itself. Each call may block for a moment. No
    call touches the mount.
    """

    def mount(self, where: Path, source: str) -> int:
        """Mount at `where` for all users. Return the descriptor of /dev/fuse, which the session owns from now on.

        `source`: the mount's name in lists of mounts.
        """

    def agreed(self) -> None:
        """Note that the kernel has asked for the session's features (FUSE_INIT)."""

    def unmount(self) -> None:
        """Unmount, and return when the mount is gone. Open files stay open."""


async def serve_mount(
    fs: FileSystem,
    mountpoint: Path,
    *,
    allow_other: bool,
    name: str = "",
    mounter: Mounter | None = None,
    is_busy: Callable[[], bool] = lambda: False,
    catch_up: Callable[[], None] = lambda: None,
    exclusive: Exclusive = at_once,
    control: ControlTree | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Mount `fs`, report the mount, serve requests until cancelled, and unmount. A process has at most one mount.

    `control`: the control files to show in `.symphony`; None: the mount has no control files. `allow_other`: every user
    may use the mount, within the permission bits. Otherwise only the daemon's own user may use the mount, and even root
    may not. `name`: distinguishes this mount from others in `df` and `findmnt`. `mounter`: mounts for this process, and
    checks the mount point. `is_busy`: returns whether the model is computing. While the model computes, requests for
    names and attributes get a bounded share of the time. `catch_up`: called before a request is answered, so that files
    show all entries computed so far. `exclusive`: runs a change of a KV file when no call appends to the file.
    """
    where = await trio.to_thread.run_sync(_make_ready, mountpoint, allow_other, mounter)
    aliases = await trio.to_thread.run_sync(_aliases, mountpoint, where)
    eager = Eager()
    requests = Requests(eager, Pace(is_busy), catch_up, lambda uid: fs.pool.accounts.of(uid).holdings)
    answers = Answers(shim.out, shim.send)
    changes = WaitingChanges(eager, exclusive)
    grants = Grants(fs.volume.tree, shim.withdraw)
    files = FileHandlers(fs.volume, answers, eager, changes, lambda: requests.caller, grants)
    controls = None if control is None else ControlHandlers(control, fs.volume, answers, eager, files, changes)
    bind(requests, files, controls)
    agreed = trio.Event()
    await _mount(where, _source(name), agreed, mounter, allow_other=allow_other)
    try:
        shim.verify()
        fs.mountpoint = where
        fs.alias_mountpoint(*aliases)
        log.info("mounted at %s", where)
        task_status.started()
        await requests.serve(functools.partial(_loop, fs.volume.tree, grants, where, agreed, mounter))
    finally:
        fs.mountpoint = None
        fs.alias_mountpoint()
        _unmount(where, files, control, mounter)
    raise NotConnected(f"{where} was unmounted by somebody else; restart to mount it again")


async def _tell_of_lost(tree: Tree) -> None:
    """Have the kernel forget removed names, in an endless loop. The account of a removed file pays for the file until
    the kernel has forgotten the removed name.

    A thread makes the calls, because each call waits for the kernel's lock of the directory. A request that waits for
    the daemon may hold that lock. For the same reason, a cancelled task does not wait for its thread.
    """
    while True:
        await tree.bell.wait()
        names, tree.lost = tree.lost, []
        await trio.to_thread.run_sync(_forget, names, abandon_on_cancel=True)


def _forget(names: list[tuple[int, bytes]]) -> None:
    for directory, name in names:
        try:
            pyfuse3.invalidate_entry(pyfuse3.InodeT(directory), pyfuse3.FileNameT(name))
        except FileNotFoundError:
            pass  # the kernel has forgotten the name already
        except OSError as error:
            trio.from_thread.check_cancelled()  # a mount that is gone has no names
            log.warning("the kernel keeps the removed name %r in directory %d: %s", name, directory, error)
        trio.from_thread.check_cancelled()


def _source(name: str) -> str:
    """Return the mount's name for lists of mounts, without characters that are special in these lists or in options."""
    return "symphony:" + re.sub(r"[^!-~]|[,\\]", "_", name) if name else "symphony"


class _Settings(pyfuse3.Operations):
    """Settings of the mount. pyfuse3 calls none of its handlers except `init`."""

    supports_dot_lookup = True
    enable_writeback_cache = False  # calls of programs read the files, so bytes must not wait in the kernel

    def __init__(self, agreed: trio.Event) -> None:
        self._agreed = agreed

    def init(self) -> None:
        self._agreed.set()


async def _mount(where: Path, source: str, agreed: trio.Event, mounter: Mounter | None, *, allow_other: bool) -> None:
    """Mount. `agreed` is set when the kernel has asked for the session's features (FUSE_INIT)."""
    options = {"default_permissions", f"fsname={source}", "subtype=kv"}
    if allow_other:
        options.add("allow_other")
    shim.forget_session()
    # The session owns the descriptor and closes it. libfuse accepts a descriptor in place of a path, and then mounts
    # nothing.
    place = where if mounter is None else f"/dev/fd/{await trio.to_thread.run_sync(mounter.mount, where, source)}"
    try:
        pyfuse3.init(_Settings(agreed), str(place), options)
    except RuntimeError as error:
        if mounter is not None:
            mounter.unmount()
        raise SymError(f"can't mount at {where}: {error}; the line before this one says why") from error


def _read_ahead(where: Path) -> None:
    """Raise the kernel's read-ahead above FUSE's 128 KiB, which makes reads of images a quarter faster.

    This works only for root, and a failure is harmless. The device of the mount is found without touching the mount.
    """
    mounts = [line.split(b" ") for line in _MOUNTS.read_bytes().splitlines()]
    name = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % ord(found[0]), os.fsencode(where))
    devices = [os.fsdecode(fields[2]) for fields in mounts if fields[4] == name]
    try:
        Path(f"/sys/class/bdi/{devices[-1]}/read_ahead_kb").write_text(str(READ_AHEAD_KB), encoding="ascii")
    except (OSError, IndexError) as error:
        log.debug("read-ahead stays as it is: %s", error)


async def _loop(tree: Tree, grants: Grants, where: Path, agreed: trio.Event, mounter: Mounter | None) -> None:
    """Receive requests until the file system is unmounted. One task is enough, because requests never wait in it."""

    async def when_agreed() -> None:
        await agreed.wait()  # earlier, the kernel would overwrite the read-ahead when it gets the answer to FUSE_INIT
        if mounter is None:
            _read_ahead(where)
        else:
            mounter.agreed()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(when_agreed)
        nursery.start_soon(_tell_of_lost, tree)
        nursery.start_soon(grants.repeat)
        await pyfuse3.main(max_tasks=1)
        nursery.cancel_scope.cancel()


def _unmount(where: Path, files: FileHandlers, control: ControlTree | None, mounter: Mounter | None) -> None:
    if files.num_handles:
        log.warning(
            "unmounting %s with %d files and directories open: their users get errors", where, files.num_handles
        )
    if mounter is not None:
        mounter.unmount()
    shim.forget_session()
    pyfuse3.close(unmount=True)  # lazy: succeeds with files open
    if control is not None:
        control.close()
    files.dispose()
    log.info("unmounted %s", where)


def _make_ready(mountpoint: Path, allow_other: bool, mounter: Mounter | None) -> Path:
    """Ensure that the mount point is an empty directory where a mount is possible. Return its real path."""
    where = Path(os.path.realpath(mountpoint))  # Path.resolve fails on a stale mount
    if mounter is not None:
        return where
    _require_fuse(allow_other=allow_other)
    try:
        where.stat()
    except FileNotFoundError:
        _make_directory(where)
    except OSError as error:
        if error.errno not in {errno.ENOTCONN, errno.ECONNABORTED}:
            raise SymError(f"can't mount at {where}: {error.strerror}", error.errno) from error
        _clear_stale(where)
    if not where.is_dir():
        raise NotDirectory(f"can't mount at {where}: it is not a directory")
    if os.path.ismount(where):
        raise Busy(f"can't mount at {where}: something is mounted there; is another daemon running? (umount {where})")
    try:
        if next(where.iterdir(), None) is not None:
            raise NotEmpty(f"can't mount at {where}: the directory is not empty; choose an empty or a new one")
        if not os.access(where, os.W_OK):
            raise NoAccess(f"can't mount at {where}: it belongs to somebody else; choose a directory of your own")
    except PermissionError:
        raise NoAccess(f"can't mount at {where}: it can't be read; choose a directory of your own") from None
    return where


def _aliases(mountpoint: Path, where: Path) -> list[Path]:
    """Return other paths of the mount point: the given path, with and without `..`. Users may write paths that contain
    a link.
    """
    given = {mountpoint.absolute(), Path(os.path.abspath(mountpoint))} - {where}  # noqa: PTH100 - keeps no `..`
    return [path for path in given if Path(os.path.realpath(path)) == where]


def _require_fuse(*, allow_other: bool) -> None:
    if not _FUSE_DEVICE.exists():
        raise NotFound(
            f"there is no {_FUSE_DEVICE}: load the module (modprobe fuse), or give it to the container "
            f"(--device {_FUSE_DEVICE})"
        )
    if not os.access(_FUSE_DEVICE, os.R_OK | os.W_OK):
        raise NoAccess(f"{_FUSE_DEVICE} may not be opened by uid {os.getuid()}: chmod 0666 {_FUSE_DEVICE}")
    if shutil.which("fusermount3") is None:
        raise NotFound("there is no fusermount3: install the package fuse3")
    if os.geteuid() == 0 and not _may_mount():
        raise NotPermitted("root may not mount here: give the container the capability (--cap-add SYS_ADMIN)")
    if allow_other and os.geteuid() != 0 and not _user_allow_other():
        raise NotPermitted(f"allow_other needs root, or a line user_allow_other in {_FUSE_CONF}")


def _may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN. Root in a container may lack it."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found, f"{_STATUS} names no capabilities"
    return bool(int(found[1], 16) >> _CAP_SYS_ADMIN & 1)


def _user_allow_other() -> bool:
    try:
        lines = _FUSE_CONF.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def _make_directory(where: Path) -> None:
    try:
        where.mkdir(mode=0o755)
    except OSError as error:
        raise SymError(f"can't make the mount point {where}: {error.strerror}", error.errno) from error


def _clear_stale(where: Path) -> None:
    """Unmount the mount that a killed daemon left behind."""
    log.warning("%s is the mount of a daemon that is gone: unmounting it", where)
    done = subprocess.run(["fusermount3", "-uz", str(where)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Busy(f"can't unmount the stale mount at {where}: {done.stderr.strip()}")
