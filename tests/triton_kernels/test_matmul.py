"""Products with a weight matrix against plain torch in float64, and their bits beside those of other batches."""

import pytest
import torch

from triton_kernels.matmul import Scratch, cut, launch_shape, make_scratch, matmul

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned_memory")]

# Of the largest element: float32 sums in another order, and one rounding to the element type.
RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WIDE = (136, 1096)  # outputs, inputs: two splits that end within a block, a last tile of eight outputs


def random_matrix(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + seed)
    return torch.randn(rows, columns, generator=generator).to(dtype).to(device)


def assert_close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    largest = float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=RELATIVE_ERROR[actual.dtype] * largest)


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (200, 96), WIDE], ids=str)
@pytest.mark.parametrize("rows", [1, 33])
def test_rows_are_multiplied_with_matrices_of_any_shape(device, rows, shape, dtype):
    outputs, inputs = shape
    x, weight = random_matrix(rows, inputs, dtype, device), random_matrix(outputs, inputs, dtype, device, seed=1)
    assert_close(matmul(x, weight), x, weight)


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize("rows", [3, 70])
def test_a_bias_is_added_before_the_rounding(device, rows, dtype):
    x, weight = random_matrix(rows, 1096, dtype, device), random_matrix(136, 1096, dtype, device, seed=1)
    bias = 30.0 * random_matrix(1, 136, dtype, device, seed=2)[0]
    assert_close(matmul(x, weight, bias=bias), x, weight, bias)


def test_the_launches_under_test_are_of_every_kind():
    spread, walked = launch_shape(4, *WIDE, torch.bfloat16), launch_shape(9000, *WIDE, torch.bfloat16)
    assert cut(*WIDE, torch.bfloat16).splits == 2
    assert spread.spread
    assert not walked.spread
    assert launch_shape(2048, 28672, 4096, torch.bfloat16).block_rows == 256


@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_others(device, dtype):
    x, weight = random_matrix(130, WIDE[1], dtype, device), random_matrix(*WIDE, dtype, device, seed=1)
    together = matmul(x, weight)
    for first, last in ((0, 1), (129, 130), (60, 77), (5, 38)):
        assert torch.equal(matmul(x[first:last], weight), together[first:last]), (first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_splits_walked_by_one_program_give_the_bits_of_splits_spread_over_several(device, dtype, monkeypatch):
    x, weight = random_matrix(5, 1600, dtype, device), random_matrix(96, 1600, dtype, device, seed=1)
    assert cut(96, 1600, dtype).splits == 3
    spread = matmul(x, weight)
    monkeypatch.setattr("triton_kernels.matmul.SPREAD_BELOW", 0)
    assert not launch_shape(5, 96, 1600, dtype).spread
    assert torch.equal(matmul(x, weight), spread)


def test_scratch_serves_one_product_after_another(device):
    shapes = [WIDE, (48, 1600), (300, 64)]
    scratch = make_scratch(40, shapes, torch.float32, device)
    for rows in (40, 1):
        for shape in shapes:
            x, weight = (
                random_matrix(rows, shape[1], torch.float32, device),
                random_matrix(*shape, torch.float32, device),
            )
            assert_close(matmul(x, weight, scratch=scratch), x, weight)
    assert not scratch.counters.any()


def test_scratch_is_made_for_the_largest_launch_of_every_kind():
    scratch = make_scratch(64, [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)], torch.bfloat16, "meta")
    assert isinstance(scratch, Scratch)
    assert scratch.partials.shape == (4 * 4096 * 64,)
    assert scratch.counters.shape == (48,)


def test_rows_with_a_stride_are_read_and_written_where_they_are(device):
    wide = random_matrix(4, 192, torch.float32, device)
    wide[:, 96:] = float("nan")
    weight = random_matrix(80, 96, torch.float32, device, seed=1)
    out = torch.full((4, 100), 7.0, device=device)
    assert matmul(wide[:, :96], weight, out=out[:, :80]).data_ptr() == out.data_ptr()
    assert_close(out[:, :80], wide[:, :96], weight)
    assert (out[:, 80:] == 7.0).all()


def test_logits_may_stay_in_float32(device):
    x, weight = random_matrix(3, 576, torch.bfloat16, device), random_matrix(200, 576, torch.bfloat16, device, seed=1)
    out = torch.empty(3, 200, dtype=torch.float32, device=device)
    assert_close(matmul(x, weight, out=out), x, weight)


def test_what_is_no_number_in_one_row_stays_in_that_row(device):
    x, weight = random_matrix(3, 96, torch.float32, device), random_matrix(80, 96, torch.float32, device, seed=1)
    clean = matmul(x, weight)
    x[1] = float("nan")
    assert torch.equal(matmul(x, weight)[[0, 2]], clean[[0, 2]])
