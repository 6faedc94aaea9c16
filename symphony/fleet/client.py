"""Copies files of peers into this file system.

Pages that the user's account already has are shared. Only the other pages cross the network, straight into frames. A
worker checks every page against the digest of the image, as when an image is copied to the mount.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfs.fs import FileSystem, OpenKv
from kvfs.images.header import parse_header
from kvfs.images.importer import ImageImport, Survey
from kvfs.names.content import KvFile, Marks, marks_within
from kvfs.names.inode import Credentials
from kvfs.pages.digest import DIGEST_BYTES
from kvfs.pages.pool import PagePool
from kvfs.pages.twins import Digests, Entries, find_twins
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, NoSpace, NotFound
from symphony.fleet.link import Ask, Copy, Held, Link, held_of, in_worker, offer_of, require_done

NUM_WORKERS = 4
"""Maximum number of concurrent copies. Further copies wait, because steps need the cores."""

NUM_CONNECTING = 32
"""Maximum number of connections that are being made at once: a dead peer takes seconds of each."""

COPY_S = 120.0
"""Time that a peer gets to copy a version."""

HELD_S = 2.0
"""Time that a peer gets to say what it has."""

Address = tuple[str, int]


class _Remote:
    """The image of a file of a peer. Satisfies `ByteSource`. Full pages are read in the order of `load`."""

    def __init__(self, fs: FileSystem, link: Link, ask: Ask) -> None:
        """Ask for a file. Raise the peer's error if the peer refuses, and Invalid if the image is of another model."""
        self._link = link
        link.send_message(ask)
        offer = offer_of(link.receive_message(), link.other)
        self.size = offer.size
        self._header, self._rest, self._rest_at = link.receive(offer.header_bytes), b"", 0
        self.plan = plan = parse_header(fs.volume.image_format, self)
        if plan.num_pages > fs.pool.num_pages:
            raise NoSpace(
                f"{ask.path} of {link.other} has {plan.num_pages} pages, and this daemon has {fs.pool.num_pages}"
            )
        self._num_full = plan.num_entries // PAGE_ENTRIES
        self._rest_at = plan.layout.pages + self._num_full * fs.pool.page_bytes
        digests = link.receive(self._num_full * DIGEST_BYTES)
        self.digests = np.frombuffer(digests, np.uint8).reshape(self._num_full, DIGEST_BYTES)
        self._rest = link.receive(plan.layout.size - self._rest_at)
        self._marks = marks_within(tuple(offer.marks), plan.num_entries)

    def read_at(self, offset: int, size: int) -> bytes:
        """Read bytes in front of the full pages, or behind them."""
        if offset < len(self._header):
            return self._header[offset : offset + size]
        return self._rest[offset - self._rest_at :][:size]

    def read_into(self, offset: int, room: memoryview) -> int:
        """Receive the next full page, or read bytes behind the full pages."""
        if offset < self._rest_at:
            self._link.receive_into(room)
        else:
            room[:] = self.read_at(offset, len(room))
        return len(room)

    def survey(self, pool: PagePool, owner: int) -> Survey:
        """Find the full pages that the owner's account already has. The result is a guess that is checked later."""
        numbers = np.frombuffer(self.read_at(self.plan.layout.tokens, 8 * self.plan.num_entries), "<i4")
        of_full = numbers.reshape(2, -1)[:, : self._num_full * PAGE_ENTRIES]
        tokens, positions = of_full.reshape(2, self._num_full, PAGE_ENTRIES)
        entries = Entries(tokens, positions)
        return Survey(entries, self.digests, find_twins(pool, owner, entries, self.digests))

    def load(self, incoming: ImageImport) -> npt.NDArray[np.intp]:
        """Ask for the full pages that are missing, and load everything. Return the indexes of these pages."""
        numbers = incoming.missing_numbers
        numbers = numbers[numbers < self._num_full]
        self._link.send(len(numbers).to_bytes(4, "little"), numbers.astype("<u4").tobytes())
        incoming.load(self, trio.from_thread.check_cancelled)
        return numbers

    def marks(self, bits: str) -> Marks:
        """Return the marks of the new file. Entries at the end that were computed with `bits` get no mark."""
        marks = self._marks
        return marks[:-1] if marks and marks[-1][0] == bits else marks


