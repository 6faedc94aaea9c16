"""Digests of many pages at once are those of each."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvfs.pages.digest import digests


@pytest.mark.parametrize("page_bytes", [0, 1, 127, 128, 129, 256, 4096, 4096 + 64, 737_280])
@pytest.mark.parametrize("num_pages", [0, 1, 2, 3, 7, 8, 9, 20])
def test_every_page_has_the_digest_that_hashlib_gives(page_bytes: int, num_pages: int) -> None:
    pages = [np.random.default_rng(i).bytes(page_bytes) for i in range(num_pages)]
    expected = [hashlib.blake2b(page, digest_size=32).digest() for page in pages]
    assert digests(pages) == expected
    assert digests([memoryview(bytearray(page)) for page in pages]) == expected


def test_a_processor_without_the_instructions_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [bytes([i]) * 4096 for i in range(8)]
    fast = digests(pages)
    monkeypatch.setattr("kvfs.pages.digest._is_fast", False)
    assert digests(pages) == fast


def test_one_bit_changes_one_digest() -> None:
    pages = [bytearray(4096) for _ in range(8)]
    before = digests([memoryview(page) for page in pages])
    pages[5][4095] ^= 1
    after = digests([memoryview(page) for page in pages])
    assert [i for i in range(8) if before[i] != after[i]] == [5]
