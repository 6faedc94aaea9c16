"""The composition root of the daemon: builds all of its parts, wires them, and runs them."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import trio

from decoder.memory import available_memory_bytes
from kvfs.control.directory import ControlTree
from kvfs.durable.journal import Journal
from kvfs.durable.keeper import Keeper
from kvfs.durable.slot_file import slot_bytes_of
from kvfs.durable.state import State
from kvfs.durable.state_lock import locked_by_daemon
from kvfs.durable.watched import WatchedJournal
from kvfs.fs import FileSystem
from kvfs.mount.session import serve_mount
from kvfs.names.disk import Disk
from kvfs.pages.accounts import AccountLimits, Accounts
from kvfs.pages.pool import PagePool, num_pages_of
from kvfs.pages.store import PageStore
from libsym.channel.socket_path import programs_socket
from libsym.errors import NotSupported, SymError
from scheduler.batch.accounting import TIME_BOUNDS_S
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.cost_model import CostModel
from scheduler.doors.gate import Gate
from scheduler.doors.launchers import Launchers
from scheduler.doors.listener import Listener
from scheduler.operations.models import Models
from scheduler.programs.admission import Admission
from scheduler.programs.registry import Programs
from scheduler.programs.watch import ProgramWatch
from scheduler.status.facts import Control
from scheduler.status.held import HeldTimes
from scheduler.status.metrics_port import MetricsPort
from scheduler.wire.peer_socket import Threads
from symphony.daemon.alone import Alone, peering_of
from symphony.daemon.ending import Ending
from symphony.daemon.logs import set_up_log
from symphony.daemon.models import DaemonModel, build_model
from symphony.daemon.reloading import Apply, Reloading, Source
from symphony.daemon.sockets import Sockets
from symphony.daemon.tier_policy import TierPolicy
from symphony.service.activation import activated
from symphony.service.mounting import HelpersMount
from symphony.service.notify import Notifier
from symphony.service.watchdog import feed_for_ever
from symphony.settings.config import NO_POLICY, Config
from symphony.views.reports import human_bytes

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""Longest time that a busy Python thread keeps the interpreter lock from the trio thread, in seconds.
Beside a busy thread, a stat takes 0.3 ms. With Python's default interval, a stat takes 5 ms.
"""

OWN_ROOT, SHARED_ROOT = 0o755, 0o1777
"""Modes of a new mount's root directory. OWN_ROOT: only the daemon's user may write there. SHARED_ROOT: all users
may, on a mount that other users can reach."""

LONG_COLLECTION_S = 0.02
"""Processor time above which a garbage collection counts as long: about the time for 20,000 objects or 5,000 files."""
MIDDLE_COLLECTIONS = 2
"""Collections of the middle generation per full collection. With Python's default, 10, a full collection took 85 ms."""

FREED_BLOCK_BYTES = 128 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


@dataclass(frozen=True, slots=True)
class House:
    """All parts of a daemon, wired to each other."""

    config: Config
    models: tuple[DaemonModel, ...]
    """The models that the daemon serves, in the order of their arenas. The first one is the default."""
    fs: FileSystem
    keeper: Keeper
    batches: BatchScheduler
    programs: Programs
    watch: ProgramWatch
    listener: Listener
    launchers: Launchers
    control: ControlTree
    metrics: MetricsPort
    peering: Alone
    publish: Callable[[], Awaitable[None]]
    """Publishes which pages are here, for ever. Without `fleet_events`, it does nothing."""
    held: HeldTimes
    helper: HelpersMount | None
    """The mount that the mount helper made. None: the daemon mounts by itself."""
    policy: TierPolicy
    reloading: Reloading

    def status(self) -> str:
        """Return a one-line status for the service manager."""
        return f"{self.model.name} on {self.config.mount}, weights {self.model.weights.info()['weights']}"

    @property
    def model(self) -> DaemonModel:
        """The default model."""
        return self.models[0]


