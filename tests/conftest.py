"""Settings of the whole test process, made before any test module is imported."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patches import Patches

# Triton decides at its import whether kernels run in its interpreter, and transformers imports Triton.
# On a machine with a GPU, TRITON_INTERPRET=0 runs the kernel tests there.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Torch's threads wait for each other by spinning: at the tests' small shapes they only take the processor from others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has what it starts in the background ignore SIGINT, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _others_come_in(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pytest keeps its directories to one user. Tests have other users there, whom only what is tested may stop."""
    base, top = tmp_path_factory.getbasetemp(), Path(tempfile.gettempdir())
    for directory in (base, *base.parents):
        if top in directory.parents:
            directory.chmod(0o755)


@pytest.fixture
def monkeypatch() -> Iterator[Patches]:
    """pytest's, but a function that was put in the place of our own code's has to be called."""
    patches = Patches()
    try:
        yield patches
    finally:
        patches.undo()
    assert not patches.uncalled, f"patched, and never called: {', '.join(patches.uncalled)}"
