"""Paged decode attention against plain torch attention over the gathered entries."""

import copy

import pytest
import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.attention import ABSOLUTE_ERROR, NO_PAGE, Chunks, Shape, assert_close, decodes
from triton_kernels.attention_splits import SPLIT_PAGES
from triton_kernels.paged_decode_attention import Scratch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

ODD_LENGTHS = (1, 31, 32, 33, 97)
SPLIT_ENTRIES = SPLIT_PAGES * PAGE_ENTRIES
SMOLLM2 = Shape(num_heads=9, num_kv_heads=3, head_dim=64)
SMALL = Shape(num_heads=2, num_kv_heads=1, head_dim=64)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "lengths", "dtype"),
    [
        *((SMOLLM2, ODD_LENGTHS, dtype) for dtype in ABSOLUTE_ERROR),
        *((SMOLLM2, [4 * SPLIT_ENTRIES + 77], dtype) for dtype in ABSOLUTE_ERROR),
        (SMALL, [ODD_LENGTHS[row % 5] for row in range(33)], BF16),
        (SMALL, [4097, 33], BF16),
        (SMALL, [SPLIT_ENTRIES - 1, SPLIT_ENTRIES, SPLIT_ENTRIES + 1], FP32),
        (Shape(num_heads=2, num_kv_heads=1, head_dim=16), [1, 97], FP32),
        (Shape(num_heads=4, num_kv_heads=4, head_dim=80), [1, 97], FP32),
        (Shape(num_heads=7, num_kv_heads=1, head_dim=96), [1, 97], FP32),
        (Shape(num_heads=32, num_kv_heads=1, head_dim=128), [1, 97], FP32),
        (Shape(num_heads=4, num_kv_heads=2, head_dim=256), [1, 97], FP32),
    ],
)
def test_rows_attend_to_their_entries_and_no_more(device, shape, lengths, dtype):
    batch = decodes(shape, lengths, dtype, device)
    assert_close(batch.decode(), batch.reference())


@pytest.mark.parametrize(
    ("gain", "options"),
    [(1.0, {"scale": 0.5}), (10.0, {"softcap": 5.0, "window": 200}), (1000.0, {})],
    ids=["a scale", "a softcap", "beyond the range of exp"],
)
def test_scores_are_scaled_and_bent_before_the_softmax(device, gain, options):
    batch = decodes(SMALL, [97, SPLIT_ENTRIES + 1], FP32, device)
    batch.query.mul_(gain)
    assert_close(batch.decode(**options), batch.reference(**options))


def test_a_padding_row_of_length_zero_gives_zeros_and_the_output_is_where_the_caller_wants_it(device):
    batch = decodes(SMALL, [33, 0, 1], FP32, device)
    out = torch.full_like(batch.query, float("nan"))
    assert batch.decode(out=out) is out
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert_close(out, batch.reference())


@pytest.mark.parametrize("window", [1, 31, 64, 65, SPLIT_ENTRIES, 300, 10_000])
def test_a_window_hides_what_lies_before_it(device, window):
    lengths = [33, 2 * SPLIT_ENTRIES + 37]
    batch = decodes(SMALL, lengths, FP32, device)
    expected = batch.reference(window=window)
    for row, length in enumerate(lengths):  # frames wholly before the window are not read
        batch.tables[row, : max(0, length - window) // PAGE_ENTRIES // 2 * 2] = NO_PAGE
    assert_close(batch.decode(window=window), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float8_pages_are_attended_as_the_values_they_hold(device, dtype):
    batch = decodes(SMALL, [97, SPLIT_ENTRIES + 1], FP32, device)
    held = [pages.clamp(-448, 448).to(torch.float8_e4m3fn) for pages in (batch.keys, batch.values)]

    def over(pages: list[torch.Tensor]) -> torch.Tensor:
        other: Chunks = copy.copy(batch)
        other.query, (other.keys, other.values) = batch.query.to(dtype), pages
        return other.decode()

    coarse = over(held)
    assert torch.equal(coarse, over([pages.to(dtype) for pages in held]))
    # What float8 costs: 3 bits of K and of V, on scores of about 1 and values of about 1.
    error = (coarse.cpu().double() - batch.reference()).abs().max()
    assert 0.001 < error < 0.08


def test_scratch_that_a_caller_keeps_may_be_larger_than_needed_and_hold_anything(device):
    batch = decodes(SMALL, [97, SPLIT_ENTRIES + 1], FP32, device)
    scratch = Scratch.allocate(5, SMALL.num_heads, SMALL.head_dim, 40, device)
    assert torch.equal(batch.decode(scratch=scratch), batch.decode())


@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
def test_a_sequence_has_the_same_bits_alone_twice_and_in_any_batch(device, dtype):
    batch = decodes(SMALL, lengths := [33, 2 * SPLIT_ENTRIES + 5, 1, SPLIT_ENTRIES], dtype, device)
    together = batch.decode()
    for row, length in enumerate(lengths):
        used = -(-length // PAGE_ENTRIES)
        for width in (used, used + 3 * SPLIT_PAGES):
            assert torch.equal(batch.decode((row, 0), width=width)[0], together[row])
    twice = batch.decode((0, 0), (0, 0))
    assert torch.equal(twice[0], twice[1])
    assert torch.equal(twice[0], together[0])
