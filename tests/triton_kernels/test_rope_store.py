"""Queries, keys and values of new rows against torch in float64, and the contents of the pages afterwards."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from libsym.abi import PAGE_ENTRIES
from tests.triton_kernels.attention import Shape
from triton_kernels.rope_store import rope_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

# Each result is rounded once, to its own type; before, a few float32 operations on values of up to 5.
ABSOLUTE_ERROR = {torch.float32: 2e-6, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
EPS = 1e-6
FAR = 4097


def all_heads(shape: Shape) -> int:
    return shape.num_heads + 2 * shape.num_kv_heads


TINY = Shape(num_heads=4, num_kv_heads=2, head_dim=16)
SMOLLM2 = Shape(num_heads=9, num_kv_heads=3, head_dim=64)


@dataclass(slots=True)
class Step:
    shape: Shape
    qkv: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    entries: torch.Tensor
    pages: torch.Tensor
    norms: dict[str, torch.Tensor]
    layer: int = 1

    def store(self, **options) -> torch.Tensor:
        heads = self.shape.num_heads, self.shape.num_kv_heads
        options = {"eps": EPS} | self.norms | options
        return rope_store(self.qkv, self.table, self.positions, self.entries, self.pages, self.layer, *heads, **options)

    def stored(self, row: int) -> torch.Tensor:
        """[2, kv_heads, head_dim]: K and V of a row as they lie in its page."""
        frame, slot = divmod(int(self.entries[row]), PAGE_ENTRIES)
        return self.pages[frame, self.layer, :, :, slot]


def rope_table(num_positions: int, head_dim: int, factor: float = 1.0) -> torch.Tensor:
    frequencies = 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(num_positions)[:, None] * frequencies
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * factor
    return torch.from_numpy(table.astype(np.float32))


def make_step(shape: Shape, rows: int, dtype, device, *, stored=None, norm=False, gain=1.0) -> Step:
    """Random rows at shuffled places of a small arena that is full of NaN."""
    generator = torch.Generator().manual_seed(rows)
    num_frames = rows // PAGE_ENTRIES + 3
    qkv = gain * torch.randn(rows, all_heads(shape) * shape.head_dim, generator=generator)
    pages = torch.full((num_frames, 2, 2, shape.num_kv_heads, PAGE_ENTRIES, shape.head_dim), float("nan"))
    norms = {
        name: (1.0 + 0.3 * torch.randn(shape.head_dim, generator=generator)).to(dtype).to(device)
        for name in ("q_norm", "k_norm")
    }
    return Step(
        shape,
        qkv.to(dtype).to(device),
        rope_table(FAR + 1, shape.head_dim).to(device),
        torch.tensor([FAR, *torch.randint(0, FAR, (rows - 1,), generator=generator)]).int().to(device),
        torch.randperm(num_frames * PAGE_ENTRIES, generator=generator)[:rows].int().to(device),
        pages.to(dtype if stored is None else stored).to(device),
        norms if norm else {},
    )


def reference(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [rows, heads, dim], and K and V [rows, 2, kv_heads, dim], in float64."""
    shape = step.shape
    heads = step.qkv.double().view(-1, all_heads(shape), shape.head_dim)
    kinds = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = heads.split(kinds, dim=1)
    if step.norms:
        q, k = (
            x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * step.norms[name].double()
            for x, name in ((q, "q_norm"), (k, "k_norm"))
        )
    cos, sin = step.table[step.positions.long()].double().chunk(2, dim=1)
    return turn(q, cos, sin), torch.stack([turn(k, cos, sin), v], dim=1)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=ABSOLUTE_ERROR[actual.dtype])


SHAPES = [TINY, Shape(7, 1, 80), Shape(3, 3, 96), Shape(32, 8, 128), Shape(4, 2, 256)]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("shape", "rows", "dtype"),
    [
        *((SMOLLM2, rows, dtype) for rows in (1, 33) for dtype in ABSOLUTE_ERROR),
        *((s, 2, torch.float32) for s in SHAPES),
    ],
)
def test_queries_are_turned_and_keys_and_values_lie_in_their_slots(device, shape, rows, dtype, norm):
    step = make_step(shape, rows, dtype, device, norm=norm)
    step.table *= 1.5 if shape is TINY else 1.0  # a rotation's factor scales queries and keys alone
    queries, stored = reference(step)
    assert_close(step.store(), queries)
    for row in range(rows):
        assert_close(step.stored(row), stored[row])


def test_nothing_else_in_the_pages_changes(device):
    step = make_step(TINY, 5, torch.float32, device)
    step.store()
    written = torch.zeros(step.pages.shape, dtype=torch.bool)
    for entry in step.entries.tolist():
        written[entry // PAGE_ENTRIES, 1, :, :, entry % PAGE_ENTRIES] = True
    assert torch.equal(~step.pages.isnan().cpu(), written)


def test_a_padding_row_stores_nothing_and_gives_zeros(device):
    step = make_step(TINY, 3, torch.float32, device)
    step.entries[1] = -1
    step.positions[1] = 2**31 - 1
    step.qkv[1] = float("nan")
    queries = step.store()
    assert torch.equal(queries[1], torch.zeros_like(queries[1]))
    assert (~step.pages.isnan()).sum() == 2 * 2 * 2 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_pages_hold_the_nearest_value_in_range(device, dtype):
    step = make_step(SMOLLM2, 4, dtype, device, stored=torch.float8_e4m3fn, gain=200.0)
    _, stored = reference(step)
    assert stored.abs().max() > 600.0
    step.store()
    for row in range(4):
        actual, expected = step.stored(row).double(), stored[row].clamp(-448.0, 448.0)
        # 3 bits of mantissa: half a unit is a 16th at most, of the smallest numbers half of 2 ** -9.
        assert ((actual - expected).abs() <= expected.abs() / 16 + 2.0**-10 + 1e-5).all()


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    step = make_step(SMOLLM2, 33, torch.bfloat16, device, norm=True)
    together = step.store()
    for row in (0, 17, 32):
        alone = make_step(SMOLLM2, 33, torch.bfloat16, device, norm=True)
        alone.qkv, alone.positions = alone.qkv[row : row + 1], alone.positions[row : row + 1]
        alone.entries = alone.entries[row : row + 1]
        assert torch.equal(alone.store()[0], together[row])
        assert torch.equal(alone.stored(0), step.stored(row))


def test_rows_with_a_stride_are_read_where_they_are(device):
    step = make_step(TINY, 3, torch.float32, device)
    queries, _ = reference(step)
    wide = torch.full((3, 2 * step.qkv.shape[1]), float("nan"), device=device)
    wide[:, : step.qkv.shape[1]] = step.qkv
    step.qkv = wide[:, : step.qkv.shape[1]]
    out = torch.full_like(queries, float("nan"), dtype=torch.float32)
    assert step.store(out=out) is out
    assert_close(out, queries)
