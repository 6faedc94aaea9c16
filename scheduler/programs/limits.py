"""What a program may use. Whoever started it has said so; a program that has more is ended by its launcher."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from libsym.errors import Invalid, OverQuota

MAX_LIMIT = 1 << 53
"""A number that JSON keeps exactly."""


class OverLimit(OverQuota):
    """A program asks for more than it may have. Nothing of other programs would help."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """None: as much as its user may have."""

    tokens: int | None = None
    """Computed by its calls."""
    page_seconds: float | None = None
    pages: int | None = None
    """Distinct pages of the KV files that it has open at once. What it leaves in named files is its user's."""

    @classmethod
    def read(cls, found: Any) -> ProgramLimits:
        """Of a JSON object. Invalid: it is none, or a limit is no number of its kind."""
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
        """Those that there are."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_LIMITS = ProgramLimits()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
