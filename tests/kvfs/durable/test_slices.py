"""A commit is bounded by what a slice takes, whatever a sync depends on, and however far apart two operations are."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from kvfs.durable.cut import Cut, Cutter
from kvfs.durable.journal import DIRTY_LOOKED_AT, LOOKED_AT, OPERATIONS_A_SLICE, Journal, NameChange
from kvfs.durable.keeper import OTHERS_A_CUT, SYNCS_A_CUT
from kvfs.names.inode import Inode
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House, running
from tests.kvfs.durable.test_left_out import Plant
from tests.kvfs.durable.test_overtaking import hold_back_names

MANY = 4 * OPERATIONS_A_SLICE
PROMPT_S = 60.0
"""Under the storage's own deadlines together; nothing here hangs."""


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

    def are_bounded(self) -> bool:
        is_taken = max(self.num_taken) <= 2 * OPERATIONS_A_SLICE
        return (
            is_taken
            and max(self.num_walked) <= OPERATIONS_A_SLICE + 1
            and max(self.num_above) <= 2 * OPERATIONS_A_SLICE
        )


Names = dict[tuple[int, bytes], int]


def names_of(house: House) -> Names:
    return {(each.number, name): child.number for each in house.tree for name, child in each.entries.items()}


def names_after(directory: Path) -> Names:
    """Return the names that a daemon finds when it starts on this state."""
    house = House(directory)
    house.keeper.close()
    house.fs.check()
    return names_of(house)


def make_directory(house: House, name: str, directory: Inode | None = None) -> Inode:
    return house.tree.make(directory or house.tree.root, name.encode(), stat.S_IFDIR, mode=0o755, uid=0, gid=0)


def links(house: House) -> Inode:
    file = house.create("file.kv", [1]).inode
    for number in range(MANY):
        house.tree.link(file, house.tree.root, b"%d" % number)
    return file


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


