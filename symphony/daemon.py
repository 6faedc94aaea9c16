"""The composition root: the one place where the rooms of the house meet."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trio

from decoder.checkpoints.weights import Weights
from decoder.image_facts import Facts
from decoder.model import Model, load_model
from kvfs.control.directory import ControlTree
from kvfs.fs import FileSystem
from kvfs.mount.session import serve_mount
from kvfs.pages.accounts import Accounts, Limits
from kvfs.pages.pool import PagePool
from libsym.channel.socket_path import make_socket_directory
from libsym.errors import SymError
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.gate import Gate
from scheduler.listener import Listener, bind, clear_way
from scheduler.status.facts import Control
from symphony.backends import Backend, build_backend
from symphony.config import Config
from symphony.model_text import LoadedText

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""How long a busy thread may hold up the trio thread: a stat takes 0.3 ms beside one, and 5 ms at the default."""

FREED_BLOCK_BYTES = 128 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # in malloc.h


@dataclass(frozen=True, slots=True)
class House:
    """Everything a daemon consists of, wired."""

    config: Config
    model: Model
    backend: Backend
    fs: FileSystem
    batches: BatchScheduler
    listener: Listener
    control: ControlTree


def build(config: Config) -> House:
    """Load the model and wire the rooms. Nothing is visible to others yet."""
    model = load_model(config.model)
    backend = build_backend(config, model)
    arena = backend.arena
    model = dataclasses.replace(model, weights=Weights({}))  # packed: the checkpoint's mapping can go
    exempt = frozenset({0, os.geteuid()})
    accounts = Accounts(arena.num_pages, arena.page_bytes, Limits(config.quota, config.quota_files), exempt=exempt)
    fs = FileSystem(
        PagePool(arena, accounts),
        Facts(model, arena, config.precision),
        backing_dir=config.state / "files",
        uid=os.geteuid(),
        gid=os.getegid(),
    )
    batches = BatchScheduler(
        fs,
        backend.decoder,
        model.config.max_positions,
        model.config.vocab_size,
        limits=backend.limits,
        native=backend.native,
        expect=backend.expect,
        max_entries=backend.max_entries,
    )
    text = LoadedText(model, arena, backend.description, str(config.mount))
    began_s = time.monotonic()
    gate = Gate(fs, batches, text, lambda: daemon_info(house, time.monotonic() - began_s))
    listener = Listener(gate, model.config.vocab_size, exempt)
    control = ControlTree(fs, Control(fs, batches, gate, lambda: listener.lips, text))
    house = House(config, model, backend, fs, batches, listener, control)
    return house


def daemon_info(house: House, uptime_s: float) -> dict[str, Any]:
    """What `symphony stat` and `sym.daemon_stat()` show."""
    steps = house.batches.statistics
    return {
        "pid": os.getpid(),
        "uptime_s": round(uptime_s, 3),
        "model": house.model.name,
        "precision": house.config.precision,
        "mount": str(house.config.mount),
        "socket": str(house.config.socket),
        "lips": len(house.listener.lips),
        "waiting_calls": house.batches.num_waiting,
        **asdict(house.fs.statfs()),
        **asdict(steps),
        **house.backend.statistics(),
    }


async def serve(config: Config) -> None:
    """Run a daemon until SIGINT or SIGTERM; then unmount and leave nothing behind."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _allow_many_descriptors()
    give_back_freed_memory()
    # Open to the very end: an impatient second Ctrl-C must not cut the unmounting short.
    with (
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        _lock(config.state),
    ):
        _prepare_socket(config.socket)
        house = await trio.to_thread.run_sync(build, config)
        try:
            # Whoever sees the socket, a script that waits for it, finds the mount: it is there first, and goes last.
            async with _mounted(house):
                with _listening_socket(config.socket) as listening:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(house.batches.run)
                        nursery.start_soon(house.fs.volume.alarms.run)
                        nursery.start_soon(house.listener.run, listening)
                        print(f"symphony: {house.model.name} on {config.mount}, socket {config.socket}", flush=True)
                        number = await anext(signals)
                        log.info("%s: closing", signal.Signals(number).name)
                        nursery.cancel_scope.cancel()
        finally:
            house.fs.close()
            house.backend.decoder.close()


def _allow_many_descriptors() -> None:
    """A program costs four descriptors, two more while it connects; each open plain file on the mount costs one.

    The usual soft limit of 1,024 is for programs that use select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_back_freed_memory() -> None:
    """Have malloc map blocks from 128 KiB on by themselves, and return what is free at the end of the heap.

    glibc begins like that, but raises both limits, up to 32 MiB, with every large block that is freed: a thousand
    requests of 1 MiB, answered long ago, stayed resident below whatever came after them. Other C libraries that have no
    such limits are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for limit in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(limit, FREED_BLOCK_BYTES)


@asynccontextmanager
async def _mounted(house: House) -> AsyncIterator[None]:
    allow_other = house.config.allow_other
    if allow_other is None:
        allow_other = os.geteuid() == 0
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve_mount(
                house.fs,
                house.config.mount,
                allow_other=allow_other,
                control=house.control,
                is_busy=lambda: house.batches.is_stepping,
                catch_up=house.batches.sync,
                task_status=task_status,
            )
        )
        yield
        nursery.cancel_scope.cancel()


@contextmanager
def _lock(state: Path) -> Iterator[None]:
    """One daemon a state directory."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"can't use the state directory {state}: {error.strerror}; choose another --state"
        raise SymError(message, error.errno) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SymError(
                f"another daemon uses the state directory {state}: stop it, or choose another --state", errno.EBUSY
            ) from None
        yield
    finally:
        os.close(descriptor)


def _prepare_socket(path: Path) -> None:
    """See to it that a socket can be made there, before a model is loaded in vain."""
    with _may_listen(path):
        make_socket_directory(path)
        clear_way(path)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _may_listen(path: Path) -> Iterator[None]:
    try:
        yield
    except SymError:
        raise
    except OSError as error:  # Python has no errno for a path that is too long for a socket
        why = error.strerror or str(error)
        raise SymError(f"can't listen on {path}: {why}; choose another --socket", error.errno) from None


@contextmanager
def _listening_socket(path: Path) -> Iterator[trio.socket.SocketType]:
    with _may_listen(path):
        listening: socket.socket = bind(path)
    identity = path.stat().st_ino
    try:
        with trio.socket.from_stdlib_socket(listening) as wrapped:
            yield wrapped
    finally:
        if path.exists() and path.stat().st_ino == identity:
            path.unlink()
