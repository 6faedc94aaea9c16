"""Calls that the core carries out by itself: answers, files and accounts are as if the gate had begun each of them.

A program with a limit, however high, has all of its calls begun by the gate. So two of them, one with and one without,
send the same calls to daemons of their own.
"""

import json
import random

import numpy as np
import pytest
import trio

from kvfs.names.content import KvFile
from kvfs.names.tree import Credentials
from kvfs.pages.accounts import Limits
from libsym.abi import FORK_ENDED, RANGE_END, REPLY_STRUCT, REQUEST_STRUCT, RING_BYTES, Op
from libsym.channel.server import MAX_TAKEN, ServerChannel
from libsym.errors import SymError
from scheduler.connection.lip import Lip
from scheduler.programs.limits import MAX_LIMIT, ProgramLimits
from tests.kvfs.fakes import commit_all
from tests.scheduler.bench import VOCAB_SIZE, Bench
from tests.scheduler.standing_bench import COMPLETE_HEAD, COMPLETE_RING, COMPLETE_TAIL, SUBMIT_RING, SUBMIT_TAIL

ANN, BOB = Credentials(1001, 1001), Credentials(1002, 1002)
SAME = ("number", "mode", "uid", "gid", "opens")
SAME_OF_KV = ("born_length", "changes", "cuts", "fewest", "forked_from", "hits", "lost", "users")


