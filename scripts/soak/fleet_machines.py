"""Machines of a fleet with their programs and an etcd, and what disturbs them."""

from __future__ import annotations

import faulthandler
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from crashes import Daemons, connected
from fleet_clients import PARENTS, SEED, Appender, Client, Namer, Outsider, Reader, World
from fleet_network import CUTS, Network

import libsym as sym
from symphony.fleet.keys import make_keys

MACHINES = ("east", "west", "north")
NUM_HANDS = 2
"""Number of tasks that disturb machines: more cannot be away at once."""
STARTED_S, SETTLED_S = 60.0, 60.0
"""Longest time until a daemon's mount is there, and until all machines agree after the last disturbance."""


class Machine(Daemons):
    """Daemons of one machine, one after another."""

    def __init__(self, base: Path, name: str, network: Network, keys: Path) -> None:
        self.name, self._inside = name, network.inside(name)
        options = [
            *("--copies", "2", "--machine", name, "--peer-listen", f"{network.addresses[name]}:7313"),
            *("--peer-keys", str(keys / "peers" / name)),
            *("--etcd", f"https://{network.etcd}:2379", "--etcd-keys", str(keys / "etcd" / "daemons")),
        ]
        (base / name).mkdir()
        super().__init__(base / name, options, forked=True)

    def _start(self, command: list[str], stdin: int | None = None) -> subprocess.Popen[str]:
        return super()._start([*self._inside, *command], stdin)

    def start(self) -> float:
        """Start a daemon. Return the seconds until its mount answered."""
        began_s = time.monotonic()
        self.begin()
        assert self._forker is not None
        assert self._forker.stdout is not None
        said = ""
        while "symphony: " not in said:
            if not select.select([self._forker.stdout], [], [], 0.5)[0]:
                if not self.is_there() or time.monotonic() - began_s > STARTED_S:
                    raise SystemExit(f"{self.name} did not start:\n{self.log.read_text()[-3000:]}")
                continue
            said = self._line()
        next(self.mount.iterdir(), None)
        return time.monotonic() - began_s


class Etcd:
    """A member of etcd on the bridge."""

    def __init__(self, base: Path, host: str, keys: Path) -> None:
        url, of_etcd = f"https://{host}:2379", keys / "etcd" / "etcd"
        self._command = [
            *("etcd", "--data-dir", str(base / "etcd"), "--logger", "zap"),
            *("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", "http://127.0.0.1:0"),
            *("--cert-file", str(of_etcd / "machine.pem"), "--key-file", str(of_etcd / "machine.key")),
            *("--client-cert-auth", "--trusted-ca-file", str(of_etcd / "ca.pem"), "--unsafe-no-fsync"),
        ]
        self._log = base / "etcd.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            at = log.tell()
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until_s = time.monotonic() + STARTED_S
        while b"serving client traffic" not in self._log.read_bytes()[at:]:
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"etcd did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Mischief:
    """Kills, partitions and pauses by a seed."""

    def __init__(self, fleet: Fleet, counts: dict[str, int], seed: int, *, limit_s: float, quick: bool) -> None:
        self._fleet, self._quick, self._until_s = fleet, quick, time.monotonic() + limit_s
        self._left = [what for what, count in counts.items() for _ in range(count)]
        random.Random(seed).shuffle(self._left)
        self.done = dict.fromkeys(counts, 0)
        self._away = set[str]()
        self._lock = threading.Lock()

    def hand(self, seed: int) -> None:
        """Disturb one machine after another until nothing is left to do."""
        draw = random.Random(seed)
        while not self._fleet.world.model.wrong and time.monotonic() < self._until_s:
            with self._lock:
                if not self._left:
                    return
                what = self._left.pop()
                free = sorted({"etcd"} - self._away if what == "etcd kill" else {*MACHINES} - self._away)
                if not free:
                    self._left.insert(0, what)
                    what = ""
                else:
                    name = draw.choice(free)
                    self._away.add(name)
            if what:
                self._disturb(name, what, draw)
                with self._lock:
                    self._away.discard(name)
                    self.done[what] += 1
            time.sleep(draw.uniform(0.2, 1.5))

    def _disturb(self, name: str, what: str, draw: random.Random) -> None:
        is_long = draw.random() < 0.22  # longer than the lease
        duration_s = draw.uniform(10.5, 11 if self._quick else 16) if is_long else draw.uniform(0, 4)
        disturbance = self._fleet.world.disturbed(name, what)
        machine = self._fleet.machines.get(name)
        if machine is None:
            self._fleet.etcd.kill()
            time.sleep(duration_s)
            self._fleet.etcd.start()
        elif what == "kill":
            machine.end(signal.SIGKILL)
            time.sleep(duration_s)
            self._fleet.started_s.append(machine.start())
        elif what == "pause":
            os.kill(machine.pid, signal.SIGSTOP)
            time.sleep(duration_s)
            os.kill(machine.pid, signal.SIGCONT)
        else:
            kind, peer = draw.choice(CUTS), draw.choice([each for each in MACHINES if each != name])
            self._fleet.network.cut(name, kind, peer)
            time.sleep(1 + duration_s)
            self._fleet.network.heal(name, kind, peer)
        disturbance.end_s = time.monotonic()


