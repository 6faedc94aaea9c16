"""KV_CHANGES at the gate: who is told what, in which order, and how much work that takes."""

import json
import stat
from dataclasses import replace

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from kvfs._pages import lib
from kvfs.facts.changes import LOOKED_AT, ChangesReader, Place
from kvfs.names.tree import Credentials
from libsym.abi import NO_TIMEOUT, Op
from libsym.channel.server import Request
from libsym.errors import Invalid
from scheduler.connection.system_call import SystemCall
from scheduler.operations.changes import ANEW_S, Changes
from scheduler.wire.replies import Reply
from tests.scheduler.bench import ME
from tests.scheduler.served_bench import ANN, BOB, CREATE, Side, close, fork, framed, pred

GUEST = Credentials(1003, 1003)


class Reader:
    """A program that reads changes, and knows what it was told."""

    def __init__(self, bench, creds=ME):
        self.bench, self.creds = bench, creds
        self.changes = Changes(bench.fs, bench.batches)
        self.since, self.files, self.num_replies = 0, {}, 0

    async def ask(self, timeout_ms=0):
        """Whether the answer of a call is whole, and its rows, as kv_changes() puts it together."""
        lip = self.bench.lip()
        lip.credentials = self.creds
        row, whole, found = 0, False, list[dict]()
        while True:
            args = (self.since, row, timeout_ms, 0)
            reply = self.changes.changes(SystemCall(lip, Request(Op.KV_CHANGES, 0, 1, 0, args, b"")))
            reply = reply if isinstance(reply, Reply) else await reply
            self.since, row, _, begins = reply.args
            whole, found = (True, []) if begins else (whole, found)
            found += json.loads(reply.payload)
            self.num_replies += 1
            if not row:
                break
        self.files = {} if whole else self.files
        for each in found:
            self.files.pop(each["ino"], None)
            if not each.get("gone"):
                self.files[each["ino"]] = each
        return whole, found

    def see(self):
        return trio.run(self.ask)

    def names(self):
        self.see()
        return sorted(each.get("path", "") for each in self.files.values())


@pytest.fixture
def fs(bench):
    bench.fs.volume.tree.root.mode = 0o777
    return bench.fs


@pytest.fixture
def reader(bench, fs):
    return Reader(bench)


def make(fs, path, num=0, creds=ME, mode=0o600):
    file = fs.kv_create(creds, path, mode)
    grow(file, num)
    return file


def grow(file, num):
    if num:
        file.table.reserve([1] * num).commit_first(np.ones(num, np.int32))


def test_what_was_made_forked_grown_cut_renamed_and_closed_is_told_once(fs, reader):
    a = make(fs, "a.kv", 40)
    whole, (told,) = reader.see()
    assert whole
    assert (told["path"], told["tokens"], told["pages"], told["memory_pages"]) == ("a.kv", 40, 2, 2)
    assert reader.see() == (False, [])

    forked = fs.kv_fork(ME, a, None, 0o600)
    _, found = reader.see()
    told = {each["ino"]: each for each in found}[forked.inode.number]
    assert (told["origin"], told["shared"], told["tokens"]) == (a.inode.number, 40, 40)
    assert "path" not in told

    grow(forked, 3)
    grow(forked, 3)
    assert [(each["tokens"], each["shared"]) for each in reader.see()[1]] == [(46, 40)]
    fs.kv_truncate(forked, 10)
    assert [(each["tokens"], each["shared"]) for each in reader.see()[1]] == [(10, 10)]

    fs.kv_rename(ME, "a.kv", "b.kv")
    assert reader.names() == ["", "b.kv"]
    fs.kv_close(forked)
    (told,) = reader.see()[1]
    assert (told["ino"], told["gone"], told["origin"]) == (forked.inode.number, True, a.inode.number)
    fs.kv_remove(ME, "b.kv")
    assert reader.names() == [""], "a handle still has it"
    fs.kv_close(a)
    assert reader.names() == []


