"""The gate's calls that a coroutine answers later: their number, and their remains when their program goes."""

import errno
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from kvfs.names.tree import Credentials
from kvfs.pages.accounts import AccountLimits
from libsym.abi import ANY_OWNER, LOCK_NOWAIT, REBASE, Op
from libsym.channel.server import Request
from scheduler.connection.lip import MAX_LATER, MAX_WAITS
from scheduler.connection.under_way import MAX_CONNECTION_BYTES, MAX_USER_BYTES
from scheduler.doors.gate import FILES_A_TURN
from scheduler.operations.claims import PATIENCE_S
from scheduler.operations.fetching import NO_PEERS
from scheduler.operations.models import Models
from scheduler.operations.registry import all_operations
from scheduler.operations.text import AT_ONCE, Texts
from tests.kvfs.fakes import commit_all
from tests.scheduler.bench import Bench


class Conversation:
    """Takes the place of a model's text side: one whose template has run and will run again."""

    def __init__(self):
        self.has_begun, self.may_go_on = trio.Event(), threading.Event()
        self.was_stopped = True

    def chat_tokens(self, _messages, _tools, *, checkpoint, **_options):
        trio.from_thread.run_sync(self.has_begun.set)
        self.may_go_on.wait(30)
        checkpoint()
        self.was_stopped = False
        return []


class Calls(Bench):
    """The gate alone: no scheduler runs."""

    clock: trio.abc.Clock | None = None

    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        self.text = Conversation()
        self.tree.root.mode = 0o1777

    def run_test(self, scenario):
        async def main():
            async with trio.open_nursery() as self.nursery:
                await scenario()
            self.fs.check()

        trio.run(main, clock=self.clock)

    def begin(self, lip, op, number, handle=0, *args, flags=0, payload=b""):
        self.gate.handle(lip, Request(op, flags, number, handle, (*args, 0, 0, 0, 0)[:4], payload), self.nursery)

    async def ask(self, *of_call, **of_it):
        """Begin a call, and let all tasks go on as far as they can."""
        self.begin(*of_call, **of_it)
        await trio.testing.wait_all_tasks_blocked()

    async def claim(self, lip, number=1, owner=0, mode=0o600):
        await self.ask(lip, Op.KV_CLAIM, number, 0, mode, owner, payload=b"new.kv")

    async def gone(self, *lips):
        for lip in lips:
            await self.gate.see_off(lip)
        await trio.testing.wait_all_tasks_blocked()

    def holder(self):
        """A handle of somebody else's on a file that everybody may open, with its lock."""
        file = self.fs.kv_create(Credentials(0, 0), "a.kv", 0o666)
        self.fs.volume.locks.acquire_nowait(file.inode.number, file, exclusive=True)
        return file

    def open(self, lip):
        return lip.add(self.fs.kv_open(lip.credentials, "a.kv", write=True))


@pytest.fixture
def bench(tmp_path):
    return Calls(tmp_path)


@pytest.fixture
def quick(bench):
    """A bench where time passes when all tasks wait for it."""
    bench.clock = trio.testing.MockClock(autojump_threshold=0.01)
    return bench


def test_every_system_call_has_exactly_one_operation(bench):
    """Two for one are refused as the table is made."""
    models = Models({"tiny": bench.text})
    assert all_operations(bench.fs, bench.batches, models, bench.programs, dict, NO_PEERS).by_op.keys() == set(Op)


# ---- claims


async def test_a_claim_goes_to_the_next_when_its_file_is_closed_or_its_program_goes(bench):
    first, second, third = lips = [bench.lip() for _ in range(3)]
    for lip in lips:
        await bench.claim(lip)
    assert [[*lip.channel.args] for lip in lips] == [[1], [], []]
    assert first.channel.args[1][3] == 0, "it lies in no directory yet"
    await bench.ask(first, Op.KV_CLOSE, 2, 1)
    assert second.channel.args[1][3] == 0
    await bench.gone(second)
    assert third.channel.args[1][3] == 0
    await bench.claim(first, 3)
    await bench.ask(third, Op.KV_NAME, 2, 1)
    handle, _, inode, directory = first.channel.args[3]
    assert (handle, inode) == (2, third.channel.args[2][2]), "it was made meanwhile: opened"
    assert directory == third.channel.args[2][3] != 0
    assert len(bench.fs.claims) == 0


