"""The names of a fleet: members in one process, with a real etcd and real connections between them."""

import base64
import errno
import json
import random
import signal
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.fs import OpenKv
from kvfs.names.inode import Credentials, Inode
from libsym.abi import Advice
from libsym.errors import (
    Busy,
    CrossDevice,
    Exists,
    Invalid,
    NoAccess,
    NotEmpty,
    NotFound,
    NotPermitted,
    NotSupported,
    SymError,
    TimedOut,
)
from symphony.fleet import upkeep, versions
from symphony.fleet.draining import Holding
from symphony.fleet.events import Publisher
from symphony.fleet.keys import make_keys
from symphony.fleet.records import Keys, NameRecord, record_of
from tests.symphony.etcd import EtcdServer
from tests.symphony.fleet.members import ROOT, USER, Member, fleet_of
from tests.symphony.fleet.routers import Router

Fleet = Callable[..., AbstractAsyncContextManager[list[Member]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory, ["east", "west", "north"])
    return directory


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A fleet of the test's own."""
    return "".join(each if each.isalnum() else "-" for each in request.node.name)


@pytest.fixture
def fleet(tmp_path: Path, keys: Path, server: EtcdServer, name: str) -> Fleet:
    return partial(fleet_of, tmp_path, keys, server.url, name)


async def same(members: list[Member], listing: list[str] | None = None) -> None:
    """Wait until all members have the same names."""
    wanted = set() if listing is None else {str(listing)}
    await eventually(lambda: len({str(each.listing()) for each in members} | wanted) == 1)


async def eventually(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def error_of(call: Awaitable[object]) -> SymError | None:
    try:
        await call
    except SymError as error:
        return error
    return None


async def test_a_name_that_one_machine_makes_moves_or_removes_is_the_same_on_the_others(fleet: Fleet) -> None:
    async with fleet(names=("east", "west", "north")) as (east, west, north):
        await east.call(east.fs.kv_chmod, ROOT, "fleet", 0o1777)
        await west.mkdir("fleet/a", 0o770, USER)
        await west.call(west.fs.kv_chmod, USER, "fleet/a", 0o2770)
        assert await north.call(north.fs.directory, ROOT, "fleet/a")
        await north.mkdir("fleet/a/b")
        made = await east.make("fleet/a/b/f.kv", 5)
        east.fs.kv_close(made)
        await west.call(west.fs.kv_rename, ROOT, "fleet/a", "fleet/c")
        links = await west.call(west.fs.find, ROOT, "fleet/c")
        await west.call(partial(_link, west, links, b"l"))
        await east.call(east.fs.kv_chmod, ROOT, "fleet/c/b/f.kv", 0o640)
        wanted = [
            "/c dir 2770 1000 1000 ",
            "/c/b dir 2755 0 1000 ",
            "/c/b/f.kv kv 640 0 1000 ",
            "/c/l link 777 7 1000 c/b/../é",
        ]
        await same([east, west, north])
        assert north.listing() == wanted
        assert await north.length("fleet/c/b/f.kv") == 5
        await north.call(north.fs.kv_remove, ROOT, "fleet/c/b/f.kv")
        await west.call(west.tree.rmdir, links, b"b")
        await same([east, west, north], [wanted[0], wanted[3]])
        await eventually(lambda: not any(each.names.local.entries for each in (east, west, north)))


def _link(member: Member, directory: Inode, name: bytes) -> Inode:
    return member.tree.make(directory, name, stat.S_IFLNK, mode=0o777, uid=7, gid=8, target="c/b/../é".encode())


async def test_what_a_fleet_does_not_have_is_refused(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        fs, tree, root = east.fs, east.tree, east.names.root
        fs.kv_close(await east.make("fleet/f.kv", 5))
        inode = await east.call(fs.find, ROOT, "fleet/f.kv")
        local = fs.kv_create(ROOT, "x.kv")
        make = partial(tree.make, mode=0o600, uid=0, gid=0)
        refused: list[tuple[type[SymError], Callable[[], object]]] = [
            (NotPermitted, partial(tree.link, inode, root, b"g")),
            (NotSupported, partial(make, root, b"p", stat.S_IFIFO)),
            (Invalid, partial(make, root, b".moving-1", stat.S_IFDIR)),
            (Invalid, partial(tree.rename, root, b"f.kv", root, b"f.kv", 2)),
            (CrossDevice, partial(tree.rename, root, b"f.kv", east.names.local, b"f.kv")),
            (CrossDevice, partial(fs.kv_rename, ROOT, "x.kv", "fleet/x.kv")),
            (Busy, partial(fs.kv_rename, ROOT, "fleet", "g")),
            (NotEmpty, partial(tree.rmdir, tree.root, b"fleet")),
            (NotSupported, partial(fs.kv_open_or_claim, ROOT, "fleet/y.kv", write=True)),
            (NotSupported, partial(fs.begin_merge, ROOT, [local], "fleet/y.kv", 0o600, rebase=False)),
            (NotSupported, partial(fs.kv_advise, ROOT, "fleet/f.kv", [(Advice.TTL, 1000)])),
            (NoAccess, partial(fs.kv_open, Credentials(5, 5), "fleet/f.kv", write=False)),
            (NotFound, partial(fs.kv_open, ROOT, "fleet/z.kv", write=False)),
        ]
        for kind, call in refused:
            assert isinstance(await error_of(east.call(call)), kind), call
        fs.kv_close(local)
        await same([east, west], ["/f.kv kv 600 0 0 "])


async def test_of_two_machines_that_make_a_name_at_the_same_time_one_does(fleet: Fleet) -> None:
    async with fleet() as members:
        for number in range(5):
            failed = list[SymError]()

            async def make(member: Member, path: str = f"fleet/{number}", failed: list[SymError] = failed) -> None:
                if (error := await error_of(member.mkdir(path))) is not None:
                    failed.append(error)

            async with trio.open_nursery() as nursery:
                for member in members * 2:
                    nursery.start_soon(make, member)
            assert [type(each) for each in failed] == [Exists] * 3
        await same(members, [f"/{number} dir 755 0 0 " for number in range(5)])


async def test_directories_are_not_moved_into_each_other_by_two_machines(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        for path in ("fleet/a", "fleet/a/x", "fleet/b", "fleet/b/y"):
            await east.mkdir(path)
        await same([east, west])
        errors = list[SymError | None]()

        async def move(member: Member, old: str, new: str) -> None:
            errors.append(await error_of(member.call(member.fs.kv_rename, ROOT, old, new)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, east, "fleet/a", "fleet/b/y/a")
            nursery.start_soon(move, west, "fleet/b", "fleet/a/x/b")
        assert sorted(type(each).__name__ for each in errors) == ["Invalid", "NoneType"] or sorted(
            type(each).__name__ for each in errors
        ) == ["NoneType", "NotFound"]
        await same([east, west])
        assert len(east.listing()) == 4


async def test_one_machine_at_a_time_writes_and_the_others_read_the_last_synced_version(fleet: Fleet) -> None:
    async def east_gives_back(west: Member):
        with trio.fail_after(20):
            while True:
                with suppress(Busy):
                    return await west.open("fleet/f.kv", write=True)
                await trio.sleep(0.01)

    async with fleet(copies=2) as (east, west):
        writing = await east.make("fleet/f.kv", 40)
        assert await error_of(west.open("fleet/f.kv")) is not None  # no version yet: an empty plain file
        await east.fs.sync(writing)
        assert len(west.names.local.entries) == 1, "a sync returns when the other machine has the version"
        east.machine.append(writing, range(40, 60))
        refusal = await error_of(west.open("fleet/f.kv", write=True))
        assert isinstance(refusal, Busy)
        assert "on the machine east" in str(refusal)
        reading = await west.open("fleet/f.kv")
        assert reading.table.length == 40
        assert west.machine.values(reading) == east.machine.values(writing)[: reading.table.length]
        assert await east.length("fleet/f.kv") == 60, "the machine that writes sees what it has written"
        await east.fs.sync(writing)
        await east.fs.sync(writing)  # nothing is left to do
        assert await west.length("fleet/f.kv") == 60
        assert reading.table.length == 40, "an open version stays as it is"
        west.fs.kv_close(reading)
        east.machine.append(writing, range(60, 70))
        east.fs.kv_close(writing)  # the rest is synced, and the right to write is given back
        other = await east_gives_back(west)
        assert other.table.length == 70
        west.machine.append(other, range(70, 75))
        west.fs.kv_truncate(other, 3)
        west.fs.kv_close(other)
        await eventually(lambda: len(east.names.local.entries) == 1)
        with trio.fail_after(20):
            while await east.length("fleet/f.kv") != 3:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await eventually(lambda: len(west.names.local.entries) == len(east.names.local.entries) == 1)


async def test_a_read_waits_for_the_version_that_an_open_to_write_brings(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        file = await east.make("fleet/f.kv", 40)
        await east.fs.sync(file)
        east.fs.kv_close(file)
        await eventually(lambda: not east.names._mirror.writing)
        await west.call(west.fs.directory, ROOT, "fleet")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(west.open, "fleet/f.kv", write=True))
            with trio.fail_after(20):
                while "west" not in west.names._mirror.writing.values():
                    await trio.lowlevel.checkpoint()
            assert await west.length("fleet/f.kv") == 40


async def test_a_read_that_meets_a_sync_gets_the_old_version_or_the_new_one(fleet: Fleet) -> None:
    async with fleet(names=("east", "west", "north")) as (east, *others):
        file = await east.make("fleet/f.kv", 10)
        await east.fs.sync(file)
        is_over = trio.Event()

        async def read(member: Member) -> None:
            while not is_over.is_set():
                assert await member.length("fleet/f.kv") >= 10

        async with trio.open_nursery() as nursery:
            for member in others:
                nursery.start_soon(read, member)
            for number in range(10, 40):
                east.machine.append(file, range(number, number + 1))
                await east.fs.sync(file)
            is_over.set()
        assert await others[0].length("fleet/f.kv") == 40
        east.fs.kv_close(file)


async def test_a_file_whose_open_fails_or_that_nobody_opens_is_free_to_write_again(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        root = east.names.root
        await east.call(partial(east.fs.volume.make_plain, root, b"f.kv", 0o600, 0, 0))  # as mknod(2)
        with trio.fail_after(20):
            while isinstance(await error_of(west.open("fleet/f.kv", write=True)), Busy):  # noqa: ASYNC110
                await trio.sleep(0.01)
        await east.call(east.fs.kv_remove, ROOT, "fleet/f.kv")  # an open that failed has given the right back, too


async def test_a_machine_that_was_cut_off_can_not_sync_over_a_newer_version(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        files = [await east.make(f"fleet/{name}.kv", 10) for name in "fg"]
        for file in files:
            await east.fs.sync(file)
            east.machine.append(file, range(10, 20))
        assert await west.length("fleet/f.kv") == 10
        await trio.to_thread.run_sync(east.etcd.revoke, east.membership.lease)  # as after ten seconds of silence
        await eventually(lambda: not west.names._mirror.writing)
        newer = await west.open("fleet/f.kv", write=True)
        west.machine.append(newer, range(10, 13))
        await west.fs.sync(newer)
        refusal = await error_of(east.fs.sync(files[0]))
        assert refusal is not None
        assert refusal.errno == errno.ESTALE
        assert await east.length("fleet/f.kv") == 13
        await east.membership._renew()
        await east.fs.sync(files[1])  # nobody has written this one, so the right is taken again
        assert await west.length("fleet/g.kv") == 20
        for file in files:
            east.fs.kv_close(file)
        west.fs.kv_close(newer)


async def test_a_machine_that_was_asleep_asks_before_it_shows_what_it_has(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        file = await east.make("fleet/f.kv", 10)
        await east.fs.sync(file)
        assert await west.length("fleet/f.kv") == 10
        east.following.cancel()
        await trio.to_thread.run_sync(east.etcd.revoke, east.membership.lease)
        east.membership._lease_ends_s = 0.0
        await eventually(lambda: not west.names._mirror.writing)
        newer = await west.open("fleet/f.kv", write=True)
        west.machine.append(newer, range(10, 13))
        await west.fs.sync(newer)
        found = list[int]()

        async def read() -> None:
            found.append(await east.length("fleet/f.kv"))

        async with trio.open_nursery() as nursery, trio.open_nursery() as reading:
            reading.start_soon(read)
            nursery.start_soon(east.follow)
            await eventually(lambda: bool(found))
            nursery.cancel_scope.cancel()
        assert found == [13]
        west.fs.kv_close(newer)
        east.fs.kv_close(file)


async def test_a_sync_of_a_machine_that_was_asleep_for_a_moment_succeeds(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        file = await east.make("fleet/f.kv", 10)
        east.membership._lease_ends_s = 0.0
        await east.fs.sync(file)
        assert await west.length("fleet/f.kv") == 10
        east.fs.kv_close(file)


async def test_a_right_to_write_that_no_call_knows_is_given_back(fleet: Fleet, name: str) -> None:
    async with fleet() as (east, west):
        file = await west.make("fleet/f.kv", 10)
        await west.fs.sync(file)
        west.fs.kv_close(file)
        await eventually(lambda: not east.names._mirror.writing and not west.names._mirror.writing)
        inode = await east.call(east.fs.find, ROOT, "fleet/f.kv")
        right = Keys(name).right(east.names._mirror.ident(inode))
        assert east.etcd.put(right, b"east", east.membership.lease, 0)  # as if the answer of etcd was lost
        await eventually(lambda: not east.etcd.read(right))
        with trio.fail_after(20):
            while isinstance(await error_of(west.open("fleet/f.kv", write=True)), Busy):  # noqa: ASYNC110
                await trio.sleep(0.01)


@pytest.mark.slow
async def test_a_sync_without_enough_machines_fails_and_says_how_many_there_are(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PATIENCE_S", 0.6)
    async with fleet(copies=3) as (east, west):
        file = await east.make("fleet/f.kv", 10)
        refusal = await error_of(east.fs.sync(file))
        assert refusal is not None
        assert (refusal.errno, "only 2 of 3 machines" in str(refusal)) == (errno.EIO, True)
        assert await error_of(west.open("fleet/f.kv")) is not None, "what was not synced is not shown"
        await east.call(east.fs.kv_remove, ROOT, "fleet/f.kv")
        east.fs.kv_close(file)


@pytest.mark.slow
async def test_copies_of_a_lost_machine_are_made_anew_and_old_versions_collected(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(names=("east", "west", "north"), copies=2) as members:
        east, *others = members
        file = await east.make("fleet/f.kv", 40)
        await east.fs.sync(file)
        east.fs.kv_close(file)
        holder = next(each for each in others if each.names.local.entries)
        spare = next(each for each in others if not each.names.local.entries)
        left = east.fs.kv_create(ROOT, "fleet/.versions/0a.0b")  # of a sync that failed
        east.fs.kv_close(left)
        assert len(east.names.local.entries) == 2
        holder.running.cancel()
        monkeypatch.setattr(upkeep, "ROUND_S", 0.05)
        monkeypatch.setattr(upkeep, "ABSENT_S", 0.2)
        monkeypatch.setattr(versions, "YOUNG_S", 0)
        east.following.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(east.follow)
            await eventually(lambda: len(spare.names.local.entries) == 1)
            await eventually(lambda: len(east.names.local.entries) == 1)
            nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_reads_go_on_while_etcd_is_gone_and_changes_time_out(tmp_path: Path, keys: Path) -> None:
    async def main(server: EtcdServer) -> None:
        async with fleet_of(tmp_path, keys, server.url, "f") as (east, west):
            file, closed = await east.make("fleet/f.kv", 10), await east.make("fleet/g.kv", 10)
            await east.fs.sync(file)
            await eventually(lambda: len(west.names._mirror.writing) == 2)
            east.fs.kv_close(closed)
            await eventually(lambda: len(west.names._mirror.writing) == 1)
            server.kill()
            await eventually(lambda: bool(west.names.trouble))
            assert await west.length("fleet/f.kv") == 10, "the version comes from its machine"
            await west.call(west.fs.directory, ROOT, "fleet")
            east.machine.append(file, range(10, 20))
            failing: list[Callable[[], Awaitable[object]]] = [
                partial(west.mkdir, "fleet/d"),
                partial(west.call, west.fs.kv_remove, ROOT, "fleet/f.kv"),
                partial(west.call, west.fs.kv_chmod, ROOT, "fleet/f.kv", 0o644),
                partial(west.open, "fleet/g.kv", write=True),
                partial(east.fs.sync, file),
            ]
            for call in failing:
                assert isinstance(await error_of(call()), TimedOut), call
            assert west.listing() == ["/f.kv kv 600 0 0 ", "/g.kv kv 600 0 0 "]
            server.start()
            await eventually(lambda: not west.names.trouble and not east.names.trouble)
            await east.fs.sync(file)
            east.fs.kv_close(file)
            await west.mkdir("fleet/d")
            assert await west.length("fleet/f.kv") == 20

    server = EtcdServer(tmp_path)
    try:
        trio.run(main, server)
    finally:
        server.kill()


@pytest.mark.slow
def test_a_read_does_not_wait_while_an_open_to_write_waits_for_a_silent_etcd(tmp_path: Path, keys: Path) -> None:
    async def main(server: EtcdServer) -> None:
        async with fleet_of(tmp_path, keys, server.url, "f") as (east, west):
            file = await east.make("fleet/f.kv", 10)
            await east.fs.sync(file)
            east.fs.kv_close(file)
            await eventually(lambda: not east.names._mirror.writing)
            await west.call(west.fs.directory, ROOT, "fleet")
            server.process.send_signal(signal.SIGSTOP)
            async with trio.open_nursery() as nursery:
                refused = list[SymError | None]()

                async def write() -> None:
                    refused.append(await error_of(west.open("fleet/f.kv", write=True)))

                nursery.start_soon(write)
                assert await west.length("fleet/f.kv") == 10
            assert [type(each) for each in refused] == [TimedOut]

    server = EtcdServer(tmp_path)
    try:
        trio.run(main, server)
    finally:
        server.kill()


@pytest.mark.slow
def test_names_that_never_arrived_are_waited_for_and_never_shown_as_none(tmp_path: Path, keys: Path) -> None:
    async def main() -> None:
        member = Member(tmp_path, keys, "http://127.0.0.1:1", "f", "east", 1)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(member.run)
                for call in (member.call(member.fs.directory, ROOT, "fleet"), member.open("fleet/f.kv")):
                    assert isinstance(await error_of(call), TimedOut)
                nursery.cancel_scope.cancel()
        finally:
            member.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.2))


async def test_a_machine_that_has_missed_changes_for_good_reads_all_names_anew(fleet: Fleet, name: str) -> None:
    async with fleet() as (east, west):
        for path in ("fleet/a", "fleet/a/b", "fleet/a/b/c", "fleet/d", "fleet/e"):
            await east.mkdir(path)
        file = await west.make("fleet/a/b/f.kv", 10)
        await west.fs.sync(file)
        await same([east, west])
        west.following.cancel()
        fs = east.fs
        await east.call(fs.kv_rename, ROOT, "fleet/a/b", "fleet/e/b")  # out of a directory that goes
        await east.call(fs.kv_rename, ROOT, "fleet/e/b/c", "fleet/c")
        await east.call(fs.kv_rename, ROOT, "fleet/d", "fleet/e/b/d")
        await east.call(east.tree.rmdir, east.names.root, b"a")
        await east.mkdir("fleet/a", 0o700)  # the same name, another directory
        await east.call(fs.kv_rename, ROOT, "fleet/c", "fleet/a/c")
        await east.call(fs.kv_chmod, ROOT, "fleet/e/b/f.kv", 0o644)
        await trio.to_thread.run_sync(compact, east)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(west.follow)
            await same([east, west])
            west.machine.append(file, range(10, 12))  # the right to write was not lost
            await west.fs.sync(file)
            west.fs.kv_close(file)
            assert await east.length("fleet/e/b/f.kv") == 12
            nursery.cancel_scope.cancel()


def compact(member: Member) -> None:
    last = member.etcd.snapshot("symphony/")[1]
    member.etcd._ask("kv/compaction", {"revision": str(last), "physical": True})


async def test_an_etcd_that_has_lost_the_names_takes_no_file_away(fleet: Fleet, name: str) -> None:
    async with fleet() as (east, west):
        file = await east.make("fleet/f.kv", 10)
        await east.fs.sync(file)
        east.fs.kv_close(file)
        await same([east, west])
        west.following.cancel()
        keys = {"key": _encoded(Keys(name).prefix), "range_end": _encoded(Keys(name).prefix[:-1] + "0")}
        await trio.to_thread.run_sync(east.etcd._ask, "kv/deleterange", keys)
        await trio.to_thread.run_sync(compact, east)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(west.follow)
            await eventually(lambda: "has lost the fleet's names" in west.names.trouble)
            assert west.listing() == ["/f.kv kv 600 0 0 "]
            nursery.cancel_scope.cancel()


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.slow
async def test_records_that_make_no_sense_are_left_out(fleet: Fleet, name: str) -> None:
    record = NameRecord("file", 0o600, 0, 0, generation=1, tag="a", num_entries=1, size=10, machines=("north",))
    good, keys = json.loads(record.encoded()), Keys(name)
    bad: list[object] = [{**good, key: value} for key in good for value in (None, -1, [1], 1 << 70)]
    values = [b"", b"[" * 100_000, b"\xff", *(json.dumps(each).encode() for each in [*bad, {}, 1])]
    values = [each for each in values if record_of(each) is None]
    assert len(values) > 40
    async with fleet() as (east, west):
        await east.mkdir("fleet/d")

        async def put(key: str, value: bytes) -> None:
            await trio.to_thread.run_sync(east.etcd.put, key, value, 0, 0)

        for number, value in enumerate(values):
            await put(keys.inode(f"bad{number}"), value)
            await put(keys.name("root", b"bad%d" % number), b"bad%d" % number)
        await put(keys.inode("good"), record.encoded())
        for text in ("..", "%2e", "a%2fb", "%00", "", "x" * 256, ".versions"):
            await put(keys.entries("root") + text, b"good")
        await put(keys.name("nowhere", b"x"), b"good")
        await put(keys.right("nobody"), b"\xff")
        await put(keys.prefix + "n/a/b/c", b"x")
        await east.mkdir("fleet/e")
        wanted = ["/d dir 755 0 0 ", "/e dir 755 0 0 "]
        await same([east, west], wanted)
        async with fleet(names=("north",)) as again:
            await same(again, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_machines_that_change_names_at_random_agree(fleet: Fleet, seed: int) -> None:
    async def walk(member: Member, chance: random.Random) -> None:
        fs = member.fs
        for _ in range(40):
            depth = chance.randint(1, 3)
            path, other = ("/".join(["fleet", *chance.choices("abc", k=depth)]) for _ in range(2))
            calls: list[Callable[[], object]] = [
                partial(fs.kv_mkdir, ROOT, path, 0o755),
                partial(fs.kv_mkdir, ROOT, path, 0o700),
                partial(fs.kv_rename, ROOT, path, other),
                partial(fs.kv_rename, ROOT, path, other),
                partial(fs.kv_chmod, ROOT, path, chance.choice([0o711, 0o755])),
                partial(_remove, member, path),
                partial(fs.kv_remove, ROOT, path),
                partial(fs.kv_create, ROOT, path),
            ]
            with suppress(SymError):
                file = await member.call(chance.choice(calls))
                if isinstance(file, OpenKv):
                    member.machine.append(file, range(chance.randint(1, 9)))
                    with suppress(SymError):
                        await fs.sync(file)
                    fs.kv_close(file)

    async with fleet(names=("east", "west", "north")) as members:
        async with trio.open_nursery() as nursery:
            for number, member in enumerate(members):
                nursery.start_soon(walk, member, random.Random(100 * seed + number))
        await same(members)
        async with fleet(names=("east",)) as again:
            await same([*members, *again])
        for member in members:
            member.fs.check()


def _remove(member: Member, path: str) -> None:
    parent, _, name = path.rpartition("/")
    member.tree.rmdir(member.fs.find(ROOT, parent), name.encode())


async def holding(member: Member, machine: str) -> dict[str, int]:
    """Figures of a machine, as `symphony fleet status` shows them on `member`."""
    await member.names.draining.change("", "")
    held = member.names.draining.holdings.get(machine, Holding())
    return {"versions": held.versions, "alone": held.alone, "stuck": held.stuck, "writing": held.writing}


async def until_holding(member: Member, machine: str, **expected: int) -> None:
    """Wait until a machine holds just this."""
    with trio.fail_after(20):
        while True:
            if await holding(member, machine) == NOTHING | expected:
                return
            await trio.sleep(0.05)


NOTHING = {"versions": 0, "alone": 0, "stuck": 0, "writing": 0}


@pytest.mark.slow
async def test_routers_know_the_public_files_that_a_machine_has_made_or_opened(fleet: Fleet, tmp_path: Path) -> None:
    with ExitStack() as stack:
        async with fleet() as (east, west), trio.open_nursery() as nursery:
            routers = list[Router]()

            def known() -> list[int]:
                return [router.read() and router.num_known(range(64)) for router in routers]

            for member in (east, west):
                endpoint = f"ipc://{tmp_path}/{member.name}.sock"
                nursery.start_soon(Publisher(endpoint, member.name, member.fs, member.journal.watch).run)
                routers.append(stack.enter_context(closing(Router(endpoint))))
            await east.mkdir("fleet/d")
            file = await east.make("fleet/d/f.kv", 64)
            await east.call(east.fs.kv_chmod, ROOT, "fleet/d/f.kv", 0o644)
            await eventually(lambda: known() == [64, 0])
            await east.fs.sync(file)
            assert await west.length("fleet/d/f.kv") == 64
            await eventually(lambda: known() == [64, 64])
            for member, path, closed, opened in [
                (east, "fleet/d/f.kv", 0o600, 0o644),
                (west, "fleet/d/f.kv", 0o600, 0o644),
                (east, "fleet/d", 0o700, 0o755),
                (west, "fleet/d", 0o700, 0o755),
            ]:
                await member.call(member.fs.kv_chmod, ROOT, path, closed)
                await eventually(lambda: known() == [0, 0])
                await member.call(member.fs.kv_chmod, ROOT, path, opened)
                await eventually(lambda: known() == [64, 64])
            east.fs.kv_truncate(file, 32)
            await eventually(lambda: known() == [32, 64])
            await east.fs.sync(file)  # west has to open the new version
            await eventually(lambda: known() == [32, 0])
            await east.call(east.fs.kv_remove, ROOT, "fleet/d/f.kv")
            await eventually(lambda: known() == [0, 0])
            east.fs.kv_close(file)
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_drained_machine_gives_its_versions_to_others_and_can_leave(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DRAIN_S", 0.05)

    async with fleet(copies=1) as (east, west):
        file = await east.make("fleet/f.kv", 40)
        await east.fs.sync(file)
        assert await holding(west, "east") == {"versions": 1, "alone": 1, "stuck": 0, "writing": 1}
        refusal = await error_of(east.names.draining.change("leave", ""))
        assert "east is not drained" in str(refusal)
        refusal = await error_of(west.names.draining.change("leave", "east"))
        assert "by a command of its own" in str(refusal)
        await west.names.draining.change("drain", "east")
        assert east.membership.others() == ["west"]
        assert west.membership.others() == []
        refusal = await error_of(west.names.draining.change("drain", ""))
        assert "no other machine stays" in str(refusal)
        await until_holding(west, "east", writing=1)  # a program has the file open there
        await east.membership._renew()
        refusal = await error_of(east.names.draining.change("leave", ""))
        assert isinstance(refusal, Busy)
        assert "for example /fleet/f.kv" in str(refusal)
        assert east.membership.lease, "a machine that may not leave goes on"
        east.machine.append(file, range(5))
        await east.fs.sync(file)
        east.fs.kv_close(file)
        await until_holding(west, "east")
        await east.names.draining.change("leave", "")
        await west.membership._renew()
        assert west.membership.present == ["west"]
        assert not west.membership.drained
        await east.membership._renew()
        assert west.membership.present == east.membership.present == ["west"]
        assert "has left the fleet" in east.membership.info()["trouble"]
        refusal = await error_of(east.open("fleet/f.kv", write=True))
        assert isinstance(refusal, TimedOut)
        assert await west.length("fleet/f.kv") == 45
        assert (await west.open("fleet/f.kv", write=True)).table.length == 45


@pytest.mark.slow
async def test_a_machine_does_not_leave_with_a_content_that_is_not_synced(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DRAIN_S", 0.05)

    async with fleet() as (east, west):
        file = await east.make("fleet/f.kv", 40)
        await east.fs.sync(file)
        await east.names.draining.change("drain", "")
        east.machine.append(file, range(5))
        await trio.to_thread.run_sync(east.etcd.revoke, east.membership.lease)  # as after ten seconds of silence
        await eventually(lambda: not west.names._mirror.writing)
        await east.membership._renew()
        await until_holding(west, "east")
        refusal = await error_of(east.names.draining.change("leave", ""))
        assert "writes 1 files, for example /fleet/f.kv" in str(refusal)
        await east.fs.sync(file)
        assert await west.length("fleet/f.kv") == 45
        east.fs.kv_close(file)
        await until_holding(east, "east")
        await east.names.draining.change("leave", "")


@pytest.mark.slow
async def test_copies_do_not_come_to_a_drained_machine_until_it_returns(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PATIENCE_S", 0.6)

    async with fleet(copies=2) as (east, west):
        file = await east.make("fleet/f.kv", 10)
        await west.names.draining.change("drain", "")
        refusal = await error_of(east.fs.sync(file))  # east may not know it yet, but west does
        assert "only 1 of 2 machines" in str(refusal)
        await east.membership._renew()
        refusal = await error_of(east.fs.sync(file))
        assert "only 1 of 2 machines" in str(refusal)
        await west.names.draining.change("return", "")
        await east.membership._renew()
        await east.fs.sync(file)
        east.fs.kv_close(file)
        await east.names.draining.change("", "")
        assert east.names.draining.num_missing == 0


@pytest.mark.slow
async def test_a_machine_that_has_left_counts_no_more_for_a_sync_that_had_failed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PATIENCE_S", 0.6)

    async def no_answer(*_arguments: object) -> None:
        raise TimedOut("etcd did not answer")

    async with fleet(copies=2) as (east, west):
        file = await east.make("fleet/f.kv", 10)
        await east.fs.sync(file)
        east.machine.append(file, range(5))
        with monkeypatch.context() as patch:
            patch.setattr(east.names._follower, "commit", no_answer)
            assert isinstance(await error_of(east.fs.sync(file)), TimedOut)
        await west.names.draining.change("lose", "")
        await east.membership._renew()
        refusal = await error_of(east.fs.sync(file))
        assert "only 1 of 2 machines" in str(refusal)
        east.fs.kv_close(file)


@pytest.mark.slow
async def test_what_a_dead_machine_had_alone_is_lost_by_force_only_and_fetched_copies_count(
    fleet: Fleet, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DRAIN_S", 0.05)

    async with fleet(copies=1) as (east, west):
        for path in ("fleet/read.kv", "fleet/unread.kv"):
            file = await east.make(path, 40)
            await east.fs.sync(file)
            east.fs.kv_close(file)
        await until_holding(west, "east", versions=2, alone=2)
        assert await west.length("fleet/read.kv") == 40
        east.running.cancel()
        with trio.fail_after(20):
            while west.membership.present != ["west"]:
                await trio.sleep(0.05)
                await west.membership._renew()
        assert await holding(west, "east") == {"versions": 2, "alone": 2, "stuck": 0, "writing": 0}
        refusal = await error_of(west.names.draining.change("leave", "east"))
        assert "2 versions that no other machine has" in str(refusal)
        await west.names.draining.change("drain", "east")
        await until_holding(west, "east", versions=1, alone=1)
        assert await west.length("fleet/read.kv") == 40
        refusal = await error_of(west.names.draining.change("leave", "east"))
        assert "for example /fleet/unread.kv" in str(refusal)
        assert "it is away, so start it, or lose them by --force" in str(refusal)
        await west.names.draining.change("lose", "east")
        assert west.names.draining.holdings["east"].paths == ["/fleet/unread.kv"]
        assert not west.membership.drained
        assert not west.etcd.read(Keys(name).change("east"))
        refusal = await error_of(west.names.draining.change("leave", "nobody"))
        assert isinstance(refusal, NotFound)
