"""The plan that fsck makes for an index: the contradictions that fsck has found, and the rows of the repaired index.

A plan is always complete. Without --repair it is only printed, so the output says exactly what --repair would do.
"""

from __future__ import annotations

import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvfs.durable.findings import Finding, listed, what_is_left
from kvfs.durable.identity import KeptFacts
from kvfs.durable.index import Row
from kvfs.durable.records import InodeRecord, SumsRecord, VersionRecord
from kvfs.durable.slot_survey import SlotSurvey
from kvfs.durable.sound_rows import NO_SLOTS, SoundRows
from kvfs.durable.sums_survey import SumsSurvey
from kvfs.names.content import marks_within
from kvfs.names.inode import shown
from kvfs.names.plain import Backing, backing_name
from kvfs.names.tree import ROOT_NUMBER, is_possible_name
from kvfs.pages.turns import turns_within
from libsym.abi import PAGE_ENTRIES

LOST_AND_FOUND = b"lost+found"
NO_BACKING = -1
_TYPES = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK})

Place = tuple[int, bytes]
"""A directory's number, and a name in it."""


@dataclass(slots=True)
class Plan:
    """The repaired index, except for tokens, which are copied from the rows of sound slots."""

    uuid: str
    facts: dict[int, KeptFacts]
    inodes: dict[int, InodeRecord] = field(default_factory=dict)
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    names: dict[Place, int] = field(default_factory=dict)
    sums: dict[tuple[int, int], SumsRecord] = field(default_factory=dict)
    next_inode: int = 0
    findings: list[Finding] = field(default_factory=list)
    unknown_backing: list[Backing] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding whose paths are not known yet. The paths are looked up once the tree is complete."""

    kind: str
    inodes: tuple[int, ...]
    what: str
    repair: str | Callable[[], str]
    extra_paths: tuple[Callable[[], str], ...] = ()
    is_damage: bool = True


class Mender:
    """Makes one plan."""

    def __init__(
        self,
        rows: SoundRows,
        plan: Plan,
        slots: Mapping[int, SlotSurvey],
        backing: Iterable[Backing],
        sums: SumsSurvey,
        owner: tuple[int, int],
    ) -> None:
        """`owner`: uid and gid for inodes whose own uid and gid are lost."""
        self._rows = rows
        self._plan = plan
        self._slots = slots
        self._backing: dict[int, set[int]] = {}
        for each in backing:
            self._backing.setdefault(each.inode, set()).add(each.number)
        self._sums = sums
        self._owner = owner
        self._broken = {table: set(keys) for table, keys in rows.broken.items()}
        self._found: list[_Found] = []
        self._parents: dict[int, list[Place]] = {}
        self._cuts: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        """Fill the plan."""
        plan, rows = self._plan, self._rows
        plan.inodes = {number: each for number, each in rows.inodes.items() if each.file_type in _TYPES}
        plan.versions, plan.names = dict(rows.versions), dict(rows.names)
        self._mend_versions()
        self._give_default_rows()
        self._mend_backing()
        self._mend_sums()
        self._mend_root()
        self._mend_attributes()
        self._mend_names()
        self._find_unreachable()
        self._mend_counts()
        self._tell_of_rows_that_nobody_needs()
        plan.findings += [self._finding(each) for each in self._found]

    def _note(
        self,
        kind: str,
        inodes: Iterable[int],
        what: str,
        repair: str | Callable[[], str],
        *extra_paths: Callable[[], str],
        is_damage: bool = True,
    ) -> None:
        self._found.append(_Found(kind, tuple(inodes), what, repair, extra_paths, is_damage))

    def _finding(self, found: _Found) -> Finding:
        paths = [path for number in found.inodes for path in self.paths_of(number)]
        paths += [path() for path in found.extra_paths]
        repair = found.repair if isinstance(found.repair, str) else found.repair()
        return Finding(found.kind, tuple(dict.fromkeys(paths)), found.what, repair, found.is_damage)

    def _take_broken(self, table: str, key: Row) -> bool:
        """Whether the row exists and is damaged. Each damaged row is reported only once."""
        keys = self._broken.get(table, set())
        is_broken = key in keys
        keys.discard(key)
        return is_broken

    def _why(self, table: str, key: Row) -> str:
        return "is damaged" if self._take_broken(table, key) else "is lost"

    # Entries

    def _mend_versions(self) -> None:
        plan = self._plan
        claimed = {number for number, inode in plan.inodes.items() if inode.has_entries}
        for number in sorted(claimed - plan.versions.keys()):
            why = self._why("versions", (number,))
            self._note("entries", [number], f"its list of entries {why}", "it has no entries any more")
            self._empty(number, 0)
        strange = [
            number
            for number in plan.versions
            if number in plan.inodes and plan.inodes[number].file_type != stat.S_IFREG
        ]
        for number in strange:
            self._note("entries", [number], "it has entries, and is no regular file", "it has none any more")
            del plan.versions[number]
        for number, version in tuple(plan.versions.items()):
            inode = plan.inodes.get(number)
            if inode is not None and (not inode.has_entries or inode.backing >= 0):
                self._note("inode", [number], "its row does not say that it has entries", "it keeps them")
                plan.inodes[number] = inode._replace(has_entries=True, backing=NO_BACKING)
            if version.identity not in plan.facts:
                self._note("identity", [number], "the model of its entries is unknown", "it has no entries any more")
                self._empty(number, version.full_length)
        self._cut_at_damage()
        for number, version in plan.versions.items():
            if version.length < version.full_length and version is self._rows.versions.get(number):
                self._note("lost", [number], what_is_left(version.length, version.full_length), "", is_damage=False)

    def _empty(self, number: int, full_length: int) -> None:
        """Give a file that lost all entries an empty version. If no model is known, the file becomes a plain file."""
        plan = self._plan
        if plan.facts:
            plan.versions[number] = VersionRecord(min(plan.facts), 0, full_length, (), np.empty(0, np.int32))
            return
        plan.versions.pop(number, None)
        if number in plan.inodes:
            plan.inodes[number] = plan.inodes[number]._replace(has_entries=False)

    def _cut_at_damage(self) -> None:
        """Cut versions that are not whole to the entries before the damage."""
        damage: dict[tuple[int, int, str], list[int]] = {}
        for identity in self._plan.facts:
            self._cut_files_of(identity, damage)
        self._tell_of_slots(damage)

    def _cut_files_of(self, identity: int, damage: dict[tuple[int, int, str], list[int]]) -> None:
        """Cut the damaged files of an identity. All versions are checked together, because there may be a hundred
        thousand of them.
        """
        survey, rows = self._slots[identity], self._rows.slots.get(identity, NO_SLOTS)
        versions = [each for each in self._plan.versions.items() if each[1].identity == identity and each[1].length]
        if not versions:
            return
        slots = np.concatenate([version.slots for _, version in versions])
        ends = np.cumsum([version.slots.size for _, version in versions])
        needed = np.full(slots.size, PAGE_ENTRIES)
        needed[ends - 1] = (np.array([version.length for _, version in versions]) - 1) % PAGE_ENTRIES + 1
        at, is_known = rows.find(slots)
        kept = np.where(is_known, rows.kept[at], 0) if rows.kept.size else np.zeros(slots.size, np.int8)
        is_bad = np.isin(slots, survey.bad)
        done = set[int]()
        for place in np.flatnonzero(is_bad | (kept < needed)).tolist():
            which = int(np.searchsorted(ends, place, side="right"))
            number, version = versions[which]
            slot, bad = int(slots[place]), bool(is_bad[place])
            why = self._why_not(survey, identity, slot, bool(is_known[place]), bad)
            damage.setdefault((identity, slot, why), []).append(number)
            if number not in done:
                done.add(number)
                num_whole = place - int(ends[which]) + version.slots.size
                self._cut(number, version, num_whole * PAGE_ENTRIES + (0 if bad else int(kept[place])))

    def _why_not(self, survey: SlotSurvey, identity: int, slot: int, is_known: bool, is_bad: bool) -> str:
        if survey.is_missing:
            return "missing"
        if is_known and slot >= survey.num_slots:
            return "short"
        if is_bad:
            return "page"
        if is_known:
            return "kept"
        return "row damaged" if (identity, slot) in self._broken.get("slots", ()) else "row lost"

    def _cut(self, number: int, version: VersionRecord, length: int) -> None:
        num_slots = -(-length // PAGE_ENTRIES)
        self._cuts[number] = length, version.full_length
        self._plan.versions[number] = version._replace(
            length=length,
            marks=marks_within(version.marks, length),
            slots=version.slots[:num_slots],
            turns=turns_within(version.turns, length),
        )

    def _tell_of_slots(self, damage: Mapping[tuple[int, int, str], list[int]]) -> None:
        whole_files: dict[tuple[int, str], dict[int, None]] = {}
        for (identity, slot, why), numbers in sorted(damage.items()):
            if why in {"missing", "short"}:
                whole_files.setdefault((identity, why), {}).update(dict.fromkeys(numbers))
                continue
            where = f"slot {slot} of slots/{identity}.kv"
            kind, what = {
                "page": ("page", f"the page in {where} is damaged"),
                "kept": ("count", f"{where} holds fewer entries than it is needed for"),
                "row damaged": ("slot", f"the index's row of {where} is damaged"),
                "row lost": ("slot", f"the index has no row of {where}"),
            }[why]
            self._take_broken("slots", (identity, slot))
            self._note(kind, numbers, what, self._what_is_left(numbers))
        for identity, survey in self._slots.items():
            self._tell_of_file(identity, survey, whole_files)

    def _tell_of_file(
        self, identity: int, survey: SlotSurvey, files: Mapping[tuple[int, str], dict[int, None]]
    ) -> None:
        name = f"slots/{identity}.kv"
        if survey.is_missing:
            numbers = files.get((identity, "missing"), {})
            left = self._what_is_left(numbers)
            self._note("slots", numbers, f"{name} is missing", lambda: f"an empty one is made; {left()}")
            return
        if survey.is_misnamed:
            what = f"{name} does not have the superblock that the index expects"
            users = [number for number, version in self._rows.versions.items() if version.identity == identity]
            self._note("superblock", users, what, "its superblock is written anew")
        if numbers := files.get((identity, "short"), {}):
            self._note("slots", numbers, f"{name} is too short", self._what_is_left(numbers))

    def _what_is_left(self, numbers: Iterable[int]) -> Callable[[], str]:
        def told() -> str:
            return listed(
                f"{self.paths_of(number)[0]} keeps {left} of {full} entries"
                for number in dict.fromkeys(numbers)
                for left, full in [self._cuts[number]]
            )

        return told

    # Inodes

    def _give_default_rows(self) -> None:
        """Make rows for inodes whose own row is lost, with the facts that other rows show."""
        plan = self._plan
        directories = {directory for directory, _ in plan.names}
        needed = {*plan.versions, *plan.names.values(), *directories} - plan.inodes.keys() - {ROOT_NUMBER}
        for number in sorted(needed):
            record, as_what = self._default_row(number, is_directory=number in directories)
            if record is None:
                continue  # the names that lead to it are reported
            why = self._why("inodes", (number,))
            uid, mode = record.uid, record.mode
            self._note("inode", [number], f"its row {why}", f"it is {as_what} of uid {uid} with mode {mode:04o}")
            plan.inodes[number] = record

    def _default_row(self, number: int, *, is_directory: bool) -> tuple[InodeRecord | None, str]:
        if number in self._plan.versions:
            return self._blank(stat.S_IFREG, 0o600)._replace(has_entries=True), "a KV file"
        if is_directory:
            return self._blank(stat.S_IFDIR, 0o700), "a directory"
        if number in self._backing:
            backing = max(self._backing[number])
            what = f"the plain file files/{backing_name(number, backing)}"
            return self._blank(stat.S_IFREG, 0o600)._replace(backing=backing), what
        return None, ""

    def _blank(self, file_type: int, mode: int) -> InodeRecord:
        now = time.time_ns()
        return InodeRecord(file_type, mode, *self._owner, now, now, now)

    def _mend_backing(self) -> None:
        plan, left = self._plan, {number: set(each) for number, each in self._backing.items()}
        for number, inode in tuple(plan.inodes.items()):
            if inode.backing < 0 or inode.file_type != stat.S_IFREG:
                continue
            if inode.backing in left.get(number, ()):
                left[number].discard(inode.backing)
                continue
            what = f"its bytes are lost: there is no files/{backing_name(number, inode.backing)}"
            self._note("backing", [number], what, "it is empty")
            plan.inodes[number] = inode._replace(backing=NO_BACKING)
        plan.unknown_backing = [Backing(number, each) for number in sorted(left) for each in sorted(left[number])]
        for backing in plan.unknown_backing:
            what, repair = (
                f"no file has the bytes in files/{backing.name}",
                f"they are moved to files/lost/{backing.name}",
            )
            self._note("leftover", (), what, repair, is_damage=False)

    def _mend_sums(self) -> None:
        """Keep the checksums of bytes that exist and are as they were synced. Report the other checksums."""
        plan, rows, survey = self._plan, self._rows.sums, self._sums
        backing = {number: Backing(number, inode.backing) for number, inode in plan.inodes.items()}
        for (number, part), record in rows.items():
            left = survey.mended.get((number, part), record)
            if left is not None and backing.get(number) == Backing(number, record.backing):
                plan.sums[number, part] = left
        for damaged, what in survey.damage.items():
            if backing.get(damaged.inode) == damaged:
                self._note("sum", [damaged.inode], what, "the bytes are kept, and are not checked any more")
        for key in sorted(self._broken.get("sums", set()), key=repr):
            if key not in rows and key[0] in backing:
                self._take_broken("sums", key)
                what = "a row of the checksums of its bytes is damaged"
                self._note("sum", [key[0]], what, "the bytes are not checked before they get new ones")

    def _mend_root(self) -> None:
        plan = self._plan
        root = plan.inodes.get(ROOT_NUMBER)
        if root is not None and root.file_type == stat.S_IFDIR:
            return
        plan.inodes[ROOT_NUMBER] = self._blank(stat.S_IFDIR, 0o755)
        is_broken = self._take_broken("inodes", (ROOT_NUMBER,))
        if root is not None or is_broken:  # else the state is new: the root gets its row at its first change
            why = "is damaged" if is_broken else "is no directory's"
            uid = self._owner[0]
            self._note("inode", [ROOT_NUMBER], f"its row {why}", f"it is a directory of uid {uid} with mode 0755")

    def _mend_attributes(self) -> None:
        """Compare inodes with their attributes' own rows. A row without an inode belongs to a file that was removed."""
        sound = self._rows.xattrs
        for number, inode in tuple(self._plan.inodes.items()):
            sums = sound.get(number)
            if inode.apart == sums or (inode.apart is None and inode.xattrs):
                continue
            if sums is None:
                why = self._why("xattrs", (number,))
                self._note("attributes", [number], f"its attributes' row {why}", "it has none any more")
            elif number in self._rows.inodes:
                self._note("attributes", [number], "its row does not say that it has attributes", "it keeps them")
            self._plan.inodes[number] = inode._replace(apart=sums)

    # Names

    def _mend_names(self) -> None:
        plan, named = self._plan, set[int]()
        for (directory, name), number in sorted(plan.names.items()):
            why = self._wrong_name(directory, name, number, named)
            if why:
                del plan.names[directory, name]
                path = self._path_in(directory, name)
                self._note("name", (), why, "the name goes", path)
                continue
            if plan.inodes[number].file_type == stat.S_IFDIR:
                named.add(number)
        for key in sorted(self._broken.pop("names", ()), key=repr):
            number = key[0] if isinstance(key[0], int) else 0
            path = self._path_in(number, key[1] if isinstance(key[1], bytes) else str(key[1]).encode())
            repair = "the name goes; a file or directory without another name is put into /lost+found"
            self._note("name", (), "the name's row is damaged", repair, path)

    def _wrong_name(self, directory: int, name: bytes, number: int, named: set[int]) -> str:
        inodes = self._plan.inodes
        if directory not in inodes or inodes[directory].file_type != stat.S_IFDIR:
            return f"it lies in inode {directory}, which is no directory"
        if number not in inodes:
            return f"it leads to inode {number}, {self._gone(number)}"
        if not is_possible_name(directory, name):
            return "it is no possible name"
        if number == ROOT_NUMBER or number in named:
            return f"it is a second name of directory {number}"
        return ""

    def _gone(self, number: int) -> str:
        self._take_broken("versions", (number,))
        return "whose row is damaged" if self._take_broken("inodes", (number,)) else "and there is none"

    def _path_in(self, directory: int, name: bytes) -> Callable[[], str]:
        return lambda: self._path(directory, name)

    def paths_of(self, number: int) -> list[str]:
        """Return every path of an inode in the repaired tree."""
        if number == ROOT_NUMBER:
            return ["/"]
        places = self._parents.get(number)
        if not places:
            return [f"(inode {number})"]
        return [self._path(directory, name) for directory, name in sorted(places)]

    def _path(self, directory: int, name: bytes) -> str:
        parts = [name]
        while directory != ROOT_NUMBER:
            if directory not in self._parents:
                return f"(inode {directory})/" + "/".join(map(shown, reversed(parts)))
            directory, name = self._parents[directory][0]
            parts.append(name)
        return "/" + "/".join(map(shown, reversed(parts)))

    # Unreachable inodes

    def _find_unreachable(self) -> None:
        """Give unreachable inodes names in /lost+found. Directories get their names first, because a path then leads to
        all inodes below them.
        """
        plan = self._plan
        children: dict[int, list[tuple[bytes, int]]] = {}
        targets: dict[int, list[Place]] = {}
        for (directory, name), number in plan.names.items():
            children.setdefault(directory, []).append((name, number))
            targets.setdefault(number, []).append((directory, name))
        reached = self._reach(ROOT_NUMBER, children, set())
        lost = sorted(plan.inodes.keys() - reached)
        is_directory = {number for number in lost if plan.inodes[number].file_type == stat.S_IFDIR}
        heads = [number for number in lost if number in is_directory and number not in targets]
        for number in heads:
            self._rescue(number, "it has no name", children, reached)
        for each in lost:
            if each not in reached and each in is_directory:
                number = _in_loop(each, targets)
                (place,) = targets[number]
                del plan.names[place]
                children[place[0]].remove((place[1], number))
                self._rescue(number, "it lies in itself, and no path leads to it", children, reached)
        for number in lost:
            if number not in reached:
                self._rescue(number, "it has no name", children, reached)
        for place, number in plan.names.items():
            self._parents.setdefault(number, []).append(place)

    def _reach(self, start: int, children: Mapping[int, list[tuple[bytes, int]]], reached: set[int]) -> set[int]:
        waiting = deque([start])
        reached.add(start)
        while waiting:
            for _, number in children.get(waiting.popleft(), ()):
                if number not in reached:
                    reached.add(number)
                    waiting.append(number)
        return reached

    def _rescue(self, number: int, why: str, children: dict[int, list[tuple[bytes, int]]], reached: set[int]) -> None:
        directory = self._lost_and_found(children, reached)
        name = b"#%d" % number
        while (directory, name) in self._plan.names:
            name += b"'"
        self._plan.names[directory, name] = number
        children.setdefault(directory, []).append((name, number))
        self._reach(number, children, reached)
        self._note("unreachable", [number], why, lambda: f"it becomes {self.paths_of(number)[0]}")

    def _lost_and_found(self, children: dict[int, list[tuple[bytes, int]]], reached: set[int]) -> int:
        plan, name = self._plan, LOST_AND_FOUND
        while (found := plan.names.get((ROOT_NUMBER, name))) is not None:
            if plan.inodes[found].file_type == stat.S_IFDIR:
                return found
            name += b"'"
        number = self._unused_number()
        plan.inodes[number] = self._blank(stat.S_IFDIR, 0o700)
        plan.names[ROOT_NUMBER, name] = number
        children.setdefault(ROOT_NUMBER, []).append((name, number))
        reached.add(number)
        return number

    # Numbers, and rows that no file needs

    def _unused_number(self) -> int:
        plan = self._plan
        known = max((ROOT_NUMBER, *plan.inodes, *self._backing, *self._rows.inodes))
        return max(known + 1, self._next_inode())

    def _next_inode(self) -> int:
        text = self._rows.about.get("next_inode", "0")
        return int(text) if text.isdecimal() else 0

    def _mend_counts(self) -> None:
        plan, told = self._plan, self._next_inode()
        is_broken = self._take_broken("about", ("next_inode",))
        beyond = [number for number in self._rows.inodes if number >= max(told, ROOT_NUMBER + 1)]
        if is_broken or beyond:
            why = "is damaged" if is_broken else f"is said to be {told}"
            self._note("count", beyond, f"the number of the next inode {why}", "it is the number after the last")
        plan.next_inode = self._unused_number()

    def _tell_of_rows_that_nobody_needs(self) -> None:
        if self._take_broken("about", ("uuid",)) or "uuid" not in self._rows.about:
            self._note("about", (), "the state's uuid is lost", f"it is {self._plan.uuid}")
        broken = {key[0] for key in self._broken.pop("identities", ())}
        for number in sorted(broken | self._plan.facts.keys() - self._rows.facts.keys(), key=repr):
            is_known = number in self._plan.facts
            repair = f"they are taken from slots/{number}.kv" if is_known else "they can't be restored"
            why = "damaged" if number in broken else "lost"
            self._note("identity", (), f"the facts of identity {number} are {why} in the index", repair)
        for table, keys in sorted(self._broken.items()):
            for key in sorted(keys, key=repr):
                what = f"row {', '.join(map(str, key))} of the index's {table} is damaged, and no file needs it"
                self._note("row", (), what, "it goes")


def _in_loop(start: int, targets: Mapping[int, list[Place]]) -> int:
    """Return a directory that lies below itself. The search climbs from `start`, a directory that no path leads to."""
    seen, number = set[int](), start
    while number not in seen:
        seen.add(number)
        number = targets[number][0][0]
    return number
