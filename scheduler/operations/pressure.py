"""KV_PRESSURE: the daemon warns programs before it evicts pages, and gives them a grace to free memory themselves.

The listener is an account: a user, or a domain that connections are confined to. There are two kinds of events. In the
first, the pager is about to move pages of the account's files to disk (`tell`), and calls that need the memory wait
until the grace ends. In the second, nine tenths of the account's quota are used, and no pages are moved.

*Each connection hears of each event once*, through all its waiting calls. A connection that calls later, while the
event lasts, is told at once. Events of an account are at least a tenth of a second apart. An account counts as a
listener for a second after an answer, so that a loop may take this time between two calls.

*An account that does not react delays other accounts by one grace.* Shortly before the end of the grace, the daemon
looks at the named files. If none of these files has become smaller in memory, or was marked as cold by advice, the
account has no grace for the next `NO_GRACE_S`.

*Nothing leaks.* The daemon names only files that the caller's own uid owns, and in a domain only files within it.

The trio thread owns this state. Nothing here awaits.
"""

from __future__ import annotations

import errno
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import trio

from kvfs.base.alarms import Alarm
from kvfs.facts.hot import path_for
from kvfs.fs import FileSystem
from kvfs.names.content import KvFile
from kvfs.names.inode import Inode
from kvfs.pages.accounts import Account
from kvfs.pages.frames import NOWHERE
from kvfs.pages.pool import NO_ROW
from kvfs.pages.table import PageTable
from libsym.abi import NO_TIMEOUT, Op, PressureKind
from libsym.errors import Invalid, SymError, WouldBlock
from scheduler.connection.lip import MAX_WAITS, Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table
from scheduler.wire.replies import Reply

MAX_CANDIDATES = 64
"""Maximum number of candidates of one event. A reply stays below some 20 KB."""
MAX_VICTIMS = 4096
"""Maximum number of files that one event examines, in the order of eviction. Examining them takes a millisecond."""
LEAST_S = 0.1
"""Least time between two events of an account."""
LISTENS_S = 1.0
"""Time after an answer for which the account still counts as a listener."""
NO_GRACE_S = 5.0
"""Time without a grace, for an account that did not react in its last grace."""
_LOOK_AT = 0.9
"""Fraction of a grace after which an account that has not reacted loses its grace for `NO_GRACE_S`."""
NEARLY_FULL = 90
"""Percentage of a quota at which an event begins. Each further percent is another event."""

Listeners: TypeAlias = tuple[int, int | None]
"""Uid, and the number of the directory that a connection is confined to."""


@dataclass(frozen=True, slots=True)
class EvictableFile:
    """A file whose pages may be evicted, or which the program may free: see `libsym.pressure`."""

    path: str | None
    handles: tuple[int, ...]
    ino: int
    tokens: int
    memory_bytes: int
    freed_bytes: int
    idle_s: float
    bring_s: float
    priority: int
    pinned: bool


@dataclass(slots=True, eq=False)
class Event:
    """A warning to one account that memory or its quota runs short."""

    kind: PressureKind
    wanted_bytes: int
    end_s: float
    """End of the grace, in the time of `trio.current_time()`."""
    files: Sequence[tuple[Inode, KvFile]]
    in_memory: Sequence[int] = ()
    """Number of each file's pages that were in memory when the event began."""
    page_s: float = 0.0
    """Seconds that it takes to bring one page back."""
    told: set[Lip] = field(default_factory=set)
    answered: list[SystemCall] = field(default_factory=list)
    """Answered calls whose answer CANCEL can still take back."""

    def left_s(self, now_s: float) -> float:
        return max(0.0, self.end_s - now_s)


