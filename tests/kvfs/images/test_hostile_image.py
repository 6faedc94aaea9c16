"""Hostile images: each gives one clear error, and takes no page."""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvfs.images.format import ImageFormat
from kvfs.images.header import parse_header
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from kvfs.pages.turns import TURN, TURNS_BYTES, fitting, with_turn
from libsym.errors import Invalid, SymError
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeFacts, import_image
from tests.kvfs.images.hostile import Fuzzer, forge, image_of, with_header

ANN = 1001
Refused: TypeAlias = Callable[[bytes], str]


@pytest.fixture
def image(pool: PagePool, decoder: FakeDecoder, image_format: ImageFormat) -> bytes:
    table = PageTable(pool, ANN)
    decoder.append(table, list(range(40)))
    data = image_of(table, image_format)
    table.close()
    return data


@pytest.fixture
def refused(pool: PagePool, image_format: ImageFormat) -> Refused:
    """Import what must be refused; give the message."""

    def attempt(data: bytes) -> str:
        with pytest.raises(Invalid) as caught:
            import_image(pool, image_format, BytesSource(data), ANN)
        pool.check()
        message = str(caught.value)
        assert message.startswith("image")
        assert message.isprintable()  # one line, whatever the image says
        assert len(message) < 200
        return message

    return attempt


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_forged_image_with_proper_content_is_fine(pool: PagePool, image_format: ImageFormat, version: str) -> None:
    made = ImageFormat(image_format.facts, version)
    data = forge(made, [0, 999], [0, 99_999])
    assert (b"turns" in data[: made.data_start]) == (version == "2")
    table = import_image(pool, image_format, BytesSource(data), ANN)
    assert [array.tolist() for array in table.read()] == [[0, 999], [0, 99_999]]


def test_entries_out_of_range_are_named(image_format: ImageFormat, refused: Refused) -> None:
    for token in (-1, 1000, 2**31 - 1, -(2**31)):
        assert f"entry 2 has token id {token}, out of 0..999" in refused(forge(image_format, [1, 2, token, -5]))
    for position in (-1, 100_000):
        message = refused(forge(image_format, [1, 2], [0, position]))
        assert f"entry 1 has position {position}, out of 0..99999" in message


