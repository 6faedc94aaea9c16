"""Mounts a KV file system, serves it, and unmounts it: whatever happens, nothing stale is left behind.

The daemon must never touch its own mount from the trio thread: it would wait for itself. What is looked at here, is
looked at before mounting, in a worker.
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
from kvfs.mount.handlers import FileHandlers
from kvfs.mount.pace import Pace
from kvfs.mount.requests import Requests
from kvfs.mount.shim import pyfuse3
from kvfs.mount.turns import Exclusive, Turns, at_once
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
    """Mounts for a daemon that may not. Each call may block for a moment, and none touches the mount."""

    def mount(self, where: Path, source: str) -> int:
        """Mount there, for all users; the descriptor of /dev/fuse, which is the session's from now on.

        `source`: what lists of mounts call it.
        """

    def agreed(self) -> None:
        """The kernel has asked what we can do."""

    def unmount(self) -> None:
        """Returns when it is no more there; what is open stays open."""


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
    """Mount `fs`, report that it is, serve until cancelled, unmount. One mount a process at a time.

    `control`: what its `.symphony` holds; without it there is none.
    `allow_other`: every user may enter, and modes decide; without it only the daemon's own user may, not even root.
    `name`: tells this mount from others in `df` and `findmnt`.
    `mounter`: mounts in place of this process, and then looks after the mount point, too.
    `is_busy`: whether the model is computing; names and attributes then get a bounded share of the time.
    `catch_up`: called before a request is answered, so that files show what was computed until then.
    `exclusive`: has a KV file changed when no call appends to it.
    """
    where = await trio.to_thread.run_sync(_make_ready, mountpoint, allow_other, mounter)
    aliases = await trio.to_thread.run_sync(_aliases, mountpoint, where)
    eager = Eager()
    requests = Requests(eager, Pace(is_busy), catch_up, lambda uid: fs.pool.accounts.of(uid).holdings)
    answers = Answers(shim.out, shim.send)
    turns = Turns(eager, exclusive)
    files = FileHandlers(fs.volume, answers, eager, turns, lambda: requests.caller)
    controls = None if control is None else ControlHandlers(control, fs.volume, answers, eager, files, turns)
    bind(requests, files, controls)
    agreed = trio.Event()
    await _mount(where, _source(name), agreed, mounter, allow_other=allow_other)
    try:
        shim.verify()
        fs.mountpoint = where
        fs.alias_mountpoint(*aliases)
        log.info("mounted at %s", where)
        task_status.started()
        await requests.serve(functools.partial(_loop, fs.volume.tree, where, agreed, mounter))
    finally:
        fs.mountpoint = None
        fs.alias_mountpoint()
        _unmount(where, files, control, mounter)
    raise NotConnected(f"{where} was unmounted by somebody else; restart to mount it again")


async def _tell_of_lost(tree: Tree) -> None:
    """For ever: have the kernel forget names that were removed, for their owners pay until it does.

    In pyfuse3's thread for that: the kernel locks the directory meanwhile, and requests of ours may hold it.
    """
    while True:
        await tree.bell.wait()
        for directory, name in tree.lost:
            pyfuse3.invalidate_entry_async(pyfuse3.InodeT(directory), pyfuse3.FileNameT(name), ignore_enoent=True)
        tree.lost.clear()


def _source(name: str) -> str:
    """The mount's name in lists of mounts, without characters that mean something there or in options."""
    return "symphony:" + re.sub(r"[^!-~]|[,\\]", "_", name) if name else "symphony"


class _Settings(pyfuse3.Operations):
    """Settings of the mount: handlers are never called, but for `init`."""

    supports_dot_lookup = True
    enable_writeback_cache = False  # LIPs read and change the same files: bytes must not wait in the kernel

    def __init__(self, agreed: trio.Event) -> None:
        self._agreed = agreed

    def init(self) -> None:
        self._agreed.set()


async def _mount(where: Path, source: str, agreed: trio.Event, mounter: Mounter | None, *, allow_other: bool) -> None:
    """Mount; `agreed` is set when the kernel has asked what we can do."""
    options = {"default_permissions", f"fsname={source}", "subtype=kv"}
    if allow_other:
        options.add("allow_other")
    shim.expect_session()
    # The descriptor is the session's, which closes it: libfuse takes one in place of a path, and mounts nothing then.
    place = where if mounter is None else f"/dev/fd/{await trio.to_thread.run_sync(mounter.mount, where, source)}"
    try:
        pyfuse3.init(_Settings(agreed), str(place), options)
    except RuntimeError as error:
        if mounter is not None:
            mounter.unmount()
        raise SymError(f"can't mount at {where}: {error}; the line before this one says why") from error


def _read_ahead(where: Path) -> None:
    """Let the kernel read images in pieces larger than the 128 KiB that it offers to FUSE: a quarter faster.

    Needs root, and no more than a wish. The mount's own device is looked up where that does not touch the mount.
    """
    mounts = [line.split(b" ") for line in _MOUNTS.read_bytes().splitlines()]
    name = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % ord(found[0]), os.fsencode(where))
    devices = [os.fsdecode(fields[2]) for fields in mounts if fields[4] == name]
    try:
        Path(f"/sys/class/bdi/{devices[-1]}/read_ahead_kb").write_text(str(READ_AHEAD_KB), encoding="ascii")
    except (OSError, IndexError) as error:
        log.debug("read-ahead stays as it is: %s", error)


async def _loop(tree: Tree, where: Path, agreed: trio.Event, mounter: Mounter | None) -> None:
    """Receive requests until the file system is unmounted. One task is enough: none of them waits in it."""

    async def when_agreed() -> None:
        await agreed.wait()  # the kernel sets its own figure when it gets our answer
        if mounter is None:
            _read_ahead(where)
        else:
            mounter.agreed()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(when_agreed)
        nursery.start_soon(_tell_of_lost, tree)
        await pyfuse3.main(max_tasks=1)
        nursery.cancel_scope.cancel()


def _unmount(where: Path, files: FileHandlers, control: ControlTree | None, mounter: Mounter | None) -> None:
    if files.num_handles:
        log.warning(
            "unmounting %s with %d files and directories open: their users get errors", where, files.num_handles
        )
    if mounter is not None:
        mounter.unmount()
    pyfuse3.close(unmount=True)  # lazy: succeeds with files open
    if control is not None:
        control.close()
    files.dispose()
    log.info("unmounted %s", where)


def _make_ready(mountpoint: Path, allow_other: bool, mounter: Mounter | None) -> Path:
    """See to it that there is an empty directory that may be mounted on, or say why it can't be; give its real path."""
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
    """The path as it was given, with and without `..`: if it leads through a link, people will write it like that."""
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
    """Whether this process has CAP_SYS_ADMIN, which root in a container may lack."""
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
    """Take away the mount of a daemon that was killed."""
    log.warning("%s is the mount of a daemon that is gone: unmounting it", where)
    done = subprocess.run(["fusermount3", "-uz", str(where)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Busy(f"can't unmount the stale mount at {where}: {done.stderr.strip()}")