async def test_a_claim_of_another_user_holds_up_nobody_and_a_team_for_a_bounded_time(quick):
    """Each user has one program that computes. A program that would take another's file waits for it a while."""
    hostile, mine, next_mine, team, patient = lips = [quick.lip(uid) for uid in (4242, 1000, 1000, 1001, 1002)]
    for lip in lips:
        owner = ANY_OWNER if lip in (team, patient) else 0
        quick.begin(lip, Op.KV_CLAIM, 1, 0, 0o644, owner, payload=b"new.kv")
        await trio.lowlevel.checkpoint()
    assert [[*lip.channel.args] for lip in lips] == [[1], [1], [], [], []]
    await trio.sleep(PATIENCE_S + 1)
    assert [[*lip.channel.args] for lip in lips] == [[1], [1], [], [1], [1]]
    quick.begin(mine, Op.KV_NAME, 2, 1)
    await trio.sleep(1)
    assert next_mine.channel.args[1][3] != 0, "the file is there: opened"
    quick.begin(team, Op.KV_NAME, 2, 1)
    quick.begin(hostile, Op.KV_CLAIM, 3, 0, 0o644, payload=b"new.kv")
    await trio.sleep(1)
    assert team.channel.errors[2] == errno.EEXIST, "the first that has its name stays"
    assert hostile.channel.errors[3] == errno.EACCES
    await quick.gone(*lips)
    assert len(quick.fs.claims) == 0


async def test_a_team_waits_for_the_user_who_computes_and_takes_that_file(bench):
    first, second = bench.lip(1000), bench.lip(1001)
    for lip in (first, second):
        await bench.claim(lip, owner=ANY_OWNER, mode=0o644)
    assert not second.channel.args
    await bench.ask(first, Op.KV_NAME, 2, 1)
    assert second.channel.args[1][2] == first.channel.args[2][2], "the same inode"
    await bench.gone(first, second)
    assert len(bench.fs.claims) == 0


async def test_a_claim_that_is_cancelled_behind_its_answer_or_as_it_is_given_goes_to_the_next(bench):
    first, second, third = lips = [bench.lip() for _ in range(3)]
    for lip in lips:
        await bench.claim(lip)
    bench.begin(first, Op.CANCEL, 2, 0, 1)  # was answered
    await bench.ask(second, Op.CANCEL, 2, 0, 1)  # has it in this moment
    assert third.channel.args[1][0] == 1
    assert not first.handles
    assert not second.handles
    bench.begin(third, Op.KV_NAME, 2, 1)
    bench.begin(third, Op.CANCEL, 3, 0, 1)
    assert list(third.handles) == [1], "it has its name, and is the program's"
    bench.begin(third, Op.KV_CLOSE, 4, 1)
    assert not third.calls
    assert not third.tied
    assert len(bench.fs.claims) == 0


async def test_a_wait_for_a_claim_that_is_cancelled_takes_none(bench):
    holder, waiter = bench.lip(), bench.lip()
    for lip in (holder, waiter):
        await bench.claim(lip)
    await bench.ask(waiter, Op.CANCEL, 2, 0, 1)
    assert waiter.channel.errors[1] == errno.ECANCELED
    await bench.gone(holder)
    assert len(bench.fs.claims) == 0
    assert not waiter.handles


# ---- how much a program may have under way


async def test_others_get_their_turn_while_the_files_of_a_program_are_closed(bench):
    left, lip = [], bench.lip()

    async def others():
        while lip.handles:
            left.append(len(lip.handles))
            await trio.lowlevel.checkpoint()

    bench.gate.welcome(lip)
    for _ in range(5 * FILES_A_TURN):
        lip.add(bench.fs.kv_create(lip.credentials, None))
    bench.nursery.start_soon(others)
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.gate.see_off(lip)
    assert bench.fs.volume.num_kv_versions == 0
    assert len(left) >= 3  # once for each turn but the last, where either may go first


async def test_one_program_can_not_fill_the_daemon_with_calls_that_wait(bench):
    holder, greedy, modest = bench.holder(), bench.lip(), bench.lip()
    handle = bench.open(greedy)
    for number in range(1, MAX_WAITS + 2):
        bench.begin(greedy, Op.KV_LOCK, number, handle)
    assert greedy.channel.errors == {MAX_WAITS + 1: errno.EWOULDBLOCK}
    for number in range(MAX_WAITS + 2, MAX_LATER + 3):
        bench.begin(greedy, Op.KV_LIST, number)
    assert greedy.channel.errors == dict.fromkeys((MAX_WAITS + 1, MAX_LATER + 2), errno.EWOULDBLOCK)
    await bench.ask(modest, Op.KV_LIST, 1)
    assert modest.channel.errors == {1: 0}
    bench.fs.kv_close(holder)
    await trio.testing.wait_all_tasks_blocked()
    assert set(greedy.channel.errors.values()) == {0, errno.EWOULDBLOCK}
    assert greedy.num_later == 0
    await bench.gone(greedy)
    assert len(bench.fs.volume.locks) == 0