def test_bytes_hidden_past_the_last_entry_are_refused(image_format: ImageFormat, refused: Refused) -> None:
    for length in (1, 31, 33):
        pages = bytearray(-(-length // 32) * image_format.page_bytes)
        pages[-1] = 1
        message = refused(forge(image_format, [1] * length, pages=bytes(pages)))
        assert f"its last page holds bytes past entry {length}" in message


def test_a_header_that_is_not_one_is_refused(image: bytes, image_format: ImageFormat, refused: Refused) -> None:
    for text, message in (
        (b"", "no JSON"),
        (b"[]", "no JSON object"),
        (b' {"__metadata__":{}}', "no JSON object"),
        (b"{}", "no metadata"),
        (b'{"__metadata__":[]}', "no metadata"),
        (b'{"__metadata__":{"format":1}}', "no metadata"),
        (b'{"__metadata__":{"format":"a\\nb\\u0007\\ud800c"}}', r"format a?b??c"),
        (b'{"a":{"b":1,"b":1}}', "a key occurs twice"),
        (b'{"a":NaN}', "NaN is no JSON"),
        (b'{"a":' + b"1" * 4000 + b"}", "no metadata"),
        (b"[" * 4000, "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
    ):
        assert message in refused(with_header(image_format, image, text)), text[:99]


def test_turns_that_do_not_fit_the_tokens_are_none(pool: PagePool, image_format: ImageFormat) -> None:
    """The writer of an image may note any turns: only a matching hash counts, and a length within the entries."""
    tokens = np.array([1, 2, 3, 4], np.int32)
    good = b"".join(with_turn(b"", tokens[:length]) for length in (0, 3))
    wild = TURN.pack(2, 7) + TURN.pack(2**64 - 1, 1) + TURN.pack(4, 1) + TURN.pack(0, 5)
    data = image_format.header(4, "0" * 64, wild + good)
    plan = parse_header(image_format, BytesSource(data + bytes(image_format.layout(4).size - len(data))))
    assert fitting(plan.turns, tokens) == [0, 3]
    assert len(plan.turns) <= TURNS_BYTES


def test_headers_of_strange_lengths_are_refused(image: bytes, refused: Refused) -> None:
    for length in (65_537, 2**64 - 1):
        message = refused(length.to_bytes(8, "little") + image[8:])
        assert f"a header of {length} bytes; 65536 is the most" in message
    nested = b'{"a":' + b"[" * 65_000
    assert "no JSON" in refused(len(nested).to_bytes(8, "little") + nested)
    text = image[8:4096].ljust(8192 - 8)
    assert "begins at 8192, not at 4096" in refused(len(text).to_bytes(8, "little") + text + image[4096:])


EDITS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda h: h["__metadata__"].update(format="other.kv"), "of format other.kv, not symphony.kv"),
    (lambda h: h["__metadata__"].update(version="3"), "version 3 (this daemon reads versions 1 and 2)"),
    (lambda h: h["__metadata__"].update(version="1"), "unknown key turns"),
    (lambda h: h["__metadata__"].pop("turns"), "no list of turns"),
    (lambda h: h["__metadata__"].update(turns="0G" * 1024), "no list of turns"),
    (lambda h: h["__metadata__"].update(digest="0" * 64), "another digest"),
    (lambda h: h["__metadata__"].update(digest="0" * 64 + "\n"), "no digest"),
    (lambda h: h["__metadata__"].pop("digest"), "no digest"),
    (lambda h: h["__metadata__"].pop("rope"), "of rope unknown (this daemon runs theta=10000)"),
    (lambda h: h["__metadata__"].update(more="1"), "unknown key more"),
    (lambda h: h.update(more={}), "holds tensors pages, tokens, positions, more instead of"),
    (lambda h: h.pop("positions"), "holds tensors pages, tokens instead of"),
    (lambda h: h.update(pages=h.pop("pages")), "holds tensors tokens, positions, pages instead of"),
    (lambda h: h["pages"].update(dtype="BF16"), "tensor pages does not fit"),
    (lambda h: h["pages"]["shape"].append(1), "tensor pages does not fit"),
    (lambda h: h["pages"]["shape"].__setitem__(0, 2.0), "tensor pages does not fit"),
    (lambda h: h["pages"].update(more=1), "tensor pages does not fit"),
    (lambda h: h["pages"]["data_offsets"].__setitem__(0, False), "tensor pages does not fit"),
    (lambda h: h["tokens"].update(dtype="U32"), "tensor tokens does not fit"),
    (lambda h: h["tokens"].update(shape=[-1]), "no shape [n]"),
    (lambda h: h["tokens"].update(shape=[True]), "no shape [n]"),
    (lambda h: h["tokens"].update(shape=[40, 1]), "no shape [n]"),
    (lambda h: h.update(tokens=[]), "no shape [n]"),
    (lambda h: h["tokens"].update(shape=[10**1200]), "can't hold the entries it claims"),
    (lambda h: h["tokens"].update(shape=[39]), "39 entries of this model"),
    (lambda h: h["positions"].update(data_offsets=[0, 160]), "tensor positions does not fit"),
]


def test_a_header_that_contradicts_the_format_is_refused(
    image: bytes, image_format: ImageFormat, refused: Refused
) -> None:
    for edit, message in EDITS:
        header = json.loads(image[8:4096])
        edit(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert message in refused(with_header(image_format, image, text)), message


def test_a_small_file_that_claims_a_huge_image_takes_no_memory(image_format: ImageFormat, pool: PagePool) -> None:
    with pytest.raises(Invalid, match="can't hold the entries it claims"):
        import_image(pool, image_format, BytesSource(image_format.header(10**12, "0" * 64)), ANN)

    class Sparse(BytesSource):
        """A file of terabytes that occupies one block."""

        size = image_format.image_bytes(10**9)

    with pytest.raises(SymError, match="the page pool is full: 31250000 pages wanted"):
        import_image(pool, image_format, Sparse(image_format.header(10**9, "0" * 64)), ANN)
    pool.check()


@pytest.mark.slow
def test_thousands_of_hostile_images_raise_only_our_errors_and_touch_nobody() -> None:
    """Ten million are `scripts/fuzz/image_bytes.py`'s."""
    fuzzer = Fuzzer(1)
    fuzzer.run(2_000)
    assert fuzzer.num_accepted > 20
    for reason in [
        *("image's header is", "image's tensor pages", "image's tensor tokens", "image's tensor positions"),
        *("image is damaged:", "image is cut", "image is too", "image is of", "image has no", "image holds tensors"),
    ]:
        assert fuzzer.refusals[reason], f"none got to {reason!r}"


def test_a_header_of_ours_is_parsed_whatever_the_length_of_the_models_identity(facts: FakeFacts) -> None:
    image_format = ImageFormat(FakeFacts(identity={**facts.identity, "layout": "x" * 5000}))
    assert image_format.data_start == 8192
    plan = parse_header(image_format, BytesSource(forge(image_format, [1, 2])))
    assert (plan.num_entries, plan.num_pages) == (2, 1)
