"""Facts that a restart keeps beside names and contents, which `test_powercuts` has: numbers, charges, turns."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvfs.durable.fsck import fsck
from kvfs.facts import xattrs
from kvfs.facts.du import by_model
from kvfs.pages.turns import fitting
from libsym.abi import Advice
from libsym.errors import Invalid, NotPermitted
from tests.kvfs.durable.house import ROOT, House, is_clean, running
from tests.kvfs.fakes import FakeFacts, fake_identity

OTHER = FakeFacts(name="other", identity=fake_identity("other"), head_dim=8)
"""A model whose pages are twice as large."""


async def test_a_ttl_runs_on_while_no_daemon_is_there_and_no_longer_by_a_clock_years_ahead(tmp_path):
    minute, years = 60 * 10**9, 10 * 365 * 86_400 * 10**9
    async with running(House(tmp_path), drain=True) as house:
        for name, ttl_ms, used, modified in (
            ("short.kv", 10_000, -minute, -minute),
            ("long.kv", 10_000_000, -minute, -minute),
            ("used-ahead.kv", 100, years, 0),
            ("modified-ahead.kv", 100, 0, years),
        ):
            file = house.create(name, [1])
            house.fs.kv_advise_open(ROOT, file, [(Advice.TTL, ttl_ms)])
            house.fs.kv_close(file)
            file.inode.used_ns += used
            file.inode.mtime_ns += modified
            if modified < 0:  # no clock of the next daemon says that it was changed since
                file.inode.ctime_ns += modified
            else:
                file.inode.note_change()
    async with running(House(tmp_path), drain=True) as house, trio.open_nursery() as nursery:
        nursery.start_soon(house.volume.alarms.run)
        await wait_all_tasks_blocked()
        assert "/short.kv" not in house.names()
        while house.names() != ["/long.kv"]:  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    async with running(House(tmp_path)) as house:
        assert house.names() == ["/long.kv"]


async def test_where_turns_begin_is_kept_and_goes_along_with_forks_images_and_cuts(tmp_path):
    async with running(House(tmp_path), drain=True) as house:
        file = house.create("a.kv", [1, 2, 3])
        for tokens in ([4, 5], [6, 7, 8]):
            file.content.goes_on(file.table.read()[0])
            house.append(file, tokens)
        house.fs.kv_fork(ROOT, file, "fork.kv")
        assert house.fs.kv_stat_open(file).turns == (3, 5)
    async with running(House(tmp_path), drain=True) as house:
        file = await house.open("a.kv", write=True)
        assert house.fs.kv_stat_open(file).turns == house.fs.kv_stat(ROOT, "fork.kv").turns == (3, 5)
        house.fs.kv_truncate(file, 5)
        assert house.fs.kv_stat_open(file).turns == (3,)
        house.append(file, [9])
        snapshot = house.volume.hold(file.content)
        assert fitting(snapshot.turns, file.table.read()[0]) == [3]
        house.volume.close_snapshot(snapshot)
    async with running(House(tmp_path), drain=True) as house:
        file = await house.open("a.kv", write=True)
        assert house.fs.kv_stat_open(file).turns == (3,)
        assert house.tokens(file) == [1, 2, 3, 4, 5, 9]
        file.content.goes_on(None)  # a call that is of no turn
        assert house.fs.kv_stat_open(file).turns == ()
        for _ in range(70):
            file.content.goes_on(file.table.read()[0])
            house.append(file, [1])
        assert house.fs.kv_stat_open(file).turns == tuple(range(12, 76))
    async with running(House(tmp_path), drain=True) as house:
        assert house.fs.kv_stat(ROOT, "a.kv").turns == tuple(range(12, 76))


async def test_files_of_another_model_do_all_but_compute(tmp_path):
    async with running(House(tmp_path, facts=OTHER), drain=True) as house:
        file = house.create("theirs.kv", range(100))
        fork = house.fs.kv_fork(ROOT, file, "fork.kv")
        house.append(fork, [1, 2, 3])
        images = {name: await house.image(house.kv(name)) for name in ("theirs.kv", "fork.kv")}
        house.create("empty.kv")
        house.create("removed.kv")
    async with running(House(tmp_path), drain=True) as house:
        found = house.fs.kv_stat(ROOT, "theirs.kv")
        assert (found.tokens, found.size) == (100, len(images["theirs.kv"]))
        with pytest.raises(Invalid, match="other"):
            house.fs.kv_open(ROOT, "theirs.kv", write=False)
        theirs = house.tree.root.entries[b"theirs.kv"]
        assert xattrs.get(house.volume, theirs, b"user.kv.model") == b"other"
        for name, known in images.items():
            assert await house.image(house.kv(name)) == known
        copy = house.make_plain("copy.kv")
        snapshot = house.volume.open_snapshot(house.kv("theirs.kv"))
        house.volume.fork_into(snapshot, theirs, house.kv("theirs.kv"), copy)
        house.volume.close_snapshot(snapshot)
        house.fs.kv_rename(ROOT, "theirs.kv", "moved.kv")
        house.fs.kv_chmod(ROOT, "empty.kv", 0o644)
        await house.sync("empty.kv")
        for name in ("fork.kv", "empty.kv", "removed.kv"):
            house.fs.kv_remove(ROOT, name)
        house.create("own.kv", range(50))
    async with running(House(tmp_path, facts=OTHER), drain=True) as house:
        assert house.names() == ["/copy.kv", "/moved.kv", "/own.kv"]
        for name in ("copy.kv", "moved.kv"):
            file = await house.require(name, range(100))
        with pytest.raises(Invalid, match="fake"):
            house.fs.kv_open(ROOT, "own.kv", write=False)


async def test_each_model_has_a_sum_of_its_own_in_which_a_page_counts_once(tmp_path):
    async with running(House(tmp_path, facts=OTHER), drain=True) as house:
        house.fs.kv_fork(ROOT, house.create("theirs.kv", range(100)), "fork.kv")
    async with running(House(tmp_path), drain=True) as house:
        house.create("own.kv", range(40))
        house.make_plain("plain")
        own, theirs = await by_model(house.volume, house.tree.root, ".", ROOT)
        assert (own.path, own.tokens, own.pages, own.exclusive_pages) == ("fake F32", 40, 2, 2)
        assert (theirs.path, theirs.tokens, theirs.pages, theirs.exclusive_pages) == ("other F32", 200, 4, 4)
        assert (own.exclusive_bytes, theirs.exclusive_bytes, theirs.disk_bytes) == (2 * 4096, 4 * 8192, 4 * 8192)


async def test_models_of_one_name_have_sums_of_their_own_told_apart_by_fingerprints(tmp_path):
    namesake = FakeFacts(name="fake", identity=fake_identity("other"), head_dim=8)
    async with running(House(tmp_path, facts=namesake), drain=True) as house:
        house.create("theirs.kv", range(100))
    async with running(House(tmp_path), drain=True) as house:
        house.create("own.kv", range(40))
        rows = await by_model(house.volume, house.tree.root, ".", ROOT)
        models = sorted((house.volume.model.identity["model"], namesake.identity["model"]))
        assert [row.path for row in rows] == [f"fake F32 {model[:12]}" for model in models]
        assert sorted(row.tokens for row in rows) == [40, 100]


async def test_pages_of_another_model_are_charged_by_their_own_size(tmp_path):
    async with running(House(tmp_path, facts=OTHER), drain=True) as house:
        house.create("theirs.kv", range(100))
    async with running(House(tmp_path), drain=True) as house:
        house.create("own.kv", range(100))
        assert house.fs.pool.accounts.of(0).num_bytes == 4 * 8192 + 4 * 4096
    async with running(House(tmp_path)) as house:
        assert house.fs.pool.accounts.of(0).num_bytes == 4 * 8192 + 4 * 4096
        house.fs.kv_remove(ROOT, "theirs.kv")
        assert house.fs.pool.accounts.of(0).num_bytes == 4 * 4096


async def test_entries_that_something_else_computed_are_marked_in_forks_and_in_files_made_of_them(tmp_path):
    async with running(House(tmp_path, bits="cpu avx512"), drain=True) as house:
        house.create("a.kv", range(40))
    async with running(House(tmp_path, bits="cpu avx2")) as house:
        file = await house.open("a.kv", write=True)
        house.append(file, [1, 2])
        assert house.fs.kv_stat_open(file).other_bits == 40
        fork = house.fs.kv_fork(ROOT, file, "fork.kv")
        assert house.fs.kv_stat_open(fork).other_bits == 40
        assembly = house.fs.begin_merge(ROOT, [house.create("own.kv", [5]), file], "both.kv", 0o600, rebase=False)
        assert house.fs.kv_stat_open(await house.assemble(assembly, "both.kv")).other_bits == 43
        house.fs.kv_truncate(file, 20)
        assert house.fs.kv_stat_open(file).other_bits == 20
        await house.keeper.sync_all()
    async with running(House(tmp_path, bits="cpu avx512", same_bits=True)) as house:
        assert house.fs.kv_stat(ROOT, "own.kv").other_bits == 1
        with pytest.raises(Invalid, match="--same-bits"):
            await house.open("own.kv")
        assert (await house.open("a.kv")).table.length == 20


async def test_files_that_lost_entries_to_a_full_disk_are_told_of_until_they_are_cut_removed_or_acknowledged(
    tmp_path, caplog
):
    def told() -> list[str]:
        found = [each.getMessage() for each in caplog.records if "lost entries" in each.getMessage()]
        caplog.clear()
        return found

    async with running(House(tmp_path, num_pages=80, disk_limit=0)) as house:
        for number in range(25):
            house.create(f"{number}.kv", range(40))
        assert await house.keeper.drain()
    async with running(House(tmp_path), drain=True) as house:
        (line,) = told()
        assert line.startswith("KV files that lost entries: 25: /0.kv has 0 of 40, /1.kv has 0 of 40, ")
        assert line.endswith("/19.kv has 0 of 40, symphony fsck names the others")
        assert house.keeper.statistics().num_lost_files == 25
        cut, grown = await house.open("0.kv", write=True), await house.open("1.kv", write=True)
        house.fs.kv_truncate(cut, 0)
        house.append(grown, [1])
        house.fs.kv_remove(ROOT, "2.kv")
        known = house.fs.find(ROOT, "3.kv")
        with pytest.raises(NotPermitted):
            xattrs.remove(house.volume, known, xattrs.LOST, 4242)
        xattrs.remove(house.volume, known, xattrs.LOST, 0)
        assert xattrs.LOST not in xattrs.names(house.volume, known)
        assert house.keeper.statistics().num_lost_files == 22
    found = fsck(tmp_path)
    assert (is_clean(found), len(found.findings)) == (True, 22)
    assert found.findings[0].line(is_repaired=False) == (
        "/1.kv: 1 of its 41 entries are left: see symphony help user.kv.lost"
    )
    assert not fsck(tmp_path, repair=True).is_repaired
    async with running(House(tmp_path), drain=True) as house:
        assert told()[0].startswith("KV files that lost entries: 22: /1.kv has 1 of 41, /4.kv has 0 of 40, ")
        for number in (1, *range(4, 25)):
            house.fs.kv_remove(ROOT, f"{number}.kv")
    House(tmp_path).keeper.close()
    assert told() == []


async def test_an_append_that_copies_the_last_page_takes_nothing_from_what_was_synced(tmp_path):
    async with running(House(tmp_path)) as house:
        one = house.create("one.kv", range(40))
        two = house.fs.kv_fork(ROOT, one, "two.kv")
        house.tree.link(two.inode, house.tree.root, b"three.kv")
        await house.keeper.sync_all()
        house.append(one, [1])
        house.append(two, [2])  # its last page is a copy, of which nothing is on disk
        house.fs.kv_remove(ROOT, "three.kv")  # and this has a commit write about it
        await house.keeper.sync(house.tree.root)
    async with running(House(tmp_path)) as house:
        assert house.tokens(await house.open("two.kv")) == list(range(40))
        assert house.fs.kv_stat(ROOT, "two.kv").lost_tokens == 1
