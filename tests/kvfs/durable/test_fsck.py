"""Damage of every kind is found, the files concerned are named, and the rest is kept."""

import re
from pathlib import Path

import pytest

from kvfs.durable.fsck import Report, fsck
from kvfs.durable.index import FORMAT_VERSION
from libsym.errors import SymError
from tests.kvfs.durable.damage import (
    DAMAGES,
    OTHER_FACTS,
    PLAIN,
    TOKENS,
    copy_of,
    flip,
    number_of,
    own_slots,
    slot_at,
    sql,
    zero_page,
)
from tests.kvfs.durable.house import ROOT, House, is_clean, names_after, running
from tests.kvfs.durable.test_migrations import extracted, names_of


def everything(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")
    }


def named(report: Report) -> set[str]:
    return {path for finding in report.findings for path in finding.paths}


def with_numbers(state: Path, text: str, path: str = "") -> str:
    """`{}`: the number of a path's inode, `{/dir}`: that of another."""
    return re.sub(r"\{(.*?)\}", lambda found: str(number_of(state, found[1] or path)), text)


def test_a_sound_state_is_clean_and_every_page_was_read(state):
    found = fsck(state)
    assert (found.findings, is_clean(found)) == ((), True)
    assert (found.num_files, found.num_pages) == (len(TOKENS) + len(PLAIN), 2 + 10 + 3 + 1 + 1)


async def killed(directory: Path, *names: str) -> Path:
    """A state of a daemon that was killed when it had synced these files."""
    async with running(House(directory)) as house:
        for name in names:
            house.create(name, range(40))
            await house.sync(name)
        state = copy_of(directory, directory / "killed")
    assert (state / "index.db-wal").stat().st_size
    return state


def written_bytes(log: Path) -> int:
    """Return the number of written bytes of a log, which has room for more."""
    return len(log.read_bytes().rstrip(b"\0"))


async def test_a_state_that_a_killed_daemon_left_is_clean_and_a_torn_commit_at_its_end_no_damage(tmp_path):
    state = await killed(tmp_path, "a.kv", "b.kv")
    found = fsck(state)
    assert (found.findings, found.num_pages) == ((), 4)
    flip(state / "index.db-wal", written_bytes(state / "index.db-wal") - 10)
    assert fsck(state).findings == ()
    assert names_after(state) == ["/a.kv"]


