"""Tests that need more than a Bench make a kind of it of their own, and have it as `bench`, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from libsym._channel import lib
from libsym.channel.server import ServerChannel
from scheduler.batch.call import PredCall
from scheduler.operations.generate import TokenReplies
from tests.scheduler.bench import VOCAB_SIZE, Answers, Bench


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


@pytest.fixture(scope="session")
def full() -> Iterator[ServerChannel]:
    """A channel whose ring has no room for what C would send."""
    channel = ServerChannel.create(VOCAB_SIZE)
    lib.sym_server_set_backlog(channel.memory[0], 1)
    yield channel
    channel.close()


@pytest.fixture(autouse=True)
def no_rings(monkeypatch, full):
    """What C would send or take can't be where there is no ring: then tokens are sent at the end."""
    direct, hot = TokenReplies.direct.fget, PredCall.hot.fget

    def direct_if_there_is_one(self):
        channel, number = direct(self)
        return (full, number) if isinstance(channel, Answers) else (channel, number)

    def hot_if_there_is_one(self):
        found = hot(self)
        return None if found is not None and isinstance(found.channel, Answers) else found

    monkeypatch.setattr(TokenReplies, "direct", property(direct_if_there_is_one))
    monkeypatch.setattr(PredCall, "hot", property(hot_if_there_is_one))
