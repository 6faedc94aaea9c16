"""Sends images of files to peers.

A peer gets the digests of a file's pages first, and asks only for the pages that it lacks. The file is read as it was
when the peer asked, whatever happens to the file afterwards.
"""

from __future__ import annotations

import logging
import socket
import ssl
from contextlib import suppress

import numpy as np
import trio

from kvfs.fs import FileSystem
from kvfs.images.snapshot import Snapshot
from kvfs.names.content import Marks
from kvfs.names.inode import Credentials
from kvfs.pages.looking import copies, look
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, SymError
from scheduler.wire.peers import accept_for_ever
from symphony.fleet.link import Ask, Link, Offer, ask_of, in_worker

log = logging.getLogger(__name__)

NUM_WORKERS = 4
"""Maximum number of peers that are served at the same time. Further peers wait, because steps need the cores."""
PAGES_AT_ONCE = 8


class PeerServer:
    """Serves peers that connect to a listening socket."""

    def __init__(self, fs: FileSystem, context: ssl.SSLContext, bound: socket.socket) -> None:
        self._fs = fs
        self._bound = bound
        self._context = context
        self._workers = trio.CapacityLimiter(NUM_WORKERS)
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
        plain.setblocking(True)
        other = "a peer that has gone"
        with suppress(OSError):
            other = "the peer at {}:{}".format(*plain.getpeername()[:2])
        link = Link(plain, other)
        try:
            await self._answer(link)
        except SymError as error:
            log.info("%s: %s", other, error)
        finally:
            link.close()

    async def _answer(self, link: Link) -> None:
        ask = await in_worker(link, self._workers, self._greet, link)
        try:
            snapshot, marks = self._open(ask)
        except SymError as error:
            refusal = {"errno": error.errno, "message": str(error)}
            await in_worker(link, self._workers, link.send_message, refusal)
            return
        try:
            await in_worker(link, self._workers, self._send, link, snapshot, marks)
        finally:
            self._fs.volume.close_snapshot(snapshot)

    def _greet(self, link: Link) -> Ask:
        link.accept(self._context)
        return ask_of(link.receive_message())

    def _open(self, ask: Ask) -> tuple[Snapshot, Marks]:
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

    def _send(self, link: Link, snapshot: Snapshot, marks: Marks) -> None:
        pool, layout, checkpoint = snapshot.pool, snapshot.layout, trio.from_thread.check_cancelled
        full_pages = snapshot.held_pages()[: layout.num_entries // PAGE_ENTRIES]
        snapshot.prepare(checkpoint)
        header, digests = bytes(snapshot.read(0, layout.pages)), pool.digests_of(full_pages, checkpoint)
        rest_at = layout.pages + len(full_pages) * pool.page_bytes
        rest = bytes(snapshot.read(rest_at, layout.size - rest_at))
        link.send_message(Offer(layout.size, len(header), [*marks]))
        link.send(header, digests, rest)
        count = int.from_bytes(link.receive(4), "little")
        if count > len(full_pages):
            raise Invalid(f"{count} pages were asked for, of a file that has {len(full_pages)}")
        numbers = np.frombuffer(link.receive(4 * count), "<u4")
        if count and numbers.max() >= len(full_pages):
            raise Invalid(f"page {numbers.max()} was asked for, of a file that has {len(full_pages)}")
        for first in range(0, count, PAGES_AT_ONCE):
            checkpoint()
            group = numbers[first : first + PAGES_AT_ONCE]
            self.num_pages_sent += len(group)
            link.send(*look(pool.store, pool.cold, full_pages[group], copies))
