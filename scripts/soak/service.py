#!/usr/bin/env python3
"""A daemon in service for hours, with programs of every kind, shells on the mount, kills, restarts and full disks.

The time is divided into lives of the daemon, and lives into rounds. A round starts programs with `symphony run`
(`service_program.py`) and a shell on the mount (`service_storm.sh`), and kills one program. All others must succeed.
Meanwhile client programs of `crashes.py` and a timed loop over pred() run. After each round the script reads the
memory, descriptors, threads, pages and mounts of the daemon and its launcher, and the daemon checks its accounts. Over
a life these figures must not grow (`flatness.py`). The first life has two fifths of the time.

A life ends in the middle of a round, by SIGTERM or kill -9. After the next start all synced files must exist, according
to `crash_model.py`; after SIGTERM also all work that was answered without a sync. In some short lives the launcher is
killed, too. In other short lives the disk of the state is full for a while. Then work in memory must continue, and
synced files must stay.

Run as root, because the script fills a file system of its own, with the repository's interpreter:
.venv/bin/python scripts/soak/service.py --hours 8 --out soak
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from crashes import Clients, Daemons, connected, require  # noqa: E402 - the path comes first
from flatness import Bound, leaks  # noqa: E402
from service_plot import draw as plot  # noqa: E402
from service_program import KINDS  # noqa: E402

import libsym as sym  # noqa: E402
from symphony.launcher.asking import client  # noqa: E402
from symphony.launcher.common.places import Places, find_places  # noqa: E402
from symphony.launcher.machine import processes  # noqa: E402

PROGRAM, STORM = (str(Path(__file__).with_name(name)) for name in ("service_program.py", "service_storm.sh"))
FIRST_LIFE = 0.4
"""Share of the total time for the first life."""
LIFE_S = 300.0
"""Length of a later life. In a short run: a tenth of the time, but at least SHORTEST_S."""
SHORTEST_S = 6.0
PROGRAMS_A_ROUND = 3
PAUSE_S = 2e-3
"""Pause between two timed calls."""
PROBE_TOKENS = 3000
REST_S = 30.0
"""Longest wait for the end of a round's programs and files, on a busy machine."""
ROUND_S = 120.0
"""Time after which a round counts as hung."""
NUM_HELD = 10
HELD = ("held_s", "processor_s")
"""The two durations of a hold of the main thread: wall time, and CPU time, which excludes other processes."""
DISK_BYTES = 256 << 20
BOUNDS = {
    "daemon_mb": Bound(16),
    "launcher_mb": Bound(4, 0.05),
    "daemon_fds": Bound(6),
    "launcher_fds": Bound(4),
    "daemon_threads": Bound(6),
    "launcher_threads": Bound(2),
    "launcher_children": Bound(1),
    "free_pages": Bound(400, is_room=True),
    "files": Bound(20),
    "disk_mb": Bound(16, 0.2),
}
"""Limits on growth during a life. In a long life even a small leak exceeds them. The limits allow for normal changes.
The daemon keeps the last 1,000 ended programs, 6 KB each, and the heaps of workers fill for some minutes. The clients
make and remove files, with their pages and slots. trio keeps idle workers for a while.
"""


@dataclass(frozen=True, slots=True)
class Life:
    seconds: float
    ends_by: signal.Signals
    kills_launcher: bool = False
    is_full: bool = False
    """Whether the disk is full for a part of each round."""


def lives(total_s: float) -> Iterator[Life]:
    """Yield lives of daemons without end. The caller watches the time."""
    yield Life(FIRST_LIFE * total_s, signal.SIGTERM)
    seconds = max(SHORTEST_S, min(LIFE_S, 0.1 * total_s))
    while True:
        yield Life(seconds, signal.SIGKILL, kills_launcher=True)
        yield Life(seconds, signal.SIGTERM, is_full=True)
        yield Life(seconds, signal.SIGTERM)
        yield Life(seconds, signal.SIGKILL)


