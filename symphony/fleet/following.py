"""Changes of a fleet's names: a machine makes its own by transactions in etcd, and follows those of all machines."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

import trio

from kvfs.names.agreement import grant_everything
from libsym.errors import SymError, TimedOut
from symphony.fleet.etcd import Change, Etcd, Stale, Watch, has_revision, putting
from symphony.fleet.link import in_worker
from symphony.fleet.mirror import Mirror
from symphony.fleet.records import ROOT, Keys

log = logging.getLogger(__name__)

T = TypeVar("T")

NUM_WORKERS = 8
"""Maximum number of concurrent requests to etcd. Further requests wait."""
PATIENCE_S, LOOK_S, RETRY_S = 5.0, 1.0, 1.0
"""Time limits: of a change until it is seen here, and of a look at etcd before an open. Pause after a failure."""
NO_LEASE = "lease not found"
"""Words of etcd about a lease that has ended."""
DUE_S = 1.0
"""Time that a call gets to make its own change. Changes of later revisions wait meanwhile."""


class OwnChange:
    """A change of this daemon that is under way. The call that waits for it makes it when the change is due, after all
    changes of earlier revisions.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.has_answer, self.is_due, self.over = trio.Event(), trio.Event(), trio.Event()


class Follower:
    """The truth of a fleet's names, as this machine knows it."""

    def __init__(self, etcd: Etcd, keys: Keys, machine: str, mirror: Mirror) -> None:
        self._etcd, self._keys, self._machine, self._mirror = etcd, keys, machine, mirror
        self._own: dict[str, OwnChange] = {}
        """Changes of this daemon that are under way, by stamp."""
        self.seen = 0
        """Last revision of the store whose changes are made here. 0: none yet."""
        self._news = trio.Event()
        self.trouble = "etcd has not answered yet"
        """Reason why changes of other machines do not arrive. Empty: they arrive."""
        self._is_loaded = self.is_watching = False
        self._num_asked = self._num_answered = self._last = 0
        """Looks that have begun, those of them that etcd has answered, and the last change that it knew."""
        self._looking = trio.Lock()
        self._workers, self._watching = trio.CapacityLimiter(NUM_WORKERS), trio.CapacityLimiter(1)

    async def commit(self, compare: list[Any], then: list[Any], stamp: str = "") -> tuple[bool, int]:
        """Make a transaction. The record of this machine's last change gets its stamp, so that `look` sees it.

        TimedOut, immediately if etcd is known to be away: others may wait for this call, for example in the kernel.
        """
        if self.trouble:
            raise TimedOut(f"the fleet's names can't be changed now: {self.trouble}")
        stamping = putting(self._keys.change(self._machine), (stamp or uuid4().hex).encode())
        try:
            return await self._in_worker(self._etcd.commit, compare, [*then, stamping])
        except SymError as error:
            if NO_LEASE in str(error):
                raise TimedOut("etcd does not list this machine now, so it can't write files of the fleet") from None
            raise

    async def commit_own(self, compare: list[Any], then: list[Any], change: OwnChange) -> bool:
        """Make a transaction whose changes the caller makes here. Return when the caller has to make them, before any
        later change is made. False: the comparisons do not hold, and the reason is known here by now.
        """
        stamp, is_due = uuid4().hex, False
        self._own[stamp] = change
        try:
            held, _ = await self.commit(compare, then, stamp)
            change.has_answer.set()
            if not held:
                await self.look()
                return False
            with trio.move_on_after(PATIENCE_S):
                await change.is_due.wait()
                is_due = not change.over.is_set()
            if not is_due:
                raise self._silence()
            return True
        finally:
            change.has_answer.set()
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
        self._num_asked += 1
        mine = self._num_asked
        async with self._looking:
            if self._num_answered < mine and not self.trouble:
                await self._ask()
        with trio.move_on_after(LOOK_S) as reaching:
            await self._reach(self._last)
        if reaching.cancelled_caught:
            self._fails("the watch is behind")

    async def _ask(self) -> None:
        """Ask etcd for the last changes of all machines. One request answers all looks that have begun before it."""
        asked = self._num_asked
        try:
            with trio.fail_after(LOOK_S):
                self._last = await self._last_change()
            self._num_answered = asked
        except (trio.TooSlowError, TimedOut) as error:
            self._fails(str(error) or f"etcd did not answer within {LOOK_S:g} s")

    async def probe_for_ever(self) -> None:
        """After a look without an answer, find out when etcd answers again."""
        while True:
            await trio.sleep(RETRY_S)
            if self.trouble and self.is_watching:
                with trio.move_on_after(LOOK_S), suppress(SymError):
                    await self._reach(await self._last_change())
                    self._is_told()

    async def _last_change(self) -> int:
        """Return the revision of the last change of all machines, as etcd has it."""
        changes = await self._in_worker(self._etcd.read, self._keys.change(""))
        return max((each.revision for each in changes), default=0)

    async def _reach(self, revision: int) -> None:
        """Wait until a change of this revision is made here."""
        while self.seen < revision:
            await self._news.wait()

    async def run(self) -> None:
        """Follow the changes of all machines for ever."""
        grant_everything()
        while True:
            try:
                if not self.seen:
                    await self._load()
                await self._follow()
            except Stale as error:
                log.info("fleet: %s; all names are read anew", error)
                self.seen = 0
            except SymError as error:
                self._fails(str(error))
                await trio.sleep(RETRY_S)

    async def _watch(self) -> Watch:
        made, is_wanted = list[Watch](), True

        def begin() -> None:
            made.append(self._etcd.watch(self._keys.prefix, self.seen))
            if not is_wanted:  # the task was cancelled meanwhile
                made[0].close()

        try:
            await self._in_worker(begin)
        except BaseException:
            is_wanted = False
            for watch in made:
                watch.close()
            raise
        return made[0]

    async def _follow(self) -> None:
        """Make changes until etcd has said nothing for a while."""
        watch = await self._watch()
        try:
            self.is_watching = True
            self._is_told()
            while changes := await in_worker(watch, self._watching, watch.next):
                by_revision = defaultdict[int, list[Change]](list)
                for each in changes:
                    by_revision[each.revision].append(each)
                for revision, group in sorted(by_revision.items()):
                    await self._let_own_call_go_on(revision, group)
                    await self._mirror.apply(group)
                    self.seen = revision
                self._is_told()
        finally:
            self.is_watching = False
            watch.close()

    async def _let_own_call_go_on(self, revision: int, changes: list[Change]) -> None:
        """If a call of this machine waits for these changes, let the call make them."""
        mine = self._keys.change(self._machine)
        stamp = next((each.value for each in changes if each.key == mine and each.value), b"")
        change = self._own.get(stamp.decode(errors="replace"))
        if change is not None:
            change.revision = revision
            change.is_due.set()
            with trio.move_on_after(PATIENCE_S):
                await change.has_answer.wait()
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
            await self._in_worker(self._etcd.commit, [has_revision(root, 0)], [putting(root, record.encoded())])
            records, revision = await self._in_worker(self._etcd.snapshot, self._keys.prefix)
        found = {each.key.removeprefix(self._keys.prefix + "i/") for each in records}
        gone = [
            Change(self._keys.inode(ident), None, revision) for ident in self._mirror.by_ident if ident not in found
        ]
        keys, rights = {each.key for each in records}, {each.revision for each in records}
        for item in self._mirror.by_ident.values():
            item.revision = 0  # an etcd that got its backup counts anew
        ended = [Change(key, None, revision) for key in map(self._keys.right, self._mirror.writing) if key not in keys]
        await self._mirror.apply([*ended, *(Change(each.key, each.value, each.revision) for each in records), *gone])
        for item in self._mirror.by_ident.values():
            if item.right and item.right not in rights:
                item.right = 0
        self._mirror.note_fleet()
        self.seen, self._is_loaded = revision, True
        self._is_told()

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