class Fleet:
    """All machines with their programs."""

    def __init__(self, base: Path, seed: int, stack: ExitStack) -> None:
        keys = base / "keys"
        self.network = Network(MACHINES)
        stack.callback(self.network.close)
        make_keys(keys / "peers", [*MACHINES])
        make_keys(keys / "etcd", [f"etcd={self.network.etcd}", "daemons"])
        self.etcd = Etcd(base, self.network.etcd, keys)
        stack.callback(self.etcd.kill)
        self.machines = {name: Machine(base, name, self.network, keys) for name in MACHINES}
        for machine in self.machines.values():
            stack.callback(machine.close)
        self.world, self.started_s = World(), [machine.start() for machine in self.machines.values()]
        for machine in self.machines.values():
            with sym.connection(machine.socket), sym.kv_create("seed.kv") as kv:
                sym.kv_write(kv, SEED)
                sym.kv_sync(kv)
        with sym.connection(self.machines["east"].socket):
            for path in PARENTS:
                sym.kv_mkdir(path)
        kinds: tuple[type[Client], ...] = (Appender, Reader, Namer, Outsider)
        self.clients = [
            kind(self.world, machine, seed * 1000 + number)
            for number, (machine, kind) in enumerate((each, kind) for each in self.machines.values() for kind in kinds)
        ]
        for client in self.clients:
            client.start()

    def disturb(self, counts: dict[str, int], seed: int, *, limit_s: float, quick: bool) -> dict[str, int]:
        """Kill, stop and cut off machines. Return how often each was done."""
        mischief = Mischief(self, counts, seed, limit_s=limit_s, quick=quick)
        failed = list[BaseException]()

        def hand(number: int) -> None:
            try:
                mischief.hand(seed * 10 + number)
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)
                self.world.is_wrong("the script", f"{error!r}")

        hands = [threading.Thread(target=hand, args=(number,), daemon=True) for number in range(NUM_HANDS)]
        for each in hands:
            each.start()
        for each in hands:
            each.join()
        if failed:
            raise failed[0]
        return mischief.done

    def lose_etcd(self, seconds: float) -> None:
        """Be without etcd for a long time, and wait until all machines sync again."""
        self.await_syncs()
        disturbance = self.world.disturbed("etcd", "long")
        self.etcd.kill()
        self.world.etcd_gone_s = time.monotonic()
        time.sleep(seconds)
        self.world.etcd_gone_s = 0
        self.etcd.start()
        disturbance.end_s = time.monotonic()
        self.await_syncs()

    def lose_machines(self, names: Sequence[str]) -> None:
        """Kill machines one after the other, right after each has synced a new file. The others must have the file."""
        for name in names:
            self.await_syncs()
            machine, path = self.machines[name], f"fleet/last-{name}.kv"
            with sym.connection(machine.socket):
                self.until(partial(self._writes, machine, path), f"{path} is synced")
            disturbance = self.world.disturbed(name, "kill")
            machine.end(signal.SIGKILL)
            for other in self.machines.values():
                if other is not machine:
                    with sym.connection(other.socket):
                        reader = Reader(self.world, other, 0)
                        self.until(partial(reader.read, path), f"{other.name} reads {path} without {name}")
            self.world.files.append(path)
            self.started_s.append(machine.start())
            disturbance.end_s = time.monotonic()

    def _writes(self, machine: Machine, path: str) -> bool:
        """Append a record to a file, and sync it. Return whether that succeeded."""
        record, tokens = self.world.model.new(machine.name, path), list[int]()
        try:
            with _opened(path) as kv:
                tokens += [*(sym.kv_read(kv)[0] if kv.len() else []), *record.tokens]
                sym.kv_write(kv, record.tokens)
                began_s = time.monotonic()
                sym.kv_sync(kv)
        except sym.SymError:
            return False
        self.world.model.acknowledged(machine.name, path, tokens, began_s)
        return True

    def await_syncs(self) -> None:
        """Wait until a program of each machine has synced a record."""
        self.world.acknowledged_s.clear()
        self.until(lambda: len(self.world.acknowledged_s) == len(MACHINES), "all machines sync")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + SETTLED_S
        while not condition():
            if time.monotonic() > until_s:
                self.world.is_wrong("all machines", f"not within {SETTLED_S:g} s: {what}")
                return
            time.sleep(0.2)

    def finish(self) -> int:
        """End the programs, and compare all machines. Return the number of names."""
        self.world.over.set()
        for client in self.clients:
            client.join(SETTLED_S)
            if client.is_alive():
                faulthandler.dump_traceback()
                self.world.is_wrong(client.where.name, f"{client.name} hangs")
        for machine in self.machines.values():
            with sym.connection(machine.socket):
                reader = Reader(self.world, machine, 0)
                for path in self.world.files:
                    self.until(partial(reader.read, path), f"{path} is up to date")
        self.until(lambda: not self.differences(), "the same contents")
        for difference in self.differences():
            self.world.is_wrong("the fleet", difference)
        contents = dict(self.contents(self.machines["west"]))
        paths = {*contents}
        for machine in self.machines.values():
            places = [each for each in (machine.mount / "fleet").rglob("*") if ".versions" not in each.parts]
            walked = {str(each.relative_to(machine.mount)) for each in places if each.stat()}
            if walked != paths:
                self.world.is_wrong(machine.name, f"its mount shows other names: {sorted(walked ^ paths)}")
        for name in self.world.names:
            if wrong := name.wrong(paths):
                self.world.is_wrong("the fleet", wrong)
        for name in self.world.names:
            for path in paths & {*name.paths}:
                if contents[path] not in ([], SEED):
                    self.world.is_wrong("the fleet", f"{path} has {contents[path]}, and nobody wrote this")
        known = {*PARENTS, *self.world.files, *(path for name in self.world.names for path in name.paths)}
        if strange := paths - known:
            self.world.is_wrong("the fleet", f"has names that nobody made: {strange}")
        return len(paths)

    def contents(self, machine: Machine) -> list[tuple[str, list[int]]]:
        """Return all paths of a machine's `/kv/fleet`, with the tokens of files."""
        with sym.connection(machine.socket):
            return sorted(_contents("fleet"))

    def differences(self) -> list[str]:
        """Return what the machines show in different ways."""
        east, *others = ({str(each) for each in self.contents(machine)} for machine in self.machines.values())
        return sorted({each for other in others for each in east ^ other})

    def audit(self) -> None:
        """Check each daemon's accounts, end the daemons, and check their states and logs."""
        for name, machine in self.machines.items():
            with connected(machine):
                sym.daemon_check()
            machine.end(signal.SIGTERM)
            for each in machine.fsck():
                self.world.is_wrong(name, each)
            if "Traceback" in (text := machine.log.read_text()):
                self.world.is_wrong(name, "its log: " + text[text.index("Traceback") - 300 :][:3000])


def _opened(path: str) -> sym.KV:
    try:
        return sym.kv_create(path)
    except sym.Exists:
        return sym.kv_open(path, "rw")


def _contents(path: str) -> Iterator[tuple[str, list[int]]]:
    for entry in sym.kv_list(path):
        if entry.name != ".versions":
            here, tokens = f"{path}/{entry.name}", list[int]()
            if entry.kind == "dir":
                yield from _contents(here)
            elif entry.kind == "kv":
                with sym.kv_open(here) as kv:
                    tokens = sym.kv_read(kv)[0] if kv.len() else []
            yield here, tokens
