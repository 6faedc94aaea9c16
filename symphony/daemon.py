"""The composition root: the one place where the rooms of the house meet."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import trio

from decoder.checkpoints.weights import Weights
from decoder.image_facts import Facts
from decoder.model import Model, load_model
from kvfs.control.directory import ControlTree
from kvfs.durable.journal import Journal
from kvfs.durable.keeper import Keeper
from kvfs.durable.state import State
from kvfs.durable.state_lock import locked_by_daemon
from kvfs.fs import FileSystem
from kvfs.mount.session import serve_mount
from kvfs.names.disk import Disk
from kvfs.pages.accounts import Accounts, Limits
from kvfs.pages.pool import PagePool
from libsym.channel.socket_path import make_socket_directory, programs_socket
from libsym.errors import SymError
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.cost_model import CostModel
from scheduler.gate import Gate
from scheduler.launchers import Launchers
from scheduler.listener import Listener, bind, clear_way
from scheduler.programs.admission import Admission
from scheduler.programs.registry import Programs
from scheduler.programs.watch import ProgramWatch
from scheduler.status.facts import Control
from scheduler.status.held import HeldTimes
from symphony.backends import Backend, build_backend
from symphony.config import Config
from symphony.ending import Ending
from symphony.model_text import LoadedText
from symphony.weights_loading import WeightsLoading

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
    weights: WeightsLoading
    fs: FileSystem
    keeper: Keeper
    batches: BatchScheduler
    programs: Programs
    watch: ProgramWatch
    listener: Listener
    launchers: Launchers
    control: ControlTree
    held: HeldTimes


def build(config: Config) -> House:
    """Wire the rooms, with all of the model but its weights. Nothing is visible to others yet."""
    model = load_model(config.model)
    backend = build_backend(config, model)
    arena = backend.arena
    weights = WeightsLoading(backend, model.weights)  # which has them alone
    model = dataclasses.replace(model, weights=Weights({}))
    exempt = frozenset({0, os.geteuid()})
    facts = Facts(model, arena, config.precision)
    state = State(config.state)
    kept = state.load()
    restored = kept.num_slots(state.identity_of(facts, kept))
    limits = Limits(config.quota, config.quota_files)
    accounts = Accounts(arena.num_pages + sum(restored), arena.page_bytes, limits, exempt=exempt, weights=config.weight)
    journal = Journal()
    fs = FileSystem(
        PagePool(arena, accounts, *restored),
        facts,
        backing_dir=state.files,
        uid=os.geteuid(),
        gid=os.getegid(),
        disk=Disk(deadline_s=config.disk_timeout),
        changes=journal,
        bits=backend.bits,
        same_bits=config.same_bits,
    )
    keeper = Keeper(state, kept, fs.volume, journal, config.disk_timeout, config.disk)
    batches = BatchScheduler(
        fs,
        None,
        model.config.max_positions,
        model.config.vocab_size,
        limits=replace(backend.limits, step_s=config.step_ms * 1e-3),
        expect=backend.expect,
        max_entries=backend.max_entries,
        cost=CostModel(backend.description, config.precision, state.directory / "costs.json", model=model.name),
    )
    programs = Programs(Admission(config.programs, config.starts), state.directory / "programs.json")
    programs.when_gone = batches.forget
    watch = ProgramWatch(programs, batches.sync, batches.stop)
    text = LoadedText(model, arena, backend.description, str(config.mount))
    began_s = time.monotonic()
    gate = Gate(fs, batches, text, programs, lambda: daemon_info(house, time.monotonic() - began_s))
    listener = Listener(gate, model.config.vocab_size, exempt)
    hidden = [config.state, config.socket, programs_socket(config.socket)]
    for_sandboxes = {"mount": str(config.mount.absolute()), "hidden": [str(path.absolute()) for path in hidden]}
    launchers = Launchers(programs, listener.adopt, exempt, for_sandboxes)
    held = HeldTimes()
    control = ControlTree(fs, Control(fs, batches, gate, programs, text, held))
    house = House(
        config, model, backend, weights, fs, keeper, batches, programs, watch, listener, launchers, control, held
    )
    return house


def daemon_info(house: House, uptime_s: float) -> dict[str, Any]:
    """What `symphony stat` and `sym.daemon_stat()` show."""
    steps = house.batches.statistics
    return {
        "pid": os.getpid(),
        "uptime_s": round(uptime_s, 3),
        "model": house.model.name,
        "precision": house.config.precision,
        **house.weights.info(),
        "mount": str(house.config.mount),
        "socket": str(house.config.socket),
        "lips": len(house.listener.lips),
        "programs": len(house.programs),
        "programs_refused": house.programs.admission.num_refused,
        "launchers": house.launchers.num_connected,
        "waiting_calls": house.batches.num_waiting,
        **asdict(house.fs.statfs()),
        **asdict(steps),
        "cost_model": {
            kind: {"median_error": round(error, 4), "steps": count}
            for kind, (error, count) in house.batches.cost.errors().items()
        },
        **house.backend.statistics(),
        "held": house.held.info(),
        "disk": asdict(house.keeper.statistics()),
    }


async def serve(config: Config) -> None:
    """Run a daemon until SIGINT or SIGTERM; then unmount and leave nothing behind. SymError: not everything is kept."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _allow_many_descriptors()
    give_back_freed_memory()
    ending = Ending(config.drain, config.mount)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, locked_by_daemon(config.state):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ending.watch, signals)
            await _serve_until(ending, config)
            nursery.cancel_scope.cancel()
    ending.over()
    if ending.not_kept:
        raise SymError(f"{len(ending.not_kept)} of the files are not on disk as they were: the log names them")