def test_a_file_with_a_second_name_stays_when_the_first_is_removed(fs, reader):
    file = make(fs, "a.kv")
    reader.see()
    tree = fs.volume.tree
    tree.link(file.inode, tree.root, b"b.kv")
    grow(file, 1)
    tree.unlink(tree.root, b"a.kv")
    assert reader.names() == ["b.kv"]


def test_a_file_with_new_content_is_told_with_it_and_one_without_is_gone(fs, reader):
    file = make(fs, "a.kv", 40)
    reader.see()
    fs.volume.empty_kv(file.inode)
    reader.see()
    assert [each.get("tokens", 0) for each in reader.files.values()] == [0]
    fs.kv_close(file)
    assert len(reader.files) == len(reader.names()) == 1, "the old version was closed, and not the file"
    fs.volume.truncate(file.inode, 0)
    assert reader.names() == []


def test_a_reader_is_told_of_files_that_it_could_list_and_of_its_own_forks(bench, fs):
    fs.kv_mkdir(ANN, "hers", 0o700)
    make(fs, "hers/a.kv", 40, ANN)
    open_to_all = make(fs, "all.kv", 40, ANN, mode=0o644)
    make(fs, "listed.kv", 40, ANN, mode=0o600)
    own = fs.kv_fork(ANN, open_to_all, None, 0o600)
    ann, bob, root = Reader(bench, ANN), Reader(bench, BOB), Reader(bench)
    assert ann.names() == root.names() == ["", "all.kv", "hers/a.kv", "listed.kv"]
    assert bob.names() == ["all.kv", "listed.kv"]
    told = {each["path"]: each for each in bob.files.values()}
    assert told["all.kv"]["readable"]
    assert told["all.kv"]["memory_pages"] == 2
    assert set(told["listed.kv"]) == {"ino", "path", "uid", "tokens", "pages"}
    grow(own, 1)
    fs.kv_close(own)
    assert bob.see() == (False, []), "nor that her fork has gone"
    assert [each["ino"] for each in ann.see()[1]] == [own.inode.number]
    fs.kv_remove(ANN, "all.kv")
    assert bob.names() == ["listed.kv"]
    assert [each for each in bob.see()[1] if len(each) > 2] == [], "a number alone"


def test_a_connection_of_a_domain_is_told_of_the_domain_alone(bench, fs):
    tree = fs.volume.tree
    inode = tree.make(tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=ANN.uid, gid=0)
    fs.volume.domains.set_limit(inode, b"user.kv.quota", b"1G", ANN.uid)
    confined = replace(ANN, root=inode)
    outside, inside = make(fs, "a.kv", 40, ANN), make(fs, "b.kv", 40, confined)
    other, own = fs.kv_fork(ANN, outside, None), fs.kv_fork(confined, inside, None)
    reader, free = Reader(bench, confined), Reader(bench, ANN)
    assert reader.names() == ["", "b.kv"]
    assert free.names() == ["", "", "a.kv", "d/b.kv"]
    fs.kv_close(other)
    fs.kv_remove(ANN, "a.kv")
    assert reader.see() == (False, [])
    fs.kv_close(own)
    assert reader.names() == ["b.kv"]


def test_a_connection_of_a_domain_hears_what_goes_in_the_domains_within(bench, fs):
    tree = fs.volume.tree
    outer = tree.make(tree.root, b"d", stat.S_IFDIR, mode=0o700, uid=ANN.uid, gid=0)
    fs.volume.domains.set_limit(outer, b"user.kv.quota", b"1G", ANN.uid)
    inner = tree.make(outer, b"e", stat.S_IFDIR, mode=0o700, uid=ANN.uid, gid=0)
    fs.volume.domains.set_limit(inner, b"user.kv.quota", b"1M", ANN.uid)
    of_outer, of_inner = (Reader(bench, replace(ANN, root=root)) for root in (outer, inner))
    fs.kv_close(make(fs, "d/a.kv", 0, ANN))
    file = make(fs, "d/e/b.kv", 40, ANN)
    fork = fs.kv_fork(of_inner.creds, file, None)
    assert (of_outer.names(), of_inner.names()) == (["", "a.kv", "e/b.kv"], ["", "b.kv"])
    fs.kv_close(fork)
    fs.kv_close(file)
    fs.kv_remove(ANN, "d/e/b.kv")
    assert (of_outer.names(), of_inner.names()) == (["a.kv"], [])
    fs.kv_remove(ANN, "d/a.kv")
    assert of_outer.names() == []
    assert of_inner.see() == (False, []), "the domain around it is not its own"


