"""Calls that the core carries out by itself: answers, files and accounts are as if the gate had begun each of them.

Two programs send the same calls to daemons of their own, of which one is told that the core carries out nothing.
"""

import inspect
import random
import stat
import struct
import time
from functools import partial

import pytest
import trio
import trio.testing

from kvfs.pages.accounts import AccountLimits
from libsym.abi import (
    FORK_ENDED,
    MAX_FORKS,
    RANGE_END,
    REDUCED,
    REQUEST_STRUCT,
    RING_BYTES,
    ROWS_LAST,
    ROWS_NONE,
    Op,
    PressureKind,
)
from libsym.errors import SymError
from libsym.rows.parts import Dry
from libsym.rows.reduced import reduction_block
from libsym.rows.sampler import Sampler
from scheduler.operations.pressure import MAX_CANDIDATES
from scheduler.programs.limits import NO_LIMITS, ProgramLimits
from tests.scheduler.bench import VOCAB_SIZE
from tests.scheduler.served_bench import ANN, BOB, CREATE, PING, Side, close, fork, framed, length, pred


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
                return framed(Op.KV_CREATE, 0, 0o600, payload=self.name() if rng.random() < 0.4 else b"")
            case "fork":
                flags, mode = rng.choice([0, 0, FORK_ENDED, 8]), rng.choice([0o600, 0o640, 0, 0o7777, 0o10000, -1])
                count = rng.choice([0, 0, 0, 1, 2, 5, MAX_FORKS, MAX_FORKS + 1, -1])
                name = self.name() if rng.random() < 0.1 else b""
                return framed(Op.KV_FORK, handle, mode, count, flags=flags, payload=name)
            case "close":
                return framed(Op.KV_CLOSE, handle, rng.choice([0, 5]), payload=junk)
            case "truncate":
                to = rng.choice([0, 1, 31, 32, 33, 64, 100, -1, 2**40])
                return framed(Op.KV_TRUNCATE, handle, to, payload=junk)
            case "len":
                return framed(Op.KV_READ, handle, RANGE_END, rng.choice([0, 0, 3, -1]), payload=junk)
            case "read":
                return framed(Op.KV_READ, handle, rng.choice([0, 1, 31, -1]), 7)
            case "stat":
                return framed(Op.KV_STAT, handle)
            case "remove":
                return framed(Op.KV_REMOVE, handle)
            case "pred":
                return self.pred(handle)
            case "batch":
                return self.batch([self.handle(which) for _ in range(rng.choice([1, 2, 3, 5]))])
            case "name":
                return framed(Op.KV_OPEN, payload=f"file{rng.randrange(1, self.num_names + 2)}".encode())
        return PING

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
        """PRED_BATCH, whose payload is whole requests; one in three has something that it may not have."""
        rng, found = self.rng, b""
        odd = [rng.choice(["op", "stream", "size", "junk"])] if rng.random() < 0.3 else []
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

    async def live(self, which):
        """A branch that lives for some calls, each asked when the one before is answered, and then perhaps goes."""
        rng, source = self.rng, self.handle(which)
        ask = partial(self.ask, which)
        for _ in range(rng.choice([1, 1, 2, 3])):
            await ask(fork(source))
            source = max(self.sides[0].lips[which].handles, default=0)
            for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
                truncate = framed(Op.KV_TRUNCATE, source, rng.choice([0, 1, 2, 30]))
                await ask(rng.choice([self.pred(source)] * 4 + [length(source), truncate]))
        if rng.random() < 0.7:
            await ask(close(source))

    async def beam(self, which):
        """Branches that go on together, and then perhaps go."""
        rng, source = self.rng, self.handle(which)
        ask = partial(self.ask, which)
        before = {*self.sides[0].lips[which].handles}
        for _ in range(rng.choice([2, 3, 5])):
            await ask(fork(source))
        branches = sorted({*self.sides[0].lips[which].handles} - before)
        for _ in range(rng.choice([1, 1, 2, 4]) if branches else 0):
            await ask(self.batch(rng.sample(branches, rng.randrange(len(branches)) + 1)))
        for branch in branches:
            if rng.random() < 0.7:
                await ask(close(branch))

    async def ask(self, which, *frames):
        await self.both(lambda side: side.ask(*frames, lip=side.lips[which]))

    async def step(self):
        rng, which = self.rng, self.rng.randrange(3)
        kind = rng.random()
        if rng.random() < 0.5:
            await rng.choice([self.live] if self.is_narrow else [self.live, self.beam])(which)
        elif kind < 0.84:
            frames = self.burst(which)
            await self.ask(which, *frames)
        elif kind < 0.94:
            self.quotas()
        elif kind < 0.96:
            await self.both(lambda side: sorted(each.number for each in side.fs.volume.heat.hottest(1001)))
        elif kind < 0.99:
            number = self.handle(which)
            await self.both(lambda side: side.look_at(number, side.lips[which]))
        else:
            await self.both(Side.files)

    def quotas(self):
        """Draw quotas of files and of the daemon's memory. Reservations of pages are the run's, and are left alone."""
        files, memory = self.rng.choice([None, None, 20, 60]), self.rng.choice([None, None, 300_000])
        for side in self.sides:
            account = side.fs.pool.accounts.of(ANN.uid)
            account.limits = AccountLimits(num_files=files)
            account.holdings.core.limit_bytes = -1 if memory is None else memory


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_calls_that_the_core_carries_out_are_those_of_the_gate(tmp_path, seed):
    pair = Pair(tmp_path, seed)

    async def main():
        async with trio.open_nursery() as nursery:
            for side in pair.sides:
                side.nursery = nursery
                nursery.start_soon(side.batches.run)
                await trio.testing.wait_all_tasks_blocked()  # the thread sleeps in the first one's core
            for _ in range(150):
                await pair.step()
            for act in (Side.files, Side.see_off, Side.files):
                await pair.both(act)
            nursery.cancel_scope.cancel()

    trio.run(main)
    served, begun = (side.batches.gate.num_calls for side in pair.sides)
    batch = [] if pair.is_narrow else [Op.PRED_BATCH]
    assert min(served[op] for op in (Op.KV_FORK, Op.KV_CLOSE, Op.KV_TRUNCATE, Op.KV_READ, Op.PRED, *batch)) > 0
    assert not any(begun)
    accounts = pair.sides[0].fs.pool.accounts
    assert [accounts.of(creds.uid).holdings.core.num_of[1] for creds in (ANN, BOB)] == [0, 0]


