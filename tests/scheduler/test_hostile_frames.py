"""Frames that libsym sent, mutated, at a gate: a short form of scripts/fuzz/recorded.py, which takes ten million."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from libsym.abi import Op
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.connection.under_way import UnderWay
from scheduler.operations import pred
from scheduler.wire.payloads import PayloadReader, check_priority
from scheduler.wire.replies import Reply
from tests import forked
from tests.scheduler import hostile
from tests.scheduler.hostile import Fuzzer, recorded_frames

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/fuzz"
NO_PAYLOAD = {Op.STAT, Op.CHECK, Op.SCRUB, Op.TRACE, Op.PING, Op.KV_PRESSURE, Op.CANCEL, Op.CONFINE, Op.USE_MODEL}
"""Not recorded: libsym sends nothing with these, or not by itself. `scripts/fuzz/frames.py` has them."""


@pytest.fixture(scope="module")
def frames():
    return recorded_frames()


def test_every_operation_that_carries_something_is_recorded(frames):
    assert {each.op for each in frames} >= set(Op) - NO_PAYLOAD


@pytest.mark.slow
def test_twenty_thousand_mutated_frames_leave_the_gate_as_it_was():
    command = [sys.executable, str(SCRIPTS / "recorded.py"), "--quick"]
    done = forked.run(command, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "20,000 frames of" in done.stdout
    assert "Invalid argument" in done.stdout
    assert "  done" in done.stdout, "some are valid"


@pytest.mark.slow
@pytest.mark.timeout(300)  # the C is compiled with sanitizers first
def test_the_lines_of_parsers_are_counted_under_sanitizers(tmp_path):
    command = [sys.executable, "-c", "import recorded; print(recorded.measured(6000, 1))"]
    environment = os.environ | {"CC": str(SCRIPTS.parents[1] / "tests/cc")}
    done = subprocess.run(command, cwd=SCRIPTS, env=environment, capture_output=True, text=True, check=False)
    reached = [line.split() for line in done.stdout.splitlines() if line.endswith("  all")]
    assert [float(share.rstrip("%")) > 75 for _, _, share, _ in reached] == [True, True], done.stdout + done.stderr
    assert "ERROR: AddressSanitizer" not in done.stderr
    assert "runtime error" not in done.stderr
    assert "hot.c" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is not open")
def test_recorded_frames_harm_no_daemon_when_another_user_throws_them_through_his_ring():
    command = [sys.executable, str(SCRIPTS / "frames.py"), "--recorded", "--frames", "10000"]
    done = forked.run(command, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def unchecked_take(self, num_bytes, _what):
    self._at += num_bytes
    return self._payload[self._at - num_bytes : self._at]


def answer_twice(self, outcome, *, again=SystemCall.answer):
    again(self, outcome)
    if isinstance(outcome, Reply) and self.request.op is Op.KV_STAT:
        self.is_answered = False
        again(self, outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (PayloadReader, "take", unchecked_take),
        (SystemCall, "answer", answer_twice),
        (UnderWay, "close", lambda *_: None),
        (Lip, "free_rows", lambda *_: None),
        (pred, "check_priority", lambda priority: 1 // (check_priority(priority) + 1) + priority),
    ],
    ids=["lengths", "twice", "bytes of the gone", "slots", "an exception"],
)
def test_the_fuzzer_notices_a_planted_fault(monkeypatch, frames, where, name, fault):
    monkeypatch.setattr(where, name, fault)
    monkeypatch.setattr(hostile, "SETTLED_S", 5)
    with pytest.raises(BaseExceptionGroup):
        run_seeds(frames)


def run_seeds(frames):
    for seed in range(5):
        Fuzzer(frames, seed, computing=2).run(20_000)


def test_the_same_seed_makes_the_same_frames(frames):
    def some(seed):
        mutator = Fuzzer(frames, seed).mutator
        return [next(mutator.frames(number)) for number in range(500)]

    assert some(3) == some(3) != some(4)
    assert len(Counter(some(3))) > 490