@dataclass(slots=True, eq=False)
class AccountListeners:
    """The listeners of one account."""

    uid: int
    directory: Inode | None
    account: Account
    note_charge: Callable[[AccountListeners], None]
    lips: set[Lip] = field(default_factory=set)
    """Connections that have ever called KV_PRESSURE."""
    waiters: dict[SystemCall, Alarm | None] = field(default_factory=dict)
    events: dict[PressureKind, Event] = field(default_factory=dict)
    """Last event of each kind. An event of a quota stays as long as the quota is nearly full."""
    next_s: float = 0.0
    """Time before which there is no new event."""
    heard_s: float = -LISTENS_S
    """Time of the last answer to a listener."""
    no_grace_until_s: float = 0.0
    level: int = 0
    """Percentage of the quota that was used at the last event."""
    look: Alarm | None = None
    """Alarm for the next look at the quota."""

    def watch(self) -> None:
        """Note that the account's charge has changed."""
        self.note_charge(self)

    def listens(self, now_s: float) -> bool:
        return bool(self.waiters) or now_s - self.heard_s < LISTENS_S

    def hears(self, now_s: float) -> bool:
        """Return whether another event may begin now, or the grace of the last event has not ended."""
        last = self.events.get(PressureKind.MEMORY)
        return now_s >= self.next_s or (last is not None and last.left_s(now_s) > 0)

    def has(self, inode: Inode) -> bool:
        """Return whether a file belongs to the account."""
        if inode.uid != self.uid or inode.account is None:
            return False
        return self.directory is None or self.account in inode.account.chain()