async def _serve_until(ending: Ending, config: Config) -> None:
    _prepare_socket(config.socket)
    with _nothing_is_garbage():
        house = await ending.unless_begun(lambda: build(config))
    house.held.install()
    try:
        # Whoever sees the socket, a script that waits for it, finds the mount: it is there first, and goes last.
        async with _kept(house, ending), _mounted(house):
            with (
                _listening_socket(programs_socket(config.socket), socket.SOCK_SEQPACKET) as for_launchers,
                _listening_socket(config.socket) as listening,
            ):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(house.batches.run)
                    nursery.start_soon(house.fs.volume.alarms.run)
                    nursery.start_soon(house.listener.run, listening)
                    nursery.start_soon(house.watch.run)
                    nursery.start_soon(house.launchers.run, for_launchers)
                    print(f"symphony: {house.model.name} on {config.mount}, socket {config.socket}", flush=True)
                    nursery.start_soon(house.weights.run, house.batches)
                    await ending.begun.wait()
                    nursery.cancel_scope.cancel()
    finally:
        house.keeper.close()
        house.weights.close()
        with trio.move_on_after(ending.left_s):
            await house.batches.close()
            await house.watch.close()
            await house.listener.close()


def _allow_many_descriptors() -> None:
    """A program costs four descriptors, two more while it connects; each open plain file on the mount costs one.

    The usual soft limit of 1,024 is for programs that use select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """What is made meanwhile stays. The garbage collector does not look at it now (with 100,000 files it takes 1.5 s of
    a start, and finds nothing), nor ever after, on the trio thread.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
async def _kept(house: House, ending: Ending) -> AsyncIterator[None]:
    """What changes is written back; at the end everything is, for a restart is to lose nothing."""
    async with trio.open_nursery() as nursery:
        await nursery.start(house.keeper.run)
        try:
            yield
        finally:
            ending.begin()  # also where it is an error that ends the daemon
            with trio.CancelScope(shield=True):
                ending.not_kept = await house.keeper.drain(ending.left_s)
                if not await house.keeper.is_at_rest(ending.left_s):
                    ending.leave(1 if ending.not_kept else 0)
            nursery.cancel_scope.cancel()


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
                exclusive=house.batches.exclusive,
                task_status=task_status,
            )
        )
        yield
        nursery.cancel_scope.cancel()


def _prepare_socket(path: Path) -> None:
    """See to it that a socket can be made there, before a model is loaded in vain."""
    with _may_listen(path):
        make_socket_directory(path)
        clear_way(path)
        clear_way(programs_socket(path), socket.SOCK_SEQPACKET)
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
def _listening_socket(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> Iterator[trio.socket.SocketType]:
    with _may_listen(path):
        listening: socket.socket = bind(path, kind)
    identity = path.stat().st_ino
    try:
        with trio.socket.from_stdlib_socket(listening) as wrapped:
            yield wrapped
    finally:
        if path.exists() and path.stat().st_ino == identity:
            path.unlink()
