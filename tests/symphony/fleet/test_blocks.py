"""Events about blocks, as a router reads them."""

from __future__ import annotations

import numpy as np
import pytest

from libsym.abi import PAGE_ENTRIES
from symphony.fleet.blocks import BLOCKS_A_BATCH, Blocks, Change
from tests.symphony.fleet.routers import Router


def pages(*firsts: int) -> np.ndarray:
    """Pages of tokens, each with consecutive ones from a first one on."""
    return np.array([range(first, first + PAGE_ENTRIES) for first in firsts], np.int32).reshape(-1, PAGE_ENTRIES)


def tokens(*firsts: int) -> list[int]:
    return pages(*firsts).flatten().tolist()


class Publishing:
    """Blocks, and a router that gets all batches."""

    def __init__(self) -> None:
        self.blocks, self.router = Blocks(), Router()

    def update(self, *changes: Change) -> list[str]:
        """Return the names of the events."""
        self.router.names.clear()
        for batch in self.blocks.update(changes):
            self.router.take(batch)
        return self.router.names


@pytest.fixture
def publishing() -> Publishing:
    return Publishing()


def test_the_pages_of_a_file_are_one_event_with_their_tokens(publishing):
    assert publishing.update(Change(7, 0, pages(0, 100, 200))) == ["BlockStored"]
    assert publishing.router.num_known(tokens(0, 100, 200, 300)) == 96
    assert publishing.router.num_known(tokens(100, 200)) == 0


def test_a_file_that_grows_adds_blocks_behind_its_last_one(publishing):
    publishing.update(Change(7, 0, pages(0)))
    assert publishing.update(Change(7, 1, pages(100))) == ["BlockStored"]
    assert publishing.router.num_known(tokens(0, 100)) == 64


def test_an_equal_prefix_of_two_files_is_stored_once_and_stays_until_both_are_gone(publishing):
    publishing.update(Change(7, 0, pages(0, 100)))
    assert publishing.update(Change(8, 0, pages(0, 100))) == []
    assert publishing.update(Change(9, 0, pages(0, 500))) == ["BlockStored"]
    assert publishing.update(Change(7, 0, pages()), Change(8, 1, pages())) == ["BlockRemoved"]
    assert publishing.router.num_known(tokens(0, 100)) == 32
    assert publishing.router.num_known(tokens(0, 500)) == 64
    assert publishing.update(Change(8, 0, pages()), Change(9, 0, pages())) == ["BlockRemoved"]
    assert not publishing.router.blocks


def test_equal_tokens_behind_other_tokens_are_another_block(publishing):
    publishing.update(Change(7, 0, pages(0, 100)), Change(8, 0, pages(1, 100)))
    assert len(publishing.router.blocks) == 4


def test_a_file_that_moves_its_pages_to_another_one_in_the_same_batch_causes_no_event(publishing):
    publishing.update(Change(7, 0, pages(0, 100)))
    assert publishing.update(Change(7, 0, pages()), Change(8, 0, pages(0, 100))) == []
    assert publishing.update(Change(8, 0, pages(0, 100))) == []  # as after a cut, and the same tokens again


def test_many_blocks_are_several_batches_that_a_router_can_take_one_by_one(publishing):
    prompt = range((2 * BLOCKS_A_BATCH + 1) * PAGE_ENTRIES)
    change = Change(7, 0, np.array(prompt, np.int32).reshape(-1, PAGE_ENTRIES))
    assert publishing.update(change) == ["BlockStored"] * 3
    assert publishing.router.num_known(prompt) == len(prompt)
    assert publishing.update(Change(7, 1, pages())) == ["BlockRemoved"] * 2
    assert publishing.router.num_known(prompt) == PAGE_ENTRIES


def test_a_snapshot_tells_a_router_everything_whatever_it_knew(publishing):
    publishing.update(Change(7, 0, pages(0, 100)), Change(8, 0, pages(0, 200)))
    publishing.update(Change(7, 0, pages()))
    late = Router()
    late.blocks[12345] = None, tuple(tokens(900))
    for batch in publishing.blocks.snapshot():
        late.take(batch)
    assert late.blocks == publishing.router.blocks
    assert late.names == ["AllBlocksCleared", "BlockStored"]


def test_random_changes_leave_a_router_with_what_the_files_have(publishing):
    random = np.random.default_rng(5)
    files: dict[int, list[int]] = {}
    for _ in range(300):
        changes = []
        for file in random.choice(6, random.integers(1, 4), replace=False).tolist():
            chain = files.setdefault(file, [])
            num_kept = int(random.integers(0, len(chain) + 1))
            new = random.integers(0, 2, random.integers(0, 4)).tolist()
            files[file] = [*chain[:num_kept], *new]
            changes.append(Change(file, num_kept, pages(*new)))
        publishing.update(*changes)
        prefixes = {tuple(chain[:stop]) for chain in files.values() for stop in range(1, len(chain) + 1)}
        assert len(publishing.router.blocks) == len(prefixes)
        assert all(publishing.router.num_known(tokens(*each)) == len(each) * PAGE_ENTRIES for each in prefixes)