@pytest.mark.parametrize("work", [links, nested, round_a_directory, round_a_file, replacing])
def test_a_sync_takes_what_it_depends_on_in_slices(
    work: Callable[[House], Inode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Names = {}

    async def main() -> None:
        async with running(House(tmp_path, num_pages=2 * MANY)) as house:
            cuts = Cuts(house, monkeypatch)
            inode = work(house)
            await house.keeper.sync(inode)
            assert cuts.are_bounded(), (cuts.num_taken, cuts.num_walked)
            found.update(names_of(house))

    trio.run(main)
    assert names_after(tmp_path) == found


def test_many_syncs_at_once_share_a_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Names = {}

    async def main() -> None:
        async with running(House(tmp_path)) as house:
            hold_back_names(house)
            files = [house.create(f"{number}.kv").inode for number in range(SYNCS_A_CUT)]
            for inode in files:
                for number in range(OPERATIONS_A_SLICE // 8):
                    house.tree.link(inode, house.tree.root, b"%d-%d" % (inode.number, number))
            cuts = Cuts(house, monkeypatch)
            async with trio.open_nursery() as nursery:
                for inode in files:
                    nursery.start_soon(house.keeper.sync, inode)
            assert cuts.are_bounded(), (cuts.num_taken, cuts.num_walked)
            found.update({key: number for key, number in names_of(house).items() if b"held" not in key[1]})

    trio.run(main)
    assert found.items() <= names_after(tmp_path).items()


def test_a_sync_of_more_than_a_slice_writes_what_is_before_it(tmp_path: Path) -> None:
    found: Names = {}

    async def main() -> None:
        async with running(House(tmp_path)) as house:
            hold_back_names(house)
            await house.keeper.sync(links(house))
            found.update(names_of(house))

    trio.run(main)
    assert names_after(tmp_path) == found


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_sync_of_more_than_a_slice_waits_for_nothing_that_can_not_be_written(
    is_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Names = {}

    async def main() -> None:
        plant = Plant(monkeypatch, "encode_inode")
        async with running(House(tmp_path)) as house:
            bad = make_directory(house, "bad")
            plant.bad.add(bad)
            for number in range(MANY):
                make_directory(house, str(number), bad)
            file = links(house)
            with trio.fail_after(PROMPT_S):
                if is_bad:
                    with pytest.raises(SymError, match="/bad is left out") as raised:
                        await house.keeper.sync(bad)
                    assert raised.value.errno == errno.EIO
                await house.keeper.sync(file)
            found.update({key: number for key, number in names_of(house).items() if number == file.number})

    trio.run(main)
    assert names_after(tmp_path) == found


def test_a_full_disk_forgets_what_was_removed_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running(House(tmp_path)) as house:
            house.fs.kv_close(house.create("old.kv", range(640)))
            await house.keeper.sync_all()
            house.create("held.kv", range(320))
            house.fs.kv_rename(ROOT, "held.kv", "held2.kv")
            links(house)
            house.fs.kv_remove(ROOT, "old.kv")
            cuts = Cuts(house, monkeypatch)
            house.keeper.limit(house.keeper.statistics().disk_bytes, 30.0)
            await house.sync("held2.kv")
            assert cuts.are_bounded(), (cuts.num_taken, cuts.num_walked)
            assert not house.keeper.pages_out.missing(house.fs.find(ROOT, "held2.kv").content, 320).size

    trio.run(main)


def test_a_cut_on_a_full_disk_looks_at_a_part_of_what_is_dirty_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looked, others = [0], Journal.others

    def counted(journal: Journal, may_be_taken: Callable[[Inode], bool], most: int) -> list[Inode]:
        num_looked.append(0)

        def noted(inode: Inode) -> bool:
            num_looked[-1] += 1
            return may_be_taken(inode)

        return others(journal, noted, most)

    monkeypatch.setattr(Journal, "others", counted)

    async def main() -> None:
        async with running(House(tmp_path, num_pages=2 * MANY)) as house:
            behind = house.create("behind.kv").inode
            await house.keeper.sync_all()
            for number in range(MANY):
                house.fs.kv_close(house.create(f"{number}.kv", [1]))
            behind.mode = 0o640
            behind.changed()
            house.keeper.limit(0, 30.0)
            with pytest.raises(SymError) as raised:
                await house.keeper.sync_all()
            assert raised.value.errno == errno.ENOSPC
            assert max(num_looked) <= DIRTY_LOOKED_AT

    trio.run(main)
    house = House(tmp_path)
    house.keeper.close()
    assert house.fs.find(ROOT, "behind.kv").mode == 0o640


def test_a_full_disk_has_the_room_of_what_was_cut_while_a_pass_over_what_is_dirty_was_under_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(House(tmp_path)) as house:
            old, grown = house.create("old.kv", range(640)), house.create("grown.kv")
            others = [house.create(f"{number}.kv").inode for number in range(2 * OTHERS_A_CUT)]
            await house.keeper.sync_all()
            for each in others:
                each.changed()
            await house.keeper._commit(lambda: 0, others=OTHERS_A_CUT)
            house.fs.kv_truncate(old, 0)
            house.append(grown, range(1000, 1320))
            house.keeper.limit(house.keeper.statistics().disk_bytes, 30.0)
            await house.sync("grown.kv")

    trio.run(main)
    house = House(tmp_path)
    house.keeper.close()
    assert [house.fs.kv_stat(ROOT, name).tokens for name in ("old.kv", "grown.kv")] == [0, 320]


def test_a_full_disk_has_no_commits_of_files_that_lack_their_entries_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(House(tmp_path, num_pages=4 * OTHERS_A_CUT)) as house:
            files = [house.create(f"{number}.kv") for number in range(3 * OTHERS_A_CUT)]
            await house.keeper.sync_all()
            for number, file in enumerate(files):
                house.append(file, [number])
            house.keeper.limit(house.keeper.statistics().disk_bytes, 30.0)
            num_commits = []
            for _ in range(2):
                with pytest.raises(SymError) as raised:
                    await house.sync("0.kv")
                assert raised.value.errno == errno.ENOSPC
                num_commits.append(house.keeper.statistics().num_commits)
            assert num_commits[0] == num_commits[1]
            house.keeper.limit(None, 30.0)
            await house.keeper.sync_all()

    trio.run(main)
    house = House(tmp_path, num_pages=4 * OTHERS_A_CUT)
    house.keeper.close()
    assert not house.keeper.lost_files()
    assert {house.fs.kv_stat(ROOT, name.decode()).tokens for name in house.tree.root.entries} == {1}


def test_a_sync_of_everything_beside_what_can_not_be_written_goes_through_no_list_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        plant = Plant(monkeypatch, "encode_inode")
        async with running(House(tmp_path)) as house:
            journal = house.keeper._journal
            file = links(house)
            plant.bad.add(file)
            make_directory(house, "last")
            asked: list[NameChange] = []
            waits = Journal.waits
            monkeypatch.setattr(Journal, "waits", lambda each, change: asked.append(change) or waits(each, change))
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

    trio.run(main)
