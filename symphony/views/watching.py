"""`symphony stat --watch`: show the state of the daemon repeatedly.

On a terminal, each sample is painted over the previous sample. In a pipe, or on a dumb terminal, each sample is one
line: JSON, or columns with a head every HEAD_EACH lines. If the daemon goes away, one line says so, and the command
waits for the next daemon.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import libsym
from libsym.errors import NotConnected
from symphony.views.rates import Rates, TimeQuantiles, human_count, human_time
from symphony.views.reports import stat_lines

HEAD_EACH = 20
"""Number of lines between two heads of columns."""
_HOME, _TO_THE_END_OF_LINE, _TO_THE_END, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"
_COLUMNS = (
    "UP",
    "TOKENS/S",
    "PREFILL/S",
    "STEPS/S",
    "CALLS/STEP",
    "STEP P50",
    "P99",
    "CALL P50",
    "P99",
    "WAIT P50",
    "P99",
)
Info = dict[str, Any]


def watch(connect: Callable[[], None], interval_s: float, *, as_json: bool) -> int:
    """Show samples repeatedly, until the user ends the command."""
    show = _json_line if as_json else _painted() if can_paint() else _columns()
    before: Info | None = None
    for info in _looks(connect, interval_s):
        show(info, None if before is None else Rates.between(before, info))
        before = info
    raise AssertionError("it looks for ever")


def can_paint() -> bool:
    """Return whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _looks(connect: Callable[[], None], interval_s: float) -> Iterator[Info]:
    """Yield samples at a steady pace, however long each sample takes."""
    due_s, is_gone = time.monotonic(), False
    while True:
        try:
            if is_gone:
                connect()
            info = libsym.daemon_stat()
        except NotConnected as error:
            if not is_gone:
                print(f"symphony: {error}: trying again", file=sys.stderr, flush=True)
            is_gone = True
        else:
            is_gone = False
            yield info
        due_s = max(due_s + interval_s, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))


def _json_line(info: Info, rates: Rates | None) -> None:
    print(json.dumps(info | {"rates": None if rates is None else asdict(rates)}), flush=True)


def _painted() -> Callable[[Info, Rates | None], None]:
    sys.stdout.write(_CLEAR)

    def show(info: Info, rates: Rates | None) -> None:
        size = shutil.get_terminal_size()
        lines = [*stat_lines(info), *([] if rates is None else rate_lines(rates))][: size.lines - 1]
        whole = "".join(f"{line[: size.columns]}{_TO_THE_END_OF_LINE}\n" for line in lines)
        sys.stdout.write(f"{_HOME}{whole}{_TO_THE_END}")
        sys.stdout.flush()

    return show


def rate_lines(rates: Rates) -> list[str]:
    """Return the rates since the previous sample, as lines of text."""
    steps = f"{human_count(rates.steps_per_s)} steps/s of {rates.calls_a_step:.1f} calls"
    return [
        f"lately   {human_count(rates.tokens_per_s)} tokens/s, {human_count(rates.prefill_per_s)} of prefills",
        f"         {steps}, {100 * rates.busy:.0f} % of the time",
        f"         steps {_spread(rates.steps)}",
        f"         calls {_spread(rates.calls)}",
        f"         waits {_spread(rates.waits)}",
    ]


def _spread(times: TimeQuantiles) -> str:
    return f"p50 {human_time(times.p50_s)}, p99 {human_time(times.p99_s)}"


def _columns() -> Callable[[Info, Rates | None], None]:
    num_lines = 0

    def show(info: Info, rates: Rates | None) -> None:
        nonlocal num_lines
        if rates is None:
            return  # rates need two samples
        if num_lines % HEAD_EACH == 0:
            print(_line(_COLUMNS))
        num_lines += 1
        times = [human_time(each) for spread in (rates.steps, rates.calls, rates.waits) for each in _both(spread)]
        counts = map(human_count, (rates.tokens_per_s, rates.prefill_per_s, rates.steps_per_s))
        print(_line((f"{info['uptime_s']:.0f}", *counts, f"{rates.calls_a_step:.1f}", *times)), flush=True)

    return show


def _both(times: TimeQuantiles) -> tuple[float | None, float | None]:
    return times.p50_s, times.p99_s


def _line(words: tuple[str, ...]) -> str:
    return " ".join(f"{word:>{max(len(name), 7)}}" for name, word in zip(_COLUMNS, words, strict=True))
