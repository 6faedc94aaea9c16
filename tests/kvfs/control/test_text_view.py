"""The text of a KV file as bytes at offsets, while entries come and go."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.control.text_view import TextView
from kvfs.fs import FileSystem, OpenKv
from kvfs.names.content import KvFile
from kvfs.names.tree import Credentials
from kvfs.pages.pool import PagePool
from tests.kvfs.fakes import FakeFacts, FakeStore, commit_all

ME = Credentials(0, 0)
TEXTS = [b"", b"a", b" the", b"\xc3", b"\xa9", b"<bos>", b" ", b"long" * 20]
"""Text of each token."""


class Words:
    """The part of `ControlFiles` that the view uses; `hides_space`: a space that begins a text is not shown."""

    def __init__(self, *, hides_space: bool = False) -> None:
        self.token_lengths = np.array([len(text) for text in TEXTS], np.int32)
        self.hides_space = hides_space

    def text_bytes(self, tokens):
        return b"".join(TEXTS[token] for token in tokens)

    def num_hidden_bytes(self, first_token):
        return int(self.hides_space and TEXTS[first_token].startswith(b" "))


@pytest.fixture
def fs(tmp_path):
    facts = FakeFacts()
    fs = FileSystem(PagePool(FakeStore(facts, 1024)), facts, tmp_path / "backing", 0, 0)
    yield fs
    fs.check()


@pytest.fixture
def file(fs):
    return fs.kv_create(ME, "a.kv")


def append(fs: FileSystem, file: OpenKv, tokens: list[int]) -> None:
    commit_all(fs.reserve(file, tokens, range(len(tokens))))
    fs.committed(file)


def content(file: OpenKv) -> KvFile:
    return file.content


def read(view: TextView, file: OpenKv, offset: int, size: int) -> bytes:
    return trio.run(view.read, content(file), offset, size)


def text_of(file: OpenKv) -> bytes:
    return b"".join(TEXTS[token] for token in file.table.read()[0].tolist())


def test_an_empty_file_has_an_empty_text(file):
    view = TextView(Words())
    assert view.size(content(file)) == 0
    assert read(view, file, 0, 10) == b""


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(tokens=st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=80))
def test_a_piece_of_the_text_is_that_slice_of_the_whole(tmp_path_factory, tokens):
    facts = FakeFacts()
    fs = FileSystem(PagePool(FakeStore(facts, 16)), facts, tmp_path_factory.mktemp("b"), 0, 0)
    file = fs.kv_create(ME, None)
    append(fs, file, tokens)
    view, text = TextView(Words()), text_of(file)
    assert view.size(content(file)) == len(text)
    for offset in range(0, len(text) + 2, 3):
        for size in (1, 5, len(text)):
            assert read(view, file, offset, size) == text[offset : offset + size]


def test_the_text_grows_with_the_file_and_follows_a_truncation(fs, file):
    view = TextView(Words())
    append(fs, file, [1, 2, 5] * 20)
    assert view.size(content(file)) == len(text_of(file))
    append(fs, file, [6, 7])
    assert view.size(content(file)) == len(text_of(file))
    fs.kv_truncate(file, 10)
    append(fs, file, [2] * 60)  # as long as before, and another text
    assert view.size(content(file)) == len(text_of(file))
    assert read(view, file, 0, 1000) == text_of(file)


def test_a_truncation_and_new_entries_between_two_looks_are_both_seen(fs, file):
    view = TextView(Words())
    append(fs, file, [1] * 40)
    view.size(content(file))
    fs.kv_truncate(file, 39)
    append(fs, file, [2])
    fs.kv_truncate(file, 40)
    assert read(view, file, 0, 1000) == b"a" * 39 + b" the"


def test_a_reservation_is_not_part_of_the_text(fs, file):
    view = TextView(Words())
    append(fs, file, [1, 1])
    reservation = fs.reserve(file, [2, 2], [2, 3])
    assert read(view, file, 0, 100) == b"aa"
    reservation.abort()


def test_a_long_text_comes_in_windows(fs, file):
    view = TextView(Words())
    append(fs, file, [1, 2, 3, 4, 5, 0, 6] * 3000)
    text = text_of(file)
    pieces = []
    while piece := read(view, file, sum(map(len, pieces)), 20_000):
        pieces.append(piece)
    assert b"".join(pieces) == text
    assert len(pieces) == -(-len(text) // 20_000)


def test_the_space_that_a_family_puts_in_front_of_a_text_is_not_shown(fs, file):
    view = TextView(Words(hides_space=True))
    append(fs, file, [2, 2, 1])
    assert view.size(content(file)) == 8
    assert read(view, file, 0, 100) == b"the thea"
    assert read(view, file, 2, 3) == b"e t"
    assert view.entries_within(content(file), 3) == 1
    assert view.entries_within(content(file), 7) == 2


def test_entries_within_a_size_are_whole(fs, file):
    view = TextView(Words())
    append(fs, file, [1, 5, 0, 1])
    assert [view.entries_within(content(file), size) for size in range(8)] == [0, 1, 1, 1, 1, 1, 3, 4]
