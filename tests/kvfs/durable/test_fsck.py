"""Damage of every kind is found, the files concerned are named, and the rest is kept."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
import trio

from kvfs.durable.fsck import Report, fsck
from kvfs.durable.index import FORMAT_VERSION
from libsym.errors import SymError
from tests.kvfs.durable.damage import (
    DAMAGES,
    OTHER_FACTS,
    PLAIN,
    TOKENS,
    Damage,
    copy_of,
    flip,
    number_of,
    own_slots,
    slot_at,
    sql,
    zero_page,
)
from tests.kvfs.durable.house import ROOT, House, is_clean, running
from tests.kvfs.durable.test_formats import FORMATS, names_of


def everything(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")
    }


def named(report: Report) -> set[str]:
    return {path for finding in report.findings for path in finding.paths}


def with_numbers(state: Path, text: str, path: str = "") -> str:
    """`{}`: the number of a path's inode, `{/dir}`: that of another."""
    return re.sub(r"\{(.*?)\}", lambda found: str(number_of(state, found[1] or path)), text)


def test_a_sound_state_is_clean_and_every_page_was_read(state: Path) -> None:
    found = fsck(state)
    assert (found.findings, is_clean(found)) == ((), True)
    assert (found.num_files, found.num_pages) == (len(TOKENS) + len(PLAIN), 2 + 10 + 3 + 1 + 1)


def test_a_state_that_a_killed_daemon_left_is_clean(tmp_path: Path) -> None:
    async def live() -> None:
        async with running(House(tmp_path)) as house:
            house.create("a.kv", range(100))
            await house.sync("a.kv")
            copy_of(tmp_path, tmp_path / "killed")

    trio.run(live)
    assert (tmp_path / "killed/index.db-wal").stat().st_size
    found = fsck(tmp_path / "killed")
    assert (found.findings, found.num_pages) == ((), 4)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damage_is_found_and_named_and_nothing_is_written(damage: Damage, sound: Path, state: Path) -> None:
    damage.plant(state)
    before = everything(state)
    found = fsck(state)
    assert found.findings
    assert is_clean(found) != damage.is_damage
    assert {with_numbers(sound, path) for path in damage.paths} <= named(found)
    assert everything(state) == before


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_repair_keeps_the_rest(damage: Damage, sound: Path, state: Path) -> None:
    damage.plant(state)
    assert fsck(state, repair=True).is_repaired
    again = fsck(state)
    assert {(each.kind, each.is_damage, each.repair) for each in again.findings} <= {("lost", False, "")}
    lost = {path for each in again.findings for path in each.paths}
    places = {path: with_numbers(sound, damage.moved.get(path, path), path) for path in TOKENS}
    wanted = {path: TOKENS[path][: damage.left.get(path, len(TOKENS[path]))] for path in TOKENS}
    gone = {path for path, left in damage.left.items() if left is None}

    async def look(facts: object, paths: list[str]) -> None:
        async with running(House(state, facts), drain=True) as house:
            for path in paths:
                if path in gone:
                    assert places[path] not in house.names()
                    continue
                stat = house.fs.kv_stat(ROOT, places[path].lstrip("/"))
                if stat.kind == "kv" and not (stat.tokens == 0 and not wanted[path]):
                    file = await house.open(places[path].lstrip("/"), write=True)
                    assert house.tokens(file) == wanted[path]
                    assert (places[path] in lost) == (stat.lost_tokens > 0)
                    assert house.is_right(file)
                    house.append(file, [1, 2, 3])
                    assert house.is_right(file)
                else:
                    assert wanted[path] == []

            for path, data in PLAIN.items():
                if path not in damage.paths and facts is None and not damage.moved and None not in damage.left.values():
                    assert house.fs.find(ROOT, path.lstrip("/")).content.read_at(0, 100) == data

    trio.run(look, None, list(TOKENS)[1:])
    trio.run(look, OTHER_FACTS, ["/other.kv"])
    assert is_clean(fsck(state))


def written_bytes(log: Path) -> int:
    """Return the number of written bytes of a log, which has room for more."""
    return len(log.read_bytes().rstrip(b"\0"))


