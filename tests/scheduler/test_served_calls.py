"""Calls that the core carries out by itself: answers, files and accounts are as if the gate had begun each of them.

Two programs send the same calls to daemons of their own, of which one is told that the core carries out nothing.
"""

import inspect
import json
import os
import random
import stat
import struct
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing

from kvfs.names.content import KvFile
from kvfs.names.tree import Credentials
from kvfs.pages.accounts import AccountLimits
from libsym.abi import (
    FORK_ENDED,
    MAX_FORKS,
    RANGE_END,
    REDUCED,
    REPLY_STRUCT,
    REQUEST_STRUCT,
    RING_BYTES,
    ROWS_LAST,
    ROWS_NONE,
    Op,
    PressureKind,
)
from libsym.channel.server import MAX_TAKEN, ServerChannel
from libsym.errors import SymError
from libsym.rows.reduced import reduction_block
from libsym.rows.sampler import Dry, Sampler
from scheduler._loop import lib
from scheduler.connection.lip import Lip
from scheduler.operations.pressure import MAX_CANDIDATES
from scheduler.programs.limits import NO_LIMITS, ProgramLimits
from tests.scheduler.bench import VOCAB_SIZE, Bench
from tests.scheduler.standing_bench import COMPLETE_HEAD, COMPLETE_RING, COMPLETE_TAIL, SUBMIT_RING, SUBMIT_TAIL

ANN, BOB = Credentials(1001, 1001), Credentials(1002, 1002)
FREE = 0
"""State of a slot."""
SAME = ("number", "mode", "uid", "gid", "opens")
SAME_OF_KV = ("born_length", "cuts", "fewest", "forked_from", "hits", "lost", "users")


