"""Events that users can cause again and again fill no log."""

from __future__ import annotations

import errno
import io
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from libsym.errors import SymError
from symphony.daemon.logs import BURST, RATE_PER_S, RateLimit, TextLines
from tests.symphony.daemons import Daemon


class Log:
    """A logger with the filter, the lines that came through, and the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._text = io.StringIO()
        self.handler = logging.StreamHandler(self._text)
        self.handler.addFilter(RateLimit(lambda: self.now_s))
        self.logger = logging.getLogger("tests.symphony.test_logs")
        self.logger.addHandler(self.handler)
        self.logger.propagate = False

    def complain(self, count: int) -> None:
        for number in range(count):
            self.logger.warning("the %dth is 100 %% broken", number)

    def lines(self) -> list[str]:
        """Return the lines that came through since the last call."""
        found = self._text.getvalue().splitlines()
        self._text.seek(0)
        self._text.truncate()
        return found


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    yield log
    log.logger.removeHandler(log.handler)
    log.logger.propagate = True


def test_lines_of_one_kind_come_in_a_burst_and_then_slowly(log: Log) -> None:
    log.complain(1000)
    assert len(log.lines()) == BURST
    log.now_s += 100
    log.complain(1)
    assert log.lines() == [f"the 0th is 100 % broken ({1000 - BURST} lines like this were left out)"]
    log.complain(1)
    assert log.lines() == ["the 0th is 100 % broken"]
    log.complain(1000)
    log.lines()
    for _ in range(40):
        log.now_s += 0.25
        log.complain(10)
    assert len(log.lines()) == 10 * RATE_PER_S


def test_a_flood_of_one_kind_leaves_the_others_alone(log: Log) -> None:
    log.complain(1000)
    log.lines()
    log.logger.warning("something else")
    assert log.lines() == ["something else"]


def test_a_flood_of_one_error_leaves_another_at_the_same_place_alone(log: Log) -> None:
    def fail(count: int, error: Exception) -> None:
        for _ in range(count):
            log.logger.warning("can't write: %s", error)

    fail(1000, SymError("the disk is full", errno.ENOSPC))
    assert len(log.lines()) == BURST
    fail(1, SymError("the disk is broken", errno.EIO))
    fail(1, ValueError("no number"))
    fail(1, SymError("the disk is full", errno.ENOSPC))
    assert log.lines() == ["can't write: the disk is broken", "can't write: no number"]


def test_every_error_is_written(log: Log) -> None:
    for number in range(1000):
        log.logger.error("defect %d", number)
    assert log.lines() == [f"defect {number}" for number in range(1000)]


def test_who_asks_for_a_verbose_log_gets_every_line(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        'import logging; from symphony.daemon.logs import set_up_log; set_up_log("text", verbose=True)\n'
        "for number in range(1000): logging.warning('line %d', number)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert len(capfd.readouterr().err.splitlines()) == 1000


@pytest.mark.slow
def test_a_user_who_fails_again_and_again_fills_no_log(daemon: Daemon) -> None:
    """Texts that are none: each close fails, and the first few times the log says why."""
    before = daemon.log.stat().st_size
    for _ in range(3 * BURST):
        with pytest.raises(OSError, match="Invalid argument"):
            (daemon.mount / ".symphony/text/a.kv").write_bytes(b"a\xff")
    written = daemon.log.read_bytes()[before:].decode()
    assert BURST <= written.count("nothing was written: /a.kv: the text is not UTF-8") < 2 * BURST


def test_a_name_of_several_lines_is_one_line_and_no_terminal_obeys_it() -> None:
    record = logging.makeLogRecord(
        {"name": "kvfs.volume.expiry", "msg": "%s expires", "args": ("a\n<0>b\x1b[2J\x9b\u2028é",)}
    )
    assert (
        TextLines("%(name)s: %(message)s").format(record) == "kvfs.volume.expiry: a\\n<0>b\\x1b[2J\\x9b\\u2028é expires"
    )
