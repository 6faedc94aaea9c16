"""Pages of a fleet in Mooncake Store: a cache in the memory of several machines.

A fetch asks the store before it asks the peer, and the pages that the peer had to send are put into the store
afterwards. The peer still says which pages a file has, after it has checked the user's rights. Every page is checked
against the digest that the peer has sent. So whatever the store does is a miss at worst.

The store has no users, and everybody who reaches a machine can list, read and replace its values. So a page is
encrypted, by AES in counter mode. Its name and its key are a keyed BLAKE2b of its owner and its digest. The secret of
the hash is the record `symphony/FLEET/store` in etcd, so nobody else can read a page, or ask whether an owner has it. A
key encrypts only one content, so its counter begins at zero.

Frames are not registered with the store, for two reasons. Registered memory can be read and written from the network.
And a call of the store can't be cancelled: an answer that is late would be written to a frame that holds another page
by then. So pages pass through a room that a process shares with the daemon. The process calls the store; it may hang or
crash, and knows neither keys nor pages.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import trio
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR

from kvfs.fs import FileSystem
from kvfs.images.importer import ImageImport
from kvfs.images.snapshot import Snapshot
from kvfs.names.content import KvFile
from kvfs.pages.digest import DIGEST_BYTES
from kvfs.pages.free_list import IntArray
from kvfs.pages.looking import copies, look
from kvfs.pages.twins import Digests
from libsym.errors import ProtocolError, SymError
from symphony.fleet.etcd import Etcd, has_revision, putting
from symphony.fleet.store_calls import PAGES_AT_ONCE, RETRY_S, StoreProcess

log = logging.getLogger(__name__)

MAX_OFFERED = 8
"""Maximum number of files whose pages wait to be put. Pages of further files are not put."""
Numbers: TypeAlias = npt.NDArray[np.intp]
SECRET_BYTES, KEY_BYTES, NAME_BYTES = 32, 16, 32


class Store:
    """The store, for the pages of this daemon."""

    def __init__(self, fs: FileSystem, etcd: Etcd, fleet: str, process: StoreProcess) -> None:
        self._fs, self._etcd, self._process = fs, etcd, process
        self._key = f"symphony/{fleet}/store"
        self._secret = b""
        self._room = trio.Lock()
        self._worker = trio.CapacityLimiter(1)
        self._offering, self._offered = trio.open_memory_channel[tuple[Snapshot, Numbers, int]](MAX_OFFERED)
        self.num_pages_got = self.num_pages_put = 0

    def info(self) -> dict[str, Any]:
        """Return facts for `symphony fleet status`."""
        counts = {"pages_got": self.num_pages_got, "pages_put": self.num_pages_put}
        return {"master": self._process.master, "trouble": self._process.trouble, **counts}

    async def run(self) -> None:
        """Keep the store for ever, and put pages that were offered."""
        while not self._secret:
            try:
                self._secret = await trio.to_thread.run_sync(self._agree, abandon_on_cancel=True)
            except SymError as error:
                self._process.fails(f"no secret: {error}")
                await trio.sleep(RETRY_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._process.run)
            nursery.start_soon(self._put_for_ever)

    def _agree(self) -> bytes:
        """Return the secret of the fleet. The first daemon that asks draws it."""
        mine = secrets.token_bytes(SECRET_BYTES)
        self._etcd.commit([has_revision(self._key, 0)], [putting(self._key, mine)])
        values = [each.value for each in self._etcd.read(self._key) if each.key == self._key]
        if [len(each) for each in values] != [SECRET_BYTES]:
            raise ProtocolError(f"{self._key} in etcd is no secret of {SECRET_BYTES} bytes")
        return values[0]

    def sealed(self, owner: int, digest: bytes) -> tuple[str, bytes]:
        """Return the name and the key of an owner's page."""
        size = NAME_BYTES + KEY_BYTES
        both = hashlib.blake2b(owner.to_bytes(8, "little") + digest, key=self._secret, digest_size=size).digest()
        return both[:NAME_BYTES].hex(), both[NAME_BYTES:]

    async def get(self, incoming: ImageImport, digests: Digests, owner: int) -> None:
        """Load the pages of an import that the store has."""
        wanted, page_bytes = incoming.missing_numbers, self._fs.pool.page_bytes
        wanted = wanted[wanted < len(digests)]
        for first in range(0, len(wanted), PAGES_AT_ONCE):
            numbers = wanted[first : first + PAGES_AT_ONCE]
            sealed = [self.sealed(owner, digests[number].tobytes()) for number in numbers.tolist()]
            async with self._room:
                codes = await self._process.call("get", [name for name, _ in sealed], page_bytes)
                there = [place for place, code in enumerate(codes) if code == page_bytes]
                if not there:
                    continue
                read = partial(_read, [(sealed[place][1], self._part(place)) for place in there])
                chosen = numbers[there]
                self.num_pages_got += await trio.to_thread.run_sync(
                    incoming.take, chosen, digests[chosen], read, limiter=self._worker
                )

    def offer(self, file: KvFile, numbers: Numbers, owner: int) -> None:
        """Put full pages of a file into the store, later. If the store is away, or too many wait, it gets none."""
        if len(numbers) and not self._process.trouble:
            snapshot = self._fs.volume.hold(file)
            try:
                self._offering.send_nowait((snapshot, numbers, owner))
            except trio.WouldBlock:
                self._fs.volume.close_snapshot(snapshot)

    async def _put_for_ever(self) -> None:
        try:
            async for snapshot, numbers, owner in self._offered:
                try:
                    await self._put(snapshot, numbers, owner)
                except SymError as error:
                    log.warning("fleet: pages are not put into the store: %s", error)
                finally:
                    self._fs.volume.close_snapshot(snapshot)
        finally:
            while self._offered.statistics().current_buffer_used:
                self._fs.volume.close_snapshot(self._offered.receive_nowait()[0])

    async def _put(self, snapshot: Snapshot, numbers: Numbers, owner: int) -> None:
        pages, page_bytes = snapshot.held_pages()[numbers], snapshot.pool.page_bytes
        for first in range(0, len(pages), PAGES_AT_ONCE):
            group = pages[first : first + PAGES_AT_ONCE]
            async with self._room:
                if self._process.trouble:
                    return
                names = await trio.to_thread.run_sync(self._seal, snapshot, group, owner, limiter=self._worker)
                codes = await self._process.call("put", names, page_bytes)
            self.num_pages_put += codes.count(0)

    def _seal(self, snapshot: Snapshot, pages: IntArray, owner: int) -> list[str]:
        """Write encrypted pages into the room, and return their names."""
        pool, names = snapshot.pool, list[str]()
        digests = pool.digests_of(pages)
        # `look` may see a page of another content first, which must not meet the key: so it copies
        for place, page in enumerate(look(pool.store, pool.cold, pages, copies)):
            name, key = self.sealed(owner, digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
            _cipher(key).encryptor().update_into(page, self._part(place))
            names.append(name)
        return names

    def _part(self, place: int) -> memoryview:
        page_bytes = self._fs.pool.page_bytes
        return self._process.room[place * page_bytes : (place + 1) * page_bytes]


def _read(parts: Sequence[tuple[bytes, memoryview]], place: int, page: memoryview) -> None:
    """Decrypt a page. `parts` has each page's key and encrypted bytes."""
    key, part = parts[place]
    _cipher(key).decryptor().update_into(part, page)


def _cipher(key: bytes) -> Cipher[CTR]:
    return Cipher(AES128(key), CTR(bytes(16)))
