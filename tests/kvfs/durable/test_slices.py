"""A commit is bounded by what a slice takes, whatever a sync depends on, and however far apart two operations are."""

import errno
import stat
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvfs.durable.cut import Cut, Cutter
from kvfs.durable.journal import DIRTY_LOOKED_AT, LOOKED_AT, OPERATIONS_A_SLICE, Journal, NameChange
from kvfs.durable.keeper import OTHERS_A_CUT
from kvfs.names.inode import Inode
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House, failing, names_after, running
from tests.kvfs.durable.test_cut import Plant
from tests.kvfs.durable.test_overtaking import hold_back_names

MANY = 2 * OPERATIONS_A_SLICE + OPERATIONS_A_SLICE // 8


class Cuts:
    """Counts the operations of each cut of a house, those that a walk of its journal gives, and directories above."""

    def __init__(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_taken: list[int] = []
        self.num_walked: list[int] = []
        self.num_above: list[int] = []
        take, closure = Cutter.take, Journal.closure

        def noted(cutter: Cutter, *arguments: object, **named: object) -> Cut:
            before = sum(self.num_walked)
            cut = take(cutter, *arguments, **named)  # type: ignore[arg-type]
            self.num_taken.append(len(cut.changes))
            assert sum(self.num_walked) - before <= 2 * OPERATIONS_A_SLICE
            return cut

        def above(number: int) -> Inode:
            self.num_above[-1:] = [sum(self.num_above[-1:]) + 1]
            return house.tree.get(number)

        house.keeper._journal._directories = lambda: SimpleNamespace(get=above)

        def walked(journal: Journal, *arguments: object, **named: object) -> list[NameChange]:
            self.num_above.append(0)
            found = closure(journal, *arguments, **named)  # type: ignore[arg-type]
            self.num_walked.append(len(found))
            return found

        monkeypatch.setattr(Cutter, "take", noted)
        monkeypatch.setattr(Journal, "closure", walked)

    def check(self) -> None:
        assert max(self.num_taken) <= 2 * OPERATIONS_A_SLICE
        assert max(self.num_walked) <= OPERATIONS_A_SLICE + 1
        assert max(self.num_above) <= 2 * OPERATIONS_A_SLICE


def make_directory(house: House, name: str, directory: Inode | None = None) -> Inode:
    return house.tree.make(directory or house.tree.root, name.encode(), stat.S_IFDIR, mode=0o755, uid=0, gid=0)


def links(house: House) -> Inode:
    file = house.create("file.kv", [1]).inode
    for number in range(MANY):
        house.tree.link(file, house.tree.root, b"%d" % number)
    return file


def links_behind_others(house: House) -> Inode:
    hold_back_names(house)
    return links(house)


def nested(house: House) -> Inode:
    directory = house.tree.root
    for _ in range(MANY):
        directory = make_directory(house, "d", directory)
    return directory


def round_a_directory(house: House) -> Inode:
    make_directory(house, "x")
    for number in range(MANY):
        make_directory(house, str(number))
    house.tree.rmdir(house.tree.root, b"x")
    return house.tree.root


def round_a_file(house: House) -> Inode:
    house.create("new.kv", range(40))
    house.fs.kv_rename(ROOT, "new.kv", "x.kv")
    for number in range(MANY):
        make_directory(house, str(number))
    house.fs.kv_remove(ROOT, "x.kv")
    return house.tree.root


def replacing(house: House) -> Inode:
    for number in range(MANY):
        house.create("new.kv", [number % 1000])
        house.fs.kv_rename(ROOT, "new.kv", "x.kv")
        make_directory(house, str(number))
    return house.tree.root


@pytest.mark.slow
@pytest.mark.parametrize("work", [links, links_behind_others, nested, round_a_directory, round_a_file, replacing])
async def test_a_sync_takes_what_it_depends_on_in_slices(work, tmp_path, monkeypatch):
    async with running(House(tmp_path, num_pages=2 * MANY)) as house:
        cuts = Cuts(house, monkeypatch)
        inode = work(house)
        await house.keeper.sync(inode)
        cuts.check()
        found = house.names()
    assert names_after(tmp_path) == found


@pytest.mark.parametrize("is_bad", [False, True])
async def test_a_sync_of_more_than_a_slice_waits_for_nothing_that_can_not_be_written(is_bad, tmp_path, monkeypatch):
    plant = Plant(monkeypatch, "encode_inode")
    async with running(House(tmp_path)) as house:
        bad = make_directory(house, "bad")
        plant.bad.add(bad)
        for number in range(MANY):
            make_directory(house, str(number), bad)
        file = links(house)
        if is_bad:
            with failing(errno.EIO, "/bad is left out"):
                await house.keeper.sync(bad)
        await house.keeper.sync(file)
    assert names_after(tmp_path) == sorted(["/file.kv", *(f"/{number}" for number in range(MANY))])


@pytest.mark.slow
async def test_a_cut_on_a_full_disk_looks_at_a_part_of_what_is_dirty_and_the_next_one_goes_on(tmp_path, monkeypatch):
    num_looked, others = [0], Journal.others

    def counted(journal: Journal, may_be_taken: Callable[[Inode], bool], most: int) -> list[Inode]:
        num_looked.append(0)

        def noted(inode: Inode) -> bool:
            num_looked[-1] += 1
            return may_be_taken(inode)

        return others(journal, noted, most)

    monkeypatch.setattr(Journal, "others", counted)
    async with running(House(tmp_path, num_pages=2 * MANY)) as house:
        behind = house.create("behind.kv").inode
        await house.keeper.sync_all()
        for number in range(MANY):
            house.fs.kv_close(house.create(f"{number}.kv", [1]))
        behind.mode = 0o640
        behind.changed()
        house.keeper.limit(0, 30.0)
        with failing(errno.ENOSPC):
            await house.keeper.sync_all()
        assert max(num_looked) <= DIRTY_LOOKED_AT
    house = House(tmp_path)
    house.keeper.close()
    assert house.fs.find(ROOT, "behind.kv").mode == 0o640


async def test_a_full_disk_has_no_commits_of_files_that_lack_their_entries_alone(tmp_path):
    async with running(House(tmp_path, num_pages=4 * OTHERS_A_CUT)) as house:
        files = [house.create(f"{number}.kv") for number in range(3 * OTHERS_A_CUT)]
        await house.keeper.sync_all()
        for number, file in enumerate(files):
            house.append(file, [number])
        house.keeper.limit(house.keeper.statistics().disk_bytes, 30.0)
        num_commits = []
        for _ in range(2):
            with failing(errno.ENOSPC):
                await house.sync("0.kv")
            num_commits.append(house.keeper.statistics().num_commits)
        assert num_commits[0] == num_commits[1]
        house.keeper.limit(None, 30.0)
        await house.keeper.sync_all()
    house = House(tmp_path, num_pages=4 * OTHERS_A_CUT)
    house.keeper.close()
    assert not house.keeper.lost_files()
    assert {house.fs.kv_stat(ROOT, name.decode()).tokens for name in house.tree.root.entries} == {1}


async def test_a_sync_of_everything_beside_what_can_not_be_written_goes_through_no_list_of_changes(
    tmp_path, monkeypatch
):
    plant = Plant(monkeypatch, "encode_inode")
    async with running(House(tmp_path)) as house:
        journal = house.keeper._journal
        file = links(house)
        plant.bad.add(file)
        make_directory(house, "last")
        asked, waits = list[NameChange](), Journal.waits

        def noted(each: Journal, change: NameChange) -> bool:
            asked.append(change)
            return waits(each, change)

        monkeypatch.setattr(Journal, "waits", noted)
        with journal.counting() as num_left:
            assert num_left() == len(journal.operations) + len(journal.dirty) + 1
            make_directory(house, "later")
            with pytest.raises(SymError, match="left out"):
                await house.keeper.sync_all()
            assert num_left() == MANY + 1 + 1 + 1, "of the file: its names and itself; and that there are some"
            asked.clear()
            journal.first_operations()
            assert len(asked) <= LOOKED_AT
            plant.bad.clear()
            await house.keeper.sync_all()
            assert num_left() == 0