async def test_what_was_kept_before_a_damaged_log_is_kept_and_the_loss_is_told(tmp_path):
    state = await killed(tmp_path, "a.kv", "b.kv", "c.kv", "d.kv")
    log = state / "index.db-wal"
    flip(log, written_bytes(log) // 2)
    with pytest.raises(SymError, match="symphony fsck"):
        House(state)
    found = fsck(state)
    assert found.findings[0].kind == "index"
    assert "log" in found.findings[0].what
    assert fsck(state, repair=True).is_repaired
    assert is_clean(fsck(state))
    assert log.with_name("index.db.before-repair-1-wal").exists()
    async with running(House(state)) as house:
        assert house.tokens(await house.open("a.kv")) == list(range(40))
        assert "/d.kv" not in house.names()


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
async def test_damage_is_found_and_named_and_a_repair_keeps_the_rest(damage, sound, state):
    damage.plant(state)
    before = everything(state)
    found = fsck(state)
    assert found.findings
    assert is_clean(found) != damage.is_damage
    assert {with_numbers(sound, path) for path in damage.paths} <= named(found)
    assert everything(state) == before
    assert fsck(state, repair=True).is_repaired
    again = fsck(state)
    assert {(each.kind, each.is_damage, each.repair) for each in again.findings} <= {("lost", False, "")}
    other, *own = TOKENS
    for facts, paths in ((None, own), (OTHER_FACTS, [other])):
        async with running(House(state, facts), drain=True) as house:
            for path in paths:
                left = damage.left.get(path, len(TOKENS[path]))
                place = with_numbers(sound, damage.moved.get(path, path), path)
                if left is None:
                    assert place not in house.names()
                elif left or house.fs.kv_stat(ROOT, place.lstrip("/")).tokens:
                    file = await house.open(place.lstrip("/"), write=True)
                    assert house.tokens(file) == TOKENS[path][:left]
                    assert (place in named(again)) == (house.fs.kv_stat_open(file).lost_tokens > 0)
                    assert house.is_right(file)
                    house.append(file, [1, 2, 3])
                    assert house.is_right(file)
            if facts is None and not damage.moved and None not in damage.left.values():
                for path in PLAIN.keys() - {*damage.paths}:
                    assert house.read(house.fs.find(ROOT, path.lstrip("/"))) == PLAIN[path]
    assert is_clean(fsck(state))


@pytest.mark.slow
async def test_rows_behind_damage_in_a_large_index_are_found(tmp_path):
    """A page in the middle of a table: what is in it is lost, and no more."""
    async with running(House(tmp_path, num_pages=420), drain=True) as house:
        house.fs.kv_mkdir(ROOT, "many", 0o755)
        for number in range(400):
            house.create(f"many/file-{number}.kv", [number])
    index = (tmp_path / "index.db").read_bytes()
    leaf = next(at for at in range(0, len(index), 4096) if index[at] == 10 and b"file-299.kv" in index[at : at + 4096])
    zero_page(tmp_path, leaf // 4096 + 1)
    lost = int.from_bytes(index[leaf + 3 : leaf + 5])  # how many cells SQLite says that it has
    found = fsck(tmp_path, repair=True)
    assert found.num_files == 400, "those without a name are in /lost+found"
    assert sum(path.startswith("/lost+found/#") for path in named(found)) == lost
    assert is_clean(fsck(tmp_path))
    async with running(House(tmp_path, num_pages=420)) as house:
        names = house.names()
    assert sum(name.startswith("/many/") for name in names) == 400 - lost
    assert sum(name.startswith("/lost+found/#") for name in names) == lost


@pytest.mark.parametrize("older", range(1, FORMAT_VERSION))
def test_a_state_of_an_older_format_is_clean_and_is_repaired_even_without_its_first_page(older, tmp_path):
    state = extracted(older, tmp_path)
    assert fsck(state).findings == ()
    sql(state, "UPDATE inodes SET record = x'00' WHERE number = ?", number_of(state, "/empty.kv"))
    assert "/empty.kv" in named(fsck(state, repair=True))
    assert fsck(state).findings == ()
    state = extracted(older, tmp_path / "again")
    zero_page(state, 1)
    fsck(state, repair=True)
    assert fsck(state).findings == ()
    assert names_after(state) == names_of(older)


async def test_a_repair_brings_a_state_on_through_all_formats(tmp_path):
    """A state of format 3 without turns is one of format 2. The second migration puts large attributes apart."""
    state = extracted(3, tmp_path)
    sql(state, "PRAGMA user_version=2")
    sql(state, "UPDATE inodes SET record = x'00' WHERE number = ?", number_of(state, "/empty.kv"))
    fsck(state, repair=True)
    async with running(House(state)) as house:
        assert house.fs.find(ROOT, "a.kv").xattrs.is_away


@pytest.mark.parametrize("older", range(1, 4))  # no later migration reads records
def test_a_text_where_a_migration_looks_for_a_record_is_damage_like_any_other(older, tmp_path):
    """A bit of a row's header makes a text of bytes."""
    state = extracted(older, tmp_path)
    sql(state, "UPDATE inodes SET record = hex(zeroblob(300)) WHERE number = ?", number_of(state, "/a.kv"))
    with pytest.raises(SymError, match="symphony fsck"):
        House(state)
    assert "/a.kv" in named(fsck(state, repair=True))
    assert fsck(state).findings == ()


def test_quick_reads_no_page(state):
    flip(own_slots(state), slot_at(3))
    assert is_clean(fsck(state, quick=True))
    assert not is_clean(fsck(state))


def test_the_old_index_stays_beside_the_new_one(state):
    for number in (1, 2):
        sql(state, "DELETE FROM slots WHERE slot = ?", 6 - 2 * number)  # what lies behind is cut off
        old = (state / "index.db").read_bytes()
        fsck(state, repair=True)
        assert (state / f"index.db.before-repair-{number}").read_bytes() == old


def test_a_repair_that_was_cut_off_is_finished_by_whoever_comes_next(state):
    """The new index was whole, and had not taken the old one's place; the old one's log must not get into it."""
    sql(state, "DELETE FROM slots WHERE slot = 5 AND identity = 2")
    copy = copy_of(state, state.parent / "copy")
    fsck(copy, repair=True)
    (copy / "index.db").rename(state / "index.db.repaired")
    (state / "index.db-wal").write_bytes(b"of the old one")
    assert is_clean(fsck(state))
    house = House(state)
    assert house.fs.kv_stat(ROOT, "a.kv").tokens == 160
    house.keeper.close()
    assert (state / "index.db.before-repair-1-wal").read_bytes() == b"of the old one"


def test_where_there_is_no_state_nothing_is_made(tmp_path):
    with pytest.raises(SymError, match="no state"):
        fsck(tmp_path / "nowhere", repair=True)
    assert not (tmp_path / "nowhere").exists()
