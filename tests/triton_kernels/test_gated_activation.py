"""The MLP's gated product against torch in float64."""

import pytest
import torch
from torch.nn.functional import gelu, silu

from triton_kernels.gated_activation import KINDS, gated_activation

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Each result is rounded once, to its own type.
RELATIVE_ERROR = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_rows(rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (3.0 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)


def reference(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    return (silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")) * up


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=RELATIVE_ERROR[actual.dtype], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize(("rows", "ffn_size"), [(1, 1), (1, 1536), (33, 128), (3, 1025)])
def test_the_gate_is_activated_and_multiplies_the_other_half(device, rows, ffn_size, dtype, kind):
    gate_up = random_rows(rows, 2 * ffn_size, dtype, device)
    assert_close(gated_activation(gate_up, kind), reference(gate_up, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_gates_far_from_zero_do_not_overflow(device, kind):
    gate_up = torch.tensor([[-3e4, -100.0, 100.0, 3e4, 2.0, 2.0, 2.0, 2.0]], device=device)
    out = gated_activation(gate_up, kind)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 200.0, 6e4]], device=device), rtol=0, atol=1e-38)


def test_rows_with_a_stride_are_read_and_written_where_they_are(device):
    wide = random_rows(3, 3 * 96, torch.float32, device)
    wide[:, 192:] = float("nan")
    gate_up = wide[:, :192]
    out = torch.full((3, 96), float("nan"), device=device)
    assert gated_activation(gate_up, "silu", out=out) is out
    assert_close(out, reference(gate_up, "silu"))
