"""The gate's calls that a coroutine answers later: their number, and their remains when their program goes."""

import errno
import threading
from types import SimpleNamespace

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
    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        self.text = Conversation()

    def holder(self):
        """A handle of somebody else's on a file that everybody may open, with its lock."""
        file = self.fs.kv_create(Credentials(0, 0), "a.kv", 0o666)
        self.fs.volume.locks.acquire_nowait(file.inode.number, file, exclusive=True)
        return file

    def open_new(self, lip):
        return lip.add(self.fs.kv_create(lip.credentials, None))

    def open(self, lip):
        return lip.add(self.fs.kv_open(lip.credentials, "a.kv", write=True))


@pytest.fixture
def bench(tmp_path):
    return Calls(tmp_path)


def request(op, number, handle=0, *, flags=0, args=(0, 0), payload=b""):
    return Request(op, flags, number, handle, (*args, 0, 0), payload)


def test_every_system_call_has_exactly_one_operation(bench):
    """Two for one are refused as the table is made."""
    assert all_operations(bench.fs, bench.batches, bench.text, bench.programs, dict).by_op.keys() == set(Op)


def test_a_claim_goes_to_the_next_when_its_file_is_closed_or_its_program_goes(bench):
    async def main():
        first, second, third = bench.lip(), bench.lip(), bench.lip()
        async with trio.open_nursery() as nursery:
            for lip in (first, second, third):
                bench.gate.handle(lip, request(Op.KV_CLAIM, 1, args=(0o600, 0), payload=b"new.kv"), nursery)
                await trio.testing.wait_all_tasks_blocked()
            assert [[*lip.channel.args] for lip in (first, second, third)] == [[1], [], []]
            assert first.channel.args[1][3] == 0, "it lies in no directory yet"
            bench.gate.handle(first, request(Op.KV_CLOSE, 2, 1), nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert second.channel.args[1][3] == 0
            await bench.gate.see_off(second)
            await trio.testing.wait_all_tasks_blocked()
            assert third.channel.args[1][3] == 0
            bench.gate.handle(first, request(Op.KV_CLAIM, 3, args=(0o600, 0), payload=b"new.kv"), nursery)
            bench.gate.handle(third, request(Op.KV_NAME, 2, 1), nursery)
            await trio.testing.wait_all_tasks_blocked()
            handle, _, inode, directory = first.channel.args[3]
            assert (handle, inode) == (2, third.channel.args[2][2]), "it was made meanwhile: opened"
            assert directory == third.channel.args[2][3] != 0
        assert len(bench.fs.claims) == 0

    trio.run(main)


def test_a_claim_of_another_user_holds_up_nobody_and_a_team_for_a_bounded_time(bench):
    """Each user has one program that computes. A program that would take another's file waits for it a while."""

    async def main():
        bench.tree.root.mode = 0o1777
        hostile, mine, next_mine, team, patient = lips = [bench.lip(uid) for uid in (4242, 1000, 1000, 1001, 1002)]
        async with trio.open_nursery() as nursery:
            for lip in lips:
                owner = ANY_OWNER if lip in (team, patient) else 0
                bench.gate.handle(lip, request(Op.KV_CLAIM, 1, args=(0o644, owner), payload=b"new.kv"), nursery)
                await trio.lowlevel.checkpoint()
            assert [[*lip.channel.args] for lip in lips] == [[1], [1], [], [], []]
            await trio.sleep(PATIENCE_S + 1)
            assert [[*lip.channel.args] for lip in lips] == [[1], [1], [], [1], [1]]
            bench.gate.handle(mine, request(Op.KV_NAME, 2, 1), nursery)
            await trio.sleep(1)
            assert next_mine.channel.args[1][3] != 0, "the file is there: opened"
            bench.gate.handle(team, request(Op.KV_NAME, 2, 1), nursery)
            bench.gate.handle(hostile, request(Op.KV_CLAIM, 3, args=(0o644, 0), payload=b"new.kv"), nursery)
            await trio.sleep(1)
            assert team.channel.errors[2] == errno.EEXIST, "the first that has its name stays"
            assert hostile.channel.errors[3] == errno.EACCES
            for lip in lips:
                await bench.gate.see_off(lip)
        assert len(bench.fs.claims) == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))


