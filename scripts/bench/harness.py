"""Code that the benchmarks share: options, daemons of a checkout, turns, tables, and the load of the machine.

Some benchmarks have the name of a package (`decoder`). This module puts the checkout first in `sys.path`, so import it
before such a package.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
SYMPHONY = ("-m", "symphony.cli")
sys.path[:0] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]

T = TypeVar("T")


# Options

HELP = {
    "before": "another built checkout, measured in turns with this one",
    "json": "print one JSON object instead of tables",
    "model": "as for symphony serve (default: %(default)s)",
    "only": "parts to run, separated by commas",
    "patience": "seconds that a turn waits for a quiet machine",
    "quick": "small sizes: whether it works, not how fast",
    "quiet": "share of the cores that other processes may use",
    "rounds": "measurements of each kind (default: %(default)s)",
    "save": "write the table to results/NAME",
    "scale": "factor of the number of sequences",
    "server": "NAME=URL of another server (may be given again)",
    "group": "NAME=PGID, the process group of a server",
    "options": "NAME=JSON, more fields for each request to a server",
    "tree": "the built checkout that is measured",
    "tries": "most repetitions of a turn; the least disturbed one counts",
}


def arguments(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of options. Each option is given as its default, or as a pair of the default and a help text.

    The default False makes a flag. A class is the type of an option without a default. A list makes an option that may
    be given several times.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in options.items():
        default, text = option if isinstance(option, tuple) else (option, HELP.get(name))
        how: dict[str, Any] = {"help": text}
        if default is False:
            how |= {"action": "store_true"}
        elif isinstance(default, list):
            how |= {"action": "append", "default": default}
        elif isinstance(default, type):
            how |= {"type": default}
        else:
            how |= {"default": default, "type": Path if isinstance(default, Path) else type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    return parser


def chosen(words: str, known: Collection[str]) -> list[str]:
    """Return the parts that `--only` lists, separated by commas. SystemExit: a part is unknown."""
    names = words.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--only: no {', '.join(unknown)} among {', '.join(known)}")
    return names


def pairs(words: Iterable[str]) -> dict[str, str]:
    """Parse words `NAME=VALUE`; return the values by name."""
    return {name: value for name, _, value in (word.partition("=") for word in words)}


# Daemons


@dataclass(frozen=True)
class Daemon:
    """A running daemon, its temporary directory, and the environment for programs that call it."""

    pid: int
    where: Path
    tree: Path

    @property
    def mount(self) -> Path:
        return self.where / "kv"

    @property
    def socket(self) -> Path:
        return self.where / "socket"

    @property
    def log(self) -> Path:
        return self.where / "log"

    @property
    def environment(self) -> dict[str, str]:
        own = {"SYMPHONY_SOCKET": str(self.socket), "XDG_RUNTIME_DIR": str(self.where / "run")}
        return os.environ | own | {"PYTHONPATH": str(self.tree)}

    def program(self, source: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a Python program from its source, with pipes for its input and output.

        A program that shall run as another user calls os.setresuid.
        """
        return subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            cwd=self.where,  # a tree as the working directory would be the first entry of sys.path
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stat(self) -> dict[str, Any]:
        """Return the figures of `symphony stat`, run from the daemon's tree."""
        command = [sys.executable, *SYMPHONY, "stat", "--json"]
        done = subprocess.run(command, env=self.environment, cwd=self.tree, capture_output=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextmanager
def served(
    model: str, *options: str | Path, tree: Path = ROOT, symphony: Sequence[str | Path] = SYMPHONY
) -> Iterator[Daemon]:
    """Run a daemon from a built checkout of any version. Every user can reach the daemon's socket and mount."""
    with tempfile.TemporaryDirectory(prefix="sb") as directory:  # short, because a socket's path has limited length
        where, tree = Path(directory), tree.resolve()
        where.chmod(0o755)
        (where / "kv").mkdir()
        (where / "run").mkdir(mode=0o700)
        own = tree / ".venv/bin/python"
        command = [own if own.exists() else sys.executable, *symphony, "serve", "--model", model]
        command += ["--mount", where / "kv", "--socket", where / "socket", "--state", where / "state", *options]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        with (where / "log").open("w") as log:
            daemon = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert daemon.stdout is not None
            if not daemon.stdout.readline():
                raise SystemExit(f"the daemon did not start:\n{(where / 'log').read_text()}")
            yield Daemon(daemon.pid, where, tree)
        finally:
            for lock in (where / "run").rglob("lock"):  # the lock file of each launcher contains the launcher's pid
                if (pid := lock.read_text().strip()).isdigit():
                    end(int(pid))
            daemon.terminate()
            status = daemon.wait(120)
            if status:  # a mount would keep the directory from being removed
                subprocess.run(["fusermount3", "-uzq", where / "kv"], check=False)
        if status:
            raise SystemExit(f"the daemon ended with status {status}:\n{(where / 'log').read_text()}")


@contextmanager
def connected(
    model: str, *options: str | Path, tree: Path = ROOT, symphony: Sequence[str | Path] = SYMPHONY
) -> Iterator[Daemon]:
    """Run a daemon and connect this process; yield when the weights are loaded."""
    import libsym as sym

    with served(model, *options, tree=tree, symphony=symphony) as daemon:
        sym.connect(daemon.socket)
        try:
            while sym.daemon_stat()["weights"] != "loaded":
                time.sleep(0.02)
            yield daemon
        finally:
            sym.close()


def end(pid: int) -> None:
    """Send SIGTERM to a process, and wait for its end. The process need not be a child."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        select.select([pidfd], [], [], 30)
        os.close(pidfd)


def word_tokens() -> list[int]:
    """Return the tokens whose text is a space and a word. If a text of such tokens is tokenized, the result is the same
    tokens.

    The tiny model has only letters, so its tokens are single letters.
    """
    import libsym as sym

    texts = list(enumerate(sym.vocabulary()))
    found = [[token for token, text in texts if re.fullmatch(form, text)] for form in (rb" [a-z]{2,}", rb"[a-z]")]
    return found[0] or found[1]


def read_line(program: subprocess.Popen[str]) -> str:
    """Return the next line of a program's output. If the program has ended, exit."""
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        raise SystemExit("a program of the benchmark did not start, or has failed: see above")
    return line.rstrip("\n")


def write_line(program: subprocess.Popen[str], line: str) -> None:
    assert program.stdin is not None
    program.stdin.write(f"{line}\n")
    program.stdin.flush()


@contextmanager
def beside(program: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Let a program run during the block, and kill it after the block."""
    try:
        yield program
        assert program.poll() is None, "a program beside has ended"
    finally:
        program.kill()
        program.communicate()


# Turns and figures


def rotated(ways: Sequence[T], number: int) -> list[T]:
    """Return the ways in an order that begins with another way in each round. A turn affects the caches and clocks of
    the next turn.
    """
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, warm: int = 1) -> dict[str, list[T]]:
    """Run all ways in turns, and return the result of each for each round. The first `warm` rounds do not count."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(warm + rounds):
        for name in rotated(list(ways), number):
            result = ways[name]()
            if number >= warm:
                found[name].append(result)
    return found


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the median of the ratios of single rounds. A machine's speed drifts by more than most differences."""
    return statistics.median(own / other for own, other in zip(ours, theirs, strict=True))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the quantile of the values at `share`. If there are few values, the quantile may be the highest value."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


@dataclass(slots=True)
class Row:
    """A row of a table: our figure of each round, and the peer's figure of the same round."""

    what: str
    unit: str
    figures: Sequence[float]
    peer: str = ""
    peers: Sequence[float] = ()
    aim: str = ""
    note: str = ""

    def line(self) -> str:
        """Return the row as text, with medians. The ratio is our figure divided by the peer's."""
        text = f"{self.what:56}{statistics.median(self.figures):>10.2f} {self.unit:9}"
        text += f"{f'{min(self.figures):.1f} to {max(self.figures):.1f}':>20}"
        if self.peers:
            text += f"  {self.peer} {statistics.median(self.peers):.2f}, ratio {ratio(self.figures, self.peers):.3f}"
        return text + (f" (aim {self.aim})" if self.aim else "") + (f"; {self.note}" if self.note else "")


def show_rows(rows: Sequence[Row], heading: str, args: argparse.Namespace, *more: str) -> None:
    """Print rows and more lines below them, as JSON with `--json`. With `--save NAME` also write results/NAME.txt."""
    text = "\n".join([heading, *(row.line() for row in rows), *more]) + "\n"
    if getattr(args, "save", None):
        (RESULTS / f"{args.save}.txt").write_text(text)
    whole = {"about": heading, "rows": list(map(asdict, rows)), "more": more}
    print(f"{json.dumps(whole)}\n" if args.json else text, end="")


def seconds_of(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def row_view(row: Any) -> memoryview[float]:
    """Return a numpy row of logits in the form that a step needs."""
    return memoryview(row)


# The machine


def processor() -> str:
    """Describe the processor. Every table begins with this text."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    flags = set(next((line.partition(": ")[2] for line in lines if line.startswith("flags")), "").split())
    known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if flag in flags]
    return f"{os.cpu_count()} cores of {name} ({', '.join(known)})"


def processor_s(pid: int) -> float:
    """Return the processor time of a process, including threads that have ended."""
    return time.clock_gettime((~pid << 3) | 2)


def busy_s() -> float:
    """Return the processor time that all processes used since the boot, and the time that the host withheld (steal)."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and of children that it waited for, or 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Others:
    """The share of the cores that unrelated processes used since this object was made.

    `pids` and this process are not counted.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = list(pids)
        self._began_s, self._busy_s, self._own_s = time.monotonic(), busy_s(), self._ours_s()

    def _ours_s(self) -> float:
        return sum(map(cpu_s, self._pids)) + sum(os.times()[:4])

    def share(self) -> float:
        elapsed_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        return max(0.0, (busy_s() - self._busy_s - self._ours_s() + self._own_s) / elapsed_s)


def wait_for_quiet(args: argparse.Namespace) -> None:
    """Wait until other processes use at most `quiet` of the cores, but no longer than `patience` seconds."""
    until_s = time.monotonic() + args.patience
    while time.monotonic() < until_s:
        others = Others()
        time.sleep(0.5)
        if others.share() <= args.quiet:
            return


class Disturbed(Protocol):
    """A turn with the share of the cores that other processes used during it."""

    @property
    def others(self) -> float: ...


D = TypeVar("D", bound=Disturbed)


def least_disturbed(turn: Callable[[], D], args: argparse.Namespace) -> D:
    """Run a turn up to `tries` times, until other processes use at most `quiet` of the cores. Return the least
    disturbed turn.
    """
    found: list[D] = []
    while not found or (found[-1].others > args.quiet and len(found) < args.tries):
        wait_for_quiet(args)
        found.append(turn())
    return min(found, key=lambda each: each.others)


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile C code with the system's compiler, and load it. No compiled file stays."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "library.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
        return ctypes.CDLL(str(library))