NO_PAYLOAD = [Op.KV_CLOSE, Op.KV_TRUNCATE, Op.KV_SYNC, Op.KV_READ, Op.KV_LOCK, Op.KV_UNLOCK, Op.CANCEL, Op.PING]
NO_PAYLOAD += [Op.GETRUSAGE, Op.VOCABULARY, Op.STAT, Op.CHECK]


async def test_a_payload_that_an_operation_has_no_use_for_is_refused(bench):
    lip = bench.lip()
    handle = lip.add(bench.fs.kv_create(lip.credentials, None))
    for op in NO_PAYLOAD:
        await bench.ask(lip, op, op, handle, payload=b"x")
    assert lip.channel.errors == dict.fromkeys(NO_PAYLOAD, errno.EINVAL)
    assert list(lip.handles) == [handle]


LARGE = b"." + bytes(1_000_000)
"""Name with NULs behind it: a long list is under way as long as nobody else gets a turn."""
PER_CONNECTION, PER_USER = MAX_CONNECTION_BYTES // len(LARGE), MAX_USER_BYTES // len(LARGE)


async def test_what_a_connection_has_under_way_is_bounded_in_bytes_and_what_ends_calls_gets_through(bench):
    holder, lip = bench.holder(), bench.lip()
    handle = bench.open(lip)
    bench.begin(lip, Op.KV_LOCK, 1, handle)
    for number in range(2, PER_CONNECTION + 2):
        bench.begin(lip, Op.KV_LIST, number, payload=LARGE)
    assert lip.channel.errors == {}
    bench.begin(lip, Op.KV_LIST, 100, payload=LARGE)
    assert lip.channel.errors == {100: errno.EAGAIN}
    bench.begin(lip, Op.CANCEL, 101, 0, 2)
    bench.begin(lip, Op.KV_UNLOCK, 102, handle)
    bench.begin(lip, Op.KV_CREATE, 103, 0, 0o600, payload=b"small.kv")
    assert [lip.channel.errors[number] for number in (101, 102, 103)] == [0, 0, 0]
    await trio.testing.wait_all_tasks_blocked()
    assert lip.under_way.num_bytes == 0
    await bench.ask(lip, Op.KV_LIST, 104, payload=LARGE)
    assert lip.channel.errors[104] == 0
    bench.fs.kv_close(holder)


