"""Free pages: which are given out, beside a model in numpy that looks at all of them."""

import random

import numpy as np
import pytest

from kvfs.pages.free_list import FreeList, IntArray

BLOCK, GROUP = 64**2, 64**3
"""Pages of the two lowest blocks of the tree."""


class Model:
    """A flag for each page."""

    def __init__(self, num_pages: int) -> None:
        self.free = np.ones(num_pages, np.bool_)

    def take(self, count: int) -> IntArray:
        starts, length = self.free, 1  # starts[i]: a run of `length` free pages begins at i
        while length < count:
            step = min(length, count - length)
            starts = starts[:-step] & starts[step:]
            length += step
        if count > 1 and starts.any():
            first = int(starts.argmax())
            self.free[first : first + count] = False
            return np.arange(first, first + count, dtype=np.int32)
        return self.take_lowest(count)

    def take_lowest(self, count: int) -> IntArray:
        pages = np.flatnonzero(self.free)[:count].astype(np.int32)
        self.free[pages] = False
        return pages


def pages_of(model: Model, num_pages: int, rng: random.Random) -> IntArray:
    """Runs and single pages, over borders of blocks often, some of them free already, and some named twice."""
    found: list[int] = []
    for _ in range(rng.choice([1, 2, 30])):
        first = rng.choice([rng.randrange(num_pages), rng.choice([64, BLOCK, GROUP]) * rng.randrange(1, 5)])
        first = max(0, min(first, num_pages) - rng.choice([0, 1, 3, 70, 5000]))
        found += range(first, min(num_pages, first + rng.choice([1, 1, 2, 64, 100, 9000])))
    found += rng.sample(found, len(found) // 3)
    if rng.random() < 0.3:
        rng.shuffle(found)
    if rng.random() < 0.3:
        found = found[:: rng.randrange(1, 4)]  # in fragments
    return np.array(found, np.int32)


@pytest.mark.parametrize("num_pages", [1, 63, 200, BLOCK, BLOCK + 1, 5 * BLOCK - 7, GROUP + 3 * BLOCK + 5])
def test_a_free_list_agrees_with_the_model_over_random_moves(num_pages: int):
    rng = random.Random(num_pages)
    free, model = FreeList(num_pages), Model(num_pages)
    counts = [0, 1, 1, 2, 3, 7, 40, 64, 65, 130, BLOCK, BLOCK + 1, 2 * BLOCK + 70, num_pages // 2]
    for move in range(300 if num_pages <= BLOCK else 60):
        num_free = int(model.free.sum())
        if rng.random() < 0.5:
            count = min(rng.choice(counts), num_free)
            lowest = rng.random() < 0.3
            expected = model.take_lowest(count) if lowest else model.take(count)
            assert free.take(count, lowest=lowest).tolist() == expected.tolist(), (move, lowest, count)
        else:
            pages, are_free = pages_of(model, num_pages, rng), rng.random() < 0.6
            (free.give if are_free else free.hold)(pages)
            model.free[pages] = are_free
        assert free.count == int(model.free.sum()), move
        assert model.free[free.top :].all(), move
        assert (free.bitmap() == model.free).all(), move
        free.check()


@pytest.mark.parametrize("page", [-1, 10])
def test_a_page_that_is_none_changes_nothing_and_a_list_that_contradicts_itself_is_found_out(page: int):
    free = FreeList(10)
    free.take(10)
    with pytest.raises(AssertionError, match="not all below 10"):
        free.give(np.array([3, page], np.int32))
    assert free.count == 0
    free.check()
    free.core.num_free = 1
    with pytest.raises(AssertionError, match="contradicts itself"):
        free.check()
