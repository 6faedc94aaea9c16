"""Versions of a fleet's files: KV files of this machine alone, `/kv/fleet/.versions/IDENT.TOKEN`.

A version never changes, and its tag is never used again. So a machine that has a file of that name has the version.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import trio

from kvfs.fs import FileSystem, OpenKv
from kvfs.names.agreement import granted
from kvfs.names.content import KvFile
from kvfs.names.inode import Credentials, Inode
from libsym.errors import Busy, Exists, NoSpace, NotFound, OverQuota, SymError, TimedOut
from symphony.fleet.client import Peers
from symphony.fleet.link import Copy
from symphony.fleet.membership import Membership

log = logging.getLogger(__name__)

PATIENCE_S, PAUSE_S = 5.0, 0.5
"""Time that a sync waits for machines that are missing, and the pause between two looks at the list of machines."""
YOUNG_S = 600.0
"""Age below which a version may belong to a sync that is under way on another machine."""
AS_ROOT = Credentials(0, 0)
DIRECTORY, VERSIONS = b"fleet", b".versions"


@dataclass(slots=True, eq=False)
class Draft:
    """A version that no record names yet."""

    ident: str
    tag: str
    machines: list[str]
    """Machines that have the version on disk."""
    made_of: tuple[KvFile, int] | None = None
    """The content that the version was made of, and its count of changes."""


class Versions:
    """The versions that this machine has, and copies on other machines."""

    def __init__(self, fs: FileSystem, peers: Peers, membership: Membership, count: int) -> None:
        """`count`: number of machines that have a synced version on disk, this one included."""
        self._fs, self._peers, self._membership, self.count = fs, peers, membership, count

    async def make(self, ident: str, inode: Inode) -> Draft:
        """Make a version of a file's present content, and sync it here."""
        fs, tag = self._fs, uuid4().hex
        with granted():  # this machine's own content, whatever others have
            source = fs.kv_open_inode(inode, write=False)
        draft = Draft(ident, tag, [self._membership.name], (source.content, source.content.changes))
        try:
            version = fs.kv_fork(AS_ROOT, source, _path(ident, tag))
        finally:
            fs.kv_close(source)
        try:
            await fs.sync(version)
        except BaseException:
            self.drop(ident, tag)
            raise
        finally:
            fs.kv_close(version)
        return draft

    async def spread(self, draft: Draft, count: int) -> None:
        """Have other machines copy a version, until `count` machines have it on disk. EIO: there are too few. Machines
        that are drained do not count.
        """
        until_s, failures = trio.current_time() + PATIENCE_S, dict[str, str]()

        def num_there() -> int:
            return len({*draft.machines} - self._membership.drained)

        while True:
            for machine in self._membership.others():
                if num_there() < count and machine not in draft.machines:
                    try:
                        await self._copy(machine, draft)
                        draft.machines.append(machine)
                    except SymError as error:
                        failures[machine] = f"; {error}"
            if num_there() >= count:
                return
            if trio.current_time() > until_s:
                why = "".join(each for name, each in failures.items() if name not in draft.machines)
                raise SymError(f"only {num_there()} of {count} machines (`copies`) have it on disk{why}", errno.EIO)
            await trio.sleep(PAUSE_S)

    async def _copy(self, machine: str, draft: Draft) -> None:
        """Have a machine copy a version. TimedOut: etcd does not list the machine any more."""
        failure: SymError | None = TimedOut(f"{machine} has gone")
        async with trio.open_nursery() as nursery:

            async def copy() -> None:
                nonlocal failure
                try:
                    await self._peers.copy(machine, Copy(f"{draft.ident}.{draft.tag}", self._membership.name))
                    failure = None
                except SymError as error:
                    failure = error
                nursery.cancel_scope.cancel()

            nursery.start_soon(copy)
            while machine in self._membership.others():  # noqa: ASYNC110 - the list rings no bell
                await trio.sleep(PAUSE_S)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def keep(self, request: Copy) -> None:
        """Copy a version of another machine to this machine's disk. Busy: this machine is drained, which the other one
        does not know yet.
        """
        membership = self._membership
        if request.machine != membership.name and (membership.has_left or membership.name in membership.drained):
            raise Busy(f"{membership.name} is drained: it gets no more copies")
        ident, _, tag = request.version.partition(".")
        version = await self.open(ident, tag, [request.machine])
        try:
            await self._fs.sync(version)
        finally:
            self._fs.kv_close(version)

    async def open(self, ident: str, tag: str, machines: list[str], owner: int | None = None) -> OpenKv:
        """Open a version. If this machine does not have it, fetch it from one of `machines`. EIO: none can send it.

        `owner`: the file's owner, if the cache of pages is asked first.
        """
        path, failures = _path(ident, tag), list[str]()
        with suppress(NotFound):
            return self._fs.kv_open(AS_ROOT, path, write=False)
        for machine in machines:
            if machine != self._membership.name:
                try:
                    return await self._peers.fetch_for(owner, AS_ROOT, machine, path, path, 0o600)
                except Exists:  # another open has fetched it meanwhile
                    return self._fs.kv_open(AS_ROOT, path, write=False)
                except (NoSpace, OverQuota):
                    raise
                except SymError as error:
                    failures.append(str(error))
        raise SymError(f"no machine that has it can send it: {'; '.join(failures) or 'it is lost here'}", errno.EIO)

    def is_here(self, version: str) -> bool:
        return _found(self._fs, version) is not None

    def drop(self, ident: str, tag: str) -> None:
        """Remove a version from this machine."""
        with suppress(NotFound):
            self._fs.kv_remove(AS_ROOT, _path(ident, tag))

    def old(self, directory: Inode) -> list[tuple[str, str]]:
        """Return ident and tag of the versions that belong to no sync under way."""
        before_ns = time.time_ns() - int(YOUNG_S * 1e9)
        names = [os.fsdecode(name) for name, inode in directory.entries.items() if inode.ctime_ns < before_ns]
        return [(ident, tag) for ident, _, tag in (name.partition(".") for name in names)]


def entries_here(fs: FileSystem, version: str) -> int:
    """Return the number of entries of a version on this machine. 0: the version is not here.

    `version`: IDENT.TAG. A version is here as a whole or not at all.
    """
    content = _found(fs, version)
    return 0 if content is None else content.table.length


def _found(fs: FileSystem, version: str) -> KvFile | None:
    fleet = fs.volume.tree.root.entries.get(DIRECTORY)
    local = None if fleet is None else fleet.entries.get(VERSIONS)
    inode = None if local is None else local.entries.get(version.encode())
    return inode.content if inode is not None and isinstance(inode.content, KvFile) else None


def _path(ident: str, tag: str) -> str:
    return f"{DIRECTORY.decode()}/{VERSIONS.decode()}/{ident}.{tag}"
