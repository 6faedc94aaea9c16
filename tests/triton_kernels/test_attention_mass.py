"""The mass of attention against the weights of plain torch attention, added up over rows and over heads of a group."""

import numpy as np
import pytest
import torch

from tests.triton_kernels.attention import GROUPED, SMALL, TYPED_CASES, Chunks, chunks_of
from triton_kernels.attention_launch import wide_shape
from triton_kernels.attention_mass import attention_mass, mass_steps
from triton_kernels.paged_prefill_attention import prefill_tiles

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Tolerance as a share of a chunk's whole. Scores of half-precision queries and keys are exact products, added up in
float32.
"""


def masses(chunks: Chunks, asking=None, **options) -> list[torch.Tensor]:
    """[kv heads, entries] of each chunk that asks."""
    asking = range(len(chunks.sizes)) if asking is None else asking
    query, lists = chunks.launch_lists([(chunk, 0, rows) for chunk, (_, rows) in enumerate(chunks.sizes)])
    shape = wide_shape(chunks.shape.num_heads, chunks.shape.num_kv_heads, chunks.shape.head_dim, query.dtype)
    rows = np.array([rows if chunk in asking else 0 for chunk, (_, rows) in enumerate(chunks.sizes)])
    ends = np.array([sum(size) if chunk in asking else 0 for chunk, size in enumerate(chunks.sizes)])
    first = np.cumsum(ends) - ends
    lists |= {
        "tiles": torch.from_numpy(prefill_tiles(rows, shape)).to(chunks.device),
        "steps": torch.from_numpy(mass_steps(ends)).to(chunks.device),
        "first_columns": torch.from_numpy(first.astype(np.int32)).to(chunks.device),
    }
    out = torch.full((chunks.shape.num_kv_heads, int(ends.sum()) + 1), 7.0, device=chunks.device)
    levels = torch.empty((len(query), chunks.shape.num_heads), device=chunks.device)
    assert attention_mass(query, chunks.keys, **lists, levels=levels, out=out, **options) is out
    assert (out[:, -1] == 7.0).all()  # of no chunk
    return [out[:, first[chunk] : first[chunk] + ends[chunk]].cpu() for chunk in asking]


def check(chunks: Chunks, asking=None, **options) -> None:
    found = masses(chunks, asking, **options)
    for chunk, mass in zip(range(len(found)) if asking is None else asking, found, strict=True):
        most = chunks.sizes[chunk][1] * chunks.shape.num_heads / chunks.shape.num_kv_heads
        weights = chunks.weights(chunk, **options).sum(dim=1)
        expected = weights.view(chunks.shape.num_kv_heads, -1, weights.shape[1]).sum(dim=1)
        torch.testing.assert_close(mass.double(), expected, rtol=0, atol=ERROR[chunks.query.dtype] * most)


@pytest.mark.parametrize(("name", "dtype"), TYPED_CASES)
def test_every_entry_has_the_mass_that_the_reference_gives_it(device, name, dtype):
    chunks, options = chunks_of(name, dtype, device)
    check(chunks, **options)


def test_chunks_that_do_not_ask_are_left_out(device):
    check(Chunks(GROUPED, [(0, 40), (31, 2), (0, 33), (64, 31), (70, 1)], torch.float32, device), asking=[1, 3, 4])
    assert masses(Chunks(SMALL, [(3, 2)], torch.float32, device), asking=[]) == []


def test_steps_cover_every_entry_once():
    steps = mass_steps(np.array([1, 64, 0, 65, 200]))
    assert steps.dtype == np.int32
    assert steps.tolist() == [[0, 0], [1, 0], [3, 0], [3, 1], [4, 0], [4, 1], [4, 2], [4, 3]]
