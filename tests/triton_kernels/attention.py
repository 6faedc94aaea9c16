"""Shapes, chunks and masks that the tests of attention share."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from libsym.abi import PAGE_ENTRIES
from triton_kernels.attention_launch import wide_shape
from triton_kernels.paged_decode_attention import layer_pages, paged_decode_attention
from triton_kernels.paged_prefill_attention import paged_prefill_attention, prefill_tiles

# float32: sums of a thousand terms in another order. fp16 and bf16: the weights are rounded to the type
# before they meet V, and the result once more.
ABSOLUTE_ERROR = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


NO_PAGE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


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
        self.tables = torch.full((len(sizes), max(used) + 1), NO_PAGE, dtype=torch.int32)
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
        query, numbers = self.launch_lists(pieces)
        return paged_prefill_attention(query, self.keys, self.values, **numbers, **options)

    def launch_lists(self, pieces) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the query of pieces, and the arguments of a launch for them."""
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
            words, mask_first, mask_words = list[np.ndarray](), list[int](), list[int]()
            for chunk, first, rows in pieces:
                mask = self.masks[chunk]
                mask_first.append(-1 if mask is None else sum(len(each) for each in words))
                mask_words.append(0)
                if mask is not None:
                    packed = pack_words(mask[first : first + rows])
                    mask_words[-1] = packed.shape[1]
                    words.append(packed.reshape(-1))
            numbers["masks"] = torch.from_numpy(np.concatenate(words))
            numbers |= {"mask_first": torch.tensor(mask_first), "mask_words": torch.tensor(mask_words)}
        return query, {name: value.int().to(self.device) for name, value in numbers.items()}

    def decode(self, *places: tuple[int, int], width: int | None = None, **options) -> torch.Tensor:
        """Rows `(chunk, row)`, all by default, each as a decode step with its own entry as the last.

        Page tables are cut to a width, or filled with pages that do not exist.
        """
        places = places or tuple((chunk, row) for chunk, (_, rows) in enumerate(self.sizes) for row in range(rows))
        ranges, chunks = self.row_ranges(), [chunk for chunk, _ in places]
        tables = self.tables[chunks]
        if width is not None:
            tables = torch.nn.functional.pad(tables, (0, width - tables.shape[1]), value=NO_PAGE)
        lengths = torch.tensor([self.sizes[chunk][0] + row + 1 for chunk, row in places], dtype=torch.int32)
        query = self.query[[ranges[chunk][row] for chunk, row in places]]
        lists = tables.contiguous().to(self.device), lengths.to(self.device)
        return paged_decode_attention(query, self.keys, self.values, *lists, **options)

    def reference(self, **options) -> torch.Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        for chunk, places in enumerate(self.row_ranges()):
            for head, weights in enumerate(self.weights(chunk, **options)):
                out[places, head] = weights @ self._held(self.values, chunk, head // group)
        return out

    def weights(self, chunk: int, softcap: float = 0.0, window: int = 0, scale: float | None = None) -> torch.Tensor:
        """[heads, rows, entries] of a chunk."""
        start, rows = self.sizes[chunk]
        entries, places = start + rows, self.row_ranges()[chunk]
        group = self.shape.num_heads // self.shape.num_kv_heads
        scale = self.shape.head_dim**-0.5 if scale is None else scale
        seen = torch.arange(entries)[None] <= start + torch.arange(rows)[:, None]
        if window:
            seen &= torch.arange(entries)[None] > start + torch.arange(rows)[:, None] - window
        if self.masks[chunk] is not None:
            seen &= torch.from_numpy(self.masks[chunk])
        found = []
        for head in range(self.shape.num_heads):
            keys = self._held(self.keys, chunk, head // group)
            scores = self.query.cpu()[places, head].double() @ keys.T * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            found.append(scores.masked_fill(~seen, -torch.inf).softmax(dim=-1))
        return torch.stack(found)

    def _held(self, pages: torch.Tensor, chunk: int, kv_head: int) -> torch.Tensor:
        entries = sum(self.sizes[chunk])
        frames = self.tables[chunk, : -(-entries // PAGE_ENTRIES)].long()
        return pages.cpu()[frames, kv_head].reshape(-1, self.shape.head_dim)[:entries].double()


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


def decodes(shape: Shape, lengths, dtype, device) -> Chunks:
    """A row of each sequence, which is its last entry; a length of zero is a row that pads a batch."""
    return Chunks(shape, [(length - 1, 1) for length in lengths], dtype, device)


ODD_SIZES = [(0, 1), (0, 33), (31, 2), (64, 31), (97, 65), (300, 1)]
MASKED = [(40, 9), (300, 20), (5, 3)]
MASKS = [None, random_mask(300, 20, 0.3), random_mask(5, 3, 0.5)]
CASES: dict[str, tuple[Shape, list, list | None, dict]] = {  # shape, sizes, masks, options
    "odd lengths": (GROUPED, ODD_SIZES, None, {}),
    "head_dim no power of two, a group of three": (PADDED, [(250, 20), (0, 5)], None, {}),
    **{f"window {w}": (SMALL, [(0, 40), (390, 30)], None, {"window": w, "softcap": 3.0}) for w in (1, 40, 64, 300)},
    "masks": (SMALL, MASKED, MASKS, {}),
    "masks and a window": (SMALL, MASKED, MASKS, {"window": 35}),
    "a long prefix": (SMALL, [(4090, 7)], None, {}),
}
"""Chunks whose attention, and the mass of it, are compared with the reference's."""
TYPED_CASES = [(name, torch.float32) for name in CASES] + [
    ("odd lengths", torch.float16),
    ("odd lengths", torch.bfloat16),
]


def chunks_of(name: str, dtype, device) -> tuple[Chunks, dict]:
    shape, sizes, masks, options = CASES[name]
    return Chunks(shape, sizes, dtype, device, masks), options


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=ABSOLUTE_ERROR[actual.dtype])