def test_a_team_waits_for_the_user_who_computes_and_takes_that_file(bench):
    async def main():
        bench.tree.root.mode = 0o1777
        first, second = bench.lip(1000), bench.lip(1001)
        async with trio.open_nursery() as nursery:
            for lip in (first, second):
                claim = request(Op.KV_CLAIM, 1, args=(0o644, ANY_OWNER), payload=b"new.kv")
                bench.gate.handle(lip, claim, nursery)
                await trio.testing.wait_all_tasks_blocked()
            assert not second.channel.args
            bench.gate.handle(first, request(Op.KV_NAME, 2, 1), nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert second.channel.args[1][2] == first.channel.args[2][2], "the same inode"
            for lip in (first, second):
                await bench.gate.see_off(lip)
        assert len(bench.fs.claims) == 0

    trio.run(main)


@pytest.mark.parametrize("owner", [-2, 1 << 32])
def test_an_owner_that_is_no_uid_is_refused(bench, owner):
    lip = bench.lip()
    bench.gate.handle(lip, request(Op.KV_CLAIM, 1, args=(0o600, owner), payload=b"new.kv"), None)
    assert lip.channel.errors == {1: errno.EINVAL}


def test_a_claim_that_is_cancelled_behind_its_answer_or_as_it_is_given_goes_to_the_next(bench):
    async def main():
        first, second, third = lips = bench.lip(), bench.lip(), bench.lip()
        async with trio.open_nursery() as nursery:
            for lip in lips:
                bench.gate.handle(lip, request(Op.KV_CLAIM, 1, args=(0o600, 0), payload=b"new.kv"), nursery)
                await trio.testing.wait_all_tasks_blocked()
            bench.gate.handle(first, request(Op.CANCEL, 2, args=(1, 0)), nursery)  # was answered
            bench.gate.handle(second, request(Op.CANCEL, 2, args=(1, 0)), nursery)  # has it in this moment
            await trio.testing.wait_all_tasks_blocked()
            assert third.channel.args[1][0] == 1
            assert not first.handles
            assert not second.handles
            bench.gate.handle(third, request(Op.KV_NAME, 2, 1), nursery)
            bench.gate.handle(third, request(Op.CANCEL, 3, args=(1, 0)), nursery)
            assert list(third.handles) == [1], "it has its name, and is the program's"
            bench.gate.handle(third, request(Op.KV_CLOSE, 4, 1), nursery)
            assert not third.calls
            assert not third.tied
        assert len(bench.fs.claims) == 0

    trio.run(main)


def test_a_wait_for_a_claim_that_is_cancelled_takes_none(bench):
    async def main():
        holder, waiter = bench.lip(), bench.lip()
        async with trio.open_nursery() as nursery:
            for lip in (holder, waiter):
                bench.gate.handle(lip, request(Op.KV_CLAIM, 1, args=(0o600, 0), payload=b"new.kv"), nursery)
                await trio.testing.wait_all_tasks_blocked()
            bench.gate.handle(waiter, request(Op.CANCEL, 2, args=(1, 0)), nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert waiter.channel.errors[1] == errno.ECANCELED
        await bench.gate.see_off(holder)
        assert len(bench.fs.claims) == 0
        assert not waiter.handles

    trio.run(main)


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
        await bench.gate.see_off(greedy)
        assert len(bench.fs.volume.locks) == 0

    trio.run(main)


def test_what_a_program_waited_for_is_forgotten_when_it_goes(bench):
    async def main():
        holder, gone, heir = bench.holder(), bench.lip(), bench.lip()
        async with trio.open_nursery() as nursery:
            bench.gate.handle(gone, request(Op.KV_LOCK, 1, bench.open(gone)), nursery)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        await bench.gate.see_off(gone)
        assert gone.channel.errors == {}
        bench.fs.kv_close(holder)
        async with trio.open_nursery() as nursery:
            bench.gate.handle(heir, request(Op.KV_LOCK, 1, bench.open(heir), flags=LOCK_NOWAIT), nursery)
        assert heir.channel.errors == {1: 0}

    trio.run(main)


NO_PAYLOAD = sorted(
    {Op.KV_CLOSE, Op.KV_TRUNCATE, Op.KV_SYNC, Op.KV_READ, Op.KV_LOCK, Op.KV_UNLOCK, Op.CANCEL, Op.PING}
    | {Op.GETRUSAGE, Op.VOCABULARY, Op.MODEL_INFO, Op.STAT, Op.CHECK}
)


@pytest.mark.parametrize("op", NO_PAYLOAD)
def test_a_payload_that_an_operation_has_no_use_for_is_refused(bench, op):
    async def main():
        lip = bench.lip()
        handle = bench.open_new(lip)
        async with trio.open_nursery() as nursery:
            bench.gate.handle(lip, request(op, 1, handle, payload=b"x"), nursery)
        assert lip.channel.errors == {1: errno.EINVAL}
        assert list(lip.handles) == [handle]

    trio.run(main)


def test_what_a_connection_has_under_way_is_bounded_in_bytes_and_what_ends_calls_gets_through(bench):
    """A long list is under way as long as nobody else gets a turn; its payload is a name with NULs behind it."""

    async def main():
        holder, lip = bench.holder(), bench.lip()
        handle = bench.open(lip)
        large = b"." + bytes(1_000_000)
        count = MAX_CONNECTION_BYTES // len(large)
        async with trio.open_nursery() as nursery:
            bench.gate.handle(lip, request(Op.KV_LOCK, 1, handle), nursery)
            for number in range(2, count + 2):
                bench.gate.handle(lip, request(Op.KV_LIST, number, payload=large), nursery)
            assert lip.channel.errors == {}
            bench.gate.handle(lip, request(Op.KV_LIST, 100, payload=large), nursery)
            assert lip.channel.errors == {100: errno.EAGAIN}
            bench.gate.handle(lip, request(Op.CANCEL, 101, args=(2, 0)), nursery)
            bench.gate.handle(lip, request(Op.KV_UNLOCK, 102, handle), nursery)
            bench.gate.handle(lip, request(Op.KV_CREATE, 103, payload=b"small.kv", args=(0o600, 0)), nursery)
            assert [lip.channel.errors[number] for number in (101, 102, 103)] == [0, 0, 0]
            await trio.testing.wait_all_tasks_blocked()
            assert lip.under_way.num_bytes == 0
            bench.gate.handle(lip, request(Op.KV_LIST, 104, payload=large), nursery)
        assert lip.channel.errors[104] == 0
        bench.fs.kv_close(holder)

    trio.run(main)


def test_what_a_user_has_under_way_is_bounded_over_all_of_its_connections(bench):
    async def main():
        large = b"." + bytes(1_000_000)
        per_connection = MAX_CONNECTION_BYTES // len(large)
        own = [bench.lip() for _ in range(MAX_USER_BYTES // MAX_CONNECTION_BYTES + 2)]
        other = bench.lip(uid=7)
        for lip in (*own, other):
            bench.gate.welcome(lip)
        async with trio.open_nursery() as nursery:
            for lip in own:
                for number in range(1, per_connection + 1):
                    bench.gate.handle(lip, request(Op.KV_LIST, number, payload=large), nursery)
            refused = [len(lip.channel.errors) for lip in own]
            assert refused[0] == refused[1] == 0
            assert sum(refused) == len(own) * per_connection - MAX_USER_BYTES // len(large)
            bench.gate.handle(other, request(Op.KV_LIST, 1, payload=large), nursery)
            assert other.channel.errors == {}
            await bench.gate.see_off(own[0])
            bench.gate.handle(own[1], request(Op.KV_LIST, 100, payload=b"."), nursery)
            bench.gate.handle(own[-1], request(Op.KV_LIST, 100, payload=large), nursery)
            assert 100 not in own[-1].channel.errors, "what a program had that went is nobody's"
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize("goes_early", [True, False])
def test_an_extract_of_a_program_that_goes_gives_its_pages_back(bench, goes_early):
    async def main():
        lip = bench.lip()
        file = bench.fs.kv_create(lip.credentials, "a.kv")
        handle = bench.open(lip)
        commit_all(bench.fs.reserve(file, [1] * 320, range(320)))
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
        await bench.gate.see_off(lip)
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
        assert lip.calls == {}
        assert lip.num_later == 0

    trio.run(main)


def test_a_file_is_made_at_the_quota_as_soon_as_the_kernel_has_forgotten_a_removed_one(bench):
    async def main():
        lip, tree = bench.lip(1000), bench.tree
        tree.root.mode = 0o1777
        file = bench.fs.kv_create(lip.credentials, "a.kv")
        bench.fs.pool.accounts.limit(AccountLimits(num_files=1))
        file.inode.lookups = 1
        bench.fs.kv_close(file)
        bench.fs.kv_remove(lip.credentials, "a.kv")
        async with trio.open_nursery() as nursery:
            bench.gate.handle(lip, request(Op.KV_CREATE, 1, args=(0o600, 0), payload=b"b.kv"), nursery)
            await trio.testing.wait_all_tasks_blocked()
            assert lip.channel.errors == {}
            tree.forget(file.inode, 1)
        assert lip.channel.errors == {1: 0}
        assert (lip.num_later, len(lip.handles)) == (0, 1)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))


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


def test_no_call_converts_many_tokens_of_a_reply(monkeypatch):
    """A call of C's holds the interpreter's lock, and so the trio thread."""
    converted, asarray = list[int](), np.asarray

    def noted(tokens, kind):
        converted.append(len(tokens))
        return asarray(tokens, kind)

    model = SimpleNamespace(encode=lambda text, **_how: list(range(len(text))))
    tokenize = Texts(model).table()[Op.TOKENIZE].begin
    call = SimpleNamespace(request=request(Op.TOKENIZE, 1, payload=b"x" * 100_000), lip=SimpleNamespace(uid=0))
    monkeypatch.setattr(np, "asarray", noted)
    reply = trio.run(tokenize, call)
    assert max(converted) <= AT_ONCE
    assert reply.args == (100_000,)
    assert reply.payload == np.arange(100_000, dtype=np.int32).tobytes()


def test_a_user_has_one_text_in_a_worker_and_another_user_is_not_behind_his_others(bench):
    begin, begun = trio.open_memory_channel(3)
    may_end = threading.Event()

    def encode(text, **_how):
        trio.from_thread.run_sync(begin.send_nowait, text[:1])
        may_end.wait(30)
        return [1]

    bench.text = SimpleNamespace(encode=encode)

    async def main():
        hoarder, other = bench.lip(1000), bench.lip(1001)
        async with trio.open_nursery() as nursery:
            for lip, number, letter in ((hoarder, 1, b"a"), (hoarder, 2, b"b"), (other, 1, b"c")):
                bench.gate.handle(lip, request(Op.TOKENIZE, number, payload=letter * 5000), nursery)
                await trio.testing.wait_all_tasks_blocked()
            assert {await begun.receive(), await begun.receive()} == {"a", "c"}
            may_end.set()
            assert await begun.receive() == "b"
        assert (hoarder.channel.errors, other.channel.errors) == ({1: 0, 2: 0}, {1: 0})

    trio.run(main)


@pytest.mark.parametrize("ended_by", ["CANCEL", "the program's end", None])
def test_a_conversation_that_is_being_tokenized_stops_when_its_call_is_cancelled_or_its_program_goes(bench, ended_by):
    async def main():
        lip = bench.lip()
        async with trio.open_nursery() as nursery:
            bench.gate.handle(lip, request(Op.CHAT_TOKENS, 1, payload=b'{"messages": []}'), nursery)
            await bench.text.has_begun.wait()
            if ended_by == "CANCEL":
                bench.gate.handle(lip, request(Op.CANCEL, 2, args=(1, 0)), nursery)
            elif ended_by is not None:
                nursery.cancel_scope.cancel()
            bench.text.may_go_on.set()
        assert bench.text.was_stopped == (ended_by is not None)
        if ended_by == "CANCEL":
            assert lip.channel.errors == {2: 0, 1: errno.ECANCELED}
        assert lip.num_later == 0

    trio.run(main)