USERS_PART = 4
"""Divisor of the memory that the daemon may take beside pages. The quotient is the default of --quota-memory."""
MAX_TIMES_MEMORY = 32
"""Default limit of KV on disk, as a multiple of the memory for pages. --disk overrides it."""


def build(config: Config, source: Source, ending: Ending, notifier: Notifier) -> House:
    """Build and wire all parts of the daemon, without the model's weights. Users see nothing of the daemon yet.

    The file system is built before the layers that it calls, so it gets lambdas that return these layers.
    """
    served, asked = build_model(config), config
    model, backend, facts = served.model, served.backend, served.facts
    config, arena = replace(config, precision=served.precision), backend.arena
    exempt = frozenset({0, os.geteuid()})
    state = State(config.state)
    kept = state.load()
    restored = kept.num_slots(state.identity_of(facts, kept))
    free_bytes = available_memory_bytes()
    own_bytes = max(free_bytes - arena.num_pages * arena.page_bytes, free_bytes // 2)
    limits = _limits_of_users(config, own_bytes)
    num_on_disk = _num_on_disk(config, arena, restored[0])
    num_pages = num_pages_of(arena.num_pages, restored[0], num_on_disk) + restored[1]
    accounts = Accounts(
        num_pages,
        arena.page_bytes,
        limits,
        exempt,
        config.weight,
        lambda account: batches.weigh(account),  # noqa: PLW0108 - `batches` is built later
    )
    journal = (Journal if config.fleet_events is None else WatchedJournal)(lambda: fs.volume.tree)
    fs = FileSystem(
        PagePool(arena, accounts, *restored, num_on_disk, lambda: keeper),
        facts,
        backing_dir=state.files,
        uid=os.geteuid(),
        gid=os.getegid(),
        disk=Disk(deadline_s=config.disk_timeout),
        changes=journal,
        bits=backend.bits,
        same_bits=config.same_bits,
        root_mode=SHARED_ROOT if config.open or config.mount_helper is not None else OWN_ROOT,
        engine=lambda: batches,
        pressure=lambda: gate.pressing,
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
    programs = Programs(Admission(config.programs, config.starts), state.directory / "programs.json", batches.forget)
    watch = ProgramWatch(programs, batches.sync, batches.stop)
    began_s = time.monotonic()
    peering = peering_of(config, fs, kept.uuid, batches)
    models = Models({served.name: served.text})
    gate = Gate(fs, batches, models, programs, lambda: daemon_info(house, time.monotonic() - began_s), peering.others)
    threads = Threads()
    listener = Listener(gate, model.config.vocab_size, exempt, threads)
    hidden = [config.state, config.socket, programs_socket(config.socket)]
    hidden += [path for path in (config.mount_helper, config.weights_cache) if path is not None]
    for_sandboxes = {"mount": str(config.mount.absolute()), "hidden": [str(path.absolute()) for path in hidden]}
    launchers = Launchers(programs, listener.adopt, exempt, for_sandboxes, threads, batches.sync)
    held = HeldTimes()
    shown = Control(fs, batches, gate, programs, served.text, held, peering.metrics)
    helper = None if config.mount_helper is None else HelpersMount(config.mount_helper)
    policy = TierPolicy(fs.volume.pager.departures, config.policy)
    changes = _changes(fs, keeper, batches, programs, ending, own_bytes)
    changes |= _changes_of_tiers(fs, gate)
    for key in ("grace_ms", "pin_share"):
        changes[key](config)
    house = House(
        config=config,
        models=(served,),
        fs=fs,
        keeper=keeper,
        batches=batches,
        programs=programs,
        watch=watch,
        listener=listener,
        launchers=launchers,
        control=ControlTree(fs, shown),
        metrics=MetricsPort(config.metrics_port, shown.metrics),
        peering=peering,
        publish=_publisher(config, fs, journal),
        held=held,
        helper=helper,
        policy=policy,
        reloading=Reloading(
            asked, source, changes, notifier, {"policy": lambda wanted: policy.prepared(wanted.policy)}
        ),
    )
    return house


def _publisher(config: Config, fs: FileSystem, journal: Journal) -> Callable[[], Awaitable[None]]:
    """Listen at `fleet_events`, and return the task that publishes. NotSupported: its packages are not installed."""
    if config.fleet_events is None:
        return trio.lowlevel.checkpoint
    if not (find_spec("msgpack") and find_spec("zmq")):
        raise NotSupported("fleet_events needs packages: pip install 'symphony-os[fleet]'")
    from symphony.fleet.events import Publisher  # noqa: PLC0415 - needs packages of the extra `fleet`

    assert isinstance(journal, WatchedJournal)
    return Publisher(config.fleet_events, config.machine, fs, journal.watch).run


def _num_on_disk(config: Config, arena: PageStore, num_restored: int) -> int:
    """Return the maximum number of pages on disk. `num_restored`: number of pages that are on disk already."""
    slot_bytes, memory_bytes = slot_bytes_of(arena.page_bytes), arena.num_pages * arena.page_bytes
    there = shutil.disk_usage(config.state).free + num_restored * slot_bytes
    if there < memory_bytes:
        log.warning(
            "%s has room for %s of KV, and memory for %s: what does not fit can't be kept; choose another --state, or "
            "say a smaller --kv-memory",
            config.state,
            human_bytes(there),
            human_bytes(memory_bytes),
        )
    if config.policy == NO_POLICY:
        return 0
    room = min(there, MAX_TIMES_MEMORY * memory_bytes) if config.disk is None else config.disk
    return room // slot_bytes


def _limits_of_users(config: Config, own_bytes: int) -> AccountLimits:
    """Return the limits of each user. `own_bytes`: memory that the daemon may take beside pages."""
    memory_bytes = own_bytes // USERS_PART if config.quota_memory is None else config.quota_memory
    return AccountLimits(config.quota, config.quota_files, memory_bytes)


def _changes(
    fs: FileSystem, keeper: Keeper, batches: BatchScheduler, programs: Programs, ending: Ending, own_bytes: int
) -> dict[str, Apply]:
    """Return a function for each key that can change while the daemon runs. The function applies the new value."""

    def limit_users(config: Config) -> None:
        fs.pool.accounts.limit(_limits_of_users(config, own_bytes))

    def limit_disk(config: Config) -> None:
        fs.volume.disk.deadline_s = config.disk_timeout
        keeper.limit(config.disk, config.disk_timeout)

    def limit_programs(config: Config) -> None:
        programs.admission.limit(config.programs, config.starts)

    def log_otherwise(config: Config) -> None:
        set_up_log(config.log, verbose=config.verbose)

    return {
        **dict.fromkeys(("quota", "quota_files", "quota_memory"), limit_users),
        **dict.fromkeys(("disk", "disk_timeout"), limit_disk),
        **dict.fromkeys(("programs", "starts"), limit_programs),
        **dict.fromkeys(("log", "verbose"), log_otherwise),
        "weight": lambda config: fs.pool.accounts.weigh_uids(config.weight),
        "step_ms": lambda config: batches.set_step(config.step_ms * 1e-3),
        "drain": lambda config: ending.limit(config.drain),
        "watchdog": lambda _config: None,  # nothing to do: `_fed` reads the present value each time
    }


def _changes_of_tiers(fs: FileSystem, gate: Gate) -> dict[str, Apply]:
    """Return the functions that apply new values of the tiers' keys."""

    def pin_otherwise(config: Config) -> None:
        fs.volume.pager.departures.max_kept_share = config.pin_share

    def wait_otherwise(config: Config) -> None:
        gate.pressing.grace_s = config.grace_ms * 1e-3

    return {
        "grace_ms": wait_otherwise,
        "pin_share": pin_otherwise,
    }


def daemon_info(house: House, uptime_s: float) -> dict[str, Any]:
    """Return the facts that `symphony stat` and `sym.daemon_stat()` show."""
    steps = house.batches.statistics
    return {
        "pid": os.getpid(),
        "uptime_s": round(uptime_s, 3),
        "model": house.model.name,
        "precision": house.model.precision,
        **house.model.weights.info(),
        "weights_cache": None if house.config.weights_cache is None else str(house.config.weights_cache),
        "mount": str(house.config.mount),
        "socket": str(house.config.socket),
        "mount_helper": None if house.helper is None else {"kept": house.helper.is_kept},
        "config": house.reloading.info(),
        "metrics_port": house.metrics.number,
        "peers": house.peering.info(),
        "fleet": house.peering.fleet(),
        "lips": len(house.listener.lips),
        "programs": len(house.programs),
        "programs_refused": house.programs.admission.num_refused,
        "launchers": house.launchers.num_connected,
        "waiting_calls": house.batches.num_waiting,
        **asdict(house.fs.statfs()),
        **asdict(steps),
        "time_bounds_s": TIME_BOUNDS_S,
        "cost_model": {
            kind: {"median_error": round(error, 4), "steps": count}
            for kind, (error, count) in house.batches.cost.errors().items()
        },
        **house.model.backend.statistics(),
        "held": house.held.info(),
        "disk": asdict(house.keeper.statistics()),
        "tiers": {**house.policy.info(), **asdict(house.fs.volume.pager.statistics())},
    }


async def serve(config: Config, source: Source) -> None:
    """Run a daemon until a signal ends it, then unmount and clean up. SymError: some files could not be written back.

    `source`: the origin of the configuration. If it is a file, SIGHUP has the daemon read it again.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _allow_many_descriptors()
    give_back_freed_memory()
    ending, notifier = Ending(config.drain, config.mount), Notifier()
    ends = trio.open_signal_receiver(*_ends(source))
    with ends as signals, _reloads(source) as reloads, locked_by_daemon(config.state):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ending.watch, signals)
            await _serve_until(ending, config, source, notifier, reloads)
            nursery.cancel_scope.cancel()
    ending.over()
    if ending.not_kept:
        raise SymError(f"{len(ending.not_kept)} files are not on disk in their last state: the log names them")


def _ends(source: Source) -> list[signal.Signals]:
    """Return the signals that end a daemon.
    SIGHUP (a closed terminal) is among them, unless it reloads a configuration file, or is ignored, as under nohup(1).
    """
    hung_up = source.path is None and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hung_up else [])]


@contextmanager
def _reloads(source: Source) -> Iterator[AsyncIterator[int] | None]:
    """Receive every SIGHUP that comes after the daemon has begun to start. None: the configuration has no file."""
    if source.path is None:
        yield None
    else:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # trio restores SIG_IGN at the end: a late SIGHUP does nothing
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            yield signals


async def _serve_until(
    ending: Ending, config: Config, source: Source, notifier: Notifier, reloads: AsyncIterator[int] | None
) -> None:
    sockets = Sockets(config.socket, activated())
    with _nothing_is_garbage():
        house = await ending.unless_begun(lambda: build(config, source, ending, notifier))
    house.held.install()
    try:
        await house.peering.join()
        # Mount before listening, and unmount after: a script that waits for the socket must find the mount.
        async with _fed(house, notifier), _kept(house, ending), _mounted(house):
            with _old_objects_rest(), sockets.listening() as (for_programs, for_launchers):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(house.batches.run)
                    nursery.start_soon(house.fs.volume.alarms.run)
                    nursery.start_soon(house.listener.run, for_programs)
                    nursery.start_soon(house.watch.run)
                    nursery.start_soon(house.launchers.run, for_launchers)
                    nursery.start_soon(house.metrics.run)
                    nursery.start_soon(house.peering.run)
                    nursery.start_soon(house.publish)
                    print(f"symphony: {house.model.name} on {config.mount}, socket {config.socket}", flush=True)
                    notifier.ready(house.status())
                    nursery.start_soon(_load_weights, house, notifier)
                    if reloads is not None:  # only now, since a reload reports READY
                        nursery.start_soon(house.reloading.run, reloads, house.status)
                    await ending.begun.wait()
                    notifier.stopping("writing what is not on disk yet")
                    await house.peering.close(ending.left_s)
                    nursery.cancel_scope.cancel()
    finally:
        house.keeper.close()
        for model in house.models:
            model.weights.close()
        with trio.move_on_after(ending.left_s):
            await house.batches.close()
            await house.watch.close()
            await house.listener.close()


async def _load_weights(house: House, notifier: Notifier) -> None:
    await house.model.weights.run(house.batches)
    notifier.status(house.status())
    await house.model.weights.keep()


def _allow_many_descriptors() -> None:
    """Raise the soft limit on descriptors to the hard limit. The usual 1,024 is for programs that use select(2).

    A program takes four descriptors, and two more while it connects. Each open plain file on the mount takes one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """Exempt the objects that are made in this block from garbage collection, for good. With 100,000 files, collections
    take 1.5 s of a start and find nothing. Later collections would scan the objects on the trio thread.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _old_objects_rest() -> Iterator[None]:
    """Freeze all live objects after a full garbage collection that takes LONG_COLLECTION_S.

    Python's own collector scans all objects again whenever a quarter of them is new. With a million files, a scan takes
    3.6 s on the trio thread. A frozen reference cycle is never freed, but neither files nor connections are in cycles.
    """
    began_s = 0.0

    def rest(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if info["generation"] == 2:
            if phase == "start":
                began_s = time.thread_time()
            elif time.thread_time() - began_s > LONG_COLLECTION_S:
                gc.freeze()

    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], MIDDLE_COLLECTIONS)
    gc.callbacks.append(rest)
    try:
        yield
    finally:
        gc.callbacks.remove(rest)
        gc.set_threshold(*thresholds)


def give_back_freed_memory() -> None:
    """Have malloc map each block of 128 KiB or more separately, and return free memory at the end of the heap.

    glibc starts with these limits, but raises both, up to 32 MiB, with every large block that is freed. So the memory
    of a thousand requests of 1 MiB stayed resident below later blocks, long after their answers. Other C libraries have
    no `mallopt`: with them, this function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for limit in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(limit, FREED_BLOCK_BYTES)


@asynccontextmanager
async def _kept(house: House, ending: Ending) -> AsyncIterator[None]:
    """Write back changes while the daemon runs. At the end, write back the rest, so that a restart loses nothing."""
    async with trio.open_nursery() as nursery:
        await nursery.start(house.keeper.run)
        try:
            yield
        finally:
            ending.begin()  # an error may end the daemon, too
            with trio.CancelScope(shield=True):
                ending.not_kept = await house.keeper.drain(ending.left_s)
                if not await house.keeper.is_at_rest(ending.left_s):
                    ending.leave(1 if ending.not_kept else 0)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _fed(house: House, notifier: Notifier) -> AsyncIterator[None]:
    """Feed the service manager's watchdog until everything is written back."""
    async with trio.open_nursery() as nursery:
        age_s, limit_s = lambda: house.batches.step_age_s, lambda: house.reloading.config.watchdog
        nursery.start_soon(feed_for_ever, notifier, age_s, limit_s)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _mounted(house: House) -> AsyncIterator[None]:
    allow_other = house.config.allow_other
    if allow_other is None:
        allow_other = os.geteuid() == 0 or house.helper is not None
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve_mount(
                house.fs,
                house.config.mount,
                allow_other=allow_other,
                name=str(house.config.state.absolute()),
                mounter=house.helper,
                control=house.control,
                is_busy=lambda: house.batches.is_stepping,
                catch_up=house.batches.sync,
                exclusive=house.batches.exclusive,
                task_status=task_status,
            )
        )
        if house.helper is not None:
            nursery.start_soon(house.helper.keep_for_ever)
        yield
        nursery.cancel_scope.cancel()
