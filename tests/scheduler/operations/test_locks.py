"""Locks by the gate: who is refused is told who holds them, and a wait ends with its handle."""

import errno
import os

import pytest
import trio
import trio.testing

from kvfs.names.tree import Credentials
from libsym.abi import LOCK_NOWAIT, LOCK_SHARED, Op
from libsym.channel.server import Request


@pytest.fixture
def lips(bench):
    """Two programs of a user and one of another. Each has the file open as its handle 1."""
    bench.fs.kv_close(bench.fs.kv_create(Credentials(0, 0), "a.kv", 0o666))
    found = [bench.lip(uid) for uid in (1000, 1000, 1001)]
    for lip in found:
        lip.add(bench.fs.kv_open(lip.credentials, "a.kv", write=False))
    return found


def test_a_lock_excludes_other_handles_by_the_name_of_its_holder_if_the_asker_may_know_it(bench, lips):
    def ask(lip, number, op=Op.KV_LOCK, flags=LOCK_NOWAIT):
        bench.gate.handle(lip, Request(op, flags, number, 1, (0, 0, 0, 0), b""), None)
        return lip.channel.replies[number][-1][2]

    mine, next_mine, theirs = lips
    assert ask(mine, 1) is None
    for flags in (LOCK_NOWAIT, LOCK_NOWAIT | LOCK_SHARED):
        refused = [ask(lip, 1 + flags, flags=flags) for lip in (next_mine, theirs)]
        assert [error.errno for error in refused] == [errno.EWOULDBLOCK] * 2
        assert f"a.kv is locked by pid {os.getpid()} (" in str(refused[0])
        assert "a.kv is locked by somebody else: " in str(refused[1])
    assert ask(mine, 2, Op.KV_UNLOCK, 0) is None
    assert [ask(lip, 20, flags=LOCK_NOWAIT | LOCK_SHARED) for lip in (mine, theirs)] == [None, None]
    assert ask(next_mine, 21).errno == errno.EWOULDBLOCK
    assert [ask(lip, 22, op, 0) for lip, op in ((mine, Op.KV_CLOSE), (theirs, Op.KV_UNLOCK))] == [None, None]
    assert ask(next_mine, 23) is None


@pytest.mark.parametrize("end", [Op.KV_UNLOCK, Op.KV_CLOSE])
@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_wait_ends_when_its_own_handle_is_unlocked_or_closed_and_takes_nothing(bench, lips, end, has_begun):
    async with trio.open_nursery() as nursery:
        holder, waiter, heir = lips
        for lip in (holder, waiter):
            bench.gate.handle(lip, Request(Op.KV_LOCK, 0, 1, 1, (0, 0, 0, 0), b""), nursery)
        if has_begun:
            await trio.testing.wait_all_tasks_blocked()
        bench.gate.handle(waiter, Request(end, 0, 2, 1, (0, 0, 0, 0), b""), nursery)
        await trio.testing.wait_all_tasks_blocked()
        assert waiter.channel.errors == {1: errno.EINTR, 2: 0}
        bench.gate.handle(holder, Request(Op.KV_UNLOCK, 0, 2, 1, (0, 0, 0, 0), b""), nursery)
        bench.gate.handle(heir, Request(Op.KV_LOCK, LOCK_NOWAIT, 1, 1, (0, 0, 0, 0), b""), nursery)
        assert heir.channel.errors == {1: 0}
        for lip in lips:
            await bench.gate.see_off(lip)
    assert len(bench.fs.volume.locks) == 0
