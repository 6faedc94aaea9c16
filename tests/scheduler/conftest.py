"""Fixtures. A test module that needs more than a Bench subclasses it, and has the result as `bench`, too.

`Bench.run_test` runs a test that is a coroutine beside the scheduler, and checks the books after it.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from libsym._channel import lib as channel_lib
from libsym.channel.server import ServerChannel
from scheduler._loop import lib
from scheduler.batch.call import PredCall
from scheduler.batch.generation import GenerateCall
from tests.scheduler.bench import VOCAB_SIZE, Answers, Bench
from tests.scheduler.served_bench import Side


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Turn the garbage collector off, so that reference counts alone free objects, at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def full() -> Iterator[ServerChannel]:
    """A channel whose ring never has room for messages from C."""
    channel = ServerChannel.create(VOCAB_SIZE)
    channel_lib.sym_server_set_backlog(channel.memory[0], 1)
    yield channel
    channel.close()


@pytest.fixture(autouse=True)
def no_rings(monkeypatch, full):
    """Give calls without a ring the fake channel `full` and no run in C. Their tokens are sent at the end."""
    channel, run_kind = vars(GenerateCall)["channel"].fget, vars(PredCall)["run_kind"].fget

    def channel_or_none(self):
        found = channel(self)
        return full if isinstance(found, Answers) else found

    def kind_without_rings(self):
        found = run_kind(self)
        is_loop = found == lib.SYM_PROGRAM and not isinstance(self.channel, Answers)
        return found if is_loop else lib.SYM_CALL

    monkeypatch.setattr(GenerateCall, "channel", property(channel_or_none))
    monkeypatch.setattr(PredCall, "run_kind", property(kind_without_rings))
