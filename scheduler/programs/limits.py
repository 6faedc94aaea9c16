"""Limits of a program, set at its start: tokens, page-seconds and pages. The launcher ends a program over a limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from libsym.errors import Invalid, OverQuota

MAX_LIMIT = 1 << 53
"""Largest limit. In JSON, whole numbers are exact up to this limit."""


class OverLimit(OverQuota):
    """Error of a program that asks for more than its own limit. Memory freed by other programs does not help."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one program. None: only the limits of its user apply."""

    tokens: int | None = None
    """Tokens that the program's calls may compute."""
    page_seconds: float | None = None
    pages: int | None = None
    """Distinct pages of the KV files that the program has open. Pages of closed files count for the user alone."""

    @classmethod
    def read(cls, found: Any) -> ProgramLimits:
        """Return the limits in a JSON object. Invalid: the value is no object, or a limit has a wrong name or value."""
        if found is None:
            return NO_LIMITS
        if not isinstance(found, dict):
            raise Invalid(f"limits are {_shown(found)}: an object is needed")
        for name, value in found.items():
            if name not in ("tokens", "page_seconds", "pages"):
                raise Invalid(f"there is no limit on {_shown(name)} here: tokens, page_seconds, pages")
            kinds = (int, float) if name == "page_seconds" else (int,)
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise Invalid(f"the limit on {name} is {_shown(value)}: a number is needed")
            if value is not None and not 0 <= value <= MAX_LIMIT:
                raise Invalid(f"the limit on {name} is {_shown(value)}: 0 to {MAX_LIMIT} are possible")
        limits = cls(**found)
        return NO_LIMITS if limits == NO_LIMITS else limits

    @property
    def is_any(self) -> bool:
        return self is not NO_LIMITS

    def facts(self) -> dict[str, Any]:
        """Return the limits that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_LIMITS = ProgramLimits()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
