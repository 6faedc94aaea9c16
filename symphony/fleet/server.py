"""Sends images of files to peers.

A peer gets the digests of a file's pages first, and asks only for the pages that it lacks. The file is read as it was
when the peer asked, whatever happens to the file afterwards.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import trio

from kvfs.fs import FileSystem
from kvfs.images.snapshot import Snapshot
from kvfs.names.content import Marks
from kvfs.names.inode import Credentials
from kvfs.pages.free_list import IntArray
from kvfs.pages.looking import copies, look
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, SymError
from scheduler.wire.peers import accept_for_ever
from symphony.fleet.link import IDLE_S, Ask, Copy, Held, Link, Offer, ask_of, in_worker
from symphony.fleet.versions import entries_here

log = logging.getLogger(__name__)

NUM_WORKERS = 4
"""Maximum number of peers that are served at the same time. Further peers wait, because steps need the cores."""
PAGES_AT_ONCE = 8
MAX_STRANGERS = 64
"""Maximum number of connections that have not shown a certificate yet."""
ROOM_S = 600.0
"""Time that a peer gets to make room for the pages."""


class PeerServer:
    """Serves peers that connect to a listening socket."""

    def __init__(
        self,
        fs: FileSystem,
        context: ssl.SSLContext,
        bound: socket.socket,
        catch_up: Callable[[], None],
        keep: Callable[[Copy], Awaitable[None]],
    ) -> None:
        """`catch_up` commits what calls under way have computed. `keep` copies a version of a peer to disk."""
        self._keep = keep
        self._catch_up = catch_up
        self._fs = fs
        self._bound = bound
        self._context = context
        self._workers = trio.CapacityLimiter(NUM_WORKERS)
        self._strangers: dict[trio.CancelScope, None] = {}
        self.num_pages_sent = 0

    async def run(self) -> None:
        """Serve until the task is cancelled."""
        with trio.socket.from_stdlib_socket(self._bound) as listening:
            async with trio.open_nursery() as nursery:
                await accept_for_ever(
                    listening, "connection of a peer", lambda connection: nursery.start_soon(self._serve, connection)
                )

    async def _serve(self, connection: trio.socket.SocketType) -> None:
        plain = socket.socket(fileno=connection.detach())
        other = "a peer that has gone"
        with suppress(OSError):
            other = "the peer at {}:{}".format(*plain.getpeername()[:2])
        link = Link(plain, other)
        try:
            if await self._is_peer(link):
                await self._answer(link)
        except SymError as error:
            log.info("%s: %s", other, error)
        except Exception:
            log.exception("%s: its request failed inside the daemon", other)
        finally:
            link.close()

    async def _is_peer(self, link: Link) -> bool:
        """Exchange certificates. Return whether the other side has shown one. If there are too many strangers, the one
        that has waited longest loses its place.
        """
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        with trio.CancelScope() as stranger:
            self._strangers[stranger] = None
            try:
                await link.accept(self._context)
            except SymError as error:
                log.debug("%s: %s", link.other, error)
                return False
            finally:
                self._strangers.pop(stranger, None)
            return True
        return False

    async def _answer(self, link: Link) -> None:
        await link.wait_readable(IDLE_S)
        ask = ask_of(await in_worker(link, self._workers, link.receive_message))
        if isinstance(ask, Copy):
            await self._copy(link, ask)
            return
        if isinstance(ask, Held):
            held = [entries_here(self._fs, version) for version in ask.held]
            await in_worker(link, self._workers, link.send_message, {"held": held})
            return
        try:
            snapshot, marks = self._open(ask)
        except SymError as error:
            await in_worker(link, self._workers, link.send_message, _refusal(error))
            return
        try:
            try:
                await in_worker(link, self._workers, snapshot.prepare, trio.from_thread.check_cancelled)
            except SymError as error:  # a page is damaged
                await in_worker(link, self._workers, link.send_message, _refusal(error))
                raise
            await in_worker(link, self._workers, self._offer, link, snapshot, marks)
            await link.wait_readable(ROOM_S)
            self.num_pages_sent += await in_worker(link, self._workers, self._send_pages, link, snapshot)
        finally:
            self._fs.volume.close_snapshot(snapshot)

    async def _copy(self, link: Link, ask: Copy) -> None:
        answer = dict[str, Any]()
        try:
            await self._keep(ask)
        except SymError as error:
            answer = _refusal(error)
        await in_worker(link, self._workers, link.send_message, answer)

    def _open(self, ask: Ask) -> tuple[Snapshot, Marks]:
        self._catch_up()
        creds = Credentials(ask.uid, ask.gid, frozenset(ask.groups))
        file = self._fs.kv_open(creds, ask.path, write=False)
        try:
            content = file.content
            marks = content.marks
            if not marks or marks[-1][1] < content.table.length:
                marks = (*marks, (self._fs.volume.bits, content.table.length))
            return self._fs.volume.open_snapshot(content), marks
        finally:
            self._fs.kv_close(file)

    def _offer(self, link: Link, snapshot: Snapshot, marks: Marks) -> None:
        pool, layout = snapshot.pool, snapshot.layout
        full_pages = _full_pages(snapshot)
        header, digests = bytes(snapshot.read(0, layout.pages)), pool.digests_of(full_pages)
        rest_at = layout.pages + len(full_pages) * pool.page_bytes
        rest = bytes(snapshot.read(rest_at, layout.size - rest_at))
        link.send_message(Offer(layout.size, len(header), [*marks]))
        link.send(header, digests, rest)

    def _send_pages(self, link: Link, snapshot: Snapshot) -> int:
        """Send the pages that the peer asks for, and return their number."""
        pool, full_pages = snapshot.pool, _full_pages(snapshot)
        count = int.from_bytes(link.receive(4), "little")
        if count > len(full_pages):
            raise Invalid(f"{count} pages were asked for, of a file that has {len(full_pages)}")
        numbers = np.frombuffer(link.receive(4 * count), "<u4")
        if count and numbers.max() >= len(full_pages):
            raise Invalid(f"page {numbers.max()} was asked for, of a file that has {len(full_pages)}")
        for first in range(0, count, PAGES_AT_ONCE):
            trio.from_thread.check_cancelled()
            group = numbers[first : first + PAGES_AT_ONCE]
            link.send(*look(pool.store, pool.cold, full_pages[group], copies))
        return count


def _full_pages(snapshot: Snapshot) -> IntArray:
    return snapshot.held_pages()[: snapshot.layout.num_entries // PAGE_ENTRIES]


def _refusal(error: SymError) -> dict[str, Any]:
    return {"errno": error.errno, "message": str(error)}