@pytest.mark.slow
async def test_answers_that_find_no_room_in_the_ring_are_sent_later_and_in_order(side):
    found, num_sent = [], 0
    calls = [length(await side.call(CREATE))] * 1000
    while not side.program.channel.is_full:
        side.send(calls)
        side.handle_all()
        num_sent += 1
    num_served = side.batches.gate.num_calls[Op.KV_READ]
    assert 0 <= num_served - RING_BYTES // 64 <= 1, "the last of them is kept, and no more after it"
    while answers := side.replies():
        found.extend(answers)
        side.handle_all()
    assert found == [(number, 0, 0, [0, 0, 0, 0], b"") for _ in range(num_sent) for number in range(1, 1001)]


async def test_the_length_of_a_file_has_all_entries_that_were_answered(side):
    handle = await side.call(CREATE)
    for num_entries in range(1, 4):
        await side.call(pred(handle, 7))
        ((_, _, _, args, _),) = await side.ask(length(handle))
        assert args[1] == num_entries


async def test_who_hears_of_pressure_is_told_of_a_few_branches_and_the_others_stay_the_cores(side):
    branches = await side.ask(*[fork(await side.call(CREATE))] * 500)
    first, second, *_ = [args[0] for _, _, _, args, _ in branches]
    await trio.sleep(0.002)
    await side.call(fork(first))  # a use of it
    account = side.fs.pool.accounts.of(ANN.uid)
    account.limits = AccountLimits(num_bytes=account.num_bytes)
    num_branches = side.tree.core.num_branches
    ((_, code, _, (kind, *_), files),) = await side.ask(framed(Op.KV_PRESSURE))
    assert (code, kind, len(files)) == (0, PressureKind.QUOTA, MAX_CANDIDATES)
    told = {number for file in files for number in file["handles"]}
    assert second in told
    assert first not in told
    assert side.tree.core.num_branches >= num_branches - MAX_CANDIDATES > 0


@pytest.mark.slow
async def test_page_seconds_of_branches_are_those_of_files(side):
    page_seconds, expected, num_pages, since_s = side.program.program.page_seconds, 0.0, 0, 0.0
    await side.ask(CREATE)
    await side.ask(pred(1, *range(96), flags=ROWS_NONE))
    for frames, pages in (
        ([fork(1)] * 200, 603),
        ([framed(Op.KV_TRUNCATE, handle, 40) for handle in range(2, 52)], 553),
        ([framed(Op.KV_STAT, handle) for handle in range(40, 90)], 553),
        ([close(handle) for handle in range(2, 202, 2)], 278),
    ):
        expected += num_pages * (time.monotonic() - since_s)
        num_pages, since_s = pages, time.monotonic()
        await side.ask(*frames)
        assert page_seconds.num_pages == pages
        assert page_seconds.num_distinct_pages() == 3
        await trio.sleep(0.1)
    expected += num_pages * (time.monotonic() - since_s)
    assert page_seconds.total() == pytest.approx(expected, rel=0.1)
    await side.gate.see_off(side.program)
    assert page_seconds.total() == pytest.approx(expected, rel=0.15)
    assert page_seconds.num_pages == 0
    side.program = side.lips[1]


@pytest.mark.parametrize("limits", [NO_LIMITS, ProgramLimits(tokens=1000)])
async def test_a_connection_that_is_confined_has_its_branches_paid_for_by_the_domain(side, limits):
    fs, other = side.fs, side.lips[0]
    inode = fs.volume.tree.make(fs.volume.tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=ANN.uid, gid=0)
    fs.volume.domains.set_limit(inode, b"user.kv.quota", b"1G", ANN.uid)
    side.program, share = side.connect(ANN, limits), other.handles.core.share
    await side.ask(framed(Op.CONFINE, payload=b"d"))
    await side.call(pred(await side.call(fork(await side.call(CREATE))), 7))
    side.batches.sync()
    assert inode.domain.num_files == 2, "the two files"
    assert side.batches.domains()[inode.domain.number].calls == 1
    assert other.handles.core.share == share
    await side.see_off()
