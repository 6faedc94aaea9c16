"""Events that users can cause again and again fill no log."""

import errno
import io
import logging
import subprocess
import sys

import pytest

from libsym.errors import SymError
from symphony.daemon.logs import BURST, RATE_PER_S, RateLimit, TextLines


class Log:
    """A logger with the filter, the lines that came through, and the time."""

    def __init__(self):
        self.now_s = 0.0
        self._text = io.StringIO()
        handler = logging.StreamHandler(self._text)
        handler.addFilter(RateLimit(lambda: self.now_s))
        self.logger = logging.Logger("of this test alone")  # noqa: LOG001
        self.logger.addHandler(handler)

    def complain(self, count):
        for number in range(count):
            self.logger.warning("the %dth is 100 %% broken", number)

    def lines(self):
        found = self._text.getvalue().splitlines()
        self._text.seek(0)
        self._text.truncate()
        return found


@pytest.fixture
def log():
    return Log()


def test_lines_of_one_kind_come_in_a_burst_and_then_slowly_and_others_are_left_alone(log):
    log.complain(1000)
    assert len(log.lines()) == BURST
    log.logger.warning("something else")
    assert log.lines() == ["something else"]
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


def test_a_flood_of_one_error_leaves_another_at_the_same_place_alone(log):
    errors = [SymError("the disk is full", errno.ENOSPC), SymError("the disk is broken", errno.EIO), ValueError("none")]
    for error in (*[errors[0]] * 1000, *errors[1:], errors[0]):
        log.logger.warning("can't write: %s", error)
    found = log.lines()
    assert found[:BURST] == ["can't write: the disk is full"] * BURST
    assert found[BURST:] == ["can't write: the disk is broken", "can't write: none"]


def test_every_error_is_written(log):
    for number in range(1000):
        log.logger.error("defect %d", number)
    assert log.lines() == [f"defect {number}" for number in range(1000)]


def test_who_asks_for_a_verbose_log_gets_every_line(capfd):
    program = (
        'import logging; from symphony.daemon.logs import set_up_log; set_up_log("text", verbose=True)\n'
        "for number in range(1000): logging.warning('line %d', number)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert len(capfd.readouterr().err.splitlines()) == 1000


@pytest.mark.slow
def test_a_user_who_fails_again_and_again_fills_no_log(shared):
    """Texts that are none: each close fails, and the first few times the log says why."""
    before = shared.log.stat().st_size
    for _ in range(3 * BURST):
        with pytest.raises(OSError, match="Invalid argument"):
            (shared.mount / ".symphony/text/a.kv").write_bytes(b"a\xff")
    written = shared.log.read_bytes()[before:].decode()
    assert BURST <= written.count("nothing was written: /a.kv: the text is not UTF-8") < 2 * BURST


def test_a_name_of_several_lines_is_one_line_and_no_terminal_obeys_it():
    record = logging.makeLogRecord({"msg": "%s expires", "args": ("a\n<0>b\x1b[2J\x9b\u2028é",)})
    assert TextLines("%(message)s").format(record) == "a\\n<0>b\\x1b[2J\\x9b\\u2028é expires"
