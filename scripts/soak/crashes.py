#!/usr/bin/env python3
"""Kill a daemon again and again, at random moments of its clients' work. Synced files must exist after each start.

Client programs (`crash_client.py`) create, append to, fork, rename, remove, import, write, truncate, generate and sync
files. Each client has its own directory, and logs each operation before the operation begins. After `kill -9` a new
daemon starts on the same state. Then every file is read to its end and compared with its possible states
(`crash_model.py`). The KV of some files is computed again and compared, and the daemon checks its accounts. Some
daemons are killed while they start.

Run as a user who may mount, with the repository's interpreter:
.venv/bin/python scripts/soak/crashes.py --kills 500
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from crash_model import KV, Directory, State  # noqa: E402 - the path comes first
from crash_seen import seen_in  # noqa: E402

import libsym as sym  # noqa: E402

IMAGE_TOKENS = (20, 64, 150)
STARTED_S = 20.0
"""Longest time until a daemon's mount answers. On an idle machine a start should take 2 s."""
NUM_RECOMPUTED = 2
"""Number of files of each client that are computed again in each life."""

FORKER = """
import json, os, signal, sys
from symphony.cli import main
import symphony.daemon.daemon
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os._exit(main(json.loads(line)))
    print("pid", pid, flush=True)
"""