class Side(Bench):
    """A daemon's gate, and programs with rings."""

    def __init__(self, directory, *, is_served):
        directory.mkdir()
        super().__init__(directory, num_pages=512)
        self.is_served = is_served
        self.fs.volume.tree.root.mode = 0o1777
        self.lips = [self.connect(ANN), self.connect(ANN), self.connect(BOB)]
        self.num_submitted = dict.fromkeys(self.lips, 0)

    def connect(self, creds):
        lip = Lip(4711, creds, ServerChannel.create(VOCAB_SIZE))
        lip.launched = self.programs.join(lip, None)
        if not self.is_served:
            lip.launched.limits = ProgramLimits(tokens=MAX_LIMIT)
        self.programs.leave(lip, lip.launched)
        self.gate.welcome(lip)
        return lip

    def ask(self, lip, nursery, *frames):
        """Send calls at once; returns the replies."""
        self.send(lip, frames)
        self.handle_all(lip, nursery)
        return self.replies(lip)

    def send(self, lip, frames):
        region = lip.channel.memory[1]
        for number, (op, flags, handle, args, payload) in enumerate(frames, 1):
            size = REQUEST_STRUCT.size + len(payload)
            frame = REQUEST_STRUCT.pack(size, op, 0, flags, 0, number, handle % 2**64, *args) + payload
            for at in range(0, len(frame), 64):
                place = SUBMIT_RING + (self.num_submitted[lip] + at) % RING_BYTES
                region[place : place + 64] = frame[at : at + 64].ljust(64, b"\0")
            self.num_submitted[lip] += -(-len(frame) // 64) * 64
        np.frombuffer(region, np.uint64, 64)[SUBMIT_TAIL // 8] = self.num_submitted[lip]

    def handle_all(self, lip, nursery):
        while True:
            for request in self.gate.receive(lip, MAX_TAKEN):
                self.gate.handle(lip, request, nursery)
            if lip.channel.is_full or lip.channel.arm():
                break

    def replies(self, lip):
        region = lip.channel.memory[1]
        words = np.frombuffer(region, np.uint64, 64)
        at, end, found = int(words[COMPLETE_HEAD // 8]), int(words[COMPLETE_TAIL // 8]), []
        while at < end:
            head = COMPLETE_RING + at % RING_BYTES
            size, err, number, *args, flags, _, _ = REPLY_STRUCT.unpack_from(region, head)
            payload = bytes(region[head + 64 : head + size])
            found.append((number, err, flags, args, _without_times(payload) if not err else payload))
            at += -(-size // 64) * 64
        words[COMPLETE_HEAD // 8] = at
        return found

    def append(self, lip, handle, count):
        """What a step computes, without one."""
        file = lip.handles[handle]
        reservation = self.fs.reserve(file, [7] * count)
        reservation.pages_to_zero(count)
        commit_all(reservation)
        self.fs.committed(file)

    def facts(self):
        """What there is, whoever has made it; nothing is changed."""
        accounts = [self.fs.pool.accounts.of(creds.uid) for creds in (ANN, BOB)]
        return [
            [(len(lip.handles), [*lip.handles], lip.program.page_seconds.num_pages) for lip in self.lips],
            [lip.program.page_seconds.num_distinct_pages() for lip in self.lips],
            [(each.num_files, each.num_bytes, each.holdings.num_bytes) for each in accounts],
            (len(self.tree), self.tree.next_number, self.fs.volume.num_kv_versions, dict(self.gate.num_calls)),
            self.fs.pool.refcount[: self.fs.pool.num_pages].tolist(),
        ]

    def files(self):
        """Every file, after the audit of the books, which makes the objects of all."""
        self.fs.check()
        found = []
        for inode in sorted(self.tree, key=lambda inode: inode.number):
            kv = inode.content
            assert inode.atime_ns <= inode.mtime_ns <= inode.ctime_ns or inode.is_directory
            shown = {name: getattr(inode, name) for name in SAME}
            if isinstance(kv, KvFile):
                shown |= {name: getattr(kv, name) for name in SAME_OF_KV} | {"warm": bool(kv.used_s)}
                shown |= {"length": len(kv.table), "row": kv.table.row, "owner": kv.table.owner}
            found.append(shown)
        return found


def _without_times(payload):
    try:
        found = json.loads(payload)
    except ValueError:
        return payload
    return {name: value for name, value in found.items() if not name.endswith("time_ns")}


class Pair:
    """The same is done to both, and both are the same after it."""

    def __init__(self, path, seed):
        self.rng = random.Random(seed)
        self.sides = [Side(path / "served", is_served=True), Side(path / "begun", is_served=False)]
        self.num_names = 0

    def both(self, act):
        outcomes = []
        for side in self.sides:
            try:
                outcomes.append(act(side))
            except SymError as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]
        assert self.sides[0].facts() == self.sides[1].facts()
        return outcomes[0]

    def handle(self, which):
        handles = [*self.sides[0].lips[which].handles]
        odd = self.rng.random() < 0.03 or not handles
        return self.rng.choice([0, 10**6, -1]) if odd else self.rng.choice(handles)

    def frame(self, which):
        rng, handle = self.rng, self.handle(which)
        junk = b"x" if rng.random() < 0.02 else b""
        match rng.choices(
            ["create", "fork", "close", "truncate", "len", "read", "stat", "remove", "ping", "name"],
            [4, 30, 18, 8, 10, 3, 2, 1, 1, 2],
        )[0]:
            case "create":
                return Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), self.name() if rng.random() < 0.4 else b""
            case "fork":
                flags, mode = rng.choice([0, 0, FORK_ENDED, 8]), rng.choice([0o600, 0o640, 0, 0o7777, 0o10000, -1])
                return Op.KV_FORK, flags, handle, (mode, 0, 0, 0), self.name() if rng.random() < 0.1 else b""
            case "close":
                return Op.KV_CLOSE, 0, handle, (rng.choice([0, 5]), 0, 0, 0), junk
            case "truncate":
                return Op.KV_TRUNCATE, 0, handle, (rng.choice([0, 1, 31, 32, 33, 64, 100, -1, 2**40]), 0, 0, 0), junk
            case "len":
                return Op.KV_READ, 0, handle, (RANGE_END, rng.choice([0, 0, 3, -1]), 0, 0), junk
            case "read":
                return Op.KV_READ, 0, handle, (rng.choice([0, 1, 31, -1]), 7, 0, 0), b""
            case "stat":
                return Op.KV_STAT, 0, handle, (0, 0, 0, 0), b""
            case "remove":
                return Op.KV_REMOVE, 0, handle, (0, 0, 0, 0), b""
            case "name":
                return Op.KV_OPEN, 0, 0, (0, 0, 0, 0), f"file{rng.randrange(1, self.num_names + 2)}".encode()
        return Op.PING, 0, 0, (0, 0, 0, 0), b""

    def name(self):
        self.num_names += 1
        return f"file{self.num_names}".encode()

    def step(self, nursery):
        rng, which = self.rng, self.rng.randrange(3)
        kind = rng.random()
        if kind < 0.8:
            frames = [self.frame(which) for _ in range(rng.choice([1, 1, 1, 2, 5, 30]))]
            self.both(lambda side: side.ask(side.lips[which], nursery, *frames))
        elif kind < 0.92:
            if handles := [*self.sides[0].lips[which].handles]:
                handle, count = rng.choice(handles), rng.choice([1, 2, 31, 32, 70])
                self.both(lambda side: side.append(side.lips[which], handle, count))
        elif kind < 0.94:
            self.quotas()
        elif kind < 0.96:
            self.both(lambda side: [(each.number, len(each.names)) for each in side.fs.volume.heat.hottest(1001)])
        elif kind < 0.98:
            row = rng.randrange(self.sides[0].fs.volume.pager.residents.num_rows or 1)
            self.both(lambda side: len(side.fs.volume.pager.residents.table_of(row) or ()))
        else:
            self.both(Side.files)

    def quotas(self):
        rng, pages = self.rng, self.sides[0].fs.pool.page_bytes
        files, num_bytes = rng.choice([None, None, 20, 60]), rng.choice([None, None, 20 * pages, 80 * pages])
        memory = rng.choice([None, None, 300_000])
        for side in self.sides:
            account = side.fs.pool.accounts.of(ANN.uid)
            account.limits = Limits(num_bytes=num_bytes, num_files=files)
            account.holdings.core.limit_bytes = -1 if memory is None else memory


@pytest.mark.parametrize("seed", range(6))
def test_calls_that_the_core_carries_out_are_those_of_the_gate(tmp_path, seed):
    pair = Pair(tmp_path, seed)

    async def main():
        async with trio.open_nursery() as nursery:
            for _ in range(1000):
                pair.step(nursery)
                await trio.lowlevel.checkpoint()
            pair.both(Side.files)
            for which in range(3):
                for side in pair.sides:
                    await side.gate.see_off(side.lips[which])
            pair.both(Side.files)
            nursery.cancel_scope.cancel()

    trio.run(main)
    served, begun = (side.gate._core.num_calls for side in pair.sides)
    assert min(served[op] for op in (Op.KV_FORK, Op.KV_CLOSE, Op.KV_TRUNCATE, Op.KV_READ)) > 0
    assert not any(begun)
    accounts = pair.sides[0].fs.pool.accounts
    assert [accounts.of(creds.uid).holdings.core.num_of[1] for creds in (ANN, BOB)] == [0, 0]


def test_answers_that_find_no_room_in_the_ring_are_sent_later_and_in_order(tmp_path):
    side = Side(tmp_path / "served", is_served=True)
    lip, found, num_sent = side.lips[0], [], 0

    async def main():
        nonlocal num_sent
        async with trio.open_nursery() as nursery:
            ((_, _, _, (handle, *_), _),) = side.ask(lip, nursery, (Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), b""))
            asked = [(Op.KV_READ, 0, handle, (RANGE_END, 0, 0, 0), b"")] * 1000
            while not lip.channel.is_full:
                side.send(lip, asked)
                side.handle_all(lip, nursery)
                num_sent += 1
            num_served = side.gate._core.num_calls[Op.KV_READ]
            assert RING_BYTES // 64 <= num_served <= RING_BYTES // 64 + 1, (
                "the last of them is kept, and no more after it"
            )
            while answers := side.replies(lip):
                found.extend(answers)
                side.handle_all(lip, nursery)

    trio.run(main)
    assert found == [(number, 0, 0, [0, 0, 0, 0], b"") for _ in range(num_sent) for number in range(1, 1001)]
