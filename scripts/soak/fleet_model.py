"""Model of what a fleet promises about its files and names, whatever is killed or cut off.

An appender adds one record to a file, and syncs it. A record is a few tokens, from which its number can be read. A
content is a list of records. Contents that are durable form a chain: each is a prefix of the next one. A record that a
sync has acknowledged is durable, and so is a record that a machine shows which did not write it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_MARK, BASE, FILLER = 200, 128, 129


@dataclass(slots=True)
class Record:
    number: int
    machine: str
    begun_s: float
    sure_s: float = math.inf
    """Time from which every up-to-date machine must show the record."""

    @property
    def tokens(self) -> list[int]:
        digits = [1 + self.number // BASE**power % BASE for power in (2, 1, 0)]
        return [FIRST_MARK, *digits, *[FILLER + self.number % 60] * (self.number % 23)]


def numbers_in(tokens: Sequence[int], records: Sequence[Record]) -> list[int] | None:
    """Return the numbers of the records in a content. None: the content is not made of whole records."""
    found, at = list[int](), 0
    while at < len(tokens):
        number = 0
        for digit in tokens[at + 1 : at + 4]:
            number = number * BASE + digit - 1
        if not 0 <= number < len(records):
            return None
        wanted = records[number].tokens
        if tokens[at : at + len(wanted)] != wanted:
            return None
        found.append(number)
        at += len(wanted)
    return found


@dataclass
class FileModel:
    """Contents of the files, and what must hold for them."""

    records: list[Record] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """File of each record."""
    durable: dict[str, list[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_acknowledged: int = 0
    num_reads: int = 0
    num_strict: int = 0
    """Number of reads that had to show everything that was synced before."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def new(self, machine: str, file: str) -> Record:
        with self.lock:
            record = Record(len(self.records), machine, time.monotonic())
            self.records.append(record)
            self.files.append(file)
            return record

    def read(
        self, machine: str, file: str, tokens: Sequence[int], began_s: float, *, strict: bool, why: str = ""
    ) -> None:
        """Check a content that an open for reading gave. `strict`: the machine knew that it was up to date. `why`: the
        reason why there is no content.
        """
        with self.lock:
            self.num_reads += 1
            self.num_strict += strict
            numbers = self._checked(machine, file, tokens, began_s if strict else -math.inf, why)
            if numbers is None:
                return
            known = self.durable.setdefault(file, [])
            more = numbers[len(known) :] if numbers[: len(known)] == known else []
            while more and self._is_unsynced(more[-1], machine):
                more.pop()
            self._extend(file, more)

    def acknowledged(self, machine: str, file: str, tokens: Sequence[int], began_s: float) -> None:
        """Check a content whose sync has succeeded. `began_s`: the begin of the sync."""
        with self.lock:
            self.num_acknowledged += 1
            numbers = self._checked(machine, file, tokens, began_s)
            if numbers is None:
                return
            known = self.durable.setdefault(file, [])
            if len(numbers) > len(known):
                if numbers[: len(known)] != known:
                    self._is_wrong(machine, file, f"synced {numbers} over {known}")
                self._extend(file, numbers[len(known) :])
            elif known[: len(numbers)] != numbers:
                self._is_wrong(machine, file, f"synced {numbers} beside {known}")

    def _checked(
        self, machine: str, file: str, tokens: Sequence[int], sure_s: float, why: str = ""
    ) -> list[int] | None:
        """Return the numbers of the records. None: they can't be read. All records that were sure before `sure_s` must
        be there.
        """
        numbers = numbers_in(tokens, self.records)
        if numbers is None:
            self._is_wrong(machine, file, f"has tokens that nobody wrote: {tokens}")
            return None
        if strange := [each for each in numbers if self.files[each] != file]:
            self._is_wrong(machine, file, f"has records of other files: {strange}")
        if len({*numbers}) < len(numbers):
            self._is_wrong(machine, file, f"has a record twice: {numbers}")
        known, latest_s = self.durable.get(file, []), -math.inf
        if missing := [each for each in known if self.records[each].sure_s < sure_s and each not in {*numbers}]:
            self._is_wrong(machine, file, f"lacks {missing}: has {numbers}, synced was {known}. {why}")
        for each in numbers:
            if latest_s > self.records[each].sure_s:
                self._is_wrong(machine, file, f"has {each} behind a record that was begun later: {numbers}")
            latest_s = max(latest_s, self.records[each].begun_s)
        same = 0
        while same < min(len(known), len(numbers)) and known[same] == numbers[same]:
            same += 1
        if same < len(known) and not all(self._is_unsynced(each, machine) for each in numbers[same:]):
            self._is_wrong(machine, file, f"has {numbers}, and synced was {known}: two machines have written")
        return numbers

    def _is_unsynced(self, number: int, machine: str) -> bool:
        """Whether a record may be one that only its own machine shows."""
        record = self.records[number]
        return record.machine == machine and record.sure_s == math.inf

    def _extend(self, file: str, numbers: Sequence[int]) -> None:
        self.durable[file] += numbers
        now_s = time.monotonic()
        for each in self.durable[file]:
            self.records[each].sure_s = min(self.records[each].sure_s, now_s)

    def _is_wrong(self, machine: str, file: str, what: str) -> None:
        self.wrong.append(f"{time.monotonic():.3f} {machine}: {file} {what}")


@dataclass(slots=True)
class Name:
    """A file or directory with a name of its own. Only one client at a time has it."""

    number: int
    kind: str
    paths: list[str]
    """Paths that it may have. Several: a change is in doubt, and no client changes it any more."""
    may_be_missing: bool = False

    def wrong(self, all_paths: set[str]) -> str:
        """Return why these paths can't be all paths of the fleet. Empty: they can."""
        found = [each for each in self.paths if each in all_paths]
        if len(found) > 1 or not (found or self.may_be_missing):
            return f"{self.kind} {self.number} should be at one of {self.paths}, and is at {found}"
        return ""
