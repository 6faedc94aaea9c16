"""The gate's calls that a coroutine answers later: how many, and what is left of them when their program goes."""

import errno
import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
import trio.testing

from decoder.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.facts import Facts
from decoder.model import load_model
from kvfs.fs import FileSystem
from kvfs.pages import PagePool
from kvfs.tree import Credentials
from libsym.abi import LOCK_NOWAIT, REBASE, Op
from libsym.channel import Request
from scheduler.batch import BatchScheduler
from scheduler.gate import FILES_A_TURN, MAX_LATER, MAX_WAITS, Gate
from scheduler.lip import Lip


@dataclass
class Answers:
    """Takes the place of a channel: what was replied, by request."""

    errors: dict[int, int] = field(default_factory=dict)
    """errno, 0 for none"""
    args: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def reply(self, request_id, args=(), payload=b"", error=None):
        assert request_id not in self.errors, "answered twice"
        self.errors[request_id] = 0 if error is None else error.errno
        self.args[request_id] = args

    def close(self):
        pass


class Bench:
    def __init__(self, tmp_path):
        model = load_model("tiny")
        arena = Arena(model.config, 32)
        self.fs = FileSystem(PagePool(arena), Facts(model, arena, "float32"), tmp_path / "files", 0, 0)
        decoder = CpuDecoder(model.config, model.weights, arena, 1)
        batches = BatchScheduler(self.fs, decoder, model.config.max_positions, model.config.vocab_size)
        self.gate = Gate(self.fs, batches, None, dict)

    def lip(self):
        return Lip(os.getpid(), Credentials(0, 0), Answers())

    def holder(self):
        """A handle of somebody else's on a file that everybody may open, with its lock."""
        file = self.fs.kv_create(Credentials(0, 0), "a.kv", 0o666)
        self.fs.volume.locks.acquire_nowait(file.inode.number, file, exclusive=True)
        return file

    def open(self, lip):
        return lip.add(self.fs.kv_open(lip.credentials, "a.kv", write=True))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def request(op, number, handle=0, *, flags=0, args=(0, 0), payload=b""):
    return Request(op, flags, number, handle, (*args, 0, 0), payload)


def test_others_get_their_turn_while_the_files_of_a_program_are_closed(bench):
    left = []

    async def others(lip):
        while lip.handles:
            left.append(len(lip.handles))
            await trio.lowlevel.checkpoint()

    async def main():
        lip = bench.lip()
        bench.gate.welcome(lip)
        for _ in range(5 * FILES_A_TURN):
            lip.add(bench.fs.kv_create(lip.credentials, None))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(others, lip)
            with trio.CancelScope() as scope:
                scope.cancel()
                await bench.gate.see_off(lip)
        bench.fs.check()
        assert bench.fs.volume.num_kv_versions == 0

    trio.run(main)
    assert len(left) >= 3  # once for each turn but the last, where either may go first


