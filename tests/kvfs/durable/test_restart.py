"""Facts beside contents that a restart keeps: times, names, numbers, charges, quotas."""

from __future__ import annotations

import errno
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.facts.xattrs import put
from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.domains import QUOTA, QUOTA_FILES
from kvfs.pages.accounts import AccountLimits
from kvfs.pages.looking import Bytes, copies, look
from kvfs.pages.turns import fitting
from libsym.abi import PAGE_ENTRIES, Advice
from libsym.errors import Invalid, NoSpace, OverQuota, SymError
from tests.kvfs.durable.house import ROOT, House, running
from tests.kvfs.fakes import FakeFacts, fake_identity

OTHER = FakeFacts(name="other", identity=fake_identity("other"), head_dim=8)
"""A model whose pages are twice as large."""


def lives(directory: Path, *works: Callable[[House], Awaitable[None]], **options: object) -> None:
    """Run one daemon after the other on a state; each is drained."""

    async def live(work: Callable[[House], Awaitable[None]]) -> None:
        async with running(House(directory, **options), drain=True) as house:  # type: ignore[arg-type]
            await work(house)

    for work in works:
        trio.run(live, work)


async def image(house: House, content: KvFile) -> bytes:
    """Return the image that cp would copy out."""
    snapshot = house.volume.open_snapshot(content)
    try:
        await trio.to_thread.run_sync(snapshot.prepare)
        lent: dict[int, Bytes] = {}
        while missing := snapshot.missing(0, snapshot.size, lent):
            pool, pages = snapshot.pool, snapshot.held_pages()[missing]
            found = await trio.to_thread.run_sync(look, pool.store, pool.cold, pages, copies)
            lent |= zip(missing, found, strict=True)
        return bytes(snapshot.read(0, snapshot.size, lent))
    finally:
        house.volume.close_snapshot(snapshot)


def is_here(house: House, path: str) -> bool:
    """Whether the file is in memory."""
    return house.volume.pager.tier_of(kv(house, path).table) == "memory"


def kv(house: House, path: str) -> KvFile:
    content = house.fs.find(ROOT, path).content
    assert isinstance(content, KvFile)
    return content


# TTLs


def test_a_ttl_runs_on_while_no_daemon_is_there(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        for name, ttl_s in (("short.kv", 10), ("long.kv", 10_000)):
            file = house.create(name, [1])
            house.fs.kv_advise_open(ROOT, file, [(Advice.TTL, ttl_s * 1000)])
            house.fs.kv_close(file)
            file.inode.used_ns -= 60 * 10**9  # a minute goes by
            file.inode.ctime_ns = file.inode.mtime_ns = file.inode.used_ns

    async def after(house: House) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.volume.alarms.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert house.names() == ["/long.kv"]

    async def at_last(house: House) -> None:
        assert house.names() == ["/long.kv"]

    lives(tmp_path, before, after, at_last)


@pytest.mark.parametrize("ahead", ["used_ns", "mtime_ns"])
def test_a_file_that_was_used_by_a_clock_years_ahead_has_its_ttl_and_no_more(tmp_path: Path, ahead: str) -> None:
    async def before(house: House) -> None:
        file = house.create("ahead.kv", [1])
        house.fs.kv_advise_open(ROOT, file, [(Advice.TTL, 100)])
        house.fs.kv_close(file)
        setattr(file.inode, ahead, file.inode.used_ns + 10 * 365 * 86_400 * 10**9)
        file.inode.note_change()

    async def after(house: House) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.volume.alarms.run)
            with trio.fail_after(20):
                while house.names():  # noqa: ASYNC110 - nothing tells of it
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    lives(tmp_path, before, after)


# Names of all kinds


