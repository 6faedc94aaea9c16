"""The composition root: the one place where the rooms of the house meet."""

from __future__ import annotations

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

from decoder.facts import Facts
from decoder.model import Model, load_model
from decoder.weights import Weights
from kvfs.accounts import Accounts, Limits
from kvfs.control import ControlTree
from kvfs.fs import FileSystem
from kvfs.mount import serve_mount
from kvfs.pages import PagePool
from libsym.errors import NoAccess, SymError
from libsym.paths import make_socket_directory
from scheduler.batch import BatchScheduler
from scheduler.control import Control
from scheduler.gate import Gate
from scheduler.listener import Listener, bind
from symphony.backends import Backend, build_backend
from symphony.config import Config
from symphony.text import LoadedText

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""How long a busy thread may hold up the trio thread: a stat takes 0.3 ms beside one, and 5 ms at the default."""


@dataclass(frozen=True, slots=True)
class House:
    """Everything a daemon consists of, wired."""

    config: Config
    model: Model
    backend: Backend
    fs: FileSystem
    batches: BatchScheduler
    gate: Gate
    listener: Listener
    control: ControlTree


def build(config: Config) -> House:
    """Load the model and wire the rooms. Nothing is visible to others yet."""
    model = load_model(config.model)
    backend = build_backend(config, model)
    arena = backend.arena
    model = dataclasses.replace(model, weights=Weights({}))  # packed: the checkpoint's mapping can go
    accounts = Accounts(
        arena.num_pages,
        arena.page_bytes,
        Limits(config.quota, config.quota_files),
        exempt=frozenset({0, os.geteuid()}),
    )
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
    listener = Listener(gate, model.config.vocab_size)
    control = ControlTree(fs, Control(fs, batches, gate, lambda: listener.lips, text))
    house = House(config, model, backend, fs, batches, gate, listener, control)
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
    # Open to the very end: an impatient second Ctrl-C must not cut the unmounting short.
    with (
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        _lock(config.state),
        _listening_socket(config.socket) as listening,
    ):
        house = await trio.to_thread.run_sync(build, config)
        try:
            async with _mounted(house), trio.open_nursery() as nursery:
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
    """A program costs four descriptors; the usual soft limit of 1,024 is for programs that use select(2)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    except PermissionError as error:
        raise NoAccess(f"can't use the state directory {state}: {error.strerror}; choose another --state") from None
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


@contextmanager
def _listening_socket(path: Path) -> Iterator[trio.socket.SocketType]:
    try:
        make_socket_directory(path)
        listening: socket.socket = bind(path)
    except PermissionError as error:
        raise NoAccess(f"can't listen on {path}: {error.strerror}; choose another --socket") from None
    identity = path.stat().st_ino
    try:
        with trio.socket.from_stdlib_socket(listening) as wrapped:
            yield wrapped
    finally:
        if path.exists() and path.stat().st_ino == identity:
            path.unlink()
