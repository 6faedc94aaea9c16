"""Digests of many pages at once are those of each."""

import hashlib

import numpy as np
import pytest

from kvfs.pages.digest import digests


@pytest.mark.parametrize("is_fast", [True, False], ids=["as it is", "a processor without the instructions"])
@pytest.mark.parametrize("page_bytes", [0, 1, 127, 128, 129, 256, 4096, 4096 + 64, 73_728])
def test_every_page_has_the_digest_that_hashlib_gives(
    page_bytes: int, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fast:
        monkeypatch.setattr("kvfs.pages.digest._is_fast", False)
    pages = [np.random.default_rng(i).bytes(page_bytes) for i in range(20)]
    expected = [hashlib.blake2b(page, digest_size=32).digest() for page in pages]
    for num_pages in (0, 1, 2, 3, 7, 8, 9, 20):
        assert digests(pages[:num_pages]) == expected[:num_pages]
    assert digests([memoryview(bytearray(page)) for page in pages]) == expected
