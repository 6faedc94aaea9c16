"""Tests that need more than a Bench make a kind of it of their own, and have it as `bench`, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.batch.call import PredCall
from scheduler.operations.generate import TokenReplies
from tests.scheduler.bench import Answers, Bench


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


@pytest.fixture(autouse=True)
def no_rings(monkeypatch):
    """What C would send or take can't be where there is no ring: then every token is Python's."""
    direct, hot = TokenReplies.direct.fget, PredCall.hot.fget

    def direct_if_there_is_one(self):
        return None if isinstance(self._call.lip.channel, Answers) else direct(self)

    def hot_if_there_is_one(self):
        found = hot(self)
        return None if found is not None and isinstance(found.channel, Answers) else found

    monkeypatch.setattr(TokenReplies, "direct", property(direct_if_there_is_one))
    monkeypatch.setattr(PredCall, "hot", property(hot_if_there_is_one))
