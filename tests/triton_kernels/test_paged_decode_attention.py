"""Paged decode attention against plain torch attention over the gathered entries."""

from dataclasses import dataclass

import pytest
import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.attention import ABSOLUTE_ERROR, Shape
from triton_kernels.attention_splits import SPLIT_PAGES
from triton_kernels.paged_decode_attention import Scratch, layer_pages, paged_decode_attention

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

ODD_LENGTHS = (1, 31, 32, 33, 97)
SPLIT_ENTRIES = SPLIT_PAGES * PAGE_ENTRIES


SMOLLM2 = Shape(num_heads=9, num_kv_heads=3, head_dim=64)
SMALL = Shape(num_heads=2, num_kv_heads=1, head_dim=64)


@dataclass(frozen=True, slots=True)
class Batch:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    page_tables: torch.Tensor
    lengths: torch.Tensor

    def attend(self, **options) -> torch.Tensor:
        return paged_decode_attention(self.query, self.keys, self.values, self.page_tables, self.lengths, **options)

    def row(self, index: int, *, spare_pages: int = 0) -> "Batch":
        """Return one row alone, its page table cut to the used pages (and `spare_pages` of garbage)."""
        used = -(-int(self.lengths[index]) // PAGE_ENTRIES)
        garbage = torch.full((1, spare_pages), 2**31 - 1, dtype=torch.int32, device=self.query.device)
        table = torch.cat([self.page_tables[index : index + 1, :used], garbage], dim=1)
        return Batch(self.query[index : index + 1], self.keys, self.values, table, self.lengths[index : index + 1])


def make_batch(shape: Shape, lengths, dtype, device, *, layers: int = 2, layer: int = 1) -> Batch:
    """Random entries in shuffled pages of a small arena; NaN in every slot and page that no row owns.

    Page tables are padded with a page number that does not exist.
    """
    generator = torch.Generator().manual_seed(len(lengths))
    used = [-(-length // PAGE_ENTRIES) for length in lengths]
    num_pages = sum(used) + 3
    blob = PAGE_ENTRIES * shape.head_dim
    pages = torch.full((num_pages, layers, 2, shape.num_kv_heads, blob), float("nan"), dtype=dtype)
    keys, values = layer_pages(pages, layer, shape.head_dim)
    order = torch.randperm(num_pages, generator=generator).int()
    page_tables = torch.full((len(lengths), max(*used, 1)), 2**31 - 1, dtype=torch.int32)
    taken = 0
    for row, length in enumerate(lengths):
        page_tables[row, : used[row]] = order[taken : taken + used[row]]
        taken += used[row]
        for entry in range(0, length, PAGE_ENTRIES):
            page = int(page_tables[row, entry // PAGE_ENTRIES])
            held = min(PAGE_ENTRIES, length - entry)
            size = (2, shape.num_kv_heads, held, shape.head_dim)
            keys[page, :, :held], values[page, :, :held] = torch.randn(size, generator=generator).to(dtype)
    query = torch.randn(len(lengths), shape.num_heads, shape.head_dim, generator=generator).to(dtype)
    keys, values = layer_pages(pages.to(device), layer, shape.head_dim)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Batch(query.to(device), keys, values, page_tables.to(device), lengths)


def reference_attention(
    batch: Batch, scale: float | None = None, softcap: float = 0.0, window: int = 0
) -> torch.Tensor:
    """Softmax attention in float64, a row and a head at a time."""
    _, num_heads, head_dim = batch.query.shape
    group = num_heads // batch.keys.shape[1]
    out = torch.zeros(batch.query.shape, dtype=torch.float64, device=batch.query.device)
    for row, length in enumerate(batch.lengths.tolist()):
        pages = batch.page_tables[row, : -(-length // PAGE_ENTRIES)].long()
        for head in range(num_heads if length else 0):
            keys = batch.keys[pages, head // group].reshape(-1, head_dim)[:length].double()
            values = batch.values[pages, head // group].reshape(-1, head_dim)[:length].double()
            scores = keys @ batch.query[row, head].double() * (head_dim**-0.5 if scale is None else scale)
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            seen = slice(max(0, length - window) if window else 0, length)
            out[row, head] = torch.softmax(scores[seen], dim=0) @ values[seen]
    return out


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=ABSOLUTE_ERROR[actual.dtype])


@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
@pytest.mark.parametrize("length", ODD_LENGTHS)
def test_one_sequence_of_an_odd_length_attends_to_its_entries_and_no_more(device, length, dtype):
    batch = make_batch(SMOLLM2, [length], dtype, device)
    assert_close(batch.attend(), reference_attention(batch))


@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
def test_a_batch_of_33_mixes_lengths_in_shuffled_pages(device, dtype):
    batch = make_batch(SMALL, [ODD_LENGTHS[row % 5] for row in range(33)], dtype, device)
    assert_close(batch.attend(), reference_attention(batch))


@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
def test_a_long_sequence_is_merged_from_its_splits(device, dtype):
    batch = make_batch(SMOLLM2, [4 * SPLIT_ENTRIES + 77], dtype, device)
    assert_close(batch.attend(), reference_attention(batch))


def test_a_sequence_of_4097_beside_a_short_one(device):
    batch = make_batch(SMALL, [4097, 33], torch.bfloat16, device)
    assert_close(batch.attend(), reference_attention(batch))


@pytest.mark.parametrize("length", [SPLIT_ENTRIES - 1, SPLIT_ENTRIES, SPLIT_ENTRIES + 1])
def test_lengths_around_a_split_boundary_are_exact(device, length):
    batch = make_batch(SMALL, [length], torch.float32, device)
    assert_close(batch.attend(), reference_attention(batch))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_heads=2, num_kv_heads=1, head_dim=16),
        Shape(num_heads=4, num_kv_heads=4, head_dim=80),
        Shape(num_heads=7, num_kv_heads=1, head_dim=96),
        Shape(num_heads=32, num_kv_heads=1, head_dim=128),
        Shape(num_heads=4, num_kv_heads=2, head_dim=256),
    ],
    ids=str,
)
def test_other_models_shapes_are_served(device, shape):
    batch = make_batch(shape, [1, 97], torch.float32, device)
    assert_close(batch.attend(), reference_attention(batch))


def test_a_padding_row_of_length_zero_gives_zeros(device):
    batch = make_batch(SMALL, [33, 0, 1], torch.float32, device)
    out = batch.attend()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert_close(out, reference_attention(batch))


def test_the_output_is_written_whole_where_the_caller_wants_it(device):
    batch = make_batch(SMALL, [97, 32], torch.float32, device)
    out = torch.full_like(batch.query, float("nan"))
    assert batch.attend(out=out) is out
    assert_close(out, reference_attention(batch))


def test_the_scale_of_the_scores_can_be_set(device):
    batch = make_batch(SMALL, [97], torch.float32, device)
    assert_close(batch.attend(scale=0.5), reference_attention(batch, scale=0.5))


def test_scores_beyond_the_range_of_exp_stay_finite(device):
    batch = make_batch(SMALL, [SPLIT_ENTRIES + 33], torch.float32, device)
    batch.query.mul_(1000.0)
    assert_close(batch.attend(), reference_attention(batch))


@pytest.mark.parametrize("window", [1, 31, 64, 65, SPLIT_ENTRIES, 300, 10_000])
def test_a_window_hides_what_lies_before_it(device, window):
    batch = make_batch(SMALL, [33, 2 * SPLIT_ENTRIES + 37], torch.float32, device)
    for row, length in enumerate(batch.lengths.tolist()):  # frames wholly before the window are not read
        batch.page_tables[row, : max(0, length - window) // PAGE_ENTRIES // 2 * 2] = 2**31 - 1
    expected = reference_attention(
        make_batch(SMALL, [33, 2 * SPLIT_ENTRIES + 37], torch.float32, device), window=window
    )
    assert_close(batch.attend(window=window), expected)


def test_a_softcap_bends_the_scores_before_the_softmax(device):
    batch = make_batch(SMALL, [97, SPLIT_ENTRIES + 1], torch.float32, device)
    batch.query.mul_(10.0)
    assert_close(batch.attend(softcap=5.0, window=200), reference_attention(batch, softcap=5.0, window=200))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float8_pages_are_attended_as_the_values_they_hold(device, dtype):
    batch = make_batch(SMALL, [97, SPLIT_ENTRIES + 1], torch.float32, device)
    held = [pages.clamp(-448, 448).to(torch.float8_e4m3fn) for pages in (batch.keys, batch.values)]
    half = batch.query.to(dtype)
    coarse = Batch(half, *held, batch.page_tables, batch.lengths)
    exact = Batch(half, *(pages.to(dtype) for pages in held), batch.page_tables, batch.lengths)
    assert torch.equal(coarse.attend(), exact.attend())
    # What float8 costs: 3 bits of K and of V, on scores of about 1 and values of about 1.
    error = (coarse.attend().double() - reference_attention(batch)).abs().max()
    assert 0.001 < error < 0.08


def test_scratch_that_a_caller_keeps_may_be_larger_than_needed_and_hold_anything(device):
    batch = make_batch(SMALL, [97, SPLIT_ENTRIES + 1], torch.float32, device)
    scratch = Scratch.allocate(5, SMALL.num_heads, SMALL.head_dim, 40, device)
    assert torch.equal(batch.attend(scratch=scratch), batch.attend())


@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(device, dtype):
    batch = make_batch(SMALL, [33, 2 * SPLIT_ENTRIES + 5, 1, SPLIT_ENTRIES], dtype, device)
    together = batch.attend()
    for row in range(4):
        assert torch.equal(batch.row(row).attend()[0], together[row])
        assert torch.equal(batch.row(row, spare_pages=3 * SPLIT_PAGES).attend()[0], together[row])


def test_a_fork_that_shares_pages_has_the_bits_of_its_original(device):
    batch = make_batch(SMALL, [97], torch.bfloat16, device)
    twice = Batch(
        batch.query.repeat(2, 1, 1), batch.keys, batch.values, batch.page_tables.repeat(2, 1), batch.lengths.repeat(2)
    )
    out = twice.attend()
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], batch.attend()[0])
