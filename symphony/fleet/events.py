"""Publishes which blocks this machine has, over ZeroMQ, for routers of other projects: symphony-fleet-events(7).

The socket asks nobody for a password, and events have tokens. So only files that every user may read are published:
their mode says so, and so do the modes of all directories above them.

A watch notes which inodes have changed, and a task looks at these inodes a moment later. So a step only adds
inodes to a dictionary, and a file that changed several times is looked at once. A worker computes hashes and events.

ZeroMQ never blocks the sender. A subscriber that does not read loses batches, and sees this by a gap in their numbers.
The socket tells the daemon of each new subscription, and all blocks are then published again. So a late subscriber, or
one that has lost batches and subscribes again, needs no second socket for a replay.

A worker uses the socket, because each use of an XPUB socket reads all subscriptions that have come. If somebody sends
them all the time, this takes as long, and the trio thread must not wait for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import trio
import zmq

from kvfs.durable.watched import Watch
from kvfs.fs import FileSystem
from kvfs.names.content import OWN, KvFile
from kvfs.names.inode import READ, SEARCH, Inode
from kvfs.pages.free_list import IntArray
from kvfs.pages.table import PageTable
from libsym.abi import PAGE_ENTRIES
from libsym.errors import SymError
from scheduler.doors.listener import clear_way
from symphony.fleet.blocks import Blocks, Change

PAUSE_S = 0.1
"""Pause after a turn, in which further changes gather for one batch."""
FILES_A_TURN, PAGES_A_TURN = 32, 256
"""Inodes and pages that a turn looks at: about a millisecond of the trio thread. Long files take several turns."""
MAX_NAMES = 64
"""Names of a file that are looked at to find one that all users can reach."""
MAX_WAITING = 1000
"""Batches that may wait for a subscriber. Further batches are lost for this subscriber."""
SUBSCRIPTIONS_A_TURN = 4096
"""Maximum number of subscriptions that a turn reads: some 20 ms of a worker."""
MAX_MESSAGE_BYTES = 256
"""Size of the largest message of a subscriber, which is a topic."""

_NO_PAGES = np.empty((0, PAGE_ENTRIES), np.int32)


class _Published(NamedTuple):
    """The entries of a file that were published."""

    kv: KvFile
    cuts: int
    num_pages: int


class Publisher:
    """The publisher of this machine's blocks. Owned by the trio thread."""

    def __init__(self, endpoint: str, machine: str | None, fs: FileSystem, watch: Watch) -> None:
        """Listen at `endpoint`. SymError: this is not possible.

        `machine`: the machine's name in topics; None: the host's name.
        """
        self._tree, self._watch = fs.volume.tree, watch
        self._topic = f"kv@{machine or socket.gethostname()}@{fs.volume.model.name}".encode()
        transport, _, where = endpoint.partition("://")
        self._path = Path(where) if transport == "ipc" else None
        self._socket = _bound(endpoint, self._path)
        self._blocks, self._num_batches, self._is_asked = Blocks(), 0, False
        self._published: dict[int, _Published] = {}
        self._directories: set[int] = set()
        """Numbers of the directories that all users can reach and search."""
        self._due: list[Iterator[Inode]] = [iter((self._tree.root,))]
        """Inodes that turns have to look at."""
        self._worker = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Publish for ever."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen)
                await self._publish()
        finally:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            self._socket.context.destroy(linger=0)

    async def _publish(self) -> None:
        while True:
            began_s = trio.current_time()
            if changes := self._changes():
                await self._send(self._blocks.update(changes))
            if self._is_asked:
                await self._send(self._blocks.snapshot())
            # A send may have taken the notice that `_listen` waits for.
            self._is_asked, has_more = await trio.to_thread.run_sync(self._hear, limiter=self._worker)
            pause_s = trio.current_time() - began_s
            if not self._due and not has_more:
                if not self._is_asked:
                    await self._watch.bell.wait()
                pause_s = max(pause_s, PAUSE_S)
            await trio.sleep(pause_s)

    async def _listen(self) -> None:
        """Have a turn read the subscriptions that come."""
        while True:
            await trio.lowlevel.wait_readable(self._socket.fileno())
            self._watch.bell.ring()
            await trio.sleep(PAUSE_S)

    def _hear(self) -> tuple[bool, bool]:
        """Read which subscriptions have come. A worker calls this. Return whether there is a new one, and whether there
        may be more of them. The socket's descriptor tells of them once, and only after all are read.
        """
        is_asked = False
        for _ in range(SUBSCRIPTIONS_A_TURN):
            if not self._socket.poll(0):
                return is_asked, False
            is_asked |= self._socket.recv(zmq.NOBLOCK)[:1] == b"\1"
        return is_asked, True

    async def _send(self, batches: Iterator[bytes]) -> None:
        while await trio.to_thread.run_sync(self._send_next, batches, limiter=self._worker):
            pass

    def _send_next(self, batches: Iterator[bytes]) -> bool:
        """Make and send the next batch. A worker calls this. False: there is none."""
        for batch in batches:
            self._socket.send_multipart((self._topic, self._num_batches.to_bytes(8), batch), zmq.NOBLOCK)
            self._num_batches += 1
            return True
        return False

    # ---- what has changed

    def _changes(self) -> list[Change]:
        """Look at the next inodes, at each once. Return the changes of published files."""
        self._due.append(iter(self._watch.take()))
        found, num_pages, looked = list[Change](), 0, set[Inode]()
        for inode in islice(self._inodes(), FILES_A_TURN):
            if inode in looked:  # its directory has opened or closed meanwhile
                self._due.append(iter((inode,)))
                break
            looked.add(inode)
            change = None if inode.is_directory else self._change(inode)
            if change is not None:
                found.append(change)
                num_pages += len(change.pages)
            if num_pages >= PAGES_A_TURN:
                break
        return found

    def _inodes(self) -> Iterator[Inode]:
        while self._due:
            for inode in self._due[-1]:
                if inode.is_directory:
                    self._look_at_directory(inode)
                yield inode
                break
            else:
                self._due.pop()

    def _look_at_directory(self, inode: Inode) -> None:
        """Note whether all users can reach a directory. If this has changed, its entries have changed, too."""
        above = inode.parent
        is_reached = above is not None and (above is inode or above.number in self._directories)
        is_open = is_reached and bool(inode.mode & SEARCH)
        if is_open != (inode.number in self._directories):
            self._directories ^= {inode.number}
            self._due.append(iter(tuple(inode.entries.values())))

    def _change(self, inode: Inode) -> Change | None:
        kv, number = inode.content, inode.number
        old = self._published.pop(number, None)
        pages, num_kept = _NO_PAGES, 0
        if isinstance(kv, KvFile) and kv.identity == OWN and self._is_public(inode):
            if old is not None and old.kv is kv and old.cuts == kv.cuts:
                num_kept = old.num_pages
            pages = _pages_from(kv.table, num_kept)
            if len(pages) == PAGES_A_TURN:
                self._due.append(iter((inode,)))
            if num_kept + len(pages):
                self._published[number] = _Published(kv, kv.cuts, num_kept + len(pages))
        is_same = num_kept == (0 if old is None else old.num_pages)
        return None if is_same and not len(pages) else Change(number, num_kept, pages)

    def _is_public(self, inode: Inode) -> bool:
        names = islice(inode.names, MAX_NAMES)
        return bool(inode.mode & READ) and any(directory in self._directories for directory, _ in names)