@pytest.mark.slow
async def test_what_a_user_has_under_way_is_bounded_over_all_of_its_connections(bench):
    own, other = [bench.lip() for _ in range(PER_USER // PER_CONNECTION + 2)], bench.lip(uid=7)
    for lip in (*own, other):
        bench.gate.welcome(lip)
    for lip in own:
        for number in range(1, PER_CONNECTION + 1):
            bench.begin(lip, Op.KV_LIST, number, payload=LARGE)
    refused = [len(lip.channel.errors) for lip in own]
    assert refused[0] == refused[1] == 0
    assert sum(refused) == len(own) * PER_CONNECTION - PER_USER
    bench.begin(other, Op.KV_LIST, 1, payload=LARGE)
    assert other.channel.errors == {}
    await bench.gate.see_off(own[0])
    bench.begin(own[1], Op.KV_LIST, 100, payload=b".")
    bench.begin(own[-1], Op.KV_LIST, 100, payload=LARGE)
    assert 100 not in own[-1].channel.errors, "what a program had that went is nobody's"
    bench.nursery.cancel_scope.cancel()


# ---- calls that are ended


async def test_an_extract_of_a_program_that_goes_gives_its_pages_back(bench):
    lip = bench.lip()
    file = bench.fs.kv_create(lip.credentials, "a.kv")
    handle = bench.open(lip)
    commit_all(bench.fs.reserve(file, [1] * 320, range(320)))
    whole = np.array([[1, 320]], np.int64).tobytes()
    free = bench.fs.pool.num_free
    async with trio.open_nursery() as bench.nursery:
        bench.begin(lip, Op.KV_EXTRACT, 1, handle, 0o600, 1, flags=REBASE, payload=whole)
        bench.nursery.cancel_scope.cancel()
    assert lip.channel.errors == {}
    assert bench.fs.pool.num_free == free
    await bench.gone(lip)


async def test_a_call_that_waits_can_be_cancelled_and_then_holds_nothing(bench):
    holder, lip, other = bench.holder(), bench.lip(), bench.lip()
    handle = bench.open(lip)
    await bench.ask(lip, Op.KV_LOCK, 1, handle)
    await bench.ask(other, Op.CANCEL, 1, 0, 1)  # nobody else's business
    assert lip.channel.errors == {}
    bench.begin(lip, Op.CANCEL, 2, 0, 1)
    await bench.ask(lip, Op.CANCEL, 3, 0, 1)
    assert lip.channel.errors == {2: 0, 3: 0, 1: errno.ECANCELED}
    bench.begin(lip, Op.KV_LOCK, 4, handle)
    await bench.ask(lip, Op.CANCEL, 5, 0, 4)  # before it has begun to wait
    assert lip.channel.errors[4] == errno.ECANCELED
    bench.begin(lip, Op.KV_LOCK, 6, handle, flags=LOCK_NOWAIT)
    assert lip.channel.errors[6] == errno.EWOULDBLOCK
    bench.fs.kv_close(holder)
    bench.begin(lip, Op.KV_LOCK, 7, handle, flags=LOCK_NOWAIT)
    assert lip.channel.errors[7] == 0
    assert lip.calls == {}
    assert lip.num_later == 0


async def test_a_file_is_made_at_the_quota_as_soon_as_the_kernel_has_forgotten_a_removed_one(quick):
    lip = quick.lip(1000)
    file = quick.fs.kv_create(lip.credentials, "a.kv")
    quick.fs.pool.accounts.limit(AccountLimits(num_files=1))
    file.inode.lookups = 1
    quick.fs.kv_close(file)
    quick.fs.kv_remove(lip.credentials, "a.kv")
    await quick.ask(lip, Op.KV_CREATE, 1, 0, 0o600, payload=b"b.kv")
    assert lip.channel.errors == {}
    quick.tree.forget(file.inode, 1)
    await trio.testing.wait_all_tasks_blocked()
    assert lip.channel.errors == {1: 0}
    assert (lip.num_later, len(lip.handles)) == (0, 1)


# ---- texts


def test_no_call_converts_many_tokens_of_a_reply(monkeypatch):
    """A call of C's holds the interpreter's lock, and so the trio thread."""
    converted, asarray = list[int](), np.asarray

    def noted(tokens, kind):
        converted.append(len(tokens))
        return asarray(tokens, kind)

    model: Any = SimpleNamespace(encode=lambda text, **_how: list(range(len(text))))
    tokenize: Any = Texts(lambda _lip: model).table()[Op.TOKENIZE].begin
    request = Request(Op.TOKENIZE, 0, 1, 0, (0, 0, 0, 0), b"x" * 100_000)
    monkeypatch.setattr(np, "asarray", noted)
    call: Any = SimpleNamespace(request=request, lip=SimpleNamespace(uid=0))
    reply: Any = trio.run(partial(tokenize, call))
    assert max(converted) <= AT_ONCE
    assert reply.args == (100_000,)
    assert reply.payload == np.arange(100_000, dtype=np.int32).tobytes()


async def test_a_user_has_one_text_in_a_worker_and_another_user_is_not_behind_his_others(bench):
    begin, begun = trio.open_memory_channel(3)
    may_end = threading.Event()

    def encode(text, **_how):
        trio.from_thread.run_sync(begin.send_nowait, text[:1])
        may_end.wait(30)
        return [1]

    bench.text = SimpleNamespace(encode=encode)
    hoarder, other = bench.lip(1000), bench.lip(1001)
    for lip, number, letter in ((hoarder, 1, b"a"), (hoarder, 2, b"b"), (other, 1, b"c")):
        await bench.ask(lip, Op.TOKENIZE, number, payload=letter * 5000)
    assert {await begun.receive(), await begun.receive()} == {"a", "c"}
    may_end.set()
    assert await begun.receive() == "b"
    while len(hoarder.channel.over) < 2 or not other.channel.over:  # noqa: ASYNC110 - a channel here has no event
        await trio.sleep(0.001)
    assert (hoarder.channel.errors, other.channel.errors) == ({1: 0, 2: 0}, {1: 0})


@pytest.mark.parametrize("ended_by", ["CANCEL", "the program's end", None])
async def test_a_conversation_that_is_being_tokenized_stops_when_its_call_or_its_program_ends(bench, ended_by):
    lip = bench.lip()
    async with trio.open_nursery() as bench.nursery:
        bench.begin(lip, Op.CHAT_TOKENS, 1, payload=b'{"messages": []}')
        await bench.text.has_begun.wait()
        if ended_by == "CANCEL":
            bench.begin(lip, Op.CANCEL, 2, 0, 1)
        elif ended_by is not None:
            bench.nursery.cancel_scope.cancel()
        bench.text.may_go_on.set()
    assert bench.text.was_stopped == (ended_by is not None)
    if ended_by == "CANCEL":
        assert lip.channel.errors == {2: 0, 1: errno.ECANCELED}
    assert lip.num_later == 0
