"""Embedding rows against plain indexing in float64."""

import pytest
import torch

from triton_kernels.embedding import embed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_table(vocab_size: int, hidden_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def on_device(tokens: list[int], device: str) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden_size"), [(1, 1), (1, 576), (33, 96), (2, 2049)])
def test_each_token_gives_its_row(device, rows, hidden_size, dtype):
    table = random_table(259, hidden_size, dtype, device)
    tokens = on_device([(7 * row) % 259 for row in range(rows)], device)
    assert torch.equal(embed(tokens, table), table[tokens.long()])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_are_scaled_in_float32_and_rounded_once(device, dtype):
    table = random_table(50, 96, dtype, device)
    tokens = on_device([49, 0, 3], device)
    assert torch.equal(embed(tokens, table, 45.2548), (table[tokens.long()].float() * 45.2548).to(dtype))


def test_a_padding_row_gives_zeros_and_reads_nothing(device):
    table = torch.full((3, 96), float("nan"), device=device)
    table[1] = 1.0
    out = embed(on_device([-1, 1, -1], device), table, 2.0)
    assert out.tolist() == [[0.0] * 96, [2.0] * 96, [0.0] * 96]


def test_the_output_may_be_wider_than_the_table(device):
    table = random_table(50, 96, torch.bfloat16, device)
    out = torch.full((2, 96), float("nan"), device=device)
    tokens = on_device([4, 5], device)
    assert embed(tokens, table, 0.3, out=out) is out
    assert torch.equal(out, table[tokens.long()].float() * 0.3)
