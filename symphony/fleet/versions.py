"""Versions of a fleet's files: KV files of this machine alone, `/kv/fleet/.versions/IDENT.TOKEN`.

A version never changes, and its tag is never used again. So a machine that has a file of that name has the version.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

import trio

from kvfs.fs import FileSystem, OpenKv
from kvfs.names.inode import Credentials, Inode
from libsym.errors import Exists, NotFound, SymError
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


class Versions:
    """The versions that this machine has, and copies on other machines."""

    def __init__(self, fs: FileSystem, peers: Peers, membership: Membership, count: int) -> None:
        """`count`: number of machines that have a synced version on disk, this one included."""
        self._fs, self._peers, self._membership, self.count = fs, peers, membership, count

    async def make(self, ident: str, inode: Inode) -> tuple[str, list[str]]:
        """Make a version of a file's present content. Return its tag when enough machines have it on disk, and these
        machines. EIO: there are too few machines.
        """
        fs, tag = self._fs, uuid4().hex
        source = fs.kv_open_inode(inode, write=False)
        try:
            version = fs.kv_fork(AS_ROOT, source, _path(ident, tag))
        finally:
            fs.kv_close(source)
        try:
            await fs.sync(version)
            return tag, await self.spread(ident, tag, [self._membership.name])
        except BaseException:
            self.drop(ident, tag)
            raise
        finally:
            fs.kv_close(version)

    async def spread(self, ident: str, tag: str, machines: Sequence[str]) -> list[str]:
        """Have other machines copy a version that `machines` have on disk, this one among them. Return all machines
        that have it when they are enough. EIO: there are too few.
        """
        done, until_s, failures = [*machines], trio.current_time() + PATIENCE_S, dict[str, str]()
        while True:
            for machine in self._membership.others():
                if len(done) < self.count and machine not in done:
                    try:
                        await self._peers.copy(machine, Copy(f"{ident}.{tag}", self._membership.name))
                        done.append(machine)
                    except SymError as error:
                        failures[machine] = f"; {error}"
            if len(done) >= self.count:
                return done
            if trio.current_time() > until_s:
                why = "".join(each for name, each in failures.items() if name not in done)
                raise SymError(f"only {len(done)} of {self.count} machines (`copies`) have it on disk{why}", errno.EIO)
            await trio.sleep(PAUSE_S)

    async def keep(self, request: Copy) -> None:
        """Copy a version of another machine to this machine's disk."""
        ident, _, tag = request.version.partition(".")
        version = await self.open(ident, tag, [request.machine])
        try:
            await self._fs.sync(version)
        finally:
            self._fs.kv_close(version)

    async def open(self, ident: str, tag: str, machines: list[str]) -> OpenKv:
        """Open a version. If this machine does not have it, fetch it from one of `machines`. EIO: none can send it."""
        path, failures = _path(ident, tag), list[str]()
        with suppress(NotFound):
            return self._fs.kv_open(AS_ROOT, path, write=False)
        for machine in machines:
            if machine != self._membership.name:
                try:
                    return await self._peers.fetch(AS_ROOT, machine, path, path, 0o600)
                except Exists:  # another open has fetched it meanwhile
                    return self._fs.kv_open(AS_ROOT, path, write=False)
                except SymError as error:
                    failures.append(str(error))
        raise SymError(f"no machine that has it can send it: {'; '.join(failures) or 'it is lost here'}", errno.EIO)

    def drop(self, ident: str, tag: str) -> None:
        """Remove a version from this machine."""
        with suppress(NotFound):
            self._fs.kv_remove(AS_ROOT, _path(ident, tag))

    def old(self, directory: Inode) -> list[tuple[str, str]]:
        """Return ident and tag of the versions that belong to no sync under way."""
        before_ns = time.time_ns() - int(YOUNG_S * 1e9)
        names = [os.fsdecode(name) for name, inode in directory.entries.items() if inode.ctime_ns < before_ns]
        return [(ident, tag) for ident, _, tag in (name.partition(".") for name in names)]


def _path(ident: str, tag: str) -> str:
    return f"{DIRECTORY.decode()}/{VERSIONS.decode()}/{ident}.{tag}"