class PageCache(Protocol):
    """A place that is asked for pages before a peer, and may forget or lie."""

    async def get(self, incoming: ImageImport, digests: Digests, owner: int) -> None:
        """Load pages of an import, whose full pages have these digests."""
        ...

    def offer(self, file: KvFile, numbers: npt.NDArray[np.intp], owner: int) -> None:
        """Keep some full pages of a file."""
        ...


class _NoCache:
    async def get(self, _incoming: ImageImport, _digests: Digests, _owner: int) -> None:
        pass

    def offer(self, _file: KvFile, _numbers: npt.NDArray[np.intp], _owner: int) -> None:
        pass


NO_CACHE = _NoCache()


class Peers:
    """The peers of a daemon, by name."""

    def __init__(
        self, fs: FileSystem, addresses: Mapping[str, Address], context: ssl.SSLContext, cache: PageCache = NO_CACHE
    ) -> None:
        self._fs, self._cache = fs, cache
        self._addresses = addresses
        self._context = context
        self._workers = trio.CapacityLimiter(NUM_WORKERS)
        self._connecting = trio.CapacityLimiter(NUM_CONNECTING)
        self.num_pages_received = 0

    @property
    def names(self) -> list[str]:
        return sorted(self._addresses)

    async def fetch(self, creds: Credentials, peer: str, path: str, new_path: str | None, mode: int) -> OpenKv:
        """Make a file with the entries of a peer's file, and open it for writing. The peer checks that the user may
        read its file.
        """
        if creds.root is not None:
            raise Invalid("a connection that is confined to a domain can't fetch files of peers")
        return await self.fetch_for(creds.uid, creds, peer, path, new_path, mode)

    async def fetch_for(
        self, user: int | None, creds: Credentials, peer: str, path: str, new_path: str | None, mode: int
    ) -> OpenKv:
        """Fetch a file whose pages are, in the cache, those of `user`. None: the cache is left out."""
        fs = self._fs
        cache, user = (NO_CACHE, 0) if user is None else (self._cache, user)
        owner = fs.check_new(creds, new_path, mode)
        link = await self._connected(peer)
        try:
            ask = Ask(path, creds.uid, creds.gid, sorted(creds.groups))
            remote = await in_worker(link, self._workers, _Remote, fs, link, ask)
            surveyed = await in_worker(link, self._workers, remote.survey, fs.pool, owner)
            incoming = await fs.volume.begin_fetch(remote.plan, owner, surveyed)
            try:
                await cache.get(incoming, remote.digests, user)
                sent = await in_worker(link, self._workers, remote.load, incoming)
            except BaseException:
                fs.volume.abandon_assembly(incoming)
                raise
        finally:
            link.close()
        self.num_pages_received += len(sent)
        file = fs.finish_assembly(creds, incoming, new_path, mode)
        file.content.marks, file.content.turns = remote.marks(fs.volume.bits), remote.plan.turns
        cache.offer(file.content, sent, user)
        return file

    async def copy(self, peer: str, request: Copy) -> None:
        """Have a peer fetch a version from this daemon, and sync it."""
        require_done(await self._answer(peer, request, COPY_S, self._workers), peer)

    async def held(self, peer: str, question: Held) -> list[int]:
        """Ask a peer how many entries of each version it has."""
        return held_of(await self._answer(peer, question, HELD_S, self._connecting), question, peer)

    async def _answer(
        self, peer: str, question: Copy | Held, limit_s: float, workers: trio.CapacityLimiter
    ) -> dict[str, Any]:
        link = await self._connected(peer)
        try:
            await in_worker(link, workers, link.send_message, question)
            await link.wait_readable(limit_s)
            return await in_worker(link, workers, link.receive_message)
        finally:
            link.close()

    async def _connected(self, peer: str) -> Link:
        if peer not in self._addresses:
            known = ", ".join(self.names) or "none"
            raise NotFound(f"there is no peer {peer} (peers of this daemon: {known}): see symphony-fleet(1)")
        connect = partial(Link.connected, self._context, peer, self._addresses[peer])
        return await trio.to_thread.run_sync(connect, limiter=self._connecting, abandon_on_cancel=True)
