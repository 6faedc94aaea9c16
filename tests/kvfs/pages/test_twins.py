"""A file that was copied out and in again is shared again, within one account; hostile numbers stay out."""

import numpy as np
import pytest

from kvfs.images.format import ImageFormat, all_finite
from kvfs.images.header import parse_header
from kvfs.images.importer import ImageImport, survey
from kvfs.pages.accounts import AccountLimits
from kvfs.pages.digest import digest
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import Invalid, NoSpace
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeStore, import_image
from tests.kvfs.images.hostile import image_of

ANN, BOB = 1001, 1002


@pytest.fixture
def table(pool: PagePool, decoder: FakeDecoder) -> PageTable:
    table = PageTable(pool, ANN)
    decoder.append(table, range(100))
    return table


@pytest.fixture
def image(table: PageTable, image_format: ImageFormat) -> BytesSource:
    return BytesSource(image_of(table, image_format))


def test_digests_that_come_while_a_worker_looks_lead_it_to_no_page_that_is_none(
    pool: PagePool, table: PageTable, image: BytesSource, image_format: ImageFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy may give numbers that were never written if the array changes meanwhile."""
    look = np.flatnonzero

    def racing(array: np.ndarray) -> np.ndarray:
        found = look(array)
        return found - 2**31 if np.shares_memory(array, pool.has_digest) else found

    monkeypatch.setattr(np, "flatnonzero", racing)
    copy = import_image(pool, image_format, image, ANN)
    assert copy.pages[:3].tolist() == table.pages[:3].tolist()
    pool.check([table, copy])


def test_only_pages_that_the_account_itself_holds_and_filled_alone_are_shared(
    pool: PagePool, table: PageTable, image: BytesSource, image_format: ImageFormat, decoder: FakeDecoder
) -> None:
    domain = pool.accounts.new_domain(pool.accounts.of(ANN), AccountLimits(), lambda: "domain")
    for stranger in (BOB, domain.number):
        theirs = import_image(pool, image_format, image, stranger)
        assert not set(theirs.pages.tolist()) & set(table.pages.tolist())
        theirs.close()
    bobs = table.fork(BOB)
    table.close()
    anns = import_image(pool, image_format, image, ANN)
    assert not set(anns.pages.tolist()) & set(bobs.pages.tolist()), "she no longer holds them"
    anns.truncate(10)
    mixed = anns.fork(BOB)
    decoder.append(mixed, range(22))  # in ann's page
    copy = import_image(pool, image_format, BytesSource(image_of(mixed, image_format)), BOB)
    assert not set(copy.pages.tolist()) & set(mixed.pages.tolist()), "ann's bytes are in it"
    pool.check([anns, bobs, mixed, copy])


@pytest.mark.parametrize("what", ["tokens", "positions"])
def test_equal_bytes_with_other_tokens_or_positions_are_no_twin(
    pool: PagePool, table: PageTable, image: BytesSource, image_format: ImageFormat, what: str
) -> None:
    layout = image_format.layout(100)
    data = bytearray(image.data)
    at = getattr(layout, what) + 4 * 40  # an entry of the second page
    data[at : at + 4] = (999).to_bytes(4, "little")
    pages = [data[layout.pages + i * pool.page_bytes :][: pool.page_bytes] for i in range(4)]
    whole = digest(b"".join(digest(bytes(page)) for page in pages) + bytes(data[layout.tokens :])).hex()
    data[: layout.pages] = image_format.header(100, whole)
    copy = import_image(pool, image_format, BytesSource(bytes(data)), ANN)
    shared = [mine == its for mine, its in zip(copy.pages.tolist(), table.pages.tolist(), strict=True)]
    assert shared == [True, False, True, False]
    pool.check([table, copy])


@pytest.mark.parametrize("is_surveyed", [False, True])
def test_a_twin_that_goes_while_the_image_is_loaded_is_not_referred_to(
    pool: PagePool, table: PageTable, image: BytesSource, image_format: ImageFormat, decoder: FakeDecoder,
    is_surveyed: bool,
) -> None:  # fmt: skip
    plan = parse_header(image_format, image)
    found = survey(pool, plan, ANN, image) if is_surveyed else None
    incoming = None if is_surveyed else ImageImport(pool, plan, ANN)
    if incoming is not None:
        incoming.load(image)
    table.close()  # between the worker's search and the end
    other = PageTable(pool, ANN)
    decoder.append(other, range(500, 600))  # takes the pages for something else
    if incoming is None:
        incoming = ImageImport(pool, plan, ANN, found)
        incoming.load(image)
    copy = incoming.finish()
    assert not set(copy.pages.tolist()) & set(other.pages.tolist())
    assert decoder.entries(copy.pages, 100).size == 100
    assert copy.read()[0].tolist() == list(range(100))
    pool.check([other, copy])


@pytest.mark.parametrize(("dtype", "width"), [("F32", 4), ("BF16", 2), ("F16", 2)])
def test_infinities_and_nans_are_told_from_the_largest_numbers(dtype: str, width: int) -> None:
    infinity = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}[dtype]
    sign = 1 << (8 * width - 1)
    for bits in (0, 1, infinity - 1, sign, sign | 1, sign | infinity - 1):
        assert all_finite(memoryview(b"\0" * 64 + bits.to_bytes(width, "little") + b"\0" * 64), dtype), hex(bits)
    for bits in (infinity, infinity + 1, sign - 1, sign | infinity, sign | infinity + 1, 2 * sign - 1):
        assert not all_finite(memoryview(b"\0" * 64 + bits.to_bytes(width, "little") + b"\0" * 64), dtype), hex(bits)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_an_image_with_numbers_that_are_not_finite_is_refused(
    pool: PagePool, store: FakeStore, table: PageTable, image_format: ImageFormat, number: float
) -> None:
    store.pages[table.pages[1]].reshape(-1)[77] = number
    data = image_of(table, image_format)  # its digest is right
    with pytest.raises(Invalid, match="page 1 holds numbers that are not finite"):
        import_image(pool, image_format, BytesSource(data), ANN)
    pool.check([table])


def surveyed(pool: PagePool, image_format: ImageFormat, image: BytesSource, owner: int) -> ImageImport:
    plan = parse_header(image_format, image)
    return ImageImport(pool, plan, owner, survey(pool, plan, owner, image))


@pytest.mark.parametrize("num_there", [3, 1])
def test_an_image_needs_room_for_the_pages_alone_that_are_not_there(
    pool: PagePool,
    table: PageTable,
    image: BytesSource,
    image_format: ImageFormat,
    decoder: FakeDecoder,
    num_there: int,
) -> None:
    table.truncate(32 * num_there)
    others = PageTable(pool, BOB)
    decoder.append(others, range(32 * (pool.num_free - (4 - num_there) + 1)))
    with pytest.raises(NoSpace, match=rf"{4 - num_there} pages wanted, {3 - num_there} of 16 free"):
        surveyed(pool, image_format, image, ANN)
    others.truncate(32 * (len(others.pages) - 1))
    with pytest.raises(NoSpace):
        ImageImport(pool, parse_header(image_format, image), ANN)
    incoming = surveyed(pool, image_format, image, ANN)
    assert pool.num_free == 0
    pool.check([table, others], [incoming])
    incoming.load(image)
    copy = incoming.finish()
    assert copy.pages[:num_there].tolist() == table.pages.tolist()
    pool.check([table, others, copy])
    table.close()
    assert image_of(copy, image_format) == image.data


def test_a_source_that_changes_after_the_survey_fails_the_import(
    pool: PagePool, table: PageTable, image: BytesSource, image_format: ImageFormat
) -> None:
    incoming = surveyed(pool, image_format, image, ANN)
    layout = image_format.layout(100)
    data = bytearray(image.data)
    data[layout.tokens : layout.tokens + 4] = (999).to_bytes(4, "little")
    with pytest.raises(Invalid, match="another digest"):
        incoming.load(BytesSource(bytes(data)))
    incoming.abandon()
    pool.check([table])
