"""Changes of a fleet's names: a machine makes its own by transactions in etcd, and follows those of all machines."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

import trio

from kvfs.names.agreement import grant_everything
from libsym.errors import SymError, TimedOut
from symphony.fleet.etcd import Change, Etcd, Stale, has_revision, putting
from symphony.fleet.link import in_worker
from symphony.fleet.mirror import Mirror
from symphony.fleet.records import ROOT, Keys

log = logging.getLogger(__name__)

T = TypeVar("T")

NUM_WORKERS = 8
"""Maximum number of concurrent requests to etcd. Further requests wait."""
PATIENCE_S, LOOK_S, RETRY_S = 5.0, 1.0, 1.0
"""Time limits: of a change until it is seen here, and of a look at etcd before an open. Pause after a failure."""
DUE_S = 1.0
"""Time that a call gets to make its own change. Changes of later revisions wait meanwhile."""


class OwnChange:
    """A change of this daemon that is under way. The call that waits for it makes it when the change is due, after all
    changes of earlier revisions.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.is_due, self.over = trio.Event(), trio.Event()


class Follower:
    """The truth of a fleet's names, as this machine knows it."""

    def __init__(self, etcd: Etcd, keys: Keys, machine: str, mirror: Mirror) -> None:
        self._etcd, self._keys, self._machine, self._mirror = etcd, keys, machine, mirror
        self._own: dict[str, OwnChange] = {}
        """Changes of this daemon that are under way, by stamp."""
        self._seen = 0
        """Last revision of the store whose changes are made here. 0: none yet."""
        self._news = trio.Event()
        self.trouble = "etcd has not answered yet"
        """Reason why changes of other machines do not arrive. Empty: they arrive."""
        self._is_loaded = False
        self._workers, self._watching = trio.CapacityLimiter(NUM_WORKERS), trio.CapacityLimiter(1)

    async def commit(self, compare: list[Any], then: list[Any], stamp: str = "") -> tuple[bool, int]:
        """Make a transaction. The record of this machine's last change gets its stamp, so that `look` sees it."""
        stamping = putting(self._keys.change(self._machine), (stamp or uuid4().hex).encode())
        return await self._in_worker(self._etcd.commit, compare, [*then, stamping])

    async def commit_own(self, compare: list[Any], then: list[Any], change: OwnChange) -> bool:
        """Make a transaction whose changes the caller makes here. Return when the caller has to make them, before any
        later change is made. False: the comparisons do not hold, and the reason is known here by now.
        """
        stamp, is_due = uuid4().hex, False
        self._own[stamp] = change
        try:
            held, _ = await self.commit(compare, then, stamp)
            if not held:
                await self.look()
                return False
            with trio.move_on_after(PATIENCE_S):
                await change.is_due.wait()
                is_due = not change.over.is_set()
                return is_due
            raise self._silence()
        finally:
            if not is_due:
                change.over.set()
            del self._own[stamp]

    async def reach(self, revision: int) -> None:
        """Wait until a change of this revision is made here."""
        with trio.move_on_after(PATIENCE_S):
            await self._reach(revision)
            return
        raise self._silence()

    def _silence(self) -> TimedOut:
        return TimedOut(f"etcd does not say what has changed: {self.trouble or 'the watch is behind'}")

    async def look(self) -> None:
        """Wait until the changes that other machines have completed by now are made here.

        If etcd is known to be away, return immediately, because reads go on. TimedOut: the names never arrived.
        """
        if not self._is_loaded:
            with trio.move_on_after(PATIENCE_S):
                while not self._is_loaded:
                    await self._news.wait()
            if not self._is_loaded:
                raise TimedOut(f"the fleet's names are not here yet: {self.trouble}")
        if self.trouble:
            return
        try:
            with trio.fail_after(LOOK_S):
                changes = await self._in_worker(self._etcd.read, self._keys.change(""))
                await self._reach(max((each.revision for each in changes), default=0))
        except (trio.TooSlowError, TimedOut) as error:
            self._fails(str(error) or f"etcd did not answer within {LOOK_S:g} s")

    async def _reach(self, revision: int) -> None:
        """Wait until a change of this revision is made here."""
        while self._seen < revision:
            await self._news.wait()

    async def run(self) -> None:
        """Follow the changes of all machines for ever."""
        grant_everything()
        while True:
            try:
                if not self._seen:
                    await self._load()
                await self._follow()
            except Stale as error:
                log.info("fleet: %s; all names are read anew", error)
                self._seen = 0
            except SymError as error:
                self._fails(str(error))
                await trio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Make changes until etcd has said nothing for a while."""
        watch = await self._in_worker(self._etcd.watch, self._keys.prefix, self._seen)
        try:
            self._is_told()
            while changes := await in_worker(watch, self._watching, watch.next):
                by_revision = defaultdict[int, list[Change]](list)
                for each in changes:
                    by_revision[each.revision].append(each)
                for revision, group in sorted(by_revision.items()):
                    await self._let_own_call_go_on(revision, group)
                    self._mirror.apply(group)
                    self._seen = revision
                self._is_told()
        finally:
            watch.close()

    async def _let_own_call_go_on(self, revision: int, changes: list[Change]) -> None:
        """If a call of this machine waits for these changes, let the call make them."""
        mine = self._keys.change(self._machine)
        stamp = next((each.value for each in changes if each.key == mine and each.value), b"")
        change = self._own.get(stamp.decode(errors="replace"))
        if change is not None:
            change.revision = revision
            change.is_due.set()
            with trio.move_on_after(DUE_S):
                await change.over.wait()
            change.over.set()

    async def _load(self) -> None:
        """Read all records, and make the names the same here."""
        records, revision = await self._in_worker(self._etcd.snapshot, self._keys.prefix)
        root = self._keys.inode(ROOT)
        is_new = not any(each.key == root for each in records)
        if is_new and self._is_loaded:
            raise SymError("etcd has lost the fleet's names: give it its backup, or restart all daemons to begin anew")
        if is_new:
            record = replace(self._mirror.by_ident[ROOT].record, tag=uuid4().hex)
            await self.commit([has_revision(root, 0)], [putting(root, record.encoded())])
            records, revision = await self._in_worker(self._etcd.snapshot, self._keys.prefix)
        found = {each.key.removeprefix(self._keys.prefix + "i/") for each in records}
        gone = [
            Change(self._keys.inode(ident), None, revision) for ident in self._mirror.by_ident if ident not in found
        ]
        keys = {each.key for each in records}
        ended = [Change(key, None, revision) for key in map(self._keys.right, self._mirror.writing) if key not in keys]
        self._mirror.apply([*ended, *(Change(each.key, each.value, each.revision) for each in records), *gone])
        self._mirror.note_fleet()
        self._seen, self._is_loaded = revision, True

    def _is_told(self) -> None:
        """Note that changes up to `_seen` are made."""
        if self.trouble:
            log.info("fleet: changes of names arrive")
        self.trouble = ""
        self._news.set()
        self._news = trio.Event()

    def _fails(self, trouble: str) -> None:
        if not self.trouble:
            log.warning("fleet: changes of names do not arrive: %s; reads go on", trouble)
        self.trouble = trouble

    async def _in_worker(self, what: Callable[..., T], *arguments: object) -> T:
        return await trio.to_thread.run_sync(what, *arguments, limiter=self._workers, abandon_on_cancel=True)
