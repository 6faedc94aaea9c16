"""`symphony fsck` and `symphony scrub`: check that files on disk are as they were written.

Exit status: 0, no damage; 1, damage; 2, the check failed.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import libsym
from kvfs.base.sizes import parse_bytes
from kvfs.durable.findings import Finding
from kvfs.durable.fsck import fsck
from libsym.calls.scrub import daemon_scrub
from libsym.errors import NotConnected, NotFound, SymError
from symphony.checks.kept_weights import cache_of, findings_of, kept_files
from symphony.settings.loading import defaults
from symphony.views.reports import counted, human_bytes

CLEAN, DAMAGED, FAILED = 0, 1, 2
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of `fsck` or `scrub`, to be printed."""

    what: str
    findings: Sequence[Finding]
    numbers: dict[str, Any]
    is_repaired: bool

    @property
    def is_damaged(self) -> bool:
        return any(finding.is_damage for finding in self.findings)


def fsck_command(args: argparse.Namespace, socket: Path | None) -> int:
    """Check the state directory that `args` names, or else the state of the running daemon. Return the exit status."""
    return _checked(args, lambda: _fsck(args, socket))


def scrub_command(args: argparse.Namespace, socket: Path | None) -> int:
    """Have the daemon read and check its state, at `args.rate` bytes a second at most. Return the exit status."""

    def run() -> Checked:
        rate = parse_bytes(args.rate)
        libsym.connect(str(socket) if socket else None)
        return _scrubbed(rate=rate, repair=False)

    return _checked(args, run)


def _checked(args: argparse.Namespace, run: Callable[[], Checked]) -> int:
    try:
        checked = run()
    except SymError as error:
        print(f"symphony: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        found = {"clean": not checked.is_damaged, "repaired": checked.is_repaired, **checked.numbers}
        print(json.dumps(found | {"findings": [asdict(finding) for finding in checked.findings]}, indent=2))
    else:
        for finding in checked.findings:
            print(finding.line(is_repaired=checked.is_repaired))
        print(f"{checked.what}: {_verdict(checked)}")
    return DAMAGED if checked.is_damaged else CLEAN


def _verdict(checked: Checked) -> str:
    if not checked.is_damaged:
        return "all is as it was written"
    count = sum(finding.is_damage for finding in checked.findings)
    told = f"{count} thing{'' if count == 1 else 's'} damaged"
    return f"{told}, and repaired" if checked.is_repaired else f"{told}; symphony fsck --repair keeps the rest"


def _fsck(args: argparse.Namespace, socket: Path | None) -> Checked:
    if args.weights is not None:
        return _fsck_of_weights(args, socket)
    if args.state is None and _daemon_answers(socket):
        return _fsck_of_daemon(args)
    state = Path(args.state).expanduser().absolute() if args.state else defaults().state
    with _ProgressLine() as line:
        report = fsck(state, repair=args.repair, quick=args.quick, progress=line.show)
    what = f"{state}: {report.num_files} files, {report.num_pages} pages read"
    numbers = {"state": str(state), "num_files": report.num_files, "num_pages": report.num_pages}
    return Checked(what, report.findings, numbers, report.is_repaired)


def _fsck_of_weights(args: argparse.Namespace, socket: Path | None) -> Checked:
    """Check the files of packed weights: their headers, and without --quick all their bytes."""
    directory = cache_of(args.weights or None, socket)
    files = kept_files(directory)
    with _ProgressLine() as line:
        findings = findings_of(files, line.show, quick=args.quick, repair=args.repair)
    num_bytes = sum(file.num_bytes for file in files)
    what = f"{directory}: {counted(len(files), 'file')} of packed weights, {human_bytes(num_bytes)}"
    numbers = {"weights": str(directory), "num_files": len(files), "num_bytes": num_bytes}
    return Checked(what, findings, numbers, is_repaired=args.repair and bool(findings))


def _daemon_answers(socket: Path | None) -> bool:
    try:
        libsym.connect(str(socket) if socket else None)
    except (NotConnected, NotFound):
        if socket is not None or "SYMPHONY_SOCKET" in os.environ:
            raise  # the user named a daemon, and the default state may belong to another daemon
        return False
    return True


def _fsck_of_daemon(args: argparse.Namespace) -> Checked:
    """Have the daemon check its books (its counts of pages and of references), then its disk."""
    books: list[Finding] = []
    try:
        libsym.daemon_check()
    except SymError as error:
        if error.errno != errno.EIO:
            raise
        books.append(Finding("books", (), str(error), "a restart of the daemon makes them anew"))
    if args.quick:
        return Checked("the daemon's books", books, {}, is_repaired=False)
    read = _scrubbed(rate=None, repair=args.repair)
    return Checked(read.what, [*books, *read.findings], read.numbers, read.is_repaired)


def _scrubbed(*, rate: int | None, repair: bool) -> Checked:
    with _ProgressLine() as line:
        summary, found = daemon_scrub(rate=rate, repair=repair, progress=line.show)
    findings = [Finding(**{**each, "paths": tuple(each["paths"])}) for each in found]
    size = human_bytes(summary["num_bytes"])
    what = f"{summary['num_pages']} pages, {size} of them, read in {summary['seconds']:.1f} s"
    return Checked(what, findings, summary, is_repaired=repair and any(finding.repair for finding in findings))


class _ProgressLine:
    """Progress line on standard error, if that is a terminal. The end of the check erases the line."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._last = -1

    def __enter__(self) -> Self:
        return self

    def show(self, done: int, total: int) -> None:
        if self._is_shown and done // _MEBIBYTE != self._last:
            self._last = done // _MEBIBYTE
            share = f"{100 * done // max(total, 1)} %"
            print(f"\r\033[Kreading {human_bytes(done)} of {human_bytes(total)}, {share}", end="", file=sys.stderr)
            sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._last >= 0:
            print("\r\033[K", end="", file=sys.stderr)