def test_one_program_can_not_fill_the_daemon_with_calls_that_wait(bench):
    async def main():
        holder, greedy, modest = bench.holder(), bench.lip(), bench.lip()
        handles = {lip: bench.open(lip) for lip in (greedy, modest)}
        async with trio.open_nursery() as nursery:
            for number in range(1, MAX_WAITS + 2):
                bench.gate.handle(greedy, request(Op.KV_LOCK, number, handles[greedy]), nursery)
            assert greedy.channel.errors == {MAX_WAITS + 1: errno.EWOULDBLOCK}
            for number in range(MAX_WAITS + 2, MAX_LATER + 3):
                bench.gate.handle(greedy, request(Op.KV_LIST, number), nursery)
            assert greedy.channel.errors == dict.fromkeys((MAX_WAITS + 1, MAX_LATER + 2), errno.EWOULDBLOCK)
            bench.gate.handle(modest, request(Op.KV_LIST, 1), nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert modest.channel.errors == {1: 0}
            bench.fs.kv_close(holder)
            await trio.testing.wait_all_tasks_blocked()
        assert set(greedy.channel.errors.values()) == {0, errno.EWOULDBLOCK}
        assert greedy.num_later == 0
        bench.gate.hang_up(greedy)
        assert len(bench.fs.volume.locks) == 0

    trio.run(main)


def test_what_a_program_waited_for_is_forgotten_when_it_goes(bench):
    async def main():
        holder, gone, heir = bench.holder(), bench.lip(), bench.lip()
        async with trio.open_nursery() as nursery:
            bench.gate.handle(gone, request(Op.KV_LOCK, 1, bench.open(gone)), nursery)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        bench.gate.hang_up(gone)
        assert gone.channel.errors == {}
        bench.fs.kv_close(holder)
        async with trio.open_nursery() as nursery:
            bench.gate.handle(heir, request(Op.KV_LOCK, 1, bench.open(heir), flags=LOCK_NOWAIT), nursery)
        assert heir.channel.errors == {1: 0}

    trio.run(main)


@pytest.mark.parametrize("goes_early", [True, False])
def test_an_extract_of_a_program_that_goes_gives_its_pages_back(bench, goes_early):
    async def main():
        lip = bench.lip()
        file = bench.fs.kv_create(lip.credentials, "a.kv")
        handle = bench.open(lip)
        bench.fs.reserve(file, [1] * 320, range(320)).commit()
        whole = np.array([[1, 320]], np.int64).tobytes()
        free = bench.fs.pool.num_free
        async with trio.open_nursery() as nursery:
            asked = request(Op.KV_EXTRACT, 1, handle, flags=REBASE, args=(0o600, 1), payload=whole)
            bench.gate.handle(lip, asked, nursery)
            bench.fs.check()
            if goes_early:
                nursery.cancel_scope.cancel()
        bench.fs.check()
        if goes_early:
            assert lip.channel.errors == {}
            assert bench.fs.pool.num_free == free
        else:
            assert lip.channel.args[1][1] == 319
        bench.gate.hang_up(lip)
        assert bench.fs.pool.num_free == free

    trio.run(main)


def test_a_call_that_waits_can_be_cancelled_and_then_holds_nothing(bench):
    async def main():
        holder, lip, other = bench.holder(), bench.lip(), bench.lip()
        handle = bench.open(lip)
        async with trio.open_nursery() as nursery:
            bench.gate.handle(lip, request(Op.KV_LOCK, 1, handle), nursery)
            await trio.testing.wait_all_tasks_blocked()
            bench.gate.handle(other, request(Op.CANCEL, 1, args=(1, 0)), nursery)  # nobody else's business
            await trio.testing.wait_all_tasks_blocked()
            assert lip.channel.errors == {}
            bench.gate.handle(lip, request(Op.CANCEL, 2, args=(1, 0)), nursery)
            bench.gate.handle(lip, request(Op.CANCEL, 3, args=(1, 0)), nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert lip.channel.errors == {2: 0, 3: 0, 1: errno.ECANCELED}
            bench.gate.handle(lip, request(Op.KV_LOCK, 4, handle, flags=LOCK_NOWAIT), nursery)
            assert lip.channel.errors[4] == errno.EWOULDBLOCK
            bench.fs.kv_close(holder)
            bench.gate.handle(lip, request(Op.KV_LOCK, 5, handle, flags=LOCK_NOWAIT), nursery)
            assert lip.channel.errors[5] == 0
        assert lip.cancellable == {}
        assert lip.num_later == 0

    trio.run(main)


def test_a_call_cancelled_before_it_began_to_wait_is_answered_once(bench):
    async def main():
        bench.holder()
        lip = bench.lip()
        handle = bench.open(lip)
        async with trio.open_nursery() as nursery:
            bench.gate.handle(lip, request(Op.KV_LOCK, 1, handle), nursery)
            bench.gate.handle(lip, request(Op.CANCEL, 2, args=(1, 0)), nursery)
            await trio.testing.wait_all_tasks_blocked()
        assert lip.channel.errors == {2: 0, 1: errno.ECANCELED}

    trio.run(main)