class Probe:
    """Timed loop over pred() beside all other load. Its file outlives the daemons."""

    def __init__(self) -> None:
        self._new_s: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self.num_answered = 0
        """Entries of the file that the daemon has acknowledged; 0 while the file is cut."""
        self.failure: BaseException | None = None
        sym.kv_create("probe.kv").close() if not _exists("probe.kv") else None

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            with suppress(sym.NotConnected), sym.kv_open("probe.kv", "rw") as kv:
                self._go_on(kv)
        except BaseException as failure:  # noqa: BLE001 - raised by `over`
            self.failure = failure

    def _go_on(self, kv: sym.KV) -> None:
        tokens, self.num_answered = [1], kv.len()
        while True:
            if self.num_answered >= PROBE_TOKENS:
                self.num_answered = 0
                sym.kv_truncate(kv, 0)
            began_s = time.perf_counter()
            tokens = [sym.pred(kv, tokens).argmax()]
            self._new_s.append(time.perf_counter() - began_s)
            self.num_answered += 1
            time.sleep(PAUSE_S)

    def quantiles(self) -> dict[str, float]:
        """Return quantiles of the durations of calls since the last reading, in milliseconds."""
        taken, self._new_s = sorted(self._new_s), []
        if len(taken) < 2:
            return {"p50_ms": 0.0, "p99_ms": 0.0, "calls": len(taken)}
        cuts = statistics.quantiles(taken, n=100, method="inclusive")
        return {"p50_ms": round(1e3 * cuts[49], 3), "p99_ms": round(1e3 * cuts[98], 3), "calls": len(taken)}

    def over(self) -> None:
        """Wait for the end of the loop after the daemon's end, and raise its failure."""
        self._thread.join(REST_S)
        if self.failure is not None:
            raise self.failure


def _exists(path: str) -> bool:
    try:
        sym.kv_stat(path)
    except sym.NotFound:
        return False
    return True


