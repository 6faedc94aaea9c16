"""A state directory: the index, slots and plain files that a daemon leaves to the next daemon.

lock          one daemon or one fsck at a time: `kvfs.durable.state_lock`
index.db      the index, which gives all else its meaning: `kvfs.durable.index`
slots/N.kv    pages of identity N: `kvfs.durable.slot_file`
files/        bytes of plain files
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from kvfs.durable.identity import KeptFacts
from kvfs.durable.index import Index, Rows
from kvfs.durable.kept import KeptRows, read_index
from kvfs.durable.log_check import has_lost_commits
from kvfs.durable.records import SEE_FSCK, Broken, text_check
from kvfs.durable.slot_file import SlotFile
from kvfs.durable.superblock import check_slot_file, make_slot_file, superblock, sync_directory
from kvfs.durable.whole import read_damaged_index
from kvfs.images.model_facts import ModelFacts
from libsym.errors import Invalid, SymError

log = logging.getLogger(__name__)

INDEX_NAME = "index.db"
REPAIRED_NAME = "index.db.repaired"
"""A whole index that is about to replace the damaged index."""
_HARMLESS = frozenset({"lock", "files", "lost+found"})
"""Names that the directory of a new state may contain."""


class State:
    """An open state directory. The caller holds its lock. Methods block, so workers call them."""

    def __init__(self, directory: Path) -> None:
        """Open a state, or make a new state. Raise SymError if the directory can't be used."""
        self.directory = directory
        self.files = directory / "files"
        self._slots = directory / "slots"
        try:
            _require_state(directory)
            for each in (self.files, self._slots):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
        except SymError:
            raise
        except OSError as error:
            message = f"can't use the state directory {directory}: {error.strerror}; choose another --state"
            raise SymError(message, error.errno) from error
        finish_repair(directory)
        _require_index(directory)
        self.index = Index(directory / INDEX_NAME)
        self._uuid = ""
        self._opened: dict[int, SlotFile] = {}

    def load(self) -> KeptRows:
        """Read the index. If the index is damaged, read the rows that are whole."""
        why = ""
        try:
            kept = read_index(self.index)
        except Broken as error:
            why = str(error)
        if why:
            log.error("the index %s is damaged (%s): %s", self.index.path, why, SEE_FSCK)
            kept = read_damaged_index(self.directory, self.index)
        self._uuid = kept.uuid
        return kept

    def slot_path(self, identity: int) -> Path:
        return self._slots / f"{identity}.kv"

    def slot_file(self, identity: int, facts: KeptFacts) -> SlotFile:
        """Return the slot file of an identity that the index knows."""
        if identity not in self._opened:
            path = self.slot_path(identity)
            check_slot_file(path, superblock(self._uuid, identity, facts))
            self._opened[identity] = SlotFile(path, facts.page_bytes)
        return self._opened[identity]

    def identity_of(self, facts: ModelFacts, kept: KeptRows) -> int:
        """Return the number of a model's identity. A new model gets a number and a slot file."""
        for number, known in kept.facts.items():
            if known.is_of(facts):
                return number
        number, new = max(kept.facts, default=0) + 1, KeptFacts.of(facts)
        while self.slot_path(number).exists():  # a daemon ended before the commit, or the row was lost
            number += 1
        make_slot_file(self.slot_path(number), superblock(self._uuid, number, new))
        text = new.text()
        self.index.commit(Rows(identities=[(number, text, text_check(str(number), text))]))
        kept.facts[number] = new
        return number

    def close(self) -> None:
        for each in self._opened.values():
            each.close()
        self.index.close()


def finish_repair(directory: Path) -> None:
    """Replace the index by the repaired index of fsck. The old index stays beside it under another name.

    fsck begins the replacement. If the power fails meanwhile, the next fsck or daemon finishes it. The log of the old
    index is moved first, because otherwise SQLite would apply it to the new index.
    """
    index, new = directory / INDEX_NAME, directory / REPAIRED_NAME
    if not new.exists():
        return
    number = 1
    while (old := directory / f"{INDEX_NAME}.before-repair-{number}").exists():
        number += 1
    for suffix in ("-wal", ""):
        path = Path(f"{index}{suffix}")
        if path.exists():
            path.rename(f"{old}{suffix}")
            sync_directory(directory)
    new.rename(index)
    sync_directory(directory)


def _require_state(directory: Path) -> None:
    """Raise Invalid if a directory has no state, but other files in it. A new state needs a directory of its own."""
    names = {each.name for each in directory.iterdir()} if directory.exists() else set[str]()
    if names and not names & {INDEX_NAME, REPAIRED_NAME, "slots"} and names - _HARMLESS:
        shown = ", ".join(sorted(names - _HARMLESS)[:3])
        raise Invalid(f"{directory} has other things in it ({shown}), and no state: choose another --state")


def _require_index(directory: Path) -> None:
    """Raise EIO if the index is lost or its log is damaged. A new index for old slots would lose all files, and a
    damaged log would restore an old index.
    """
    index = directory / INDEX_NAME
    if has_lost_commits(Path(f"{index}-wal")):
        raise SymError(f"the log of the index {index} is damaged, and the last commits are lost: {SEE_FSCK}", errno.EIO)
    is_lost = not index.exists() or not index.stat().st_size
    if is_lost and any((directory / "slots").glob("*.kv")):
        raise SymError(f"the index {index} is lost, and the names of all files with it: {SEE_FSCK}", errno.EIO)
