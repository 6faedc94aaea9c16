"""The image of a KV file: its bytes for readers, and its import. Hostile headers are in test_hostile_image.py."""

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from kvfs.images.format import CLAIM_BYTES, ImageFormat, claims_to_be_image
from kvfs.images.header import parse_header
from kvfs.images.importer import ImageImport
from kvfs.images.snapshot import Snapshot
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import Invalid, NoSpace
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeFacts, FakeStore, allocate, fake_identity, import_image
from tests.kvfs.images.hostile import image_of

ANN, BOB = 1001, 1002
over_lengths = pytest.mark.parametrize("length", [0, 1, 32, 33, 64, 70])


def tokens_for(length: int, seed: int = 0) -> list[int]:
    return [(seed * 101 + 7 * index) % 1000 for index in range(length)]


class House:
    """A pool, and images of tables in it."""

    def __init__(self, facts: FakeFacts) -> None:
        self.store = FakeStore(facts, num_pages=16)
        self.pool = PagePool(self.store)
        self.decoder = FakeDecoder(self.store)
        self.format = ImageFormat(facts)

    def table(self, length: int, seed: int = 0, owner: int = ANN) -> PageTable:
        table = PageTable(self.pool, owner)
        if length:
            self.decoder.append(table, tokens_for(length, seed), position=5)
        return table

    def image(self, table: PageTable) -> bytes:
        return image_of(table, self.format)

    def load(self, source: bytes | BytesSource, owner: int = ANN) -> PageTable:
        return import_image(self.pool, self.format, BytesSource(source) if isinstance(source, bytes) else source, owner)

    def begin(self, source: BytesSource, owner: int) -> ImageImport:
        return ImageImport(self.pool, parse_header(self.format, source), owner)


@pytest.fixture
def house(facts: FakeFacts) -> House:
    return House(facts)


@over_lengths
def test_any_safetensors_library_reads_an_image(house: House, tmp_path: Path, length: int) -> None:
    table, path = house.table(length), tmp_path / "a.kv"
    path.write_bytes(house.image(table))
    assert path.stat().st_size == house.format.image_bytes(length), "known without opening it"
    with safe_open(path, framework="numpy") as image:
        assert set(image.keys()) == {"pages", "tokens", "positions"}
        metadata = image.metadata()
        pages = image.get_tensor("pages")
        tokens, positions = image.get_tensor("tokens"), image.get_tensor("positions")
    assert [array.tolist() for array in (tokens, positions)] == [tokens_for(length), list(range(5, 5 + length))]
    assert tokens.dtype == positions.dtype == np.int32
    assert pages.dtype == np.float32
    assert pages.shape == ((length + 31) // 32, *house.format.page_shape)
    full = length // 32
    assert (pages[:full] == house.store.pages[table.pages[:full]]).all()
    for page in pages[full:]:
        assert page.tobytes() == house.store.masked(house.store.view(int(table.pages[-1])), length % 32)
    assert {key: metadata[key] for key in fake_identity()} == fake_identity()
    assert (metadata["format"], metadata["version"]) == ("symphony.kv", "2")
    page_digests = b"".join(hashlib.blake2b(page.tobytes(), digest_size=32).digest() for page in pages)
    whole = hashlib.blake2b(page_digests + tokens.tobytes() + positions.tobytes(), digest_size=32)
    assert metadata["digest"] == whole.hexdigest()


def test_truncating_to_a_size_keeps_the_most_entries_that_fit(house: House) -> None:
    sizes = [house.format.image_bytes(n) for n in range(140)]
    for n in range(139):
        for size in {sizes[n], sizes[n] + 1, (sizes[n] + sizes[n + 1]) // 2, sizes[n + 1] - 1}:
            assert house.format.entries_for(size) == n
    assert house.format.entries_for(house.format.image_bytes(10**12)) == 10**12
    for size in (0, 1, 4095):
        with pytest.raises(Invalid, match=f"to {size} bytes: its header alone has 4096"):
            house.format.entries_for(size)


def test_every_range_of_an_image_reads_as_that_range_of_the_whole(house: House) -> None:
    hole, table = house.table(40), house.table(40)
    hole.close()
    house.decoder.append(table, tokens_for(70))  # so its pages do not lie in one run
    assert (np.diff(table.pages) != 1).any()
    whole, snapshot = house.image(table), Snapshot(table, house.format)
    at = snapshot.layout
    edges = [0, 8, *range(at.pages, at.tokens + 1, house.format.page_bytes), at.tokens, at.positions, at.size]
    for offset in {max(0, edge + shift) for edge in edges for shift in (-1, 0, 1)}:
        for size in (0, 1, 7, 4096, 5000, 20_000, 10**6):
            assert bytes(snapshot.read(offset, size)) == whole[offset : offset + size]
    snapshot.close()


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        pytest.param(40, [+3], id="appended in place, in the reader's tail page"),
        pytest.param(40, [-20, +50], id="cut before anything is read"),
        pytest.param(70, [-38, +38], id="cut and grown to as many pages"),
        pytest.param(40, [+3, -33, +60], id="may not be in place, as the reader still looks at the page"),
    ],
)
def test_a_reader_keeps_seeing_the_file_as_it_was_when_opened(house: House, length: int, changes: list[int]) -> None:
    table = house.table(length)
    expected, snapshot = house.image(table), Snapshot(table, house.format)
    for change in changes:
        if change > 0:
            house.decoder.append(table, tokens_for(change, seed=5))
        else:
            table.truncate(table.length + change)
    house.pool.check([table], [snapshot])
    if changes == [+3]:
        assert table.pages[1] == snapshot.held_pages()[1]
    assert bytes(snapshot.read(0, snapshot.size)) == expected
    table.close()
    stranger = house.table(12 * 32, 6, BOB)
    assert bytes(snapshot.read(0, snapshot.size)) == expected
    house.pool.check([stranger], [snapshot])
    snapshot.close()
    for use in (snapshot.close, lambda: snapshot.read(0, 1)):
        with pytest.raises(AssertionError):
            use()
    house.pool.check([stranger])


