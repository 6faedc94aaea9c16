"""Reloads with errors in the files that the configuration names."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.tiers import loading
from libsym.errors import Invalid
from symphony.daemon import reloading as module
from symphony.daemon.reloading import CHANGEABLE, Reloading, Source
from symphony.daemon.tier_policy import TierPolicy
from symphony.service.notify import Notifier
from symphony.settings.config import Config


class Departures:
    """Takes the policies that it is to use."""

    def __init__(self):
        self.used = []

    def use(self, rank):
        self.used.append(rank)


def reloading(config: Config, *, read=None, policy=lambda _config: None, **apply) -> Reloading:
    source = Source(None, {})
    if read is not None:
        source = type("Read", (), {"path": Path("read.toml"), "read": staticmethod(read)})()
    every = {key: apply.get(key, lambda _config: None) for key in CHANGEABLE - {"policy"}}
    return Reloading(config, source, every, Notifier(), {"policy": policy})


def test_a_policy_that_is_refused_ends_nothing_and_changes_nothing_beside_it():
    def refuse(config):
        raise Invalid(f"policy {config.policy} is no policy")

    quotas = []
    config = replace(Config(), policy="before.py")
    wanted = replace(config, policy="after.py", quota=7)
    of_daemon = reloading(config, read=lambda: wanted, policy=refuse, quota=lambda config: quotas.append(config.quota))
    trio.run(of_daemon._read_again)
    assert of_daemon.outcome.error == "policy after.py is no policy"
    assert of_daemon.config == config
    assert quotas == []


def test_a_file_is_read_on_a_worker():
    """A read of a policy on the daemon's mount would wait for itself on the daemon's own thread."""
    threads = []
    wanted = replace(Config(), policy="lru")

    def prepared(config):
        threads.append(threading.current_thread())
        return lambda: threads.append(threading.current_thread())

    of_daemon = reloading(Config(), read=lambda: wanted, policy=prepared)
    trio.run(of_daemon._read_again)
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()
    assert of_daemon.outcome.changed == ("policy",)


def test_a_file_that_hangs_is_given_up_and_the_next_reload_reads_again(monkeypatch):
    answers, begun = threading.Event(), list[None]()

    def read():
        begun.append(None)
        answers.wait()
        return replace(Config(), quota=7)

    async def reload_twice():
        monkeypatch.setattr(module, "READ_LIMIT_S", 0.05)
        await of_daemon._read_again()
        assert of_daemon.outcome.error == "read.toml, or a file that it names, was not read in 0.05 s"
        await of_daemon._read_again()
        assert len(begun) == 1, "each reload has a thread of its own that hangs"
        answers.set()
        monkeypatch.setattr(module, "READ_LIMIT_S", 20)
        await of_daemon._read_again()

    of_daemon = reloading(Config(), read=read)
    trio.run(reload_twice)
    assert of_daemon.config.quota == 7


def test_an_error_of_a_million_characters_is_told_in_a_thousand():
    def read():
        raise Invalid("x" * 1_000_000)

    of_daemon = reloading(Config(), read=read)
    trio.run(of_daemon._read_again)
    assert of_daemon.outcome.error == f"{'x' * 1000}…"


def test_a_policy_s_file_is_read_again_where_it_has_changed_although_its_name_is_the_same(tmp_path):
    file, departures = tmp_path / "mine.py", Departures()
    file.write_text("def rank(files, gaps):\n    return files.idle_s\n")
    policy: Any = TierPolicy(departures, str(file))  # type: ignore[arg-type] # what uses a policy is faked
    assert policy.prepared(str(file)) is None
    file.write_text("def rank(files, gaps):\n    return -files.idle_s\n")
    use = policy.prepared(str(file))
    assert len(departures.used) == 1, "it was not used yet"
    use()
    assert len(departures.used) == 2
    assert policy.prepared(str(file)) is None
    policy.prepared("lru")()
    assert policy.name == "lru"
    assert departures.used[-1] is loading.NAMES["lru"]
    assert policy.prepared("lru") is None
    with pytest.raises(Invalid, match="start it again"):
        policy.prepared("none")
