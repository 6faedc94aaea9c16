"""Tests that need more than a Bench make a kind of it of their own, and have it as `bench`, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed here is freed at once, and not when the collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