def test_what_was_kept_before_a_damaged_log_is_kept_and_the_loss_is_told(tmp_path: Path) -> None:
    async def live() -> None:
        async with running(House(tmp_path)) as house:
            for name in ("a.kv", "b.kv", "c.kv", "d.kv"):
                house.create(name, range(40))
                await house.sync(name)
            copy_of(tmp_path, tmp_path / "killed")

    trio.run(live)
    state = tmp_path / "killed"
    log = state / "index.db-wal"
    flip(log, written_bytes(log) // 2)
    with pytest.raises(SymError, match="symphony fsck"):
        House(state)
    found = fsck(state)
    assert [finding.kind for finding in found.findings][:1] == ["index"]
    assert "log" in found.findings[0].what
    assert fsck(state, repair=True).is_repaired
    assert is_clean(fsck(state))
    assert log.with_name("index.db.before-repair-1-wal").exists()

    async def after() -> list[str]:
        async with running(House(state)) as house:
            assert house.tokens(await house.open("a.kv")) == list(range(40))
            return house.names()

    assert "/d.kv" not in trio.run(after)


def test_a_commit_that_a_power_cut_tore_is_no_damage(tmp_path: Path) -> None:
    async def live() -> None:
        async with running(House(tmp_path)) as house:
            for name in ("a.kv", "b.kv"):
                house.create(name, range(40))
                await house.sync(name)
            copy_of(tmp_path, tmp_path / "torn")

    trio.run(live)
    state = tmp_path / "torn"
    flip(state / "index.db-wal", written_bytes(state / "index.db-wal") - 10)
    assert fsck(state).findings == ()

    async def after() -> list[str]:
        async with running(House(state)) as house:
            return house.names()

    assert trio.run(after) == ["/a.kv"]


def test_rows_behind_damage_in_a_large_index_are_found(tmp_path: Path) -> None:
    """A page in the middle of a table: what is in it is lost, and no more."""
    state = tmp_path

    async def live() -> None:
        async with running(House(state, num_pages=420), drain=True) as house:
            house.fs.kv_mkdir(ROOT, "many", 0o755)
            for number in range(400):
                house.create(f"many/file-{number}.kv", [number])

    trio.run(live)
    index = (state / "index.db").read_bytes()
    leaf = next(at for at in range(0, len(index), 4096) if index[at] == 10 and b"file-299.kv" in index[at : at + 4096])
    with (state / "index.db").open("r+b") as file:
        file.seek(leaf)
        file.write(bytes(4096))
    lost = int.from_bytes(index[leaf + 3 : leaf + 5])  # how many cells SQLite says that it has
    found = fsck(state, repair=True)
    assert found.num_files == 400, "those without a name are in /lost+found"
    assert sum(path.startswith("/lost+found/#") for path in named(found)) == lost
    assert is_clean(fsck(state))

    async def after() -> list[str]:
        async with running(House(state, num_pages=420)) as house:
            return house.names()

    names = trio.run(after)
    assert sum(name.startswith("/many/") for name in names) == 400 - lost
    assert sum(name.startswith("/lost+found/#") for name in names) == lost


@pytest.mark.parametrize("older", range(1, FORMAT_VERSION))
def test_a_state_of_an_older_format_is_clean_and_can_be_repaired(older: int, tmp_path: Path) -> None:
    with tarfile.open(FORMATS / f"{older}.tar.xz") as planted:
        planted.extractall(tmp_path, filter="data")
    assert fsck(tmp_path / "state").findings == ()
    number = number_of(tmp_path / "state", "/empty.kv")
    sql(tmp_path / "state", "UPDATE inodes SET record = x'00' WHERE number = ?", number)
    assert "/empty.kv" in named(fsck(tmp_path / "state", repair=True))
    assert fsck(tmp_path / "state").findings == ()


@pytest.mark.parametrize("older", range(1, 4))  # no later migration reads records
def test_a_text_where_a_migration_looks_for_a_record_is_damage_like_any_other(older: int, tmp_path: Path) -> None:
    """A bit of a row's header makes a text of bytes."""
    with tarfile.open(FORMATS / f"{older}.tar.xz") as planted:
        planted.extractall(tmp_path, filter="data")
    number = number_of(tmp_path / "state", "/a.kv")
    sql(tmp_path / "state", "UPDATE inodes SET record = hex(zeroblob(300)) WHERE number = ?", number)
    with pytest.raises(SymError, match="symphony fsck"):
        House(tmp_path / "state")
    assert "/a.kv" in named(fsck(tmp_path / "state", repair=True))
    assert fsck(tmp_path / "state").findings == ()


def test_quick_reads_no_page(state: Path) -> None:
    flip(own_slots(state), slot_at(3))
    assert is_clean(fsck(state, quick=True))
    assert not is_clean(fsck(state))


def test_the_old_index_stays_beside_the_new_one(state: Path) -> None:
    sql(state, "DELETE FROM slots WHERE slot = 5")
    old = (state / "index.db").read_bytes()
    fsck(state, repair=True)
    assert (state / "index.db.before-repair-1").read_bytes() == old
    sql(state, "DELETE FROM slots WHERE slot = 1")
    fsck(state, repair=True)
    assert (state / "index.db.before-repair-2").exists()


def test_a_repair_that_was_cut_off_is_finished_by_whoever_comes_next(state: Path) -> None:
    """The new index was whole, and had not taken the old one's place; the old one's log must not get into it."""
    sql(state, "DELETE FROM slots WHERE slot = 5 AND identity = 2")
    copy = copy_of(state, state.parent / "copy")
    fsck(copy, repair=True)
    (copy / "index.db").rename(state / "index.db.repaired")
    (state / "index.db-wal").write_bytes(b"of the old one")
    assert is_clean(fsck(state))

    async def after() -> int:
        async with running(House(state)) as house:
            return house.fs.kv_stat(ROOT, "a.kv").tokens

    assert trio.run(after) == 160
    assert (state / "index.db.before-repair-1-wal").read_bytes() == b"of the old one"


def test_where_there_is_no_state_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(SymError, match="no state"):
        fsck(tmp_path / "nowhere", repair=True)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("older", range(1, FORMAT_VERSION))
def test_an_index_of_an_older_format_whose_first_page_is_lost_is_read_all_the_same(older: int, tmp_path: Path) -> None:
    with tarfile.open(FORMATS / f"{older}.tar.xz") as planted:
        planted.extractall(tmp_path, filter="data")
    zero_page(tmp_path / "state", 1)
    fsck(tmp_path / "state", repair=True)
    assert fsck(tmp_path / "state").findings == ()
    house = House(tmp_path / "state")
    assert house.names() == names_of(older)
    house.keeper.close()