def _pages_from(table: PageTable, first: int) -> IntArray:
    """Return the tokens of the next full pages from page `first` on, up to the first entry that is not at its own
    position. A prompt that a router sees has no such entries.
    """
    begin, stop = first * PAGE_ENTRIES, min(table.length // PAGE_ENTRIES, first + PAGES_A_TURN) * PAGE_ENTRIES
    tokens, positions = table.read(begin, stop)
    strange = np.flatnonzero(positions != np.arange(begin, stop))
    num_pages = (int(strange[0]) if strange.size else stop - begin) // PAGE_ENTRIES
    return tokens[: num_pages * PAGE_ENTRIES].reshape(-1, PAGE_ENTRIES)


def _bound(endpoint: str, path: Path | None) -> zmq.Socket[bytes]:
    found = zmq.Context().socket(zmq.XPUB)
    found.setsockopt(zmq.XPUB_VERBOSE, 1)
    found.setsockopt(zmq.SNDHWM, MAX_WAITING)
    found.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    found.setsockopt(zmq.TCP_KEEPALIVE, 1)
    found.setsockopt(zmq.IPV6, 1)
    mask, is_bound = os.umask(0o177), False
    try:
        if path is not None:
            clear_way(path, key="fleet_events")
        found.bind(endpoint)
        is_bound = True
    except SymError:
        raise
    except (OSError, zmq.ZMQError) as error:  # for a path that is too long, Python raises OSError without an errno
        why = os.strerror(error.errno) if error.errno else str(error)
        message = f"can't publish events at {endpoint}: {why}; choose another fleet_events"
        raise SymError(message, error.errno) from None
    finally:
        os.umask(mask)
        if not is_bound:
            found.context.destroy(linger=0)
    return found
