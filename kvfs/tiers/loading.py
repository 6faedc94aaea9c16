"""Loads the policy of the tiers: a policy of this package by its name, or a policy of the operator from a file.

A policy file is Python with a function `rank(files, gaps)`. The file may import numpy and `kvfs.tiers.policy`. The file
runs with the daemon's rights, so only the daemon's configuration can name it. But the daemon does not trust the code to
be correct: see `Guarded`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from kvfs.base.operators_file import read_operators_file
from kvfs.tiers.policies import cost_based, idleness, lru, ttl
from kvfs.tiers.policy import Files, FloatArray, Gaps, Rank
from libsym.errors import Invalid

NAMES: dict[str, Rank] = {"cost": cost_based.rank, "lru": lru.rank, "ttl": ttl.rank, "idle": idleness.rank}
DEFAULT = "cost"
MAX_BYTES = 1 << 20
"""Limit for the size of a policy file."""
LOAD_LIMIT_S = 5.0
"""Time limit for running the file, its imports included."""
LIMIT_S = 0.25
"""Time limit for a decision of an operator's policy. A policy of this package takes some ms for 10,000 files on a busy
machine.
"""


def load(name_or_path: str) -> Rank:
    """Return a policy by its name or file. Invalid: the policy can't be loaded. A policy from a file raises Invalid if
    it fails.
    """
    if name_or_path in NAMES:
        return NAMES[name_or_path]
    if not name_or_path.endswith(".py"):
        names = ", ".join((*NAMES, "none"))
        raise Invalid(f"{name_or_path!r} is no policy: give one of {names}, or a file that ends in .py")
    try:
        source = read_operators_file(Path(name_or_path), MAX_BYTES).decode()
    except Invalid as error:
        raise Invalid(f"policy {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"policy {name_or_path}: {getattr(error, 'strerror', None) or error}") from None
    if len(source) >= MAX_BYTES:
        raise Invalid(f"policy {name_or_path} has {MAX_BYTES} characters or more: it is no policy")
    rank = _run(source, name_or_path).get("rank")
    if not callable(rank):
        raise Invalid(f"policy {name_or_path} has no function rank(files, gaps)")
    trial = Guarded(rank, lru.rank, name=name_or_path)
    one, is_open = np.ones(2), np.ones(2, np.bool_)
    trial(Files(one, one, one, one, one, one, one, is_open), Gaps())
    trial.close()
    if trial.failure is not None:
        raise Invalid(trial.failure)
    return lambda files, gaps: _checked(rank, files, gaps, name_or_path)


def _run(source: str, name: str) -> dict[str, object]:
    """Run a policy file. Return the names that it defines.

    The file runs in a thread of its own, because a reload waits for it with a time limit. An exception that would end a
    program ends only that thread.
    """
    names: dict[str, object] = {"__name__": "policy", "__file__": name}
    failures: list[BaseException] = []

    def run() -> None:
        try:
            exec(compile(source, name, "exec"), names)  # noqa: S102 - the operator's own file
        except BaseException as error:  # noqa: BLE001 - any error of the file is reported as such
            failures.append(error)

    thread = threading.Thread(target=run, name="symphony-policy", daemon=True)
    thread.start()
    thread.join(LOAD_LIMIT_S)
    if thread.is_alive():
        _end(thread)
        raise Invalid(f"policy {name}: running the file took longer than {LOAD_LIMIT_S:g} s, before any call of rank")
    for error in failures:
        raise Invalid(f"policy {name}{_line(error, name)}: {_text(error)}") from None
    return names


def _checked(rank: Callable[[Files, Gaps], object], files: Files, gaps: Gaps, name: str) -> FloatArray:
    """Return the worth of each file from the policy. Invalid: the policy failed, or gave a file no number."""
    try:
        worth = np.asarray(rank(files, gaps), np.float64)
    except Invalid:
        raise  # its message is complete already
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the file is reported as such
        raise Invalid(f"policy {name}{_line(error, name)}: {_text(error)}") from None
    if worth.shape != (len(files),):
        raise Invalid(f"policy {name}: rank gave an array of shape {worth.shape} for {len(files)} files")
    if np.isnan(worth).any():
        raise Invalid(f"policy {name}: rank gave NaN for {int(np.isnan(worth).sum())} files")
    return worth


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


def _line(error: BaseException, path: str) -> str:
    """Return the number of the policy file's line that raised an error, as `:3`. Empty: the error is from elsewhere."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    line, place = "", error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == path:
            line = f":{place.tb_lineno}"
        place = place.tb_next
    return line


class _Overrun(BaseException):
    """Exception that is raised in a policy that takes too long. No `except Exception` in the policy catches it."""


class Guarded:
    """A policy that is not trusted. The default replaces the policy for good if the policy raises, returns an unusable
    result, or takes longer than `limit_s`. The log gets one line.

    The policy computes in a thread of its own, so that the caller never waits longer than the limit. A late policy is
    ended by an exception in that thread. A policy that sleeps, or is inside a C function, gets the exception only when
    the sleep or the function ends. Until then the policy only occupies a thread.
    """

    def __init__(
        self, rank: Rank, default: Rank, limit_s: float = LIMIT_S, log: logging.Logger | None = None, name: str = "file"
    ) -> None:
        """`log` gets a line when the policy fails. None: only `failure` has the reason."""
        self._rank, self._default, self._limit_s, self._name = rank, default, limit_s, name
        self._log = log
        self._wanted: SimpleQueue[tuple[Files, Gaps] | None] = SimpleQueue()
        self._answers: SimpleQueue[FloatArray | Invalid] = SimpleQueue()
        self._is_done = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """The reason for which the default has replaced the policy. None: the policy decides."""

    def __call__(self, files: Files, gaps: Gaps) -> FloatArray:
        if self.failure is None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="symphony-policy", daemon=True)
                self._thread.start()
            self._wanted.put((_copy(files), Gaps(gaps.counts.copy())))
            if not self._is_done.acquire(timeout=self._limit_s):
                self._end_thread()
                self._replace(f"policy {self._name}: rank took longer than {1000 * self._limit_s:.0f} ms")
            elif isinstance(answer := self._answers.get(), Invalid):
                self.close()
                self._replace(str(answer))
            else:
                return answer
        return self._default(files, gaps)

    def close(self) -> None:
        """End the policy's thread."""
        self._wanted.put(None)

    def _replace(self, failure: str) -> None:
        self.failure = failure
        if self._log is not None:
            self._log.warning("%s: the default decides from now on, until the policy is set anew", failure)

    def _serve(self) -> None:
        try:
            while (wanted := self._wanted.get()) is not None:
                try:
                    answer: FloatArray | Invalid = _checked(self._rank, *wanted, self._name)
                except Invalid as error:
                    answer = error
                self._answers.put(answer)
                self._is_done.release()
        except _Overrun:
            return

    def _end_thread(self) -> None:
        self.close()
        if self._thread is not None:
            _end(self._thread)


def _end(thread: threading.Thread) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Overrun))


def _copy(files: Files) -> Files:
    """Return a copy, so that late or malicious writes by the policy do not reach the arrays that the default uses."""
    return files.at(np.ones(len(files), np.bool_))
