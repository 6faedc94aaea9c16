"""Rules that make operations fail or hang, and the count of the operations."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatchcase

_FILE_CHANGES = frozenset({"write", "truncate", "allocate", "punch", "setattr", "fsync", "fsyncdir"})
_NAME_CHANGES = frozenset({"create", "mkdir", "unlink", "rmdir", "rename"})
CHANGES = _FILE_CHANGES | _NAME_CHANGES
"""Operations that change what is on the disk: `any` in a rule. Beside them there are open and read."""

OPERATIONS = CHANGES | {"open", "read"}


class Effect(Enum):
    FAIL = auto()
    HANG = auto()


@dataclass(slots=True)
class Rule:
    """`after` matching operations pass, then it acts on `times` of them; None: on all."""

    effect: Effect
    operation: str
    pattern: str
    after: int
    times: int | None
    errno: int = 0

    def acts_on(self, operation: str, paths: tuple[str, ...]) -> bool:
        if not matches(self.operation, self.pattern, operation, paths):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            if not self.times:
                return False
            self.times -= 1
        return True


class Faults:
    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self._seen: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def look_at(self, operation: str, paths: tuple[str, ...]) -> Rule | None:
        """Count this operation, and find the first rule that acts on it. Every rule counts what it matches."""
        assert operation in OPERATIONS, operation
        self._seen[operation, paths] += 1
        acting = [rule for rule in self.rules if rule.acts_on(operation, paths)]
        return acting[0] if acting else None

    def count(self, operation: str, pattern: str) -> int:
        return sum(n for (seen, paths), n in self._seen.items() if matches(operation, pattern, seen, paths))


def matches(wanted: str, pattern: str, operation: str, paths: tuple[str, ...]) -> bool:
    """A pattern without a slash is for the last name of a path, as in .gitignore; a rename has two paths."""
    if wanted != operation and not (wanted == "any" and operation in CHANGES):
        return False
    return any(fnmatchcase(path if "/" in pattern else path.rpartition("/")[2], pattern) for path in paths)