def test_a_directory_that_is_closed_renamed_or_opened_lets_readers_begin_anew(bench, fs):
    fs.kv_mkdir(ANN, "d", 0o755)
    make(fs, "d/a.kv", 40, ANN)

    async def scenario():
        bob = Reader(bench, BOB)
        seen = []
        for change in (
            lambda: None,
            lambda: fs.kv_rename(ANN, "d", "e"),
            lambda: fs.kv_chmod(ANN, "e", 0o700),
            lambda: fs.kv_chmod(ANN, "e", 0o755),
        ):
            change()
            whole, _ = await bob.ask()
            seen.append((whole, [each["path"] for each in bob.files.values()]))
            await trio.sleep(ANEW_S)
        assert seen == [(True, ["d/a.kv"]), (True, ["e/a.kv"]), (True, []), (True, ["e/a.kv"])]
        fs.kv_mkdir(ANN, "empty", 0o700)
        fs.kv_rename(ANN, "empty", "other")
        assert await bob.ask() == (False, [])
        fs.kv_chmod(ANN, "e", 0o700)
        assert (await bob.ask())[0]
        fs.kv_chmod(ANN, "e", 0o755)
        assert not (await bob.ask())[0], "not twice in so short a time"
        with trio.fail_after(2 * ANEW_S):
            assert (await bob.ask(NO_TIMEOUT))[0], "but then"

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_a_reader_that_comes_too_late_or_from_another_daemon_gets_all_files(fs, reader):
    make(fs, "a.kv")
    reader.see()
    late = reader.since
    for _ in range(lib.CORE_JOURNAL):
        lib.core_change_of_none(fs.pool.core)
    assert reader.see() == (False, []), "in time"
    for since in (late, late - 10**6, late + 10**12):
        reader.since = since
        lib.core_change_of_none(fs.pool.core)
        whole, found = reader.see()
        assert (whole, [each["path"] for each in found]) == (True, ["a.kv"])


def test_a_file_whose_change_has_left_the_journal_unread_takes_no_other_files_place(fs, reader):
    reader.see()
    core, old = fs.pool.core, make(fs, "old.kv")
    for _ in range(lib.CORE_JOURNAL - 2):
        lib.core_change_of_none(core)
    reader.since = core.last_change
    new = make(fs, "new.kv")  # its second change has the place of the last change of the old file
    fs.kv_remove(ME, "old.kv")
    fs.kv_close(old)
    assert new.inode.number in [each["ino"] for each in reader.see()[1] if "path" in each]


def test_many_files_come_in_replies_of_bounded_size(bench, fs, reader):
    for number in range(1200):
        fs.kv_close(make(fs, f"{number:04}{'n' * 200}.kv"))
    assert len(reader.names()) == 1200
    assert 2 <= reader.num_replies <= 5


def test_a_list_ends_even_if_the_journal_runs_over_meanwhile(fs, reader):
    for number in range(4 * LOOKED_AT):
        fs.kv_close(make(fs, f"{number}.kv"))

    async def scenario():
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def change():
                while True:
                    for _ in range(lib.CORE_JOURNAL + 1):
                        lib.core_change_of_none(fs.pool.core)
                    await trio.lowlevel.checkpoint()

            with trio.fail_after(10):
                whole, found = await reader.ask()
            assert (whole, len(found)) == (True, 4 * LOOKED_AT)
            nursery.cancel_scope.cancel()

    trio.run(scenario)


