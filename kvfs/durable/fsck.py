"""fsck of a state that no daemon uses. fsck finds damage, names the damaged files, and can save all other files.

1  find the rows that are as they were written, in a copy of the index     salvage.py, sound_rows.py
2  read all slots that files need, and the bytes of plain files            slot_survey.py, sums_survey.py
3  compare the rows with each other, and plan the repaired index           mend.py
4  with --repair: put a new index in the place of the old one              rewrite.py
"""

from __future__ import annotations

import stat
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvfs.durable.findings import Finding, Progress, listed
from kvfs.durable.mend import Mender, Plan
from kvfs.durable.rewrite import carry_out, put_aside
from kvfs.durable.salvage import Salvage, salvage
from kvfs.durable.slot_survey import SlotSurvey, facts_in_slot_files, survey_slots, uuid_of
from kvfs.durable.sound_rows import SoundRows, sound_rows
from kvfs.durable.state import INDEX_NAME, REPAIRED_NAME, finish_repair
from kvfs.durable.state_lock import locked_by_fsck
from kvfs.durable.sums_survey import survey_sums
from kvfs.names.plain import backing_files
from libsym.errors import NotFound

_NO_PROGRESS: Progress = lambda _done, _total: None  # noqa: E731


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one fsck."""

    findings: tuple[Finding, ...]
    num_files: int
    """Number of regular files in the state. After a repair: number of files that are left."""
    num_pages: int
    """Number of pages that were read."""
    is_repaired: bool


def fsck(directory: Path, *, repair: bool = False, quick: bool = False, progress: Progress = _NO_PROGRESS) -> Report:
    """Check a whole state. Raise SymError if the state can't be read, or if a daemon uses the state.

    Without `repair`, fsck writes nothing. `quick`: pages are not read.
    """
    if not directory.is_dir() or not any((directory / each).exists() for each in (INDEX_NAME, REPAIRED_NAME, "slots")):
        raise NotFound(f"there is no state in {directory}: say which with --state")
    with ExitStack() as stack:
        stack.enter_context(locked_by_fsck(directory))
        if repair:
            finish_repair(directory)
        begun = directory / REPAIRED_NAME
        index = begun if begun.exists() else directory / INDEX_NAME  # the index that the next daemon will take
        found = stack.enter_context(salvage(index, quick=quick))
        rows = sound_rows(found)
        plan = _new_plan(directory, rows)
        surveys = survey_slots(directory, plan.uuid, plan.facts, rows, progress, quick=quick)
        sums = survey_sums(directory / "files", rows.sums, progress, quick=quick)
        owner = directory.stat()
        plan.findings += _of_index(found)
        Mender(rows, plan, surveys, backing_files(directory / "files"), sums, (owner.st_uid, owner.st_gid)).run()
        unknown = _unknown_slots(directory, plan)
        plan.findings += [_of_unknown(name) for name in unknown]
        is_repaired = repair and any(finding.repair for finding in plan.findings)
        if is_repaired:
            for name in unknown:
                put_aside(directory / "slots", name)
            for backing in plan.unknown_backing:
                put_aside(directory / "files", backing.name)
            if any(finding.is_damage for finding in plan.findings):
                carry_out(directory, plan, found, surveys)
        return _report(plan, surveys, is_repaired=is_repaired)


def _report(plan: Plan, surveys: dict[int, SlotSurvey], *, is_repaired: bool) -> Report:
    num_files = sum(inode.file_type == stat.S_IFREG for inode in plan.inodes.values())
    num_pages = sum(survey.num_read for survey in surveys.values())
    return Report(tuple(plan.findings), num_files, num_pages, is_repaired)


def _new_plan(directory: Path, rows: SoundRows) -> Plan:
    """Return a plan with the facts of each identity, from the index or from the slot files. The facts are needed to
    read pages.
    """
    name = rows.about.get("uuid") or uuid_of(directory) or str(uuid.uuid4())
    facts = dict(rows.facts)
    needed = {version.identity for version in rows.versions.values()} | {*rows.slots}
    needed |= {key[0] for key in rows.broken.get("identities", ()) if isinstance(key[0], int)}
    for identity, of in facts_in_slot_files(directory, name).items():
        if identity in needed:
            facts.setdefault(identity, of)
    return Plan(name, facts)


def _of_index(found: Salvage) -> list[Finding]:
    repair = "a new one is made of every row that can be read"
    problems = []
    if found.problems:
        what = f"the index is damaged: {listed(found.problems, 4)}"
        problems.append(Finding("index", (), what, repair))
    if found.lost_commits:
        what = "the index's log is damaged, and commits behind the damage are lost"
        problems.append(Finding("index", (), what, "commits before the damage are kept"))
    return problems


def _unknown_slots(directory: Path, plan: Plan) -> list[str]:
    """Return the names of slot files that the index does not know."""
    known = {f"{identity}.kv" for identity in plan.facts}
    slots = directory / "slots"
    return (
        sorted(path.name for path in slots.iterdir() if path.is_file() and path.name not in known)
        if slots.is_dir()
        else []
    )


def _of_unknown(name: str) -> Finding:
    what = f"the index knows nothing of slots/{name}"
    return Finding("leftover", (), what, f"it is moved to slots/lost/{name}", is_damage=False)
