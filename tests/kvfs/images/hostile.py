"""Images that are almost right: a fuzzer feeds them to the import, and checks the result of each.

`Fuzzer` has a pool of its own with a neighbour in it, and counts what became of its attempts.
"""

import json
import random
from collections import Counter
from collections.abc import Callable

import numpy as np

from kvfs.images.format import ImageFormat
from kvfs.images.snapshot import Snapshot
from kvfs.pages.digest import digest
from kvfs.pages.free_list import IntArray
from kvfs.pages.pool import PagePool, pages_for
from kvfs.pages.table import PageTable
from libsym.errors import Invalid, NoSpace
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeFacts, FakeStore, import_image

STRANGER, NEIGHBOUR = 1001, 1002
NUM_ENTRIES = 40
_DATA_START = 4096
"""Offset of the data in the fake model's images."""
_STRANGE: list[object] = [
    *(0, 1, -1, 2, 40, 41, 2**31, 2**63, 10**30, 1.0, True, None),
    *("", "F32", "I32", "F64", [], [0], {}, [[40]]),
]
_INSERTED = [b"[", b"{", b'"', b",", b"0", b"9" * 50, b"-", b"1e9", b"\\u0000", b"null"]
_SIZES = [2**16, 2**16 + 1, 2**31, 2**32, 2**63, 2**64 - 1]


def forge(
    image_format: ImageFormat, tokens: list[int], positions: list[int] | None = None, pages: bytes | None = None
) -> bytes:
    """Return an image of any content, with the right digest."""
    positions = list(range(len(tokens))) if positions is None else positions
    layout = image_format.layout(len(tokens))
    pages = bytes(layout.num_pages * image_format.page_bytes) if pages is None else pages
    size = image_format.page_bytes
    digests = b"".join(digest(pages[start : start + size]) for start in range(0, len(pages), size))
    entries = np.array([tokens, positions], "<i4").tobytes()
    return image_format.header(len(tokens), digest(digests + entries).hex()) + pages + entries


def image_of(table: PageTable, image_format: ImageFormat) -> bytes:
    snapshot = Snapshot(table, image_format)
    data = bytes(snapshot.read(0, snapshot.size))
    assert len(data) == snapshot.size
    snapshot.close()
    return data


def with_header(image_format: ImageFormat, data: bytes, text: bytes) -> bytes:
    """The image with another header text, padded as ours is."""
    room = image_format.data_start - 8
    return data[:8] + text.ljust(room)[:room] + data[image_format.data_start :]


def edit_header(rng: random.Random, image: bytes) -> bytes:
    """Valid JSON in which one value, name or order is another."""
    header = json.loads(image[8:_DATA_START])
    node = header
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
            break
        node = node[key]
    match rng.randrange(5):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[key] = node.pop(key)  # last
        case 2 if isinstance(node[key], int):
            node[key] += rng.choice([-4096, -32, -4, -1, 1, 4, 32, 4096])
        case _:
            node[key] = rng.choice(_STRANGE)
    return image[:8] + json.dumps(header).encode().ljust(_DATA_START - 8) + image[_DATA_START:]


def scramble_header(rng: random.Random, image: bytes) -> bytes:
    """Bytes of the header changed, removed, put in or doubled; mostly at the same length."""
    data = bytearray(image)
    end = len(image[:_DATA_START].rstrip())  # where the header's padding begins
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(end)
        match rng.randrange(6):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at : at + rng.randrange(1, 9)] = b""
            case 3:
                data[at:at] = rng.choice(_INSERTED)
            case 4:
                stop = at + rng.randrange(1, 60)
                data[stop:stop] = data[at:stop]
            case _:
                other = rng.randrange(end)
                data[at], data[other] = data[other], data[at]
    if rng.random() < 0.7:  # keep the length, so that it gets past the first check
        header = bytes(data[8 : _DATA_START + len(data) - len(image)])
        room = _DATA_START - 8
        data[:] = image[:8] + header.rstrip()[:room].ljust(room) + image[_DATA_START:]
    return bytes(data)


