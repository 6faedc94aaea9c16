"""Attention over shared prefixes against the same rows without groups: every bit; and the search for groups."""

import numpy as np
import pytest
import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.attention import GROUPED, SMALL, Shape
from triton_kernels.attention_splits import SPLIT_ENTRIES, SPLIT_PAGES
from triton_kernels.paged_decode_attention import Scratch, layer_pages, paged_decode_attention
from triton_kernels.shared_prefix_attention import SharedPrefixes, find_groups

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

PREFIX_PAGES = 2 * SPLIT_PAGES + 3


def forks(
    shape: Shape, branches: int, dtype: torch.dtype, device: str, *, strangers: int = 1, shared: int = PREFIX_PAGES
) -> dict:
    """Rows that share their first pages and go on alone, and among them rows that share nothing."""
    generator = torch.Generator().manual_seed(branches)
    batch = branches + strangers
    lengths = torch.randint(1, 80, (batch,), generator=generator) + shared * PAGE_ENTRIES
    width = shared + 3
    num_pages = shared + 3 * branches + width * strangers
    order = torch.randperm(num_pages, generator=generator).int()
    tables = torch.empty((batch, width), dtype=torch.int32)
    fresh = iter(order[shared:].split(1))
    for row in range(batch):
        tables[row] = torch.cat(
            [next(fresh) if row % 4 == 1 and row // 4 < strangers else page for page in order[:width].split(1)]
        )
        if not (row % 4 == 1 and row // 4 < strangers):
            tables[row, shared:] = torch.cat([next(fresh) for _ in range(3)])
    pages = torch.randn(num_pages, 1, 2, shape.num_kv_heads, PAGE_ENTRIES, shape.head_dim, generator=generator)
    keys, values = layer_pages(pages.to(dtype).to(device), 0, shape.head_dim)
    query = torch.randn(batch, shape.num_heads, shape.head_dim, generator=generator).to(dtype)
    return {
        "query": query.to(device),
        "key_pages": keys,
        "value_pages": values,
        "page_tables": tables.to(device),
        "lengths": lengths.int().to(device),
    }


def groups_of(inputs: dict) -> SharedPrefixes:
    found = find_groups(inputs["page_tables"].cpu().numpy(), inputs["lengths"].cpu().numpy())
    return SharedPrefixes(*(torch.from_numpy(numbers).to(inputs["query"].device) for numbers in found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 4.0}, {"window": 60}], ids=str)
def test_a_shared_prefix_gives_the_bits_of_rows_that_share_nothing(device, dtype, options):
    inputs = forks(GROUPED, 4, dtype, device)
    groups = groups_of(inputs)
    assert groups.row_splits.tolist() == [2, 0, 2, 2, 2]
    assert torch.equal(
        paged_decode_attention(**inputs, groups=groups, **options), paged_decode_attention(**inputs, **options)
    )


def test_a_group_larger_than_a_tile_is_done_in_several(device):
    inputs = forks(SMALL, 33, torch.float32, device, strangers=0)  # 8 members fill a tile
    alone = paged_decode_attention(**inputs)
    assert torch.equal(paged_decode_attention(**inputs, groups=groups_of(inputs)), alone)


def test_a_prefix_of_4096_entries_is_shared_in_all_its_splits(device):
    inputs = forks(SMALL, 3, torch.float32, device, strangers=0, shared=4096 // PAGE_ENTRIES)
    groups = groups_of(inputs)
    assert groups.row_splits.tolist() == [4096 // SPLIT_ENTRIES] * 3
    alone = paged_decode_attention(**inputs)
    assert torch.equal(paged_decode_attention(**inputs, groups=groups), alone)


def test_several_groups_and_empty_ones_are_attended_together(device):
    first, second = forks(SMALL, 3, torch.bfloat16, device), forks(SMALL, 2, torch.bfloat16, device)
    offset = len(first["key_pages"])
    names = ("query", "lengths", "key_pages", "value_pages")
    inputs: dict = {name: torch.cat([first[name], second[name]]) for name in names}
    inputs["page_tables"] = torch.cat([first["page_tables"], second["page_tables"] + offset])
    groups = groups_of(inputs)
    assert len(groups.splits) == 2
    padded = SharedPrefixes(
        torch.cat([groups.first, groups.first[-1:], groups.first[-1:]]),
        torch.cat([groups.rows, torch.full_like(groups.rows, 2**31 - 1)]),
        torch.cat([groups.splits, torch.zeros_like(groups.splits)]),
        groups.row_splits,
    )
    alone = paged_decode_attention(**inputs)
    assert torch.equal(paged_decode_attention(**inputs, groups=padded), alone)


def test_the_splits_of_a_group_are_not_read_again_by_its_rows(device):
    inputs = forks(SMALL, 3, torch.float32, device, strangers=0)
    groups = groups_of(inputs)
    expected = paged_decode_attention(**inputs)
    # All but the first member's tables are made useless where the group reads for them.
    for row in groups.rows.tolist()[1:]:
        inputs["page_tables"][row, : 2 * SPLIT_PAGES] = 2**31 - 1
    scratch = Scratch.allocate(3, SMALL.num_heads, SMALL.head_dim, inputs["page_tables"].shape[1], device)
    assert torch.equal(paged_decode_attention(**inputs, groups=groups, scratch=scratch), expected)


def tables_of(*prefixes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """A row for each list of splits; equal numbers are equal frames, and each row ends in frames of its own."""
    width = (max(map(len, prefixes)) + 1) * SPLIT_PAGES
    tables = np.full((len(prefixes), width), 2**31 - 1, dtype=np.int32)
    for row, splits in enumerate(prefixes):
        frames = [10_000 * split + page for split in splits for page in range(SPLIT_PAGES)]
        tables[row, : len(frames) + 1] = [*frames, -1 - row]
    return tables, np.array([len(splits) * SPLIT_ENTRIES + 1 for splits in prefixes], dtype=np.int32)


def groups_found(*prefixes: list[int]) -> list[tuple[list[int], int]]:
    first, rows, splits, row_splits = find_groups(*tables_of(*prefixes))
    assert all(array.dtype == np.int32 for array in (first, rows, splits, row_splits))
    groups = [(rows[first[g] : first[g + 1]].tolist(), int(splits[g])) for g in range(len(splits))]
    for row in range(len(prefixes)):
        assert row_splits[row] == next((shared for members, shared in groups if row in members), 0)
    return sorted(groups)


def test_rows_that_share_no_whole_split_have_no_group():
    assert groups_found([1, 2], [3, 4], [], [5]) == []
    assert groups_found([1]) == []


def test_rows_share_as_many_whole_splits_as_are_equal_for_all_of_them():
    assert groups_found([1, 2, 3], [1, 2, 4], [9], [1, 2]) == [([0, 1, 3], 2)]


def test_a_prefix_in_other_pages_is_no_shared_prefix_even_with_equal_later_ones():
    assert groups_found([1, 7, 8], [2, 7, 8]) == []


def test_a_deeper_fork_is_a_group_of_its_own_where_that_saves_more():
    assert groups_found([1, *range(20, 30)], [1, *range(20, 30)], [1, 2], [1, 3]) == [([0, 1], 11), ([2, 3], 1)]
    assert groups_found([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3], [1, 2, 3]) == [([0, 1, 2, 3], 3)]


def test_a_chain_of_256_forks_of_forks_is_searched_to_its_end():
    tables, lengths = tables_of(*(list(range(row + 1)) for row in range(256)))
    _, _, splits, row_splits = find_groups(tables, lengths)
    assert len(splits) > 1
    assert (row_splits > 0).sum() > 200