def test_what_lies_in_a_setgid_directory_is_made_as_before(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        house.tree.make(house.tree.root, b"shared", stat.S_IFDIR, mode=0o2775, uid=5, gid=77)

    async def after(house: House) -> None:
        house.fs.kv_mkdir(ROOT, "shared/inner", 0o755)
        file = house.create("shared/a.kv")
        assert (file.inode.gid, house.fs.find(ROOT, "shared/inner").mode) == (77, 0o2755)

    lives(tmp_path, before, after)


def test_times_are_those_of_before_to_the_nanosecond(tmp_path: Path) -> None:
    seen = {}

    def times(house: House) -> dict[str, tuple[int, int]]:
        return {str(house.tree.path_of(inode)): (inode.mtime_ns, inode.ctime_ns) for inode in house.tree}

    async def before(house: House) -> None:
        house.fs.kv_mkdir(ROOT, "d", 0o755)
        house.create("d/a.kv", range(5))
        house.fs.kv_chmod(ROOT, "d/a.kv", 0o640)
        seen.update(times(house))

    async def after(house: House) -> None:
        assert times(house) == seen

    lives(tmp_path, before, after)


def test_one_name_of_a_file_with_two_may_go(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        file = house.create("a.kv", range(40))
        house.tree.link(file.inode, house.tree.root, b"b.kv")

    async def after(house: House) -> None:
        house.fs.kv_remove(ROOT, "a.kv")

    async def at_last(house: House) -> None:
        assert house.names() == ["/b.kv"]
        assert house.fs.find(ROOT, "b.kv").nlink == 1
        assert house.is_right(await house.open("b.kv"))

    lives(tmp_path, before, after, at_last)


def test_no_number_of_an_inode_is_used_again(tmp_path: Path) -> None:
    numbers = []

    async def before(house: House) -> None:
        house.create("a.kv")
        numbers.append(house.create("gone.kv").inode.number)
        await house.keeper.sync_all()
        house.fs.kv_remove(ROOT, "gone.kv")

    async def after(house: House) -> None:
        assert house.create("new.kv").inode.number > numbers[0]

    lives(tmp_path, before, after)


# Who pays


@dataclass
class Charges:
    seen: list[dict[str, tuple[int, int, int]]] = field(default_factory=list)

    async def look(self, house: House) -> None:
        self.seen.append(
            {each.describe(): (each.num_bytes, each.num_files, each.other_bytes) for each in house.fs.pool.accounts}
        )


def test_everybody_is_charged_as_before(tmp_path: Path) -> None:
    charges = Charges()

    async def before(house: House) -> None:
        for path in ("outer", "outer/inner", "other"):
            house.fs.kv_mkdir(ROOT, path, 0o755)
            put(house.volume, house.fs.find(ROOT, path), QUOTA, b"8M", 0)
        file = house.create("outer/inner/a.kv", range(100))
        house.append(house.fs.kv_fork(ROOT, file, "outer/inner/fork.kv"), [1, 2])
        house.fs.kv_fork(ROOT, file, "other/b.kv")
        house.fs.kv_fork(ROOT, file, "of_nobody.kv")
        house.write(house.volume.make_plain(house.fs.find(ROOT, "outer"), b"note", 0o644, 0, 0), bytes(5000))
        theirs = house.create("theirs.kv", range(64))
        house.volume.change_owner(theirs.inode, 1234)
        await charges.look(house)

    lives(tmp_path, before, charges.look, charges.look)
    first, *others = charges.seen
    assert len(first) == 5
    assert others == [first, first]


def test_a_quota_holds_as_before(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        house.fs.kv_mkdir(ROOT, "d", 0o755)
        put(house.volume, house.fs.find(ROOT, "d"), QUOTA, b"12K", 0)
        put(house.volume, house.fs.find(ROOT, "d"), QUOTA_FILES, b"2", 0)
        house.create("d/a.kv", range(64))

    async def after(house: House) -> None:
        file = await house.open("d/a.kv", write=True)
        house.append(file, range(32))
        with pytest.raises(OverQuota):
            house.append(file, [1])
        house.create("d/b.kv")
        with pytest.raises(OverQuota):
            house.create("d/c.kv")

    lives(tmp_path, before, after)


def test_who_has_more_than_he_may_have_by_now_keeps_it_and_gets_no_more(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        file = house.create("a.kv", range(100))
        house.volume.change_owner(file.inode, 1000)

    async def after(house: House) -> None:
        file = await house.open("a.kv", write=True)
        assert house.is_right(file)
        with pytest.raises(OverQuota):
            house.append(file, range(40))

    lives(tmp_path, before)
    lives(tmp_path, after, limits=AccountLimits(4096, None))


# Shared pages


def test_files_that_end_in_one_page_at_different_places_are_what_they_were(tmp_path: Path) -> None:
    """short.kv is copied out before anything is in memory: the entries of others behind its end are zeros there."""
    images = []

    async def before(house: House) -> None:
        base = house.create("base.kv", range(40))
        fork = house.fs.kv_fork(ROOT, base, "fork.kv")
        house.append(fork, range(10))
        short = house.fs.kv_fork(ROOT, fork, "short.kv")
        house.fs.kv_truncate(short, 35)
        images.extend([await image(house, kv(house, name)) for name in ("base.kv", "fork.kv", "short.kv")])

    async def after(house: House) -> None:
        assert not is_here(house, "short.kv")
        for name, known in zip(("base.kv", "fork.kv", "short.kv"), images, strict=True):
            assert await image(house, kv(house, name)) == known
        assert not is_here(house, "short.kv"), "a reader brings nothing into memory"
        for name in ("short.kv", "base.kv", "fork.kv"):
            file = await house.open(name, write=True)
            house.append(file, [7])
            assert house.is_right(file)

    async def at_last(house: House) -> None:
        expected = {"base.kv": [*range(40), 7], "fork.kv": [*range(40), *range(10), 7], "short.kv": [*range(35), 7]}
        for name, tokens in expected.items():
            file = await house.open(name)
            assert house.tokens(file) == tokens
            assert house.is_right(file)

    lives(tmp_path, before, after, at_last)


def test_where_turns_begin_is_kept_and_goes_along_with_forks_images_and_cuts(tmp_path: Path) -> None:
    async def first(house: House) -> None:
        file = house.create("a.kv", [1, 2, 3])
        for tokens in ([4, 5], [6, 7, 8]):
            file.content.goes_on(file.table.read()[0])
            house.append(file, tokens)
        house.fs.kv_fork(ROOT, file, "fork.kv")
        assert house.fs.kv_stat_open(file).turns == (3, 5)

    async def second(house: House) -> None:
        file = await house.open("a.kv", write=True)
        assert house.fs.kv_stat_open(file).turns == house.fs.kv_stat(ROOT, "fork.kv").turns == (3, 5)
        house.fs.kv_truncate(file, 5)
        assert house.fs.kv_stat_open(file).turns == (3,)
        house.append(file, [9])
        snapshot = house.volume.hold(file.content)
        assert fitting(snapshot.turns, file.table.read()[0]) == [3]
        house.volume.close_snapshot(snapshot)

    async def third(house: House) -> None:
        file = await house.open("a.kv", write=True)
        assert house.fs.kv_stat_open(file).turns == (3,)
        assert house.tokens(file) == [1, 2, 3, 4, 5, 9]
        file.content.goes_on(None)  # a call that is of no turn
        assert house.fs.kv_stat_open(file).turns == ()
        for _ in range(70):
            file.content.goes_on(file.table.read()[0])
            house.append(file, [1])
        assert house.fs.kv_stat_open(file).turns == tuple(range(12, 76))

    async def fourth(house: House) -> None:
        assert house.fs.kv_stat(ROOT, "a.kv").turns == tuple(range(12, 76))

    lives(tmp_path, first, second, third, fourth)


def test_a_fork_of_a_restored_file_costs_no_page(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        house.create("a.kv", range(100))

    async def after(house: House) -> None:
        file = await house.open("a.kv")
        slots = sum(each.num_used for each in house.keeper.slots.values())
        house.fs.kv_fork(ROOT, file, "fork.kv")
        await house.keeper.sync_all()
        assert sum(each.num_used for each in house.keeper.slots.values()) == slots
        assert house.fs.pool.num_free_frames == 64 - 4

    lives(tmp_path, before, after)


# Files of another model


def test_files_of_another_model_do_all_but_compute(tmp_path: Path) -> None:
    images: dict[str, bytes] = {}

    async def before(house: House) -> None:
        file = house.create("theirs.kv", range(100))
        fork = house.fs.kv_fork(ROOT, file, "fork.kv")
        house.append(fork, [1, 2, 3])
        images["theirs.kv"] = await image(house, file.content)
        images["fork.kv"] = await image(house, fork.content)

    async def after(house: House) -> None:
        found = house.fs.kv_stat(ROOT, "theirs.kv")
        assert (found.tokens, found.size) == (100, len(images["theirs.kv"]))
        with pytest.raises(Invalid, match="other"):
            house.fs.kv_open(ROOT, "theirs.kv", write=False)
        for name, known in images.items():
            assert await image(house, kv(house, name)) == known
        copy = house.volume.make_plain(house.tree.root, b"copy.kv", 0o600, 0, 0)
        snapshot = house.volume.open_snapshot(kv(house, "theirs.kv"))
        theirs = house.tree.root.entries[b"theirs.kv"]
        house.volume.fork_into(snapshot, theirs, kv(house, "theirs.kv"), copy)
        house.volume.close_snapshot(snapshot)
        house.fs.kv_rename(ROOT, "theirs.kv", "moved.kv")
        house.fs.kv_remove(ROOT, "fork.kv")
        house.create("own.kv", range(50))

    async def at_last(house: House) -> None:
        assert house.names() == ["/copy.kv", "/moved.kv", "/own.kv"]
        for name in ("copy.kv", "moved.kv"):
            file = await house.open(name)
            assert house.tokens(file) == list(range(100))
            assert house.is_right(file)
        with pytest.raises(Invalid, match="fake"):
            house.fs.kv_open(ROOT, "own.kv", write=False)

    lives(tmp_path, before, facts=OTHER)
    lives(tmp_path, after)
    lives(tmp_path, at_last, facts=OTHER)


def test_pages_of_another_model_are_charged_by_their_own_size(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def before(house: House) -> None:
        house.create("theirs.kv", range(100))

    async def after(house: House) -> None:
        house.create("own.kv", range(100))
        sizes.append(house.fs.pool.accounts.of(0).num_bytes)

    async def again(house: House) -> None:
        sizes.append(house.fs.pool.accounts.of(0).num_bytes)
        house.fs.kv_remove(ROOT, "theirs.kv")
        sizes.append(house.fs.pool.accounts.of(0).num_bytes)

    lives(tmp_path, before, facts=OTHER)
    lives(tmp_path, after, again)
    assert sizes == [4 * 8192 + 4 * 4096, 4 * 8192 + 4 * 4096, 4 * 4096]


# Memory and disk


def test_a_state_that_is_larger_than_memory_starts_and_each_file_comes_in(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        for name in ("a.kv", "b.kv", "c.kv"):
            house.create(name, range(20 * PAGE_ENTRIES))

    async def after(house: House) -> None:
        first = await house.open("a.kv")
        assert house.is_right(first)
        assert house.is_right(await house.open("b.kv"))
        assert not is_here(house, "a.kv"), "b.kv took some of its room"
        assert len(await image(house, kv(house, "c.kv"))) == house.fs.kv_stat(ROOT, "c.kv").size
        assert house.volume.pager.tier_of(kv(house, "c.kv").table) == "disk", "reading an image brings nothing in"
        assert house.is_right(await house.open("a.kv"))

    async def later(house: House) -> None:
        with pytest.raises(NoSpace, match="20 pages are needed in memory at once, and there is room for 19"):
            await house.open("b.kv")

    lives(tmp_path, before, num_pages=64)
    lives(tmp_path, after, num_pages=30)
    lives(tmp_path, later, num_pages=19)


def test_slots_of_files_that_are_gone_are_used_again_and_their_blocks_go_back(tmp_path: Path) -> None:
    def num_blocks() -> int:
        return (tmp_path / "slots/1.kv").stat().st_blocks * 512 // 4096

    async def before(house: House) -> None:
        for number in range(4):
            house.fs.kv_close(house.create(f"{number}.kv", range(8 * PAGE_ENTRIES)))
        await house.keeper.sync_all()
        used, allocated = house.keeper.slots[1].num_used, num_blocks()
        for number in range(3):
            house.fs.kv_remove(ROOT, f"{number}.kv")
        await house.keeper.sync_all()
        await house.keeper.jobs.idle()
        assert (used, house.keeper.slots[1].num_used) == (32, 8)
        assert num_blocks() <= allocated - 24

    async def after(house: House) -> None:
        house.create("new.kv", range(24 * PAGE_ENTRIES))
        await house.keeper.sync_all()
        assert house.keeper.slots[1].end() == 32, "no slot behind those that there were"

    async def at_last(house: House) -> None:
        for name in ("3.kv", "new.kv"):
            assert house.is_right(await house.open(name))

    lives(tmp_path, before, after, at_last)


def test_a_damaged_slot_fails_the_files_that_have_it_and_keeps_no_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def before(house: House) -> None:
        file = house.create("a.kv", range(100))
        house.append(house.fs.kv_fork(ROOT, file, "fork.kv"), range(40))
        house.create("b.kv", range(50))

    async def after(house: House) -> None:
        num_free = house.fs.pool.num_free
        for _ in range(3):
            with pytest.raises(SymError, match=r"/a\.kv from entry 32") as caught:
                await house.open("a.kv")
            assert caught.value.errno == errno.EIO
        assert "/fork.kv from entry 32" in caplog.text
        house.fs.check()
        assert house.fs.pool.num_free == num_free
        with pytest.raises(SymError, match="damaged"):
            await image(house, kv(house, "fork.kv"))
        assert house.is_right(await house.open("b.kv"))
        house.fs.kv_remove(ROOT, "a.kv")
        house.fs.kv_remove(ROOT, "fork.kv")

    async def at_last(house: House) -> None:
        assert house.names() == ["/b.kv"]
        assert house.is_right(await house.open("b.kv"))

    lives(tmp_path, before)
    with (tmp_path / "slots/1.kv").open("r+b") as file:
        file.seek(4096 + 4096 + 100)
        file.write(b"other bytes")
    lives(tmp_path, after, at_last)


# Handles


def test_an_anonymous_file_and_one_whose_names_are_gone_end_with_the_daemon(tmp_path: Path) -> None:
    async def before(house: House) -> None:
        handles: list[OpenKv] = [house.fs.kv_create(ROOT, None), house.create("gone.kv", range(40))]
        house.append(handles[0], range(40))
        await house.keeper.sync(handles[0].inode)
        await house.keeper.sync(handles[1].inode)
        house.fs.kv_remove(ROOT, "gone.kv")
        assert house.is_right(handles[1])

    async def after(house: House) -> None:
        assert house.names() == []
        assert house.fs.pool.num_free == 64
        assert house.keeper.slots[1].num_used == 0

    lives(tmp_path, before, after)