def test_a_list_ends_even_if_directories_are_closed_and_opened_meanwhile(fs, reader):
    for number in range(4 * LOOKED_AT):
        fs.kv_close(make(fs, f"{number}.kv"))
    fs.kv_mkdir(ME, "d", 0o700)
    make(fs, "d/a.kv")

    clock = MockClock()

    async def scenario():
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def change():
                while True:
                    fs.kv_chmod(ME, "d", 0o700)
                    clock.jump(ANEW_S)
                    await trio.lowlevel.checkpoint()

            with trio.fail_after(200 * ANEW_S):
                whole, found = await reader.ask()
            assert (whole, len(found)) == (True, 4 * LOOKED_AT + 1)
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=clock)


def test_nothing_is_noted_before_the_first_reader_and_little_that_no_reader_has_read(fs, reader):
    core = fs.pool.core
    file = make(fs, "a.kv", 1)
    assert core.last_change == 0
    reader.see()
    for _ in range(1000):
        grow(file, 1)
        fs.kv_close(fs.kv_fork(ME, file, None))
    assert core.last_change - reader.since <= 2001, (
        "one for the file, and two for each fork: made, named by its number and closed"
    )
    told = reader.see()[1]
    assert len([each for each in told if not each.get("gone")]) == 1


def test_a_call_waits_for_a_change_that_its_caller_may_see(bench, fs):
    file = make(fs, "a.kv", 1)
    fs.kv_mkdir(ME, "mine", 0o700)
    other = make(fs, "mine/b.kv", 1)

    async def scenario():
        bob = Reader(bench, BOB)
        await bob.ask()
        began_s = trio.current_time()
        assert await bob.ask(500) == (False, [])
        assert 0.5 <= trio.current_time() - began_s < 0.6
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def change():
                await trio.sleep(3)
                grow(other, 1)
                await trio.sleep(3)
                grow(file, 1)
                fs.pool.take_news()

            began_s = trio.current_time()
            assert [each["path"] for each in (await bob.ask(NO_TIMEOUT))[1]] == ["a.kv"]
            assert 6 <= trio.current_time() - began_s < 6.2

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("args", [(-1, 0, 0), (0, -1, 0), (0, 1 << 31, 0), (0, 0, -2)])
def test_a_place_or_a_time_that_no_reply_gave_is_refused(bench, args):
    call = SystemCall(bench.lip(), Request(Op.KV_CHANGES, 0, 1, 0, (*args, 0), b""))
    with pytest.raises(Invalid):
        Changes(bench.fs, bench.batches).changes(call)


def test_branches_are_told_and_python_has_no_objects_of_them(tmp_path):
    side = Side(tmp_path / "side")

    async def scenario():
        ann, bob = Reader(side, ANN), Reader(side, BOB)
        await ann.ask()
        await bob.ask()
        base = await side.call(CREATE)
        await side.ask(pred(base, *[7] * 40))
        branches = [await side.call(fork(base)) for _ in range(3)]
        await side.call(pred(branches[0], 7))
        side.batches.sync()
        num_objects = len(list(side.fs.volume.tree))
        _, found = await ann.ask()
        assert await bob.ask() == (False, [])
        assert sorted((each["tokens"], each.get("shared", 0)) for each in found) == [
            (40, 0),
            (40, 40),
            (40, 40),
            (41, 40),
        ]
        assert {each["program"] for each in found} == {side.program.program.id}
        for branch in branches:
            await side.ask(close(branch))
        assert [each["gone"] for each in (await ann.ask())[1]] == [True] * 3
        assert len(list(side.fs.volume.tree)) == num_objects
        assert side.fs.volume.tree.core.num_branches == 0
        await side.ask(framed(Op.KV_CLOSE, base))
        assert len(ann.files) == 1
        await ann.ask()
        assert not ann.files

    side.run_test(scenario)


def test_a_look_describes_no_more_files_than_it_may(fs):
    for number in range(3 * LOOKED_AT):
        make(fs, f"{number}.kv")
    changes = ChangesReader(fs.volume)
    place, num_looks = Place(), 0
    while not num_looks or place.row:
        place, _, found = changes.look(place, ME)
        assert len(found) <= LOOKED_AT
        num_looks += 1
    assert num_looks == 3
