"""Two sides beside each other: a tmpfs, which is taken to be right, and ours."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.kvfs.conformance.script import ANYTHING, OK, Case, Outcome, Step, every
from tests.kvfs.conformance.sides import Side

_ENOUGH = 8
"""Number of differences after which the search for more ends."""


@dataclass(frozen=True, slots=True)
class Twins:
    """Runs scripts on both; see `compare`."""

    right: Side
    ours: Side
    is_brief: bool = False
    """Whether we tell of a file no more than type, mode and owners, and of a call no more than the error."""

    def compare(self, *scripts: str | Case, **choices: Iterable[str] | str) -> list[str]:
        """Run the scripts, with all combinations of the choices filled in. Each must go as it says, and alike on both.

        Gives the results of the last steps, in order.
        """
        wanted = [case for each in scripts for case in ([each] if isinstance(each, Case) else every(each, **choices))]
        answers = [self._run(case) for case in wanted]
        doubted = [i for i, case in enumerate(wanted) if self._complaint(case, *answers[i])]
        told: list[str] = []
        for i in doubted:  # tmpfs takes some times from a coarse clock: what is too quick seems to change nothing
            answers[i] = self._run(wanted[i], patient=True)
            told += filter(None, [self._complaint(wanted[i], *answers[i])])
            if len(told) == _ENOUGH:
                break
        header = f"of {len(wanted)} scripts {len(doubted)} went wrong at first, these always:"
        assert not told, "\n\n".join([header, *told])
        assert answers
        return [str(ours[-1].result) for _right, ours in answers]

    def _run(self, case: Case, *, patient: bool = False) -> tuple[list[Outcome], list[Outcome]]:
        return self.right.run(case, patient=patient), self.ours.run(case, patient=patient)

    def _complaint(self, case: Case, right: list[Outcome], ours: list[Outcome]) -> str | None:
        """The first step that went wrong, if any did."""
        told = []
        for step, good, bad in zip(case.steps, right, ours, strict=True):
            told.append(f"    {step.line}")
            if not _is_expected(step.expected or OK, good.result):
                return "\n".join([*told, f"  tmpfs gave {good.result}: is the script right?"])
            if self._shown(good.result, step) != self._shown(bad.result, step):
                return "\n".join([*told, f"  tmpfs gave {good.result}", f"  we gave {bad.result}"])
            for path, here in (bad.after or {}).items():
                there = (good.after or {})[path]
                if here != (there[:3] if self.is_brief and isinstance(there, tuple) else there):
                    shown = path if len(path) < 60 else f"{path[:60]}…"
                    return "\n".join([*told, f"  {shown!r} on tmpfs {there}", f"  {shown!r} with us {here}"])
        return None

    def _shown(self, result: Any, step: Step) -> Any:
        """The part of a result that must be alike. The gate may refuse odd ends of paths by another number."""
        if not self.is_brief or not _has_failed(result):
            return OK if self.is_brief else result
        is_odd = any(isinstance(path, str) and path.endswith(("/", "/.", "/..")) for path in step.arguments)
        return "refused" if is_odd else result


def _has_failed(result: Any) -> bool:
    return isinstance(result, str) and result[:1] == "E" and result.isupper()


def _is_expected(expected: str, result: Any) -> bool:
    return expected == ANYTHING or str(result) == expected or (expected == OK and not _has_failed(result))
