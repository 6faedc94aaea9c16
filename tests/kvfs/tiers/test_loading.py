"""The operator's own policy: what is wrong with its file is told, and its limits hold."""

import contextlib
import logging
import threading
import time

import pytest

from kvfs.tiers import loading
from kvfs.tiers.loading import Guarded
from kvfs.tiers.policies import lru
from kvfs.tiers.policy import Gaps
from libsym.errors import Invalid
from tests.kvfs.tiers.idle_files import files, first_to_go


def test_an_operators_file_is_a_policy(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import numpy as np\n\ndef rank(files, gaps):\n    return -files.num_pages\n")
    rank = loading.load(str(path))
    assert first_to_go(rank, files([1, 1.0], num_pages=[3, 4]), Gaps()) == 1


WRONG_FILES = {
    "def rank(files, gaps)\n    pass\n": ":1: SyntaxError: expected ':'",
    "x = 1\ny = z\n": ":2: NameError: name 'z' is not defined",
    "def other(files, gaps): ...\n": "has no function rank(files, gaps)",
    "def rank(files, gaps):\n    return files.size\n": ":2: AttributeError: 'Files' object has no attribute 'size'",
    "def rank(files, gaps):\n    return 1\n": "rank gave an array of shape () for 2 files",
    "def rank(files, gaps):\n    return files.num_pages * float('nan')\n": "NaN for 2 files",
    "def rank(files, gaps):\n    return ['a', 'b']\n": "ValueError: could not convert string to float",
    "x = 1\nraise SystemExit(3)\n": ":2: SystemExit: 3",
    "while True:\n    pass\n": "took longer than 0.1 s",
}


@pytest.mark.parametrize(("text", "told"), WRONG_FILES.items())
def test_what_is_wrong_with_an_operators_file_is_told_with_its_line(tmp_path, monkeypatch, text, told):
    """A daemon reads one again while it serves, so the file has to come to its end in time."""
    if "longer" in told:
        monkeypatch.setattr(loading, "LOAD_LIMIT_S", 0.1)
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(Invalid) as failed:
        loading.load(str(path))
    assert str(path) in str(failed.value)
    assert told in str(failed.value)


def test_a_name_that_is_none_is_told_with_those_that_are(tmp_path):
    with pytest.raises(Invalid, match="give one of cost, lru, ttl, idle, none, or a file that ends in"):
        loading.load("lfu")
    with pytest.raises(Invalid, match="No such file or directory"):
        loading.load(str(tmp_path / "none.py"))


def endless(_files, _gaps):
    while True:
        pass


def stubborn(_files, _gaps):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.001)


woken = threading.Event()
"""Event that ends the sleep of policies that fell asleep."""


def meddling(found, _gaps):
    found.idle_s[:] = 0
    raise RuntimeError("late")


BAD = {
    "raises": (lambda _files, _gaps: 1 / 0, "ZeroDivisionError: division by zero"),
    "nan": (lambda found, _gaps: found.gap_s, "gave NaN for 3 files"),
    "length": (lambda found, _gaps: found.idle_s[1:], "gave an array of shape (2,) for 3 files"),
    "sleeps": (lambda _files, _gaps: woken.wait(60), "took longer than 50 ms"),
    "endless": (endless, "took longer than 50 ms"),
    "stubborn": (stubborn, "took longer than 50 ms"),
    "meddling": (meddling, "RuntimeError: late"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_policy_that_fails_is_replaced_by_the_default_from_then_on_with_one_line_in_the_log(kind, caplog):
    rank, told = BAD[kind]
    woken.clear()
    limit_s = 0.05 if "took longer" in told else 30.0  # what answers may take its time: the machine may be busy
    guarded = Guarded(rank, lru.rank, limit_s, logging.getLogger("tiers"), "mine.py")
    some = files([3, 1, 2.0])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert guarded(some, Gaps()).tolist() == [-3, -1, -2]
    woken.set()
    assert [told in record.getMessage() for record in caplog.records] == [True]
    assert "mine.py" in caplog.text
    assert guarded.failure is not None
    for thread in threading.enumerate():
        if thread.name == "symphony-policy":
            thread.join(5)
            assert not thread.is_alive()


def test_a_policy_that_is_right_decides_from_its_own_thread_until_it_is_closed():
    threads = []

    def rank(found, _gaps):
        threads.append(threading.current_thread())
        return found.idle_s

    guarded = Guarded(rank, lru.rank, 5.0)
    for _ in range(50):
        assert guarded(files([3, 1.0]), Gaps()).tolist() == [3, 1]
    assert guarded.failure is None
    guarded.close()
    threads[0].join(5)
    assert len(set(threads)) == 1
    assert not threads[0].is_alive()