class Daemons:
    """Daemons on one state, one after another."""

    def __init__(self, base: Path, options: list[str], *, forked: bool) -> None:
        """`forked`: fork the daemons from a process that has imported all modules.

        A start then takes a tenth of the time.
        """
        self.mount, self.socket, self.log = base / "kv", base / "s", base / "daemon.log"
        self._state = base / "state"
        where = ["--mount", self.mount, "--state", self._state, "--socket", self.socket]
        self._words = ["serve", "--model", "tiny", "--kv-memory", "64M", *map(str, where), *options]
        self._environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        self._forker = self._start([sys.executable, "-c", FORKER], stdin=subprocess.PIPE) if forked else None
        self._process: subprocess.Popen[str] | None = None
        self.pid = 0

    def _start(self, command: list[str], stdin: int | None = None) -> subprocess.Popen[str]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env=self._environment,
            )

    def begin(self) -> None:
        """Start a daemon without waiting for its mount."""
        if self._forker is None:
            self._process = self._start([sys.executable, "-m", "symphony", *self._words])
            self.pid = self._process.pid
            return
        assert self._forker.stdin is not None
        self._forker.stdin.write(json.dumps(self._words) + "\n")
        self._forker.stdin.flush()
        line = self._line()
        while not line.startswith("pid "):  # a late line, printed by a daemon that was killed while it started
            line = self._line()
        self.pid = int(line.split()[1])

    def _line(self) -> str:
        process = self._forker or self._process
        assert process is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the daemon did not start:\n" + self.log.read_text()[-3000:])
        return line

    def start(self) -> float:
        """Start a daemon. Return the seconds until its mount answered."""
        began_s = time.monotonic()
        self.begin()
        while not self._line().startswith("symphony: "):
            pass
        self.mount.stat()
        next(self.mount.iterdir(), None)
        return time.monotonic() - began_s

    def is_there(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return Path(f"/proc/{self.pid}").exists()

    def end(self, number: int) -> None:
        """Send a signal, and wait until the process has ended."""
        os.kill(self.pid, number)
        while self.is_there():
            time.sleep(0.001)

    @property
    def status(self) -> int | None:
        """Exit status of the last daemon after its end. None: unknown, because the daemon was forked."""
        return None if self._process is None else self._process.poll()

    def fsck(self) -> list[str]:
        """Run fsck while no daemon runs. Return its complaints."""
        command = [sys.executable, "-m", "symphony", "fsck", "--state", str(self._state)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=REPOSITORY, env=self._environment
        )
        return [] if done.returncode == 0 else [f"fsck: {done.stdout}{done.stderr}"]

    def close(self) -> None:
        if self.pid and self.is_there():
            self.end(signal.SIGKILL)
        for process in (self._process, self._forker):
            if process is not None:
                process.kill()
                process.wait()
        subprocess.run(["fusermount3", "-uzq", self.mount], check=False)


class Clients:
    """Client programs, with the last known contents of their directories."""

    def __init__(self, base: Path, daemons: Daemons, count: int) -> None:
        self._mount = daemons.mount
        self.names = [f"client{number}" for number in range(count)]
        self._logs = [base / f"{name}.log" for name in self.names]
        self._known = {name: Directory() for name in self.names}
        self.num_operations = self.num_syncs = 0
        images = self._prepare(base)
        client = Path(__file__).with_name("crash_client.py")
        self._processes = [
            subprocess.Popen(
                [sys.executable, client, daemons.socket, daemons.mount, base / name, images],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in self.names
        ]
        self._await("ready")

    def _prepare(self, base: Path) -> Path:
        """Make directories and images for imports, with a daemon that has just started."""
        images = {}
        for count in IMAGE_TOKENS:
            tokens, path = list(range(1, count + 1)), base / f"{count}.image"
            with sym.kv_create("image.kv") as kv:
                sym.kv_write(kv, tokens)
                path.write_bytes((self._mount / "image.kv").read_bytes())
                sym.kv_remove(kv)
            images[str(path)] = tokens
        for name in self.names:
            sym.kv_mkdir(name)
        sym.kv_sync()
        (base / "images.json").write_text(json.dumps(images))
        self._images = images
        return base / "images.json"

    def go(self, seed: int) -> None:
        for number, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write(f"go {seed * len(self._processes) + number + 1}\n")
            process.stdin.flush()

    def wait(self) -> None:
        """Wait until all clients have noticed the daemon's end."""
        self._await("over")

    def _await(self, word: str) -> None:
        for name, process in zip(self.names, self._processes, strict=True):
            assert process.stdout is not None
            if process.stdout.readline() != word + "\n":
                raise SystemExit(f"{name} has ended: see its error above")

    def check(self, draw: random.Random) -> list[str]:
        """Return the errors that the comparison finds. The present states become the known states."""
        wrong = []
        for name, log in zip(self.names, self._logs, strict=True):
            seen = seen_in(self._mount / name, name)
            directory = self._known[name]
            self._replay(log, directory)
            wrong += [f"{name}: {each}" for each in directory.wrong(seen)]
            wrong += [f"{name}: {each}" for each in self._recomputed(name, seen, draw)]
            numbers = [entry.stat().st_ino for entry in (self._mount / name).iterdir()]
            if len(set(numbers)) != len(numbers):
                wrong.append(f"{name}: a file has two names")
            self._known[name] = Directory.found(seen)
            if log.exists():
                with log.with_suffix(".logs").open("a") as all_logs:
                    all_logs.write("\n" + log.read_text())
                log.unlink()
        return wrong

    def _replay(self, log: Path, directory: Directory) -> None:
        begun = None
        for line in log.read_text().splitlines() if log.exists() else ():
            words = json.loads(line)
            if len(words) == 3:
                begun = words
                value = words[2]
                if words[0] == "import":
                    value = [Path(value).read_bytes(), self._images[value]]
                directory.begin(words[0], words[1], value)
                self.num_operations += 1
            elif begun is not None:
                directory.end(begun[0], begun[1], words[0])
                self.num_syncs += begun[0].startswith("sync")

    def _recomputed(self, name: str, seen: dict[str, State], draw: random.Random) -> Iterator[str]:
        """Compute the tokens of some files again. Yield the files whose KV differs."""
        files = sorted(each for each, state in seen.items() if state.kind == KV and state.content)
        for each in draw.sample(files, min(NUM_RECOMPUTED, len(files))):
            with sym.kv_create("again.kv") as kv:
                sym.kv_write(kv, seen[each].content)
                again = (self._mount / "again.kv").read_bytes()
                sym.kv_remove(kv)
            if (self._mount / name / each).read_bytes() != again:
                yield f"the numbers in {each} are not those of its {len(seen[each].content)} tokens"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@contextmanager
def connected(daemons: Daemons) -> Iterator[None]:
    sym.connect(daemons.socket)
    try:
        yield
    finally:
        sym.close()


def soak(base: Path, arguments: argparse.Namespace) -> dict[str, float | int]:
    draw = random.Random(arguments.seed)
    daemons = Daemons(base, arguments.option, forked=arguments.forked)
    started_s, num_starts_killed = [], 0
    clients = None
    began_s = time.monotonic()
    try:
        for number in range(arguments.kills + 1):
            is_last = number == arguments.kills or time.monotonic() - began_s > arguments.seconds
            if clients is not None and not is_last and draw.random() < arguments.killed_starts:
                daemons.begin()
                time.sleep(draw.uniform(0, 1.5 * statistics.median(started_s)))
                daemons.end(signal.SIGKILL)
                num_starts_killed += 1
                continue
            started_s.append(daemons.start())
            with connected(daemons):
                if clients is None:
                    clients = Clients(base, daemons, arguments.clients)
                require(clients.check(draw), number, base)
                sym.daemon_check()
            if is_last:
                break
            clients.go(arguments.seed * 1_000_000 + number)
            time.sleep(draw.expovariate(1 / arguments.life))
            daemons.end(signal.SIGKILL)
            clients.wait()
            if number % arguments.fsck_each == 0:
                require(daemons.fsck(), number, base)
        assert clients is not None
        daemons.end(signal.SIGTERM)
        require(daemons.fsck(), number, base)
        daemons.start()
        with connected(daemons):
            require(clients.check(draw), number, base)
        daemons.end(signal.SIGTERM)
    finally:
        if clients is not None:
            clients.close()
        daemons.close()
    if max(started_s) > STARTED_S:
        raise SystemExit(f"a daemon needed {max(started_s):.1f} s until its mount was there")
    return {
        "kills": number,
        "killed_while_starting": num_starts_killed,
        "operations": clients.num_operations,
        "syncs": clients.num_syncs,
        "start_median_s": round(statistics.median(started_s), 3),
        "start_longest_s": round(max(started_s), 3),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def require(wrong: list[str], number: int, base: Path) -> None:
    if wrong:
        log = (base / "daemon.log").read_text()[-2000:]
        raise SystemExit(f"after {number} kills:\n" + "\n".join(wrong) + f"\nthe daemon's log:\n{log}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill daemons, and see that what was synced is there.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many, even with fewer kills")
    parser.add_argument("--clients", type=int, default=3, help="client programs (default 3)")
    parser.add_argument("--life", type=float, default=1.0, help="mean seconds from a start to a kill (default 1)")
    parser.add_argument("--killed-starts", type=float, default=0.15, help="share of daemons killed while they start")
    parser.add_argument("--fsck-each", type=int, default=25, help="run fsck after so many kills (default 25)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--forked", action="store_true", help="fork daemons from one process: they start sooner")
    parser.add_argument("--state", type=Path, help="where the scratch state is made and removed")
    parser.add_argument("--keep", action="store_true", help="leave the scratch state where it is")
    parser.add_argument("--option", action="append", default=[], help="for `symphony serve`, as --option=--disk=1G")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one life, one daemon killed while it starts")
    arguments = parser.parse_args()
    if arguments.quick:  # with this seed the first life is long enough for syncs
        arguments.kills, arguments.killed_starts, arguments.seed, arguments.forked = 2, 1.0, 2, True
    directory = tempfile.TemporaryDirectory(prefix="symphony-soak-", dir=arguments.state)
    if arguments.keep:
        directory._finalizer.detach()  # type: ignore[attr-defined]  # noqa: SLF001 - `delete=False` comes with Python 3.12
        print(directory.name, file=sys.stderr)
    result = soak(Path(directory.name), arguments)
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:22} {value}" for key, value in result.items()))
    if not arguments.keep:
        directory.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main())
