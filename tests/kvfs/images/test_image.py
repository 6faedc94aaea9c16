"""The image of a KV file: its bytes for readers, and its import. Hostile headers are in test_hostile_image.py."""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from tests.kvfs.fakes import (
    BytesSource,
    FakeDecoder,
    FakeFacts,
    FakeStore,
    allocate,
    entry_values,
    fake_identity,
    import_image,
)

ANN, BOB = 1001, 1002
LENGTHS = [0, 1, 31, 32, 33, 63, 64, 70]


def tokens_for(length: int, seed: int = 0) -> list[int]:
    return [(seed * 101 + 7 * index) % 1000 for index in range(length)]


def make_table(pool: PagePool, decoder: FakeDecoder, length: int, seed: int = 0) -> PageTable:
    table = PageTable(pool, ANN)
    if length:
        decoder.append(table, tokens_for(length, seed), position=5)
    return table


def image_of(table: PageTable, image_format: ImageFormat) -> bytes:
    snapshot = Snapshot(table, image_format)
    data = bytes(snapshot.read(0, snapshot.size))
    assert len(data) == snapshot.size
    snapshot.close()
    return data


def assert_same_file(decoder: FakeDecoder, table: PageTable, length: int, seed: int = 0) -> None:
    tokens, positions = tokens_for(length, seed), list(range(5, 5 + length))
    assert [array.tolist() for array in table.read()] == [tokens, positions]
    assert decoder.entries(table.pages, table.length).tolist() == entry_values(
        list(zip(tokens, positions, strict=True))
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_any_safetensors_library_reads_an_image(
    pool: PagePool, store: FakeStore, decoder: FakeDecoder, image_format: ImageFormat, tmp_path: Path, length: int
):
    table = make_table(pool, decoder, length)
    path = tmp_path / "a.kv"
    path.write_bytes(image_of(table, image_format))
    with safe_open(path, framework="numpy") as image:
        assert set(image.keys()) == {"pages", "tokens", "positions"}
        metadata = image.metadata()
        pages = image.get_tensor("pages")
        tokens, positions = image.get_tensor("tokens"), image.get_tensor("positions")
    assert [array.tolist() for array in (tokens, positions)] == [tokens_for(length), list(range(5, 5 + length))]
    assert tokens.dtype == positions.dtype == np.int32
    assert pages.dtype == np.float32
    assert pages.shape == ((length + 31) // 32, *image_format.page_shape)
    full = length // 32
    assert (pages[:full] == store.pages[table.pages[:full]]).all()
    for page in pages[full:]:
        assert page.tobytes() == store.masked(store.view(int(table.pages[-1])), length % 32)
    assert {key: metadata[key] for key in fake_identity()} == fake_identity()
    assert (metadata["format"], metadata["version"]) == ("symphony.kv", "2")
    page_digests = b"".join(hashlib.blake2b(page.tobytes(), digest_size=32).digest() for page in pages)
    whole = hashlib.blake2b(page_digests + tokens.tobytes() + positions.tobytes(), digest_size=32)
    assert metadata["digest"] == whole.hexdigest()


@pytest.mark.parametrize("length", LENGTHS)
def test_an_image_comes_back_as_the_same_file(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat, length: int
):
    table = make_table(pool, decoder, length)
    data = image_of(table, image_format)
    copy = import_image(pool, image_format, BytesSource(data), BOB)
    assert copy.owner == BOB
    assert not set(copy.pages.tolist()) & set(table.pages.tolist())
    assert_same_file(decoder, copy, length)
    pool.check([table, copy])
    assert image_of(copy, image_format) == data
    decoder.append(copy, [3, 4])
    assert decoder.entries(copy.pages, length + 2)[:length].tolist() == decoder.entries(table.pages, length).tolist()
    pool.check([table, copy])


def test_data_begins_at_a_page_boundary_for_every_length(image_format: ImageFormat):
    assert image_format.data_start % 4096 == 0
    for num_entries in (0, 1, 10**6, 10**12):
        header = image_format.header(num_entries, "0" * 64)
        assert len(header) == image_format.data_start
        assert json.loads(header[8:])["tokens"]["shape"] == [num_entries]


def test_the_size_of_an_image_is_known_without_opening_it(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    for length in LENGTHS:
        table = make_table(pool, decoder, length)
        assert image_format.image_bytes(length) == len(image_of(table, image_format))
        table.close()


def test_truncating_to_a_size_keeps_the_most_entries_that_fit(image_format: ImageFormat):
    sizes = [image_format.image_bytes(n) for n in range(140)]
    for n in range(139):
        for size in {sizes[n], sizes[n] + 1, (sizes[n] + sizes[n + 1]) // 2, sizes[n + 1] - 1}:
            assert image_format.entries_for(size) == n
    assert image_format.entries_for(image_format.image_bytes(10**12)) == 10**12


@pytest.mark.parametrize("size", [0, 1, 4095])
def test_no_entries_fit_below_the_header(image_format: ImageFormat, size: int):
    with pytest.raises(Invalid, match=f"to {size} bytes: its header alone has 4096"):
        image_format.entries_for(size)


def test_a_page_of_the_image_is_the_page_itself(
    pool: PagePool, store: FakeStore, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 100)
    snapshot = Snapshot(table, image_format)
    view = snapshot.read(image_format.data_start + 100, 2 * store.page_bytes)
    assert isinstance(view, memoryview)
    assert view.readonly
    first = int(table.pages[0]) * store.page_bytes + 100
    assert np.shares_memory(np.frombuffer(view, np.uint8), store.pages)
    assert view == store.view(0, store.num_pages)[first : first + 2 * store.page_bytes]
    view.release()
    snapshot.close()


def test_every_range_of_an_image_reads_as_that_range_of_the_whole(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    hole = make_table(pool, decoder, 40)
    table = make_table(pool, decoder, 40)
    hole.close()
    decoder.append(table, tokens_for(70))  # so its pages do not lie in one run
    assert (np.diff(table.pages) != 1).any()
    whole = image_of(table, image_format)
    snapshot = Snapshot(table, image_format)
    at = snapshot.layout
    edges = [0, 8, *range(at.pages, at.tokens + 1, image_format.page_bytes), at.tokens, at.positions, at.size]
    offsets = sorted({max(0, edge + shift) for edge in edges for shift in (-1, 0, 1)})
    for offset in offsets:
        for size in (0, 1, 7, 4096, 5000, 20_000, 10**6):
            assert bytes(snapshot.read(offset, size)) == whole[offset : offset + size]
    snapshot.close()


def test_a_reader_keeps_seeing_the_file_as_it_was_when_opened(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 40)
    expected = image_of(table, image_format)
    snapshot = Snapshot(table, image_format)
    decoder.append(table, [1, 2, 3])  # in place, in the reader's tail page
    assert table.pages[1] == snapshot.held_pages()[1]
    assert bytes(snapshot.read(0, snapshot.size)) == expected
    table.truncate(10)
    decoder.append(table, tokens_for(60, seed=5))  # may not be in place: the reader still looks at the page
    table.close()
    stranger = PageTable(pool, BOB)
    decoder.append(stranger, tokens_for(12 * 32, seed=6))
    assert bytes(snapshot.read(0, snapshot.size)) == expected
    pool.check([stranger], [snapshot])
    snapshot.close()
    pool.check([stranger])


def test_a_reader_that_reads_nothing_before_the_file_changes_sees_the_same(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 40)
    expected = image_of(table, image_format)
    snapshot = Snapshot(table, image_format)
    table.truncate(20)
    decoder.append(table, tokens_for(50, seed=5))
    pool.check([table], [snapshot])
    assert bytes(snapshot.read(0, snapshot.size)) == expected


def test_a_reader_keeps_its_pages_when_the_file_is_cut_and_grows_again(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 70)
    expected = image_of(table, image_format)
    snapshot = Snapshot(table, image_format)
    table.truncate(32)
    decoder.append(table, tokens_for(38, seed=5))  # as many pages as before, in the same places of the table
    pool.check([table], [snapshot])
    assert bytes(snapshot.read(0, snapshot.size)) == expected


def test_a_reader_of_a_file_with_an_open_reservation_sees_committed_entries(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 31)
    expected = image_of(table, image_format)
    reservation = table.reserve([1, 2], [0, 1])
    decoder.step(reservation)
    assert image_of(table, image_format) == expected
    reservation.abort()
    assert image_of(table, image_format) == expected


def test_slots_past_the_end_read_as_zero(
    pool: PagePool, store: FakeStore, decoder: FakeDecoder, image_format: ImageFormat
):
    marker = b"what the fork said afterwards"
    table = make_table(pool, decoder, 3)
    fork = table.fork()
    decoder.append(fork, [8, 9])
    last_slot = store.entries[int(table.pages[0]), 0, 0, 0].reshape(-1)[-8:].view(np.uint8)
    last_slot[: len(marker)] = np.frombuffer(marker, np.uint8)
    assert marker in bytes(store.view(int(table.pages[0])))
    assert marker not in image_of(table, image_format)
    pages = np.frombuffer(image_of(table, image_format)[image_format.data_start :][: store.page_bytes], np.float32)
    entries = pages.reshape(store.entries.shape[1:])
    assert not entries[:, :, :, 3:].any()
    assert entries[:, :, :, :3].all()


def test_equal_content_gives_equal_bytes(pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat):
    one, other = make_table(pool, decoder, 40), make_table(pool, decoder, 10)
    decoder.append(other, tokens_for(40)[10:])
    assert image_of(one, image_format) == image_of(other, image_format)


def test_many_threads_may_prepare_one_snapshot(
    facts: FakeFacts, pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    other_store = FakeStore(facts, num_pages=16)
    expected = image_of(make_table(PagePool(other_store), FakeDecoder(other_store), 300), image_format)
    snapshot = Snapshot(make_table(pool, decoder, 300), image_format)  # nothing of it was hashed before
    start = threading.Barrier(8)

    def prepare() -> None:
        start.wait()
        snapshot.prepare()

    with ThreadPoolExecutor(8) as workers:
        for done in [workers.submit(prepare) for _ in range(8)]:
            done.result()
    assert bytes(snapshot.read(0, snapshot.size)) == expected
    snapshot.close()


def test_a_snapshot_is_closed_once_and_then_read_no_more(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    snapshot = Snapshot(make_table(pool, decoder, 3), image_format)
    snapshot.close()
    with pytest.raises(AssertionError):
        snapshot.close()
    with pytest.raises(AssertionError):
        snapshot.read(0, 1)


def test_an_image_for_which_there_is_no_room_takes_none(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 9 * 32)
    source = BytesSource(image_of(table, image_format))
    with pytest.raises(NoSpace, match="9 pages wanted, 7 of 16 free"):
        import_image(pool, image_format, source, BOB)
    pool.check([table])


def test_an_import_under_way_is_in_the_books_and_can_be_abandoned(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 40)
    source = BytesSource(image_of(table, image_format))
    incoming = ImageImport(pool, parse_header(image_format, source), BOB)
    pool.check([table], [incoming])
    with ThreadPoolExecutor(1) as worker:
        worker.submit(incoming.load, source).result()
    pool.check([table], [incoming])
    incoming.abandon()
    pool.check([table])
    assert pool.num_pages - pool.num_free == 2


def test_what_an_abandoned_import_read_is_not_shown_to_another_owner(
    pool: PagePool, store: FakeStore, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 40)
    source = BytesSource(image_of(table, image_format))
    table.close()
    incoming = ImageImport(pool, parse_header(image_format, source), ANN)
    incoming.load(source)
    incoming.abandon()
    allocate(pool, 16, BOB)
    assert not store.pages.any()


def test_an_imported_tail_is_at_its_frontier(pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat):
    data = image_of(make_table(pool, decoder, 35), image_format)
    table = import_image(pool, image_format, BytesSource(data), ANN)
    fork = table.fork()
    reservation = fork.reserve([1], [0])
    assert reservation.copies == ()
    assert reservation.pages.tolist() == table.pages.tolist()
    reservation.abort()


def test_imported_pages_are_their_owners_and_need_no_zeroing_for_it(
    pool: PagePool, store: FakeStore, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 40)
    source = BytesSource(image_of(table, image_format))
    table.close()
    import_image(pool, image_format, source, ANN).close()
    allocate(pool, 16, ANN)
    assert store.num_zeroed == 0


def test_an_imported_page_needs_no_second_hash(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[int] = []
    keep = pool.keep_digests
    monkeypatch.setattr(pool, "keep_digests", lambda pages, values: (hashed.extend(pages), keep(pages, values)))
    data = image_of(make_table(pool, decoder, 64), image_format)
    assert len(hashed) == 2, "of pages that were computed"
    table = import_image(pool, image_format, BytesSource(data), ANN)
    assert len(hashed) == 4, "which the image tells"
    hashed.clear()
    assert image_of(table, image_format) == data
    assert hashed == []


@pytest.mark.parametrize("key", list(fake_identity()))
def test_an_image_of_another_model_says_what_differs(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat, key: str
):
    identity = {**fake_identity(), key: "d1ff" * 8}
    other = ImageFormat(FakeFacts(identity=identity))
    source = BytesSource(image_of(make_table(pool, decoder, 3), image_format))
    ours = "d1ffd1ffd1ff…"
    theirs = fake_identity()[key][:12]
    with pytest.raises(
        Invalid, match=rf"^image is of {key} {theirs}…? \(this daemon runs {ours}\): it can't be used here$"
    ):
        parse_header(other, source)


def test_an_image_of_another_shape_of_page_is_refused(pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat):
    source = BytesSource(image_of(make_table(pool, decoder, 3), image_format))
    with pytest.raises(Invalid, match="tensor pages does not fit 3 entries of this model"):
        parse_header(ImageFormat(FakeFacts(head_dim=8)), source)


@pytest.mark.parametrize("length", [1, 33])
def test_an_image_cut_short_anywhere_is_refused(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat, length: int
):
    table = make_table(pool, decoder, length)
    data = image_of(table, image_format)
    for size in [*range(0, len(data), 97), len(data) - 1]:
        with pytest.raises(Invalid, match="cut short"):
            import_image(pool, image_format, BytesSource(data[:size]), ANN)
    with pytest.raises(Invalid, match="too long"):
        import_image(pool, image_format, BytesSource(data + b"\0"), ANN)
    pool.check([table])


class ShrinkingSource(BytesSource):
    """A file that is truncated after its header was read."""

    def read_at(self, offset: int, size: int) -> bytes:
        return super().read_at(offset, size)[: max(0, 6000 - offset)]


def test_a_source_that_shrinks_while_it_is_read_is_refused(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 40)
    with pytest.raises(Invalid, match="cut short: 1904 of 4096 bytes at offset 4096"):
        import_image(pool, image_format, ShrinkingSource(image_of(table, image_format)), ANN)
    pool.check([table])


class BrokenSource(BytesSource):
    """A file on a disk that fails."""

    def read_at(self, offset: int, size: int) -> bytes:
        if offset > 8000:
            raise OSError(5, "Input/output error")
        return super().read_at(offset, size)


def test_a_read_error_ends_the_import_and_gives_the_pages_back(
    pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat
):
    table = make_table(pool, decoder, 70)
    with pytest.raises(OSError, match="Input/output"):
        import_image(pool, image_format, BrokenSource(image_of(table, image_format)), ANN)
    pool.check([table])


@pytest.mark.parametrize("part", ["pages", "tokens", "positions"])
def test_one_flipped_bit_is_found(pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat, part: str):
    table = make_table(pool, decoder, 64)
    data = bytearray(image_of(table, image_format))
    data[getattr(image_format.layout(64), part) + 40] ^= 1
    with pytest.raises(Invalid, match="image is damaged: its content has another digest"):
        import_image(pool, image_format, BytesSource(bytes(data)), ANN)
    pool.check([table])


def test_a_claim_is_seen_in_the_first_bytes(pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat):
    data = image_of(make_table(pool, decoder, 3), image_format)
    assert claims_to_be_image(data[:CLAIM_BYTES], len(data))
    assert claims_to_be_image(data[:1000], 1000)  # cut short, but it claims
    spaced = json.dumps({"__metadata__": {"format": "symphony.kv"}}).encode()  # as other writers space it
    assert claims_to_be_image(len(spaced).to_bytes(8, "little") + spaced, 8 + len(spaced))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}",
        b"Once upon a time there was a format called symphony.kv",
        b'{"format":"symphony.kv"}',  # the first eight bytes are no length
        (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}',  # a safetensors file of somebody else
        (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}"format":"symphony.kv"',  # in the data, not the header
        (1 << 40).to_bytes(8, "little") + b'{"__metadata__":{"format":"symphony.kv"}}',
        (50).to_bytes(8, "little") + b'["format":"symphony.kv"]',
    ],
)
def test_other_files_claim_nothing(head: bytes):
    assert not claims_to_be_image(head, len(head))
