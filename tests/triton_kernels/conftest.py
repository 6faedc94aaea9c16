import os

import pytest
import torch
import triton

from tests.triton_kernels.interpreter import hasten, mend_bfloat16, mend_float8

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
assert triton.knobs.runtime.interpret == INTERPRETED, "TRITON_INTERPRET changed after the process started"

if INTERPRETED:
    hasten()


@pytest.fixture
def device(monkeypatch) -> str:
    """The CPU under Triton's interpreter; a GPU with TRITON_INTERPRET=0."""
    if not INTERPRETED:
        return "cuda"
    mend_bfloat16(monkeypatch)
    mend_float8(monkeypatch)
    return "cpu"


@pytest.fixture
def poisoned_memory():
    """Every torch.empty comes filled with NaN, so that a value that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # a GPU has no such algorithm for some references
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
