"""Packed weights in a cache, for `symphony model` and `symphony fsck --weights`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import libsym
from decoder.cpu.panel_cache import (
    BLOCK_BYTES,
    REVISION,
    About,
    Unfit,
    checkpoint_files,
    damaged_blocks,
    is_in_use,
    is_ours,
    is_part,
    read_header,
)
from decoder.cpu.panel_memory import FileView
from kvfs.durable.findings import Finding
from libsym.errors import NoAccess, NotConnected, NotFound
from symphony.settings.loading import defaults
from symphony.views.reports import human_bytes

IN_USE, UNUSED, OUTDATED, UNFINISHED, DAMAGED = "in use", "unused", "outdated", "unfinished", "damaged"


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of a cache."""

    path: Path
    state: str
    num_bytes: int
    """Bytes that the file takes on the disk."""
    used_s: float
    """Time of the last use, in seconds since 1970."""
    about: About | None
    """Description in the file. None: there is none that can be read."""


def cache_of(named: str | None, socket: Path | None) -> Path:
    """Return the directory that the command line names, or else that of the daemon, or else the user's.

    NotFound: there is no cache.
    """
    of_line = None if named is None else Path(named).expanduser().absolute()
    directory = of_line or _of_daemon(socket) or defaults().weights_cache
    if directory is None:
        raise NotFound("no packed weights are kept: the key weights_cache is empty")
    if not directory.is_dir():
        raise NotFound(f"no packed weights are in {directory}: there is no such directory")
    return directory


def _of_daemon(socket: Path | None) -> Path | None:
    with suppress(NotConnected, NotFound):
        libsym.connect(None if socket is None else str(socket))
        found = libsym.daemon_stat().get("weights_cache")  # a daemon of an earlier release reports none
        return None if found is None else Path(found)
    return None


def kept_files(directory: Path) -> list[KeptFile]:
    """Return the files of a cache, by name. NoAccess: the cache belongs to another user."""
    try:
        return [_looked_at(path) for path in sorted(directory.iterdir()) if is_ours(path.name)]
    except PermissionError as error:
        raise NoAccess(f"{directory} cannot be read: {error.strerror}") from error


def _looked_at(path: Path) -> KeptFile:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        at, about = os.fstat(fd), None
        if is_part(path.name):
            state = IN_USE if is_in_use(fd) else UNFINISHED
        else:
            try:
                about = read_header(fd).about
                state = IN_USE if is_in_use(fd) else UNUSED if _is_current(about) else OUTDATED
            except Unfit:
                state = DAMAGED
        return KeptFile(path, state, at.st_blocks * 512, at.st_mtime, about)
    finally:
        os.close(fd)


def _is_current(about: About) -> bool:
    try:
        files = checkpoint_files([Path(path) for path, *_ in about.checkpoint])
    except OSError:
        return False
    return about.revision == REVISION and files == about.checkpoint


def findings_of(
    files: list[KeptFile], progress: Callable[[int, int], None], *, quick: bool, repair: bool
) -> list[Finding]:
    """Read all bytes of the files, or with `quick` their headers. Return what is wrong.

    With `repair`, remove the files that no start will use.
    """
    findings, done, total = list[Finding](), 0, sum(file.num_bytes for file in files)
    for file in files:
        what = _damage_of(file, quick=quick)
        is_damage = what is not None
        if file.state in (UNFINISHED, OUTDATED) and what is None:
            what = f"{file.path} is {file.state}"
        if what is not None:
            findings.append(Finding("weights", (), what, "the file is removed; the next start packs again", is_damage))
            if repair:
                file.path.unlink(missing_ok=True)
        done += file.num_bytes
        progress(done, total)
    return findings


def _damage_of(file: KeptFile, *, quick: bool) -> str | None:
    if is_part(file.path.name):
        return None
    fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        sums = read_header(fd).sums
        if quick:
            return None
        view = FileView(fd, BLOCK_BYTES, len(sums) * BLOCK_BYTES)
        view.read(lambda _share: None)
        damaged = damaged_blocks(view.array, sums, range(len(sums)))
    except Unfit as error:
        return f"{file.path}: {error}"
    finally:
        os.close(fd)
    return f"{file.path}: {len(damaged)} of its {len(sums)} blocks are damaged" if damaged else None


def remove_files(directory: Path, names: list[str], *, unused: bool) -> list[KeptFile]:
    """Remove files by name, or all files that no daemon uses. Return them. NotFound: there is no such file."""
    files = kept_files(directory)
    if unknown := set(names) - {file.path.name for file in files}:
        raise NotFound(f"{directory} has no {', '.join(sorted(unknown))}: symphony model lists the files")
    chosen = [file for file in files if file.path.name in names or (unused and file.state != IN_USE)]
    for file in chosen:
        file.path.unlink(missing_ok=True)
    return chosen


def table_of(files: list[KeptFile]) -> list[str]:
    """Return a table of the files."""
    rows = [("MODEL", "PRECISION", "PROCESSOR", "SIZE", "LAST USE", "STATE", "FILE")]
    for file in files:
        about = file.about
        facts = ("-", "-", "-") if about is None else (about.model, about.precision, about.processor)
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used_s))
        rows.append((*facts, human_bytes(file.num_bytes), last, file.state, file.path.name))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def json_of(directory: Path, files: list[KeptFile]) -> str:
    """Return the files as JSON."""
    found = [
        {
            "name": file.path.name,
            "state": file.state,
            "num_bytes": file.num_bytes,
            "used_s": file.used_s,
            "model": file.about and file.about.model,
            "precision": file.about and file.about.precision,
            "processor": file.about and file.about.processor,
            "checkpoint": [path for path, *_ in file.about.checkpoint] if file.about else [],
        }
        for file in files
    ]
    return json.dumps({"directory": str(directory), "files": found}, indent=2)