def test_many_threads_may_prepare_one_snapshot(house: House, facts: FakeFacts) -> None:
    other = House(facts)
    expected = other.image(other.table(300))
    snapshot = Snapshot(house.table(300), house.format)  # nothing of it was hashed before
    start = threading.Barrier(8)

    def prepare() -> None:
        start.wait()
        snapshot.prepare()

    with ThreadPoolExecutor(8) as workers:
        for done in [workers.submit(prepare) for _ in range(8)]:
            done.result()
    assert bytes(snapshot.read(0, snapshot.size)) == expected
    snapshot.close()


def test_an_import_under_way_is_in_the_books_and_one_that_was_abandoned_shows_another_owner_nothing(
    house: House,
) -> None:
    table = house.table(40)
    source = BytesSource(house.image(table))
    incoming = house.begin(source, BOB)
    house.pool.check([table], [incoming])
    with ThreadPoolExecutor(1) as worker:
        worker.submit(incoming.load, source).result()
    house.pool.check([table], [incoming])
    incoming.abandon()
    house.pool.check([table])
    assert house.pool.num_pages - house.pool.num_free == 2
    table.close()
    allocate(house.pool, 16, 1003)
    assert not house.store.pages.any()


def test_an_imported_page_needs_no_second_hash(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    keep = house.pool.keep_digests

    def kept(pages: Any, values: Any) -> None:
        hashed.extend(pages)
        keep(pages, values)

    monkeypatch.setattr(house.pool, "keep_digests", kept)
    data = house.image(house.table(64))
    assert len(hashed) == 2, "of pages that were computed"
    table = house.load(data)
    assert len(hashed) == 4, "which the image tells"
    assert house.image(table) == data
    assert len(hashed) == 4


# Refusals


def test_an_image_of_another_model_says_what_differs(house: House) -> None:
    source = BytesSource(house.image(house.table(3)))
    for key, value in fake_identity().items():
        other = ImageFormat(FakeFacts(identity={**fake_identity(), key: "d1ff" * 8}))
        message = rf"^image is of {key} {value[:12]}…? \(this daemon runs d1ffd1ffd1ff…\): it can't be used here$"
        with pytest.raises(Invalid, match=message):
            parse_header(other, source)
    with pytest.raises(Invalid, match="tensor pages does not fit 3 entries of this model"):
        parse_header(ImageFormat(FakeFacts(head_dim=8)), source)


class ShrinkingSource(BytesSource):
    """A file that is truncated after its header was read."""

    def read_at(self, offset: int, size: int) -> bytes:
        return super().read_at(offset, size)[: max(0, 6000 - offset)]


class BrokenSource(BytesSource):
    """A file on a disk that fails."""

    def read_at(self, offset: int, size: int) -> bytes:
        if offset > 8000:
            raise OSError(5, "Input/output error")
        return super().read_at(offset, size)


def test_an_image_that_is_not_whole_is_refused_and_its_pages_given_back(house: House) -> None:
    table = house.table(64)
    data = house.image(table)

    def refused(source: bytes | BytesSource, message: str, error: type[Exception] = Invalid) -> None:
        with pytest.raises(error, match=message):
            house.load(source)
        house.pool.check([table])

    for size in [*range(0, len(data), 97), len(data) - 1]:
        refused(data[:size], "cut short")
    refused(data + b"\0", "too long")
    refused(ShrinkingSource(data), "cut short: 1904 of 4096 bytes at offset 4096")
    refused(BrokenSource(data), "Input/output", OSError)
    for part in ("pages", "tokens", "positions"):
        flipped = bytearray(data)
        flipped[getattr(house.format.layout(64), part) + 40] ^= 1
        refused(bytes(flipped), "image is damaged: its content has another digest")
    house.decoder.append(table, [1] * (9 * 32 - 64))
    refused(house.image(table), "9 pages wanted, 7 of 16 free", NoSpace)


def test_a_claim_is_seen_in_the_first_bytes(house: House) -> None:
    data = house.image(house.table(3))
    assert claims_to_be_image(data[:CLAIM_BYTES], len(data))
    assert claims_to_be_image(data[:1000], 1000)  # cut short, but it claims
    spaced = json.dumps({"__metadata__": {"format": "symphony.kv"}}).encode()  # as other writers space it
    assert claims_to_be_image(len(spaced).to_bytes(8, "little") + spaced, 8 + len(spaced))
    for head in (
        b"",
        b"{}",
        b"Once upon a time there was a format called symphony.kv",
        b'{"format":"symphony.kv"}',  # the first eight bytes are no length
        (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}',  # a safetensors file of somebody else
        (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}"format":"symphony.kv"',  # in the data, not the header
        (1 << 40).to_bytes(8, "little") + b'{"__metadata__":{"format":"symphony.kv"}}',
        (50).to_bytes(8, "little") + b'["format":"symphony.kv"]',
    ):
        assert not claims_to_be_image(head, len(head)), head


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_pages_are_taken_from_another_place_if_they_are_right(house: House, wrong: int | None) -> None:
    table = house.table(70)
    image, pages = BytesSource(house.image(table)), [bytes(house.store.view(page)) for page in table.pages[:2].tolist()]
    wanted = np.frombuffer(house.pool.digests_of(table.pages[:2]), np.uint8).reshape(2, -1)
    incoming = house.begin(image, BOB)
    if wrong is not None:
        pages[wrong] = pages[wrong][:-1] + b"x"

    def read(place: int, view: memoryview) -> None:
        view[:] = pages[place]

    assert incoming.take(np.array([0, 1]), wanted, read) == 2 - (wrong is not None)
    assert incoming.missing_numbers.tolist() == [*([] if wrong is None else [wrong]), 2]
    incoming.load(image)
    copy = incoming.finish()
    assert house.image(copy) == image.data
    house.pool.check([table, copy])
