"""Names of a fleet while answers are late or lost, calls are cancelled, and the limits of one machine are reached."""

import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import trio

from kvfs.names.inode import Inode
from libsym.errors import Busy
from symphony.fleet.link import Copy
from tests.symphony.fleet.members import ROOT, Member
from tests.symphony.fleet.test_names import Fleet, compact, error_of, eventually, fleet, keys, name, same, server

__all__ = ["fleet", "keys", "name", "server"]


async def at_rest(*members: Member) -> None:
    """Wait until no machine has a right to write."""
    await eventually(lambda: not any(each.names._mirror.writing for each in members))


def late(member: Member, delay_s: float) -> Callable[[], None]:
    """Let answers of etcd to this member's transactions come late. Return a function that ends this."""
    commit = member.etcd.commit

    def slow(compare: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]) -> tuple[bool, int]:
        answer = commit(compare, then)
        time.sleep(delay_s)
        return answer

    patch = pytest.MonkeyPatch()
    patch.setattr(member.etcd, "commit", slow)
    return patch.undo


async def synced(member: Member, path: str, length: int) -> None:
    file = await member.make(path, length)
    await member.fs.sync(file)
    member.fs.kv_close(file)


async def append(member: Member, path: str, begin: int, end: int) -> None:
    file = await member.open(path, write=True)
    member.machine.append(file, range(begin, end))
    member.fs.kv_close(file)


async def until_length(member: Member, path: str, length: int) -> None:
    with trio.fail_after(20):
        while await member.length(path) != length:  # noqa: ASYNC110
            await trio.sleep(0.02)


@pytest.mark.slow
async def test_what_is_written_while_a_closed_file_is_synced_is_synced_as_well(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(copies=2) as (east, west):
        await synced(east, "fleet/f.kv", 40)
        await at_rest(east, west)
        copy, has_begun = east.versions._peers.copy, trio.Event()

        async def slow(peer: str, request: Copy) -> None:
            has_begun.set()
            await trio.sleep(0.3)
            await copy(peer, request)

        monkeypatch.setattr(east.versions._peers, "copy", slow)
        await append(east, "fleet/f.kv", 40, 50)
        await has_begun.wait()
        await append(east, "fleet/f.kv", 50, 60)
        await until_length(west, "fleet/f.kv", 60)
        await at_rest(east, west)


@pytest.mark.parametrize("what", ["open", "create"])
async def test_a_call_that_was_cancelled_leaves_no_right_to_write(fleet: Fleet, what: str) -> None:
    async with fleet() as (east, west):
        await synced(east, "fleet/f.kv", 10)
        await at_rest(east, west)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "open": partial(east.open, "fleet/f.kv", write=True),
            "create": partial(east.make, "fleet/g.kv", 3),
        }
        end = late(east, 0.3)
        with trio.move_on_after(0.1) as scope:
            await calls[what]()
        end()
        assert scope.cancelled_caught
        path = "fleet/f.kv" if what == "open" else "fleet/g.kv"
        await eventually(lambda: len(west.listing()) == (1 if what == "open" else 2))
        await at_rest(east, west)
        assert not isinstance(await error_of(west.open(path, write=True)), Busy)


async def test_a_file_that_was_written_without_etcd_is_synced_when_it_is_back(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        files = [await east.make(f"fleet/{each}.kv", 10) for each in "fg"]
        for file in files:
            await east.fs.sync(file)
            east.machine.append(file, range(10, 20))
        await trio.to_thread.run_sync(east.etcd.revoke, east.membership.lease)  # cut off for more than 10 s
        await eventually(lambda: not east.names._mirror.writing)
        await east.membership._renew()
        east.fs.kv_close(files[0])
        await until_length(west, "fleet/f.kv", 20)
        assert await west.length("fleet/g.kv") == 10
        await east.fs.volume.sync_all()
        assert await west.length("fleet/g.kv") == 20
        east.fs.kv_close(files[1])


async def test_a_file_that_another_machine_removes_while_its_last_sync_is_refused_ends_no_daemon(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet() as (east, west):
        file = await east.make("fleet/f.kv", 10)
        east.machine.append(file, range(10, 20))
        await trio.to_thread.run_sync(east.etcd.revoke, east.membership.lease)
        await eventually(lambda: not east.names._mirror.writing)
        await east.membership._renew()
        look, was_removed = east.names._follower.look, trio.Event()

        async def late_look() -> None:
            if not was_removed.is_set():
                was_removed.set()
                await west.call(west.fs.kv_remove, ROOT, "fleet/f.kv")
            await look()

        monkeypatch.setattr(east.names._follower, "look", late_look)
        east.fs.kv_close(file)
        await was_removed.wait()
        await same([east, west], [])
        await synced(east, "fleet/g.kv", 10)
        await until_length(west, "fleet/g.kv", 10)


@pytest.mark.slow
async def test_a_sync_whose_answer_is_late_keeps_the_mode_that_another_machine_has_set(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        file = await east.make("fleet/f.kv", 10)
        await east.call(east.fs.kv_chmod, ROOT, "fleet/f.kv", 0o644)
        end = late(east, 0.4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(east.fs.sync, file)
            await trio.sleep(0.2)
            await west.call(west.fs.kv_chmod, ROOT, "fleet/f.kv", 0o600)
        end()
        east.machine.append(file, range(10, 12))
        await east.fs.sync(file)
        await same([east, west], ["/f.kv kv 600 0 0 "])
        east.fs.kv_close(file)


@pytest.mark.slow
async def test_a_change_whose_answer_is_late_succeeds(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        end = late(east, 1.3)
        await east.mkdir("fleet/d")
        end()
        await same([east, west], ["/d dir 755 0 0 "])


async def test_a_machine_at_its_limits_follows_the_others(fleet: Fleet) -> None:
    async with fleet() as (east, west):
        west.fs.volume.domains.set_limit(west.names.root, b"user.kv.quota_files", b"3", 0)
        for number in range(5):
            await east.mkdir(f"fleet/{number}")
        await same([east, west])


def test_a_move_far_below_the_root_reaches_all_machines(fleet: Fleet) -> None:
    async def main() -> None:
        async with fleet() as (east, west):

            async def make(directory: Inode, name: bytes) -> Inode:
                return await east.call(partial(east.tree.make, directory, name, stat.S_IFDIR, mode=0o755, uid=0, gid=0))

            directory = east.names.root
            for _ in range(8):
                directory = await make(directory, b"d")
            one, other = await make(directory, b"a"), await make(directory, b"b")
            await make(await make(one, b"x"), b"y")
            await same([east, west])
            await east.call(east.tree.rename, one, b"x", other, b"x")
            await east.mkdir("fleet/later")
            await same([east, west])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvfs.names.tree.MAX_WALK", 6)
        trio.run(main)


@pytest.mark.slow
async def test_records_longer_than_an_answer_are_read_in_parts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symphony.fleet.etcd.MAX_ANSWER_BYTES", 200_000)
    async with fleet() as (east, west):
        west.following.cancel()
        make = partial(east.tree.make, mode=0o777, uid=0, gid=0, target=b"\xff" * 4095)
        for number in range(30):
            await east.call(partial(make, east.names.root, b"%d" % number, stat.S_IFLNK))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(west.follow)
            await same([east, west])
            west.following.cancel()
            await east.mkdir("fleet/z")
            await trio.to_thread.run_sync(compact, east)
            nursery.start_soon(west.follow)
            await same([east, west])
            nursery.cancel_scope.cancel()
