"""RMSNorm against plain torch in float64."""

import pytest
import torch

from triton_kernels.rmsnorm import add_rmsnorm, rmsnorm

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Each result is rounded once, to its own type: half a unit in the last place, and float32's own sums.
RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5


def reference_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def random_rows(rows: int, hidden_size: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, hidden_size, generator=generator).to(dtype).to(device)


def random_weight(hidden_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return 1.0 + 0.3 * random_rows(1, hidden_size, dtype, device, seed=99)[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=RELATIVE_ERROR[actual.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize(("rows", "hidden_size"), [(1, 1), (1, 64), (33, 576), (3, 1000), (2, 2049)])
def test_rows_of_any_length_are_scaled_by_their_root_mean_square(device, rows, hidden_size, dtype):
    x = random_rows(rows, hidden_size, dtype, device)
    weight = random_weight(hidden_size, dtype, device)
    assert_close(rmsnorm(x, weight, EPS), reference_rmsnorm(x, weight, EPS))


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
def test_the_residual_is_added_and_handed_on_with_the_bits_of_a_separate_addition(device, dtype):
    x, residual = (random_rows(5, 576, dtype, device, seed) for seed in (1, 2))
    weight = random_weight(576, dtype, device)
    normed, new_residual = add_rmsnorm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, rmsnorm(x + residual, weight, EPS))
    post_weight = 0.5 * random_weight(576, dtype, device)  # what is added may be normed before
    normed, new_residual = add_rmsnorm(x, residual, weight, EPS, post_weight=post_weight)
    assert_close(new_residual, residual.double() + reference_rmsnorm(x, post_weight, EPS))
    assert_close(normed, reference_rmsnorm(new_residual, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_wider_residual_keeps_what_is_added_to_it(device, dtype):
    x, weight = random_rows(3, 576, dtype, device), random_weight(576, torch.float32, device)
    residual = random_rows(3, 576, torch.float32, device, seed=2)
    normed, new_residual = add_rmsnorm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x.float() + residual)
    assert normed.dtype == dtype
    assert_close(normed, reference_rmsnorm(new_residual, weight, EPS))
    narrow = torch.full_like(x, float("nan"))
    assert torch.equal(rmsnorm(new_residual, weight, EPS, out=narrow), normed)


def test_the_residual_may_be_updated_in_place(device):
    x, residual = (random_rows(5, 576, torch.float32, device, seed) for seed in (1, 2))
    weight = random_weight(576, torch.float32, device)
    expected_normed, expected_residual = add_rmsnorm(x, residual, weight, EPS)
    normed, new_residual = add_rmsnorm(x, residual, weight, EPS, out=x, new_residual=residual)
    assert normed is x
    assert new_residual is residual
    assert torch.equal(normed, expected_normed)
    assert torch.equal(new_residual, expected_residual)


def test_rows_with_a_stride_are_read_where_they_are_and_large_halves_do_not_overflow(device):
    wide = random_rows(4, 2 * 96, torch.float32, device)
    wide[:, 96:] = float("nan")
    weight = random_weight(96, torch.float32, device)
    assert_close(rmsnorm(wide[:, :96], weight, EPS), reference_rmsnorm(wide[:, :96], weight, EPS))
    large, ones = (torch.full((1, 576), value, dtype=torch.float16, device=device) for value in (6e4, 1.0))
    assert torch.equal(rmsnorm(large, ones[0], EPS), ones)


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    x = random_rows(33, 576, torch.bfloat16, device)
    weight = random_weight(576, torch.bfloat16, device)
    together = rmsnorm(x, weight, EPS)
    for row in (0, 17, 32):
        assert torch.equal(rmsnorm(x[row : row + 1], weight, EPS)[0], together[row])
