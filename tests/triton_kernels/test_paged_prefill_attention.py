"""Paged prefill attention against plain torch attention, and against decode: every bit."""

import numpy as np
import pytest
import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.attention import ABSOLUTE_ERROR, Shape
from triton_kernels.attention_launch import wide_shape
from triton_kernels.paged_decode_attention import layer_pages, paged_decode_attention
from triton_kernels.paged_prefill_attention import paged_prefill_attention, prefill_tiles

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

SMALL = Shape(num_heads=2, num_kv_heads=1, head_dim=16)
GROUPED = Shape(num_heads=6, num_kv_heads=2, head_dim=32)
PADDED = Shape(num_heads=3, num_kv_heads=1, head_dim=80)


class Chunks:
    """Sequences in shuffled pages, of each a last chunk: `(entries before it, its rows)`; NaN where nothing is held."""

    def __init__(self, shape: Shape, sizes, dtype, device, masks=None) -> None:
        generator = torch.Generator().manual_seed(len(sizes))
        self.shape, self.sizes, self.device, self.masks = shape, sizes, device, masks or [None] * len(sizes)
        used = [-(-(start + rows) // PAGE_ENTRIES) for start, rows in sizes]
        pages = torch.full((sum(used) + 2, 2, 2, shape.num_kv_heads, PAGE_ENTRIES, shape.head_dim), float("nan"))
        order = torch.randperm(len(pages), generator=generator).int()
        self.tables = torch.full((len(sizes), max(used) + 1), 2**31 - 1, dtype=torch.int32)
        taken = 0
        for chunk, (start, rows) in enumerate(sizes):
            frames = order[taken : taken + used[chunk]]
            self.tables[chunk, : used[chunk]] = frames
            taken += used[chunk]
            for page, frame in enumerate(frames.tolist()):
                held = min(PAGE_ENTRIES, start + rows - page * PAGE_ENTRIES)
                size = (2, shape.num_kv_heads, held, shape.head_dim)
                pages[frame, 1, :, :, :held] = torch.randn(size, generator=generator)
        self.keys, self.values = layer_pages(pages.to(dtype).to(device), 1, shape.head_dim)
        rows = sum(rows for _, rows in sizes)
        self.query = torch.randn(rows, shape.num_heads, shape.head_dim, generator=generator).to(dtype).to(device)

    def row_ranges(self) -> list[range]:
        ends = np.cumsum([rows for _, rows in self.sizes]).tolist()
        return [range(end - rows, end) for end, (_, rows) in zip(ends, self.sizes, strict=True)]

    def attend(self, **options) -> torch.Tensor:
        return self.attend_as([(chunk, 0, rows) for chunk, (_, rows) in enumerate(self.sizes)], **options)

    def attend_as(self, pieces, **options) -> torch.Tensor:
        """The rows of pieces `(chunk, first row, rows)` of chunks, one launch for all."""
        ranges = self.row_ranges()
        query = torch.cat([self.query[ranges[chunk][first : first + rows]] for chunk, first, rows in pieces])
        counts = np.array([rows for _, _, rows in pieces])
        shape = wide_shape(self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim, query.dtype)
        numbers = {
            "page_tables": self.tables[[chunk for chunk, _, _ in pieces]],
            "starts": torch.tensor([self.sizes[chunk][0] + first for chunk, first, _ in pieces]),
            "first_rows": torch.tensor([0, *np.cumsum(counts).tolist()]),
            "tiles": torch.from_numpy(prefill_tiles(counts, shape)),
        }
        if any(mask is not None for mask in self.masks):
            words, mask_first, mask_words = [], [], []
            for chunk, first, rows in pieces:
                mask = self.masks[chunk]
                mask_first.append(-1 if mask is None else sum(map(len, words)))
                mask_words.append(0)
                if mask is not None:
                    packed = pack_words(mask[first : first + rows])
                    mask_words[-1] = packed.shape[1]
                    words.append(packed.reshape(-1))
            numbers["masks"] = torch.from_numpy(np.concatenate(words))
            numbers |= {"mask_first": torch.tensor(mask_first), "mask_words": torch.tensor(mask_words)}
        numbers = {name: value.int().to(self.device) for name, value in numbers.items()}
        return paged_prefill_attention(query, self.keys, self.values, **numbers, **options)

    def decode(self, chunk: int, row: int, **options) -> torch.Tensor:
        """That row as a decode step: its own entry is the last."""
        index = self.row_ranges()[chunk][row]
        length = torch.tensor([self.sizes[chunk][0] + row + 1], dtype=torch.int32, device=self.device)
        tables = self.tables[chunk : chunk + 1].to(self.device)
        return paged_decode_attention(self.query[index : index + 1], self.keys, self.values, tables, length, **options)[
            0
        ]

    def reference(self, softcap: float = 0.0, window: int = 0) -> torch.Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        for chunk, ((start, rows), places) in enumerate(zip(self.sizes, self.row_ranges(), strict=True)):
            entries = start + rows
            frames = self.tables[chunk, : -(-entries // PAGE_ENTRIES)].long()
            seen = torch.arange(entries)[None] <= start + torch.arange(rows)[:, None]
            if window:
                seen &= torch.arange(entries)[None] > start + torch.arange(rows)[:, None] - window
            if self.masks[chunk] is not None:
                seen &= torch.from_numpy(self.masks[chunk])
            for head in range(self.shape.num_heads):
                keys, values = (
                    held.cpu()[frames, head // group].reshape(-1, self.shape.head_dim)[:entries].double()
                    for held in (self.keys, self.values)
                )
                scores = self.query.cpu()[places, head].double() @ keys.T * self.shape.head_dim**-0.5
                scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                out[places, head] = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ values
        return out


def pack_words(mask: np.ndarray) -> np.ndarray:
    """[rows, entries] booleans as [rows, pages] int32, bit j of word p for slot j of page p."""
    pages = -(-mask.shape[1] // PAGE_ENTRIES)
    padded = np.zeros((len(mask), pages * PAGE_ENTRIES), dtype=np.uint8)
    padded[:, : mask.shape[1]] = mask
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def random_mask(start: int, rows: int, seen: float) -> np.ndarray:
    """Rows see their own entry and a few of the others; whole pages and splits are hidden from some of them."""
    generator = np.random.default_rng(rows)
    mask = generator.random((rows, start + rows)) < seen
    mask[::2, : start // 2] = False
    mask[1, :start] = False
    mask[np.arange(rows), start + np.arange(rows)] = True
    return mask


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=ABSOLUTE_ERROR[actual.dtype])


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("dtype", ABSOLUTE_ERROR, ids=str)
def test_chunks_of_odd_lengths_attend_to_what_came_before_and_to_themselves(device, dtype, invariant):
    chunks = Chunks(GROUPED, [(0, 1), (0, 33), (31, 2), (64, 31), (97, 65), (300, 1)], dtype, device)
    assert_close(chunks.attend(invariant=invariant), chunks.reference())


def test_33_chunks_of_one_launch_stay_apart(device):
    sizes = [((1, 31, 32, 33)[number % 4], 1 + number % 3) for number in range(33)]
    chunks = Chunks(GROUPED, sizes, torch.float32, device)
    assert_close(chunks.attend(), chunks.reference())


@pytest.mark.parametrize("invariant", [True, False])
def test_chunks_that_end_at_4097_entries(device, invariant):
    chunks = Chunks(GROUPED, [(4096, 1), (4064, 33)], torch.float32, device)
    assert_close(chunks.attend(invariant=invariant), chunks.reference())


@pytest.mark.parametrize("invariant", [True, False])
def test_a_head_dim_that_is_no_power_of_two_and_a_group_of_three_are_served(device, invariant):
    chunks = Chunks(PADDED, [(250, 20), (0, 5)], torch.float32, device)
    assert_close(chunks.attend(invariant=invariant), chunks.reference())


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("window", [1, 40, 64, 300])
def test_a_window_and_a_softcap_are_those_of_decode(device, window, invariant):
    chunks = Chunks(SMALL, [(0, 40), (390, 30)], torch.float32, device)
    assert_close(
        chunks.attend(window=window, softcap=3.0, invariant=invariant), chunks.reference(softcap=3.0, window=window)
    )


@pytest.mark.parametrize("invariant", [True, False])
def test_a_mask_hides_entries_from_the_rows_of_its_chunk_alone(device, invariant):
    sizes = [(40, 9), (300, 20), (5, 3)]
    masks = [None, random_mask(300, 20, 0.3), random_mask(5, 3, 0.5)]
    chunks = Chunks(SMALL, sizes, torch.float32, device, masks)
    assert_close(chunks.attend(invariant=invariant), chunks.reference())
    assert_close(chunks.attend(invariant=invariant, window=35), chunks.reference(window=35))


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
        assert torch.equal(chunks.decode(chunk, row, **options), whole[chunks.row_ranges()[chunk][row]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_masked_token_has_the_same_bits_in_any_chunk(device, dtype):
    chunks = Chunks(SMALL, [(300, 20)], dtype, device, [random_mask(300, 20, 0.3)])
    whole = chunks.attend()
    assert torch.equal(chunks.attend_as([(0, 0, 7), (0, 7, 1), (0, 8, 12)]), whole)


def test_a_long_prefix_is_walked_to_its_end(device):
    chunks = Chunks(SMALL, [(4090, 7)], torch.float32, device)
    whole = chunks.attend()
    assert_close(whole, chunks.reference())
    assert torch.equal(chunks.decode(0, 6), whole[6])


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