class Side(Bench):
    """A daemon's gate, and programs with rings."""

    def __init__(self, directory, *, is_served, is_narrow=True):
        """`is_narrow`: the gate leaves files in the run after each call, as the core does. Else the core reserves more,
        and files share other pages.
        """
        directory.mkdir()
        super().__init__(directory, num_pages=512)
        self.is_served, self.is_narrow = is_served, is_narrow
        self.fs.volume.tree.root.mode = 0o1777
        self.lips = [self.connect(ANN), self.connect(ANN), self.connect(BOB)]
        self.num_submitted: Counter[Lip] = Counter()

    def connect(self, creds, limits=NO_LIMITS):
        lip = Lip(4711, creds, ServerChannel.create(VOCAB_SIZE))
        lip.launched = self.programs.of_process(4711, creds.uid, creds.gid)
        lip.launched.limits = limits
        self.gate.welcome(lip)
        if not self.is_served:
            lip.channel.serve_by(0, 0, 0)
        return lip

    async def ask(self, lip, nursery, *frames):
        """Send calls at once; returns the replies, in the order of the calls."""
        self.send(lip, frames)
        os.eventfd_write(lip.channel.doorbell, 1)
        found = []
        with trio.fail_after(20):
            while len(found) < len(frames):
                with trio.move_on_after(0.0002):
                    await trio.lowlevel.wait_readable(lip.channel.doorbell)
                self.handle_all(lip, nursery)
                found += self.replies(lip, frames)
        return sorted(found)

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
        lip.channel.clear_doorbell()
        while True:
            for request in self.gate.receive(lip, MAX_TAKEN):
                self.gate.handle(lip, request, nursery)
            if lip.channel.is_full or lip.channel.arm():
                break

    def replies(self, lip, frames=()):
        region = lip.channel.memory[1]
        words = np.frombuffer(region, np.uint64, 64)
        at, end, found = int(words[COMPLETE_HEAD // 8]), int(words[COMPLETE_TAIL // 8]), []
        while at < end:
            head = COMPLETE_RING + at % RING_BYTES
            size, err, number, *args, flags, _, _ = REPLY_STRUCT.unpack_from(region, head)
            payload = bytes(region[head + 64 : head + size])
            op = frames[number - 1][0] if frames and not err else None
            if op == Op.PRED:
                args, payload = self.row(lip, args, payload)
            elif op == Op.PRED_BATCH:
                payload = [*self.calls(lip, payload)]
            found.append((number, err, flags, args, _without_times(payload) if not err else payload))
            at += -(-size // 64) * 64
        words[COMPLETE_HEAD // 8] = at
        return found

    def row(self, lip, args, payload):
        """Return the row that a PRED is answered by, wherever it is, if there is one; its slot is free again."""
        slot, num_rows, *_ = args
        if not num_rows or slot < 0:
            return args, payload
        row = np.array(lip.channel.row(slot))
        np.frombuffer(lip.channel.memory[1], np.uint32)[lip.channel._plan.states_offset // 4 + slot] = FREE
        return args[1:], row.tobytes()

    def calls(self, lip, payload):
        """Give the answers of a batch's calls."""
        at = 0
        while at < len(payload):
            size, err, number, *args, _, _, _ = REPLY_STRUCT.unpack_from(payload, at)
            body = payload[at + 64 : at + size]
            yield number, err, (args, body) if err else self.row(lip, args, body)
            at += -(-size // 64) * 64

    @property
    def num_calls(self):
        """Return the number of calls by operation, served by C and by Python."""
        return self.gate.num_calls + Counter({Op.PRED: self.batches.statistics.num_taken_calls})

    def look_at(self, lip, handle):
        """Look at a file as eviction does."""
        core = lib.sym_handle_find(lip.handles.core, handle % 2**64)
        return self.fs.volume.pager.residents.table_of(core.row).length if core else None

    def facts(self):
        """Return all that there is, whoever has made it; nothing is changed."""
        self.batches.sync()
        used = [lip.program.used for lip in self.lips]
        accounts = [self.fs.pool.accounts.of(creds.uid) for creds in (ANN, BOB)]
        return [
            [(len(lip.handles), [*lip.handles], lip.program.page_seconds.num_pages) for lip in self.lips],
            [(each.num_files, each.holdings.num_bytes) for each in accounts],
            [(each.calls, each.failed_calls, each.tokens, each.tokens_in, each.tokens_out) for each in used],
            self.batches.statistics.num_calls,
            [lip.program.page_seconds.num_distinct_pages() for lip in self.lips if self.is_narrow],
            (len(self.tree), self.tree.next_number, self.fs.volume.num_kv_versions, self.num_calls),
        ]

    async def files(self):
        """Every file, after the audit of the books, which makes the objects of all; and pages, when no call has any."""
        self.fs.check()
        for lip in self.lips:
            for handle in lip.handles:
                self.batches.exclusive(lip.handles[handle], list)
        await self.until(lambda: not self.batches.num_waiting)
        accounts = [self.fs.pool.accounts.of(creds.uid) for creds in (ANN, BOB)]
        references = self.fs.pool.refcount[: self.fs.pool.num_pages]
        found = [[each.num_bytes for each in accounts], sorted(references.tolist())] if self.is_narrow else []
        for inode in sorted(self.tree, key=lambda inode: inode.number):
            kv = inode.content
            assert inode.atime_ns <= inode.mtime_ns <= inode.ctime_ns or inode.is_directory
            shown = {name: getattr(inode, name) for name in SAME}
            if isinstance(kv, KvFile):
                shown |= {name: getattr(kv, name) for name in SAME_OF_KV} | {"warm": bool(kv.used_s)}
                shown |= {"length": kv.table.length, "owner": kv.table.owner}
            found.append(shown)
        return found

    async def until(self, condition):
        with trio.fail_after(20):
            while not condition():  # noqa: ASYNC110 - of the daemon's, which has no event
                await trio.sleep(0.001)

    async def see_off(self):
        for lip in self.lips:
            await self.gate.see_off(lip)


def _without_times(payload):
    if isinstance(payload, list):
        return payload
    try:
        found = json.loads(payload)
    except ValueError:
        return payload
    if not isinstance(found, dict):
        return found
    return {name: value for name, value in found.items() if not name.endswith("time_ns")}


class Pair:
    """The same is done to both, and both are the same after it."""

    def __init__(self, path, seed):
        self.rng = random.Random(seed)
        self.is_narrow = seed % 2 == 0
        sides = {"served": True, "begun": False}
        self.sides = [
            Side(path / name, is_served=is_served, is_narrow=self.is_narrow) for name, is_served in sides.items()
        ]
        self.num_names = 0

    async def both(self, act):
        outcomes = []
        for side in self.sides:
            try:
                outcome = act(side)
                outcomes.append(await outcome if inspect.isawaitable(outcome) else outcome)
            except SymError as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]
        until_s = trio.current_time() + 5
        while (facts := [side.facts() for side in self.sides])[0] != facts[1]:  # room that the run is given comes later
            assert trio.current_time() < until_s, [pair for pair in zip(*facts, strict=True) if pair[0] != pair[1]]
            await trio.sleep(0.001)

    def handle(self, which):
        handles = [*self.sides[0].lips[which].handles]
        odd = self.rng.random() < 0.03 or not handles
        return self.rng.choice([0, 10**6, -1]) if odd else self.rng.choice(handles)

    def frame(self, which):
        rng, handle = self.rng, self.handle(which)
        junk = b"x" if rng.random() < 0.02 else b""
        match rng.choices(
            ["create", "fork", "close", "truncate", "len", "read", "stat", "remove", "ping", "name", "pred", "batch"],
            [4, 30, 18, 8, 10, 3, 2, 1, 1, 2, 40, 0 if self.is_narrow else 10],
        )[0]:
            case "create":
                return Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), self.name() if rng.random() < 0.4 else b""
            case "fork":
                flags, mode = rng.choice([0, 0, FORK_ENDED, 8]), rng.choice([0o600, 0o640, 0, 0o7777, 0o10000, -1])
                count = rng.choice([0, 0, 0, 1, 2, 5, MAX_FORKS, MAX_FORKS + 1, -1])
                return Op.KV_FORK, flags, handle, (mode, count, 0, 0), self.name() if rng.random() < 0.1 else b""
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
            case "pred":
                return self.pred(handle)
            case "batch":
                return self.batch([self.handle(which) for _ in range(rng.choice([1, 2, 3, 5]))])
            case "name":
                return Op.KV_OPEN, 0, 0, (0, 0, 0, 0), f"file{rng.randrange(1, self.num_names + 2)}".encode()
        return Op.PING, 0, 0, (0, 0, 0, 0), b""

    def name(self):
        self.num_names += 1
        return f"file{self.num_names}".encode()

    def pred(self, handle):
        rng, flags, rest = self.rng, ROWS_LAST, (0, 0)
        num_tokens = 1 if self.is_narrow else rng.choice([1, 1, 1, 2, 31, 32, 33])
        numbers = [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        if rng.random() < 0.2:
            flags = rng.choice([ROWS_NONE, ROWS_LAST, 0])
            several = [3] * (70 if self.is_narrow else rng.choice([2, 31, 32, 70]))
            numbers = rng.choice([[], several, [-1], [VOCAB_SIZE], [2**31 - 1]])
            rest = rng.choice([(0, 0), (10**7, 0), (0, 1), (-1, 0)])
        places = rng.choice([[]] * 6 + [[0], [5], [40], [-1], [10**6], [7] * len(numbers), [3, 4]])
        junk = b"x" if rng.random() < 0.02 else b""
        if flags == ROWS_LAST and not self.is_narrow and rng.random() < 0.5:
            flags, junk = ROWS_LAST | REDUCED, self.reduction() + junk
        payload = struct.pack(f"={len(numbers)}i{len(places)}i", *numbers, *places) + junk
        return Op.PRED, flags, handle, (len(numbers), len(places), *rest), payload

    def reduction(self):
        """Numbers that are asked for in place of a row; one in ten as nobody may ask for them."""
        rng, sampler = self.rng, None
        if rng.random() < 0.5:
            dry = Dry() if rng.random() < 0.2 else None
            bias = {3: 2.0} if rng.random() < 0.5 else {}
            sampler = Sampler(rng.choice([0.0, 0.8]), logit_bias=bias, dry=dry)
        named = rng.choice([[], [5], [1, 2, 3], list(range(100)), [VOCAB_SIZE] if rng.random() < 0.2 else []])
        top_k = rng.choice([None, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 1 if rng.random() < 0.2 else 2])
        block = reduction_block(top_k, named, None if sampler is None else sampler.block(seed=7))
        return block[: rng.randrange(len(block))] if rng.random() < 0.05 else block

    def batch(self, handles):
        """PRED_BATCH, whose payload is whole requests; one in ten has something that it may not have."""
        rng, found = self.rng, b""
        odd = [rng.choice(["op", "stream", "size", "junk"])] if rng.random() < 0.1 else []
        for number, handle in enumerate(handles):
            op, flags, _, args, payload = self.pred(handle)
            size = REQUEST_STRUCT.size + len(payload) + 64 * ("size" in odd)
            op, stream = Op.PING if "op" in odd else op, int("stream" in odd)
            frame = REQUEST_STRUCT.pack(size, op, stream, flags, 0, number, handle % 2**64, *args) + payload
            found += frame.ljust(-(-len(frame) // 64) * 64, b"\0")
        return Op.PRED_BATCH, 0, 0, (len(handles), 0, 0, 0), found + b"x" * ("junk" in odd)

    def burst(self, which):
        """Calls at once, but none whose answer says whether a call before it was computed already."""
        frames, predicted = list[tuple](), set[int]()
        for _ in range(self.rng.choice([1, 1, 1, 2, 5, 30])):
            frame = self.frame(which)
            if frame[2] in predicted and frame[0] not in {Op.PRED, Op.KV_CLOSE, Op.KV_TRUNCATE}:
                break
            predicted |= {frame[2]} if frame[0] == Op.PRED else set()
            frames.append(frame)
            if frame[0] == Op.PRED_BATCH:
                break
            if frame[2] in predicted and frame[0] == Op.KV_CLOSE:  # when it has room for others again is the step's
                break
        return frames

    async def live(self, which, nursery):
        """A branch that lives for some calls, each asked when the one before is answered, and then perhaps goes."""
        rng, source = self.rng, self.handle(which)
        ask = partial(self.ask, which, nursery)
        for _ in range(rng.choice([1, 1, 2, 3])):
            await ask((Op.KV_FORK, 0, source, (0o600, 0, 0, 0), b""))
            source = max(self.sides[0].lips[which].handles, default=0)
            for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
                length = Op.KV_READ, 0, source, (RANGE_END, 0, 0, 0), b""
                truncate = Op.KV_TRUNCATE, 0, source, (rng.choice([0, 1, 2, 30]), 0, 0, 0), b""
                await ask(rng.choice([self.pred(source)] * 4 + [length, truncate]))
        if rng.random() < 0.7:
            await ask((Op.KV_CLOSE, 0, source, (0, 0, 0, 0), b""))

    async def beam(self, which, nursery):
        """Branches that go on together, and then perhaps go."""
        rng, source = self.rng, self.handle(which)
        ask = partial(self.ask, which, nursery)
        before = {*self.sides[0].lips[which].handles}
        for _ in range(rng.choice([2, 3, 5])):
            await ask((Op.KV_FORK, 0, source, (0o600, 0, 0, 0), b""))
        branches = sorted({*self.sides[0].lips[which].handles} - before)
        for _ in range(rng.choice([1, 1, 2, 4]) if branches else 0):
            await ask(self.batch(rng.sample(branches, rng.randrange(len(branches)) + 1)))
        for branch in branches:
            if rng.random() < 0.7:
                await ask((Op.KV_CLOSE, 0, branch, (0, 0, 0, 0), b""))

    async def ask(self, which, nursery, *frames):
        await self.both(lambda side: side.ask(side.lips[which], nursery, *frames))

    async def step(self, nursery):
        rng, which = self.rng, self.rng.randrange(3)
        kind = rng.random()
        if rng.random() < 0.5:
            await rng.choice([self.live] if self.is_narrow else [self.live, self.beam])(which, nursery)
        elif kind < 0.92:
            frames = self.burst(which)
            await self.ask(which, nursery, *frames)
        elif kind < 0.94:
            self.quotas()
        elif kind < 0.96:
            await self.both(lambda side: sorted(each.number for each in side.fs.volume.heat.hottest(1001)))
        elif kind < 0.99:
            number = self.handle(which)
            await self.both(lambda side: side.look_at(side.lips[which], number))
        else:
            await self.both(Side.files)

    def quotas(self):
        """Draw quotas of files and of the daemon's memory. Reservations of pages are the run's, and are left alone."""
        files, memory = self.rng.choice([None, None, 20, 60]), self.rng.choice([None, None, 300_000])
        for side in self.sides:
            account = side.fs.pool.accounts.of(ANN.uid)
            account.limits = AccountLimits(num_files=files)
            account.holdings.core.limit_bytes = -1 if memory is None else memory


@pytest.mark.parametrize("seed", range(6))
def test_calls_that_the_core_carries_out_are_those_of_the_gate(tmp_path, seed):
    pair = Pair(tmp_path, seed)

    async def main():
        async with trio.open_nursery() as nursery:
            for side in pair.sides:
                nursery.start_soon(side.batches.run)
                await trio.testing.wait_all_tasks_blocked()  # the thread sleeps in the first one's core
            for _ in range(300):
                await pair.step(nursery)
            await pair.both(Side.files)
            await pair.both(Side.see_off)
            await pair.both(Side.files)
            nursery.cancel_scope.cancel()

    trio.run(main)
    served, begun = (side.batches.gate.num_calls for side in pair.sides)
    batch = [] if pair.is_narrow else [Op.PRED_BATCH]
    assert min(served[op] for op in (Op.KV_FORK, Op.KV_CLOSE, Op.KV_TRUNCATE, Op.KV_READ, Op.PRED, *batch)) > 0
    assert not any(begun)
    accounts = pair.sides[0].fs.pool.accounts
    assert [accounts.of(creds.uid).holdings.core.num_of[1] for creds in (ANN, BOB)] == [0, 0]


def test_answers_that_find_no_room_in_the_ring_are_sent_later_and_in_order(tmp_path):
    side = Side(tmp_path / "served", is_served=True)
    lip, found, num_sent = side.lips[0], [], 0

    async def main():
        nonlocal num_sent
        async with trio.open_nursery() as nursery:
            ((_, _, _, (handle, *_), _),) = await side.ask(lip, nursery, (Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), b""))
            asked = [(Op.KV_READ, 0, handle, (RANGE_END, 0, 0, 0), b"")] * 1000
            while not lip.channel.is_full:
                side.send(lip, asked)
                side.handle_all(lip, nursery)
                num_sent += 1
            num_served = side.batches.gate.num_calls[Op.KV_READ]
            assert RING_BYTES // 64 <= num_served <= RING_BYTES // 64 + 1, (
                "the last of them is kept, and no more after it"
            )
            while answers := side.replies(lip):
                found.extend(answers)
                side.handle_all(lip, nursery)

    trio.run(main)
    assert found == [(number, 0, 0, [0, 0, 0, 0], b"") for _ in range(num_sent) for number in range(1, 1001)]


def test_who_hears_of_pressure_is_told_of_a_few_branches_and_the_others_stay_the_cores(tmp_path):
    side = Side(tmp_path / "served", is_served=True)
    lip = side.lips[0]

    async def main():
        async with trio.open_nursery() as nursery:
            ((_, _, _, (handle, *_), _),) = await side.ask(lip, nursery, (Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), b""))
            branches = await side.ask(lip, nursery, *[(Op.KV_FORK, 0, handle, (0o600, 0, 0, 0), b"")] * 500)
            first, second, *_ = [args[0] for _, _, _, args, _ in branches]
            await trio.sleep(0.002)
            await side.ask(lip, nursery, (Op.KV_FORK, 0, first, (0o600, 0, 0, 0), b""))  # a use of it
            account = side.fs.pool.accounts.of(ANN.uid)
            account.limits = AccountLimits(num_bytes=account.num_bytes)
            num_branches = side.tree.core.num_branches
            ((_, code, _, (kind, *_), files),) = await side.ask(lip, nursery, (Op.KV_PRESSURE, 0, 0, (0, 0, 0, 0), b""))
            assert (code, kind) == (0, PressureKind.QUOTA)
            assert len(files) == MAX_CANDIDATES
            told = {number for file in files for number in file["handles"]}
            assert second in told
            assert first not in told
            assert side.tree.core.num_branches >= num_branches - MAX_CANDIDATES > 0
            nursery.cancel_scope.cancel()

    trio.run(main)
    side.fs.check()


def test_page_seconds_of_branches_are_those_of_files(tmp_path):
    side = Side(tmp_path / "served", is_served=True)
    lip, expected, num_pages, since_s = side.lips[0], 0.0, 0, 0.0
    page_seconds = lip.program.page_seconds

    async def main():
        nonlocal expected, num_pages, since_s
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side.batches.run)
            await side.ask(lip, nursery, (Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), b""))
            tokens = struct.pack("=96i", *range(96))
            await side.ask(lip, nursery, (Op.PRED, ROWS_NONE, 1, (96, 0, 0, 0), tokens))
            for frames, pages in (
                ([(Op.KV_FORK, 0, 1, (0o600, 0, 0, 0), b"")] * 200, 603),
                ([(Op.KV_TRUNCATE, 0, handle, (40, 0, 0, 0), b"") for handle in range(2, 52)], 553),
                ([(Op.KV_STAT, 0, handle, (0, 0, 0, 0), b"") for handle in range(40, 90)], 553),
                ([(Op.KV_CLOSE, 0, handle, (0, 0, 0, 0), b"") for handle in range(2, 202, 2)], 278),
            ):
                expected += num_pages * (time.monotonic() - since_s)
                num_pages, since_s = pages, time.monotonic()
                await side.ask(lip, nursery, *frames)
                assert page_seconds.num_pages == pages
                assert page_seconds.num_distinct_pages() == 3
                await trio.sleep(0.1)
            expected += num_pages * (time.monotonic() - since_s)
            assert page_seconds.total() == pytest.approx(expected, rel=0.1)
            await side.gate.see_off(lip)
            assert page_seconds.total() == pytest.approx(expected, rel=0.15)
            assert page_seconds.num_pages == 0
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize("limits", [NO_LIMITS, ProgramLimits(tokens=1000)])
def test_a_connection_that_is_confined_has_its_branches_paid_for_by_the_domain(tmp_path, limits):
    side = Side(tmp_path / "served", is_served=True)
    fs, other = side.fs, side.lips[0]
    inode = fs.volume.tree.make(fs.volume.tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=ANN.uid, gid=0)
    fs.volume.domains.set_limit(inode, b"user.kv.quota", b"1G", ANN.uid)
    lip = side.connect(ANN, limits)
    share = other.handles.core.share

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side.batches.run)
            await side.ask(lip, nursery, (Op.CONFINE, 0, 0, (0, 0, 0, 0), b"d"))
            ((_, _, _, (source, *_), _),) = await side.ask(lip, nursery, (Op.KV_CREATE, 0, 0, (0o600, 0, 0, 0), b""))
            ((_, _, _, (handle, *_), _),) = await side.ask(lip, nursery, (Op.KV_FORK, 0, source, (0o600, 0, 0, 0), b""))
            await side.ask(lip, nursery, (Op.PRED, ROWS_LAST, handle, (1, 0, 0, 0), struct.pack("=i", 7)))
            side.batches.sync()
            assert inode.domain.num_files == 2, "the two files"
            assert side.batches.domains()[inode.domain.number].calls == 1
            assert other.handles.core.share == share
            await side.see_off()
            await side.gate.see_off(lip)
            nursery.cancel_scope.cancel()

    trio.run(main)
    fs.check()
