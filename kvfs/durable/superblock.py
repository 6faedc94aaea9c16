"""Superblock: the first 4096 bytes of a slot file, which describe the file: a checksum, then JSON, padded with spaces.

The superblock and the index both have the facts of the identity. So each of the two can be restored from the other.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvfs.durable.identity import KeptFacts
from kvfs.durable.records import SEE_FSCK
from kvfs.durable.slot_file import SUPERBLOCK_BYTES
from libsym.errors import SymError

_FORMAT = "symphony.slots"
_VERSION = 1
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Superblock:
    """Superblock of a slot file: the state that the file belongs to, and the facts of its pages."""

    state: str
    """The uuid of the index that the slots belong to."""
    identity: int
    facts: KeptFacts


def superblock(state: str, identity: int, facts: KeptFacts) -> bytes:
    """Return a superblock as bytes. `state`: the uuid of the index that the slots belong to."""
    fields = {
        "format": _FORMAT,
        "version": _VERSION,
        "state": state,
        "identity": identity,
        "page_bytes": facts.page_bytes,
        "facts": json.loads(facts.text()),
    }
    text = json.dumps(fields).encode().ljust(SUPERBLOCK_BYTES - _CHECK_BYTES)
    assert len(text) == SUPERBLOCK_BYTES - _CHECK_BYTES, f"the facts of a model are too long: {facts.name}"
    return xxhash.xxh3_64_digest(text) + text


def read_superblock(path: Path) -> Superblock | None:
    """Return the superblock of a file, or None if the superblock is damaged or of another format."""
    with path.open("rb") as file:
        found = file.read(SUPERBLOCK_BYTES)
    text = found[_CHECK_BYTES:]
    if len(found) != SUPERBLOCK_BYTES or xxhash.xxh3_64_digest(text) != found[:_CHECK_BYTES]:
        return None
    fields = json.loads(text)
    if (fields["format"], fields["version"]) != (_FORMAT, _VERSION):
        return None
    return Superblock(fields["state"], fields["identity"], KeptFacts.parse(json.dumps(fields["facts"])))


def newest_superblocks(slots: Path) -> list[Superblock]:
    """Return the superblocks of a directory of slot files, the newest identity first, without damaged ones."""
    found = [block for block in map(read_superblock, slots.glob("*.kv")) if block is not None]
    return sorted(found, key=lambda each: each.identity, reverse=True)


def make_slot_file(path: Path, block: bytes) -> None:
    """Make a file with only a superblock, and wait until the file and its name are on disk."""
    write_superblock(path, block, os.O_CREAT | os.O_EXCL)


def write_superblock(path: Path, block: bytes, flags: int = 0) -> None:
    """Overwrite a file's superblock. The slots after it stay."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        os.pwrite(descriptor, block, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def check_slot_file(path: Path, block: bytes) -> None:
    """Raise SymError if the file is missing, or its superblock differs from `block`."""
    try:
        with path.open("rb") as file:
            found = file.read(SUPERBLOCK_BYTES)
    except OSError as error:
        raise SymError(f"can't read {path}: {error.strerror}; {SEE_FSCK}", error.errno) from error
    if found != block:
        raise SymError(f"{path} does not have the superblock that the index expects: {SEE_FSCK}")


def sync_directory(path: Path) -> None:
    """Sync a directory: names made or removed in it are on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