def change_length(rng: random.Random, image: bytes) -> bytes:
    """Cut short, drawn out, or with a header that says it is longer than anything."""
    match rng.randrange(4):
        case 0:
            return image[: rng.randrange(len(image))]
        case 1:
            return image + bytes(rng.randrange(1, 5000))
        case 2:
            at = rng.randrange(len(image))
            return image[:at] + image[at + rng.randrange(1, 64) :]
        case _:
            return rng.choice([*_SIZES, rng.randrange(_DATA_START)]).to_bytes(8, "little") + image[8:]


def damage_content(rng: random.Random, image: bytes) -> bytes:
    """Bytes behind the header changed: the digest no longer fits."""
    data = bytearray(image)
    for _ in range(rng.choice([1, 1, 4])):
        data[rng.randrange(_DATA_START, len(data))] ^= rng.randrange(1, 256)
    return bytes(data)


class Fuzzer:
    """A pool with a neighbour's table, and a stranger who imports hostile images into it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        facts = FakeFacts()
        self._format = ImageFormat(facts)
        store = FakeStore(facts, num_pages=16)
        self._pool = _Watched(store)
        decoder = FakeDecoder(store)
        self._neighbour = PageTable(self._pool, NEIGHBOUR)
        decoder.append(self._neighbour, list(range(100, 150)))
        table = PageTable(self._pool, STRANGER)
        decoder.append(table, list(range(NUM_ENTRIES)))
        self._image = image_of(table, self._format)
        table.close()
        self._neighbour_image = image_of(self._neighbour, self._format)
        self._num_free = self._pool.num_free
        self._ways: list[Callable[[random.Random, bytes], bytes]] = [
            *(edit_header, edit_header, scramble_header, scramble_header),
            *(change_length, damage_content, self._forge),
        ]
        self.refusals: Counter[str] = Counter()
        """How often each message was given, by its first words."""
        self.num_accepted = 0

    def run(self, count: int) -> None:
        """Try so many images; raise AssertionError if one of them does anything but fail or hold what it says."""
        for _ in range(count):
            self._attempt(self._rng.choice(self._ways)(self._rng, self._image))
        self.check()

    def check(self) -> None:
        """The books are right, and the neighbour's image is what it was."""
        assert self._pool.num_free == self._num_free
        self._pool.check([self._neighbour])
        assert image_of(self._neighbour, self._format) == self._neighbour_image

    def _attempt(self, data: bytes) -> None:
        self._pool.num_taken = 0
        try:
            table = import_image(self._pool, self._format, BytesSource(data), STRANGER)
        except (Invalid, NoSpace) as error:
            message = str(error)
            assert message.isprintable(), message
            assert len(message) < 200, message
            self.refusals[" ".join(message.split()[:3])] += 1
        else:
            self._must_hold(table, data)
            self.num_accepted += 1
            table.close()
        most = -(-len(data) // self._format.page_bytes)
        assert self._pool.num_taken <= most, f"{self._pool.num_taken} pages taken for {len(data)} bytes"
        assert self._pool.num_free == self._num_free

    def _must_hold(self, table: PageTable, data: bytes) -> None:
        """An image that was taken must be what was given, all but the spelling of the header."""
        start = self._format.data_start
        assert image_of(table, self._format)[start:] == data[start:]
        tokens, positions = table.read()
        facts = self._format.facts
        assert all(0 <= token < facts.vocab_size for token in tokens.tolist())
        assert all(0 <= position < facts.max_positions for position in positions.tolist())

    def _forge(self, rng: random.Random, _image: bytes) -> bytes:
        """Content of any kind, with a digest that fits it."""
        count = rng.choice([0, 1, 31, 32, 33, 64, rng.randrange(100)])
        numbers = [
            rng.randrange(900) if rng.random() < 0.999 else rng.choice([-1, 2**31 - 1, 1000]) for _ in range(count)
        ]
        pages = bytearray(rng.randbytes(64) * (pages_for(count) * self._format.page_bytes // 64))
        if rng.random() < 0.5 and count % 32:
            last = np.frombuffer(pages, np.uint8)[-self._format.page_bytes :]
            last.reshape(*self._format.facts.page_shape[:3], 32, -1)[:, :, :, count % 32 :] = 0
        return forge(self._format, numbers, None, bytes(pages))


class _Watched(PagePool):
    """Counts the pages that are given out."""

    num_taken = 0

    def allocate(self, count: int, owner: int, frames: IntArray | None = None) -> IntArray:
        pages = super().allocate(count, owner, frames)
        self.num_taken += count
        return pages
