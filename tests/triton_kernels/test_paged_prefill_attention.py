"""Paged prefill attention against plain torch attention, and against decode: every bit."""

import numpy as np
import pytest
import torch

from tests.triton_kernels.attention import GROUPED, SMALL, TYPED_CASES, Chunks, assert_close, chunks_of, random_mask
from triton_kernels.attention_launch import wide_shape
from triton_kernels.paged_prefill_attention import paged_prefill_attention, prefill_tiles

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(("name", "dtype"), TYPED_CASES)
def test_chunks_attend_as_the_reference_does(device, name, dtype, invariant):
    chunks, options = chunks_of(name, dtype, device)
    assert_close(chunks.attend(invariant=invariant, **options), chunks.reference(**options))


def test_33_chunks_of_one_launch_stay_apart_and_some_end_at_4097_entries(device):
    sizes = [((1, 31, 32, 33)[number % 4], 1 + number % 3) for number in range(31)]
    chunks = Chunks(GROUPED, [*sizes, (4096, 1), (4064, 33)], torch.float32, device)
    assert_close(chunks.attend(), chunks.reference())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 4.0}], ids=str)
def test_a_token_has_the_same_bits_in_any_chunk_and_as_a_decode_step(device, dtype, options):
    chunks = Chunks(SMALL, [(0, 280), (240, 40)], dtype, device)
    whole = chunks.attend(**options)
    pieces = [(0, 0, 1), (0, 1, 63), (1, 0, 17), (0, 64, 130), (1, 17, 23), (0, 194, 86)]
    cut = chunks.attend_as(pieces, **options)
    starts = [0, *np.cumsum([rows for _, _, rows in pieces])]
    for (chunk, first, rows), begin in zip(pieces, starts, strict=False):
        place = chunks.row_ranges()[chunk][first]
        assert torch.equal(cut[begin : begin + rows], whole[place : place + rows])
    for chunk, row in ((0, 0), (0, 31), (0, 255), (0, 256), (0, 279), (1, 15), (1, 16), (1, 39)):
        assert torch.equal(chunks.decode((chunk, row), **options)[0], whole[chunks.row_ranges()[chunk][row]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_masked_token_has_the_same_bits_in_any_chunk(device, dtype):
    chunks = Chunks(SMALL, [(300, 20)], dtype, device, [random_mask(300, 20, 0.3)])
    whole = chunks.attend()
    assert torch.equal(chunks.attend_as([(0, 0, 7), (0, 7, 1), (0, 8, 12)]), whole)


def test_padding_tiles_and_rows_of_no_tile_leave_the_output_alone(device):
    chunks = Chunks(SMALL, [(0, 5)], torch.float32, device)
    out = torch.full((8, SMALL.num_heads, SMALL.head_dim), 7.0, device=device)
    query = torch.cat([chunks.query, torch.full_like(chunks.query[:3], float("nan"))])
    lists = [chunks.tables, torch.tensor([0]), torch.tensor([0, 5]), torch.tensor([[0, 0], [-1, 0]])]
    lists = [numbers.int().to(device) for numbers in lists]
    assert paged_prefill_attention(query, chunks.keys, chunks.values, *lists, out=out) is out
    assert torch.equal(out[:5], chunks.attend())
    assert torch.equal(out[5:], torch.full_like(out[5:], 7.0))


def test_tiles_cover_every_row_once_and_begin_with_those_that_see_most():
    shape = wide_shape(32, 8, 128, torch.bfloat16)
    lengths = np.array([1, 32, 33, 0, 100])
    tiles = prefill_tiles(lengths, shape)
    assert tiles.dtype == np.int32
    covered = sorted((chunk, row) for chunk, first in tiles for row in range(first, min(first + 32, lengths[chunk])))
    assert covered == [(chunk, row) for chunk in range(5) for row in range(lengths[chunk])]
    assert (np.diff(tiles[:, 1]) <= 0).all()
