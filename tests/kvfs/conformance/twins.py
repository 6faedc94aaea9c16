"""Two file systems beside each other: a tmpfs, which is taken to be right, and the mount."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.kvfs.conformance.script import ANYTHING, OK, Case, Outcome, every
from tests.kvfs.mounted import REPOSITORY

_ENOUGH = 8
"""Number of differences after which the search for more ends."""


class Twins:
    """Runs scripts on both; see `compare`."""

    def __init__(self, right: Path, mount: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvfs.conformance.worker", str(right), str(mount)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
        )

    def compare(self, *scripts: str | Case, **choices: Iterable[str] | str) -> list[str]:
        """Run the scripts, with all combinations of the choices filled in. Each must go as it says, and alike on both.

        Gives the results of the last steps, in order.
        """
        wanted = [case for each in scripts for case in ([each] if isinstance(each, Case) else every(each, **choices))]
        answers = self._ask(wanted)
        doubted = [i for i, case in enumerate(wanted) if _complaint(case, *answers[i])]
        told: list[str] = []
        for i in doubted:  # tmpfs takes some times from a coarse clock: what is too quick seems to change nothing
            [answers[i]] = self._ask([wanted[i]], patient=True)
            told += filter(None, [_complaint(wanted[i], *answers[i])])
            if len(told) == _ENOUGH:
                break
        header = f"of {len(wanted)} scripts {len(doubted)} went wrong at first, these always:"
        assert not told, "\n\n".join([header, *told])
        assert answers
        return [str(ours[-1].result) for _right, ours in answers]

    def _ask(self, cases: list[Case], *, patient: bool = False) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((cases, patient), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=20) == 0
        self._process.stdout.close()


def _complaint(case: Case, right: list[Outcome], ours: list[Outcome]) -> str | None:
    """The first step that went wrong, if any did."""
    told = []
    for step, good, bad in zip(case.steps, right, ours, strict=True):
        told.append(f"    {step.line}")
        if not _is_expected(step.expected or OK, good.result):
            return "\n".join([*told, f"  tmpfs gave {good.result}: is the script right?"])
        if good.result != bad.result:
            return "\n".join([*told, f"  tmpfs gave {good.result}", f"  the mount gave {bad.result}"])
        for path, there in (good.after or {}).items():
            here = (bad.after or {})[path]
            if here != there:
                shown = path if len(path) < 60 else f"{path[:60]}…"
                return "\n".join([*told, f"  {shown!r} on tmpfs {there}", f"  {shown!r} on the mount {here}"])
    return None


def _is_expected(expected: str, result: Any) -> bool:
    failed = isinstance(result, str) and result[:1] == "E" and result.isupper()
    return expected == ANYTHING or str(result) == expected or (expected == OK and not failed)