class Round:
    """Programs and a shell that start together."""

    def __init__(self, soak: Soak, kinds: list[str]) -> None:
        self._scratch = tempfile.TemporaryDirectory(dir=soak.base)
        self._soak = soak
        self._processes = dict[str, subprocess.Popen[str]]()
        soak.prepare()
        soak.round = self
        for number, kind in enumerate(kinds):
            self._processes[f"{number}-{kind}"] = self._program(number, kind)
        self._processes["storm"] = self._start(["bash", STORM, str(soak.daemons.mount), "storm", self._scratch.name])
        self._spared = set(self._processes)

    def _program(self, number: int, kind: str) -> subprocess.Popen[str]:
        where = f"round/{number}"
        sym.kv_mkdir(where)
        seed = str(self._soak.draw.randrange(1000))
        name = f"{number}-{kind}"
        return self._start([sys.executable, "-m", "symphony", "run", "--name", name, PROGRAM, kind, where, seed])

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def kill_one(self) -> None:
        """Kill one program of the round, if one has started."""
        found = client.request(find_places(str(self._soak.daemons.socket)), {"do": "ps", "all": False})["programs"]
        for each in found:
            if each["pid"] and each["name"] in self._spared:
                self._spared.discard(each["name"])
                with suppress(ProcessLookupError):
                    os.kill(each["pid"], signal.SIGKILL)
                return

    def spare(self, *names: str) -> None:
        """Note that from now on, only these programs must succeed."""
        self._spared &= set(names)

    @property
    def names(self) -> list[str]:
        return list(self._processes)

    @property
    def has_programs(self) -> bool:
        """Whether a command that started a program still runs."""
        return any(process.poll() is None for name, process in self._processes.items() if name != "storm")

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def over(self) -> list[str]:
        """Wait for all processes. Return the failures of the processes that were not killed."""
        wrong = []
        for name, process in self._processes.items():
            try:
                output, _ = process.communicate(timeout=ROUND_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                wrong.append(f"{name} hangs: {output[-2000:]}")
            if name in self._spared and process.returncode:
                wrong.append(f"{name} ended with {process.returncode}: {output[-2000:]}")
        self._scratch.cleanup()
        return wrong


def launcher_of(places: Places) -> int | None:
    """Return the launcher's process. None: no launcher runs. The lock file keeps the pid of an ended launcher."""
    try:
        pid = int(places.lock.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):  # no lock file yet, an empty one, or no such process
        return None
    return pid if os.fsencode(places.directory) in words else None


def end_launcher(places: Places, number: int) -> bool:
    """Send a signal to the launcher. Return False if no launcher runs."""
    pid = launcher_of(places)
    if pid is not None:
        with suppress(ProcessLookupError):  # the launcher may be ending
            os.kill(pid, number)
            return True
    return False


class Soak:
    """Run of the soak."""

    def __init__(self, base: Path, arguments: argparse.Namespace, disk: Path | None, log: Path) -> None:
        """`disk`: the state's own file system, which the soak may fill. None: the state has none of its own."""
        self.base, self.draw, self._disk = base, random.Random(arguments.seed), disk
        self.daemons = Daemons(base, ["--model", arguments.model, *arguments.option], forked=False)
        self._total_s = arguments.hours * 3600 if arguments.minutes is None else arguments.minutes * 60
        self._least_lives = arguments.lives
        self._began_s = time.monotonic()
        self._log = log.open("w")
        self._clients: Clients | None = None
        self._num_clients = arguments.clients
        self.looks: list[dict[str, float]] = []
        self.ends: list[tuple[float, str]] = []
        self._drains_s: list[float] = []
        self._leaks: list[str] = []
        self._held: list[dict[str, Any]] = []
        """The longest times that tasks held the main threads, over all daemons."""
        self._num_rounds = 0
        self.round: Round | None = None
        self._answered: int | None = None
        """Number of entries acknowledged to the timed loop before SIGTERM."""

    def run(self) -> dict[str, Any]:
        try:
            for number, life in enumerate(lives(self._total_s), 1):
                self._live(life)
                if self._s() >= self._total_s and number >= self._least_lives:
                    break
            self.daemons.start()
            with connected(self.daemons):
                self._check()
            self.daemons.end(signal.SIGTERM)
            require(self.daemons.fsck(), len(self.ends), self.base)
        finally:
            self.close()
        return self._summary()

    def close(self) -> None:
        """Close each part, even if closing another fails. A mount or a launcher would otherwise outlive the script."""
        with ExitStack() as parts:
            parts.callback(self._log.close)
            parts.callback(end_launcher, find_places(str(self.daemons.socket)), signal.SIGTERM)
            parts.callback(self.daemons.close)
            if self._clients is not None:
                parts.callback(self._clients.close)
            if self.round is not None:
                parts.callback(self.round.close)

    def _s(self) -> float:
        return time.monotonic() - self._began_s

    def _note(self, kind: str, **facts: Any) -> None:
        self._log.write(json.dumps({"s": round(self._s(), 2), "what": kind, **facts}) + "\n")
        self._log.flush()

    # A life

    def _live(self, life: Life) -> None:
        is_full = life.is_full and self._disk is not None
        started_s = self.daemons.start()
        self._note("start", took_s=round(started_s, 2))
        with connected(self.daemons):
            self._check()
            probe = Probe()
            probe.start()
            if not is_full:  # clients cannot handle a full disk, so they stop; their synced files stay
                assert self._clients is not None
                self._clients.go(self.draw.randrange(1 << 30))
            looks = self._rounds(life, probe, is_full=is_full)
            self._end(life, probe, is_full=is_full)
        if not is_full and self._clients is not None:
            self._clients.wait()
        self._leaks += leaks(looks, BOUNDS)

    def _check(self) -> None:
        """Check that all synced files exist. After SIGTERM, also check that all acknowledged entries exist."""
        if self._clients is None:
            self._clients = Clients(self.base, self.daemons, self._num_clients)
        require(self._clients.check(self.draw), len(self.ends), self.base)
        if self._answered is not None:
            length = sym.kv_stat("probe.kv").tokens
            lost = [f"{self._answered} entries were answered, {length} are kept"] if length < self._answered else []
            require(lost, len(self.ends), self.base)
        sym.daemon_check()

    def prepare(self) -> None:
        """Make the files with which a round begins."""
        for name in ("round", "storm"):
            if _exists(name):
                shutil.rmtree(self.daemons.mount / name)
            sym.kv_mkdir(name)
        with sym.kv_create("storm/base.kv") as kv:
            sym.kv_write(kv, [97 + number % 20 for number in range(300)])

    def _rounds(self, life: Life, probe: Probe, *, is_full: bool) -> list[dict[str, float]]:
        looks: list[dict[str, float]] = []
        is_launcher_to_go = life.kills_launcher
        ends_s = min(self._s() + life.seconds, self._total_s)
        while self._s() < ends_s or not looks:
            kinds = [kind for kind in KINDS if kind != "pred" or not is_full]  # the program `pred` syncs its file
            this = Round(self, self.draw.sample(kinds, PROGRAMS_A_ROUND))
            time.sleep(self.draw.uniform(0.5, 1.5))
            if is_full:
                this.spare(*(name for name in this.names if name != "storm"))
                self._fill_disk()
            elif is_launcher_to_go:
                self._kill_launcher(this)
            else:
                this.kill_one()
            require(this.over(), len(self.ends), self.base)
            if not is_launcher_to_go:  # otherwise the next round has a new launcher
                looks.append(self._look(probe))
            self._num_rounds += 1
            is_launcher_to_go = False
        return looks

    def _fill_disk(self) -> None:
        """Fill the disk. A sync fails while it is full, and succeeds when there is free space."""
        assert self._disk is not None
        ballast = self._disk / "ballast"
        with ballast.open("wb") as file:
            _take_all(file.fileno())
            try:
                require(["a sync on a full disk has succeeded"] if self._has_room() else [], len(self.ends), self.base)
            finally:
                ballast.unlink()
        sym.kv_sync()

    @staticmethod
    def _has_room() -> bool:
        """Return whether 150 more files of a quarter of a megabyte can be synced."""
        for number in range(150):  # more than the free slots and a growth of their file (16 MiB)
            with sym.kv_create(f"round/full{number}.kv") as kv:
                sym.kv_write(kv, [number + 1] * 1000)
                try:
                    sym.kv_sync(kv)
                except sym.NoSpace:
                    return False
        return True

    def _kill_launcher(self, this: Round) -> None:
        """Kill the launcher that serves this round's programs, once it runs."""
        this.spare("storm")
        places, until_s = find_places(str(self.daemons.socket)), time.monotonic() + REST_S
        while not end_launcher(places, signal.SIGKILL):
            if time.monotonic() > until_s:
                require(["programs run, and no launcher"], len(self.ends), self.base)
            if not this.has_programs:
                self._note("launcher was gone")
                return
            time.sleep(0.02)
        self._note("launcher killed")

    def _end(self, life: Life, probe: Probe, *, is_full: bool) -> None:
        """End the daemon in the middle of a round."""
        this = Round(self, self.draw.sample(KINDS, PROGRAMS_A_ROUND))
        this.spare()
        time.sleep(self.draw.uniform(0.2, 1.5))
        self._held = nlargest(NUM_HELD, [*self._held, *sym.daemon_stat()["held"]["worst"]], itemgetter("held_s"))
        began_s = time.monotonic()
        self.daemons.end(life.ends_by)
        took_s = time.monotonic() - began_s
        this.over()
        probe.over()
        is_orderly = life.ends_by is signal.SIGTERM
        self._answered = probe.num_answered if is_orderly else None
        self.ends.append((self._s(), life.ends_by.name))
        self._note("end", by=life.ends_by.name, took_s=round(took_s, 3), status=self.daemons.status, is_full=is_full)
        wrong = self.daemons.fsck()
        if is_orderly:
            self._drains_s.append(took_s)
            wrong += [] if self.daemons.status == 0 else [f"SIGTERM: status {self.daemons.status}"]
            wrong += [f"{path} is left" for path in (self.daemons.socket,) if path.exists()]
            wrong += ["a mount is left"] if self._num_mounts() else []
        wrong += ["the daemon's log has a traceback"] if "Traceback" in self.daemons.log.read_text() else []
        require(wrong, len(self.ends), self.base)

    # Readings

    def _look(self, probe: Probe) -> dict[str, float]:
        """Read the figures of the daemon and its launcher after a round, once its programs and files are gone."""
        until_s = time.monotonic() + REST_S
        places = find_places(str(self.daemons.socket))
        while client.request(places, {"do": "ps", "all": False})["programs"]:
            if time.monotonic() > until_s:
                require(["programs of a round do not end"], len(self.ends), self.base)
            time.sleep(0.05)
        sym.daemon_check()
        stat, launcher = sym.daemon_stat(), launcher_of(places)
        assert launcher is not None, "it has just answered"
        found = {
            "s": round(self._s(), 2),
            **_process("daemon", self.daemons.pid),
            **_process("launcher", launcher),
            "launcher_children": len(processes.descendants([launcher])),
            "free_pages": stat["num_free_pages"],
            "files": stat["num_files"],
            "disk_mb": stat["disk"]["disk_bytes"] / 1e6,
            "mounts": self._num_mounts(),
            **probe.quantiles(),
        }
        require([] if found["mounts"] == 1 else [f"{found['mounts']} mounts"], len(self.ends), self.base)
        self.looks.append(found)
        self._note("look", **found)
        return found

    def _num_mounts(self) -> int:
        return Path("/proc/self/mountinfo").read_text().count(f" {self.daemons.mount} ")

    def _summary(self) -> dict[str, Any]:
        assert self._clients is not None
        return {
            "seconds": round(self._s(), 1),
            "rounds": self._num_rounds,
            "programs": self._num_rounds * PROGRAMS_A_ROUND,
            "ended_by_sigterm": sum(how == "SIGTERM" for _, how in self.ends),
            "ended_by_sigkill": sum(how == "SIGKILL" for _, how in self.ends),
            "operations": self._clients.num_operations,
            "syncs": self._clients.num_syncs,
            "sigterm_longest_s": round(max(self._drains_s), 3),
            "p50_ms_median": statistics.median(each["p50_ms"] for each in self.looks),
            "p99_ms_median": statistics.median(each["p99_ms"] for each in self.looks),
            "p99_ms_worst": max(each["p99_ms"] for each in self.looks),
            "had_full_disk": self._disk is not None,
            "held": [{name: round(each[name], 5) for name in HELD} | {"task": each["task"]} for each in self._held],
            "leaks": self._leaks,
        }


def _take_all(descriptor: int) -> None:
    """Allocate all free space of the file's disk, while other files may take some."""
    taken, piece = 0, DISK_BYTES
    while piece >= 4096:
        try:
            os.posix_fallocate(descriptor, taken, piece)
            taken += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece //= 2


def _process(name: str, pid: int) -> dict[str, float]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {
        f"{name}_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 2),
        f"{name}_fds": len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 - names are enough
        f"{name}_threads": len(os.listdir(f"/proc/{pid}/task")),  # noqa: PTH208
    }


@contextmanager
def small_disk(base: Path) -> Iterator[Path | None]:
    """Yield a file system in a file for the state. Without the right to mount, yield None and print that."""
    image, state = base / "disk.image", base / "state"
    state.mkdir(mode=0o700)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    made = subprocess.run(["mkfs.ext4", "-qF", "-m0", image], check=False, capture_output=True, text=True)
    if not made.returncode:
        made = subprocess.run(["mount", "-o", "loop", image, state], check=False, capture_output=True, text=True)
    if made.returncode:
        print(f"NO FULL DISK: {made.stderr.strip() or 'mount has failed'}: run it as root", file=sys.stderr)
        yield None
        return
    try:
        yield state
    finally:
        subprocess.run(["umount", "-l", state], check=True)


def write(out: Path, result: dict[str, Any], looks: list[dict[str, float]], ends: list[tuple[float, str]]) -> None:
    """Write the figures, with each reading in columns, and their plot."""
    columns = {name: [each[name] for each in looks] for name in looks[0]}
    facts = {**result, "processor": f"{os.cpu_count()} of {_processor()}", "ends": ends, "looks": columns}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items()]
    out.with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    minutes = result["seconds"] / 60
    title = f"Symphony in service for {minutes:.0f} minutes: {result['programs']} programs, {len(ends)} restarts"
    out.with_suffix(".svg").write_text(plot(title, looks, ends))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "a processor")


def main() -> int:
    parser = argparse.ArgumentParser(description="A daemon in service, for hours.")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--minutes", type=float, help="run for so many minutes instead of --hours")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--clients", type=int, default=2, help="client programs of crashes.py (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="for `symphony serve`, as --option=--disk=1G")
    parser.add_argument("--lives", type=int, default=1, help="least number of lives, whatever the time (default 1)")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="OUT.jsonl, OUT.json and OUT.svg are written")
    parser.add_argument("--quick", action="store_true", help="one round of each kind of life")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes, arguments.lives = 0.0, 3
    with tempfile.TemporaryDirectory(prefix="so") as name:
        base = Path(name)
        os.environ |= {"SYMPHONY_SOCKET": str(base / "s"), "XDG_RUNTIME_DIR": name, "PYTHONPATH": str(REPOSITORY)}
        with small_disk(base) as disk:
            soak = Soak(base, arguments, disk, arguments.out.with_suffix(".jsonl"))
            result = {"model": arguments.model, **soak.run()}
    print(json.dumps(result, indent=1))
    write(arguments.out, result, soak.looks, soak.ends)
    return 1 if result["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())
