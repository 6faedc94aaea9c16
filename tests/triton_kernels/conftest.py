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
    """Return the CPU under Triton's interpreter, or a GPU with TRITON_INTERPRET=0."""
    if not INTERPRETED:
        return "cuda"
    mend_bfloat16(monkeypatch)
    mend_float8(monkeypatch)
    return "cpu"


@pytest.fixture
def poisoned_memory():
    """Fills every torch.empty with NaN, so that unwritten values show."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # for some references a GPU has no deterministic algorithm
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined] # of the module's class
    yield
    torch.use_deterministic_algorithms(False)
