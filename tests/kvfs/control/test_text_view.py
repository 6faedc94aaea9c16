"""The text of a KV file as bytes at offsets, while entries come and go."""

import random
from typing import cast

import numpy as np
import pytest
import trio

from kvfs.control.sources import ControlFiles
from kvfs.control.text_view import TextView
from kvfs.fs import FileSystem
from kvfs.names.tree import Credentials
from kvfs.pages.pool import PagePool
from tests.kvfs.fakes import FakeFacts, FakeStore, commit_all

TEXTS = [b"", b"a", b" the", b"\xc3", b"\xa9", b"<bos>", b" ", b"long" * 20]
"""Text of each token."""


class Words:
    """The part of `ControlFiles` that the view uses; `hides_space`: a space that begins a text is not shown."""

    token_lengths = np.array([len(text) for text in TEXTS], np.int32)

    def __init__(self, *, hides_space: bool = False) -> None:
        self.hides_space = hides_space

    def text_bytes(self, tokens):
        return b"".join(TEXTS[token] for token in tokens)

    def num_hidden_bytes(self, first_token):
        return int(self.hides_space and TEXTS[first_token].startswith(b" "))


class File:
    """A KV file and a view of its text."""

    def __init__(self, path, *, hides_space: bool = False) -> None:
        facts = FakeFacts()
        self.fs = FileSystem(PagePool(FakeStore(facts, 1024)), facts, path / "backing", 0, 0)
        self.handle = self.fs.kv_create(Credentials(0, 0), "a.kv")
        self.view = TextView(cast(ControlFiles, Words(hides_space=hides_space)))

    def append(self, tokens: list[int]) -> None:
        commit_all(self.fs.reserve(self.handle, tokens, range(len(tokens))))
        self.fs.committed(self.handle)

    def cut(self, count: int) -> None:
        self.fs.kv_truncate(self.handle, count)

    def read(self, offset: int, size: int) -> bytes:
        return trio.run(self.view.read, self.handle.content, offset, size)

    @property
    def size(self) -> int:
        return self.view.size(self.handle.content)

    def entries_within(self, size: int) -> int:
        return self.view.entries_within(self.handle.content, size)

    @property
    def text(self) -> bytes:
        return b"".join(TEXTS[token] for token in self.handle.table.read()[0].tolist())

    def agrees(self) -> bool:
        return (self.size, self.read(0, 10_000)) == (len(self.text), self.text)


@pytest.fixture
def file(tmp_path):
    file = File(tmp_path)
    yield file
    file.fs.check()


async def test_a_piece_of_the_text_is_that_slice_of_the_whole(file):
    file.append(random.Random(1).choices(range(len(TEXTS)), k=80))
    for offset in range(len(file.text) + 2):
        for size in (1, 5, len(file.text)):
            piece = await file.view.read(file.handle.content, offset, size)
            assert piece == file.text[offset : offset + size]


def test_the_text_grows_with_the_file_and_follows_a_truncation(file):
    assert file.agrees(), "an empty file has an empty text"
    file.append([1, 2, 5] * 20)
    assert file.agrees()
    file.append([6, 7])
    assert file.agrees()
    reservation = file.fs.reserve(file.handle, [2, 2], [62, 63])
    assert file.agrees()
    reservation.abort()
    file.cut(10)
    file.append([2] * 60)  # as long as before, and another text
    assert file.agrees()
    file.cut(39)
    file.append([1])
    file.cut(40)  # between two looks, and there were as many entries
    assert file.agrees()


def test_a_long_text_comes_in_windows(file):
    file.append([1, 2, 3, 4, 5, 0, 6] * 3000)
    pieces: list[bytes] = []
    while piece := file.read(sum(map(len, pieces)), 20_000):
        pieces.append(piece)
    assert b"".join(pieces) == file.text
    assert len(pieces) == -(-len(file.text) // 20_000)


def test_the_space_that_a_family_puts_in_front_of_a_text_is_not_shown(tmp_path):
    file = File(tmp_path, hides_space=True)
    file.append([2, 2, 1])
    assert file.size == 8
    assert file.read(0, 100) == b"the thea"
    assert file.read(2, 3) == b"e t"
    assert [file.entries_within(size) for size in (3, 7)] == [1, 2]


def test_entries_within_a_size_are_whole(file):
    file.append([1, 5, 0, 1])
    assert [file.entries_within(size) for size in range(8)] == [0, 1, 1, 1, 1, 1, 3, 4]