class Pressing:
    """Answers KV_PRESSURE, and satisfies `Pressure`: the pager calls `tell` before it evicts pages."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._volume = fs.volume
        self._alarms = fs.volume.alarms
        self._groups: dict[Listeners, AccountListeners] = {}
        self.grace_s = 0.1
        """The grace, in seconds, of accounts that listen."""

    def table(self) -> Table:
        return {Op.KV_PRESSURE: Operation(self.pressure, takes_payload=False)}

    def pressure(self, call: SystemCall) -> None:
        """Wait for an event. args[0] is the timeout in milliseconds; -1: no timeout.

        The answer has the kind, the wanted bytes and the grace in milliseconds. Its payload has the files, in JSON.
        """
        timeout_ms = call.request.args[0]
        if timeout_ms < NO_TIMEOUT:
            raise Invalid(f"a timeout of {timeout_ms} ms: give 0 or more, or -1 to wait for ever")
        group = self._group_of(call.lip)
        self._look_at_quota(group)
        if timeout_ms == 0 and self._news(group, call.lip) is None:
            raise WouldBlock("there is room for the files of this account")
        call.check_may_wait(MAX_WAITS)
        call.wait(partial(self._end, group, call, errno.ECANCELED, "kv_pressure() was cancelled"))
        group.waiters[call] = None
        if timeout_ms > 0:
            why = f"room did not run short for {timeout_ms} ms"
            group.waiters[call] = self._alarms.set(
                timeout_ms / 1000, partial(self._end, group, call, errno.EWOULDBLOCK, why)
            )
        self._answer(group)

    def leave(self, lip: Lip) -> None:
        """Forget a connection that has ended, with its waiting calls."""
        for key, group in list(self._groups.items()):
            if lip not in group.lips:
                continue
            group.lips.remove(lip)
            for call in [each for each in group.waiters if each.lip is lip]:
                self._stop_waiting(group, call)
                call.drop()
            for event in group.events.values():
                event.told.discard(lip)
                event.answered = [each for each in event.answered if each.lip is not lip]
            if not group.lips:
                self._forget(key, group)

    # Memory

    def tell(self, tables: Sequence[PageTable], num_pages: int) -> float:
        """Warn the owners of these files that `num_pages` pages will go to disk. Return the grace in seconds."""
        now_s = trio.current_time()
        listening = [group for group in self._groups.values() if group.listens(now_s) and group.hears(now_s)]
        if not listening:
            return 0.0
        found: dict[AccountListeners, list[tuple[Inode, KvFile]]] = defaultdict(list)
        for table in tables[:MAX_VICTIMS]:
            file = self._volume.file_of(table)
            if file is None:
                continue
            for group in listening:
                if group.has(file[0]) and len(found[group]) < MAX_CANDIDATES:
                    found[group].append(file)
        wanted_bytes = num_pages * self._fs.pool.page_bytes
        graces_s = [self._memory_event(group, files, wanted_bytes, now_s) for group, files in found.items()]
        return max(graces_s, default=0.0)

    def _memory_event(
        self, group: AccountListeners, files: Sequence[tuple[Inode, KvFile]], wanted_bytes: int, now_s: float
    ) -> float:
        """Return the seconds that are left of the current event's grace, or the grace of a new event."""
        if now_s < group.next_s:
            last = group.events.get(PressureKind.MEMORY)
            return 0.0 if last is None else last.left_s(now_s)
        grace_s = self.grace_s if now_s >= group.no_grace_until_s else 0.0
        pager = self._volume.pager
        in_memory = [pager.num_in_memory(kv.table) for _inode, kv in files]
        event = Event(PressureKind.MEMORY, wanted_bytes, now_s + grace_s, files, in_memory)
        if grace_s:
            self._alarms.set(grace_s * _LOOK_AT, partial(self._look_at_reaction, group, event))
        self._begin(group, event, now_s)
        return grace_s

    def _look_at_reaction(self, group: AccountListeners, event: Event) -> None:
        """Give the account no grace for `NO_GRACE_S` if no program has acted on one of the named files."""
        pager = self._volume.pager
        for (_inode, kv), before in zip(event.files, event.in_memory, strict=True):
            table = kv.table
            if table.closed or pager.num_in_memory(table) < before or pager.residents.is_cold[table.row]:
                return
        group.no_grace_until_s = trio.current_time() + NO_GRACE_S

    # Quotas

    def _note_charge(self, group: AccountListeners) -> None:
        """Note a charge. If the quota is nearly full, an alarm looks at the quota later, after the charge."""
        level, _wanted = _level_of(group.account)
        group.level = min(group.level, level)
        if level >= NEARLY_FULL and level > group.level and group.waiters:
            self._look_later(group)

    def _look_later(self, group: AccountListeners) -> None:
        if group.look is None:
            delay_s = max(0.0, group.next_s - trio.current_time())
            group.look = self._alarms.set(delay_s, partial(self._look_at_quota, group))

    def _look_at_quota(self, group: AccountListeners) -> None:
        if group.look is not None:
            self._alarms.cancel(group.look)
            group.look = None
        level, wanted_bytes = _level_of(group.account)
        if level < NEARLY_FULL:
            self._over(group, PressureKind.QUOTA)
            group.level = level
            return
        now_s = trio.current_time()
        if level > group.level:
            if now_s < group.next_s:
                self._look_later(group)
                return
            group.level = level
            self._begin(group, Event(PressureKind.QUOTA, wanted_bytes, now_s, self._files_of(group)), now_s)

    def _files_of(self, group: AccountListeners) -> list[tuple[Inode, KvFile]]:
        """Return the account's hot files, and the files that its listeners have open; the least recently used first."""
        found = {
            inode: inode.content
            for inode in self._volume.heat.hottest(group.uid)
            if isinstance(inode.content, KvFile) and group.has(inode)
        }
        for lip in group.lips:
            files = [*(file for _handle, file in lip.handles.known()), *lip.handles.idle_branches(MAX_CANDIDATES)]
            found |= {file.inode: file.content for file in files if group.has(file.inode)}
        return sorted(found.items(), key=lambda file: -self._idle_s(file[1].table))[:MAX_CANDIDATES]

    def _idle_s(self, table: PageTable) -> float:
        last_use_s = self._volume.pager.residents.last_use_s
        return 0.0 if table.row == NO_ROW else max(0.0, time.monotonic() - float(last_use_s[table.row]))

    # Parts

    def _group_of(self, lip: Lip) -> AccountListeners:
        root = lip.credentials.root
        key = lip.uid, None if root is None else root.number
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = AccountListeners(
                lip.uid, root, self._fs.account_of(lip.credentials), self._note_charge
            )
            for account in group.account.chain():
                account.watch(group.watch)
        group.lips.add(lip)
        return group

    def _forget(self, key: Listeners, group: AccountListeners) -> None:
        del self._groups[key]
        if group.look is not None:
            self._alarms.cancel(group.look)
        for account in self._fs.pool.accounts:
            account.watch_no_more(group.watch)

    def _begin(self, group: AccountListeners, event: Event, now_s: float) -> None:
        self._over(group, event.kind)
        event.page_s = self._volume.pager.statistics().bring_s
        group.events[event.kind] = event
        group.next_s = now_s + LEAST_S
        self._answer(group)

    @staticmethod
    def _over(group: AccountListeners, kind: PressureKind) -> None:
        """End the last event of a kind. No further listener is told of this event."""
        event = group.events.pop(kind, None)
        for call in () if event is None else event.answered:
            call.forget()

    def _take_back(self, group: AccountListeners, event: Event, lip: Lip) -> None:
        """Give the event to another call of the connection, because the program did not look at the answer."""
        event.told.discard(lip)
        self._answer(group)

    def _news(self, group: AccountListeners, lip: Lip) -> Event | None:
        """Return a current event that the connection has not heard of, or None."""
        now_s = trio.current_time()
        for event in group.events.values():
            is_on = event.kind is PressureKind.QUOTA or event.left_s(now_s) > 0 or now_s < group.next_s
            if is_on and lip not in event.told:
                return event
        return None

    def _answer(self, group: AccountListeners) -> None:
        """Answer waiting calls of connections that missed an event. All calls of a connection get the same bytes."""
        calls: dict[Lip, list[SystemCall]] = defaultdict(list)
        for call in group.waiters:
            calls[call.lip].append(call)
        for lip, waiting in calls.items():
            event = self._news(group, lip)
            if event is None:
                continue
            event.told.add(lip)
            group.heard_s = trio.current_time()
            reply = self._reply(event, lip)
            for call in waiting:
                self._stop_waiting(group, call)
                call.answer(reply)
                call.when_cancelled(partial(self._take_back, group, event, lip))
                event.answered.append(call)

    def _reply(self, event: Event, lip: Lip) -> Reply:
        handles: dict[KvFile, list[int]] = defaultdict(list)
        for handle, file in lip.handles.known():
            handles[file.content].append(handle)
        files = [asdict(self._candidate(event, inode, kv, lip, handles)) for inode, kv in event.files]
        grace_ms = round(1000 * event.left_s(trio.current_time()))
        return Reply((event.kind, event.wanted_bytes, grace_ms), json.dumps(files).encode("ascii"))

    def _candidate(
        self, event: Event, inode: Inode, kv: KvFile, lip: Lip, handles: Mapping[KvFile, Sequence[int]]
    ) -> EvictableFile:
        pool, pager, pages = self._fs.pool, self._volume.pager, kv.table.pages
        num_in_memory, num_freed = pager.num_in_memory(kv.table), kv.table.exclusive_pages
        if event.kind is PressureKind.MEMORY:
            num_freed = int(np.count_nonzero((pool.store.of[pages] != NOWHERE) & (pool.refcount[pages] == 1)))
        return EvictableFile(
            path=path_for(self._volume, inode, lip.credentials) if inode.content is kv else None,
            handles=tuple(handles.get(kv, ())),
            ino=inode.number,
            tokens=kv.table.length,
            memory_bytes=num_in_memory * pool.page_bytes,
            freed_bytes=num_freed * pool.page_bytes,
            idle_s=round(self._idle_s(kv.table), 3),
            bring_s=round(num_in_memory * event.page_s, 6),
            priority=inode.advice.priority,
            pinned=inode.advice.is_pinned,
        )

    def _end(self, group: AccountListeners, call: SystemCall, code: int, why: str) -> None:
        """End a call with an error."""
        self._stop_waiting(group, call)
        call.answer(SymError(why, code))

    def _stop_waiting(self, group: AccountListeners, call: SystemCall) -> None:
        alarm = group.waiters.pop(call)
        if alarm is not None:
            self._alarms.cancel(alarm)


def _level_of(account: Account) -> tuple[int, int]:
    """Return the used percentage of the account's fullest quota, and the bytes beyond nine tenths of the quota."""
    found = [
        (100 * each.num_bytes // max(1, limit), each.num_bytes - limit * NEARLY_FULL // 100)
        for each in account.chain()
        if (limit := each.limits.num_bytes) is not None
    ]
    return max(found, default=(0, 0))
