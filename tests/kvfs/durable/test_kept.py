"""The index is read in bulk: it says the same as row by row, and no row that is not as it was written passes."""

import stat
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.durable.index import Index, Row
from kvfs.durable.kept import KeptRows, read_index
from kvfs.durable.records import Broken
from kvfs.durable.rows import inode_row, name_row, slot_row, version_row
from kvfs.names.retention import advised
from libsym.abi import Advice
from tests.kvfs.durable.damage import sql
from tests.kvfs.durable.house import ROOT, House, running

ONE_BY_ONE: dict[str, Callable[[Row], object]] = {
    "inodes": inode_row,
    "names": name_row,
    "slots": slot_row,
    "versions": version_row,
}


@pytest.fixture
def varied(state: Path) -> Path:
    """A state whose inodes differ in all that they can differ in."""

    async def vary() -> None:
        async with running(House(state), drain=True) as house:
            tree, volume = house.tree, house.volume
            tree.link(house.fs.find(ROOT, "a.kv"), house.fs.find(ROOT, "dir"), b"again.kv")
            tree.make(tree.root, b"link", stat.S_IFLNK, mode=0o777, uid=7, gid=8, target=b"dir/deep")
            tree.make(tree.root, b"null", stat.S_IFCHR, mode=0o666, uid=0, gid=0).device = 0x103
            quota = tree.make(tree.root, b"quota", stat.S_IFDIR, mode=0o700, uid=9, gid=9)
            volume.domains.set_limit(quota, b"user.kv.quota", b"8M", 0)
            volume.domains.set_weight(quota, b"0.25", 0)
            talk = house.create("quota/q.kv", range(33))
            talk.content.goes_on(talk.table.read()[0])
            house.append(talk, [7])
            file = house.fs.find(ROOT, "dir/b.kv")
            file.note(b"user.a", b"1")
            file.note(b"user.b", bytes(300))
            volume.advise(file, advised(file.advice, [(Advice.PIN, 0), (Advice.TTL, 5000), (Advice.PRIORITY, -3)]))

    trio.run(vary)
    return state


def read(directory: Path) -> KeptRows:
    index = Index(directory / "index.db")
    try:
        return read_index(index)
    finally:
        index.close()


def test_rows_in_bulk_say_what_each_says_alone(varied):
    kept = read(varied)
    rows = {table: sql(varied, f"SELECT * FROM {table}") for table in ONE_BY_ONE}
    assert kept.inodes == dict(map(inode_row, rows["inodes"]))
    assert [row[:3] for row in kept.names] == list(map(name_row, rows["names"]))
    versions = dict(map(version_row, rows["versions"]))
    assert kept.versions.numbers == list(versions)
    columns = (kept.versions.identities, kept.versions.lengths, kept.versions.full_lengths)
    found = zip(*(each.tolist() for each in columns), kept.versions.marks, strict=True)
    assert list(found) == [version[:4] for version in versions.values()]
    assert kept.versions.turns == [version.turns for version in versions.values()]
    assert any(kept.versions.turns)
    slots = [each.tolist() for each in kept.versions.split(kept.versions.slots)]
    assert slots == [version.slots.tolist() for version in versions.values()]
    for identity, record in map(slot_row, rows["slots"]):
        mine = kept.slots[identity]
        (place,) = (mine.slots == record.slot).nonzero()[0].tolist()
        entries = mine.tokens[place].tobytes() + mine.positions[place].tobytes()
        assert (mine.checks[place], mine.kept[place], entries) == record[1:]


async def test_a_daemon_has_all_of_it_again(varied):
    async with running(House(varied)) as house:
        find = house.fs.find
        assert find(ROOT, "dir/again.kv") is find(ROOT, "a.kv")
        assert find(ROOT, "a.kv").nlink == 2
        assert house.tree.child(house.tree.root, b"link").target == b"dir/deep"
        assert house.tree.child(house.tree.root, b"null").device == 0x103
        assert (domain := find(ROOT, "quota").domain) is not None
        assert (domain.num_files, domain.weight) == (1, 0.25)
        file = find(ROOT, "dir/b.kv")
        assert file.xattrs == {b"user.a": b"1", b"user.b": bytes(300)}
        assert (file.advice.pinned, file.advice.ttl_ms, file.advice.priority) == (True, 5000, -3)


COLUMNS = {
    "inodes": ["record"],
    "versions": ["record"],
    "names": ["directory", "name", "number", "row_check"],
    "slots": ["identity", "slot", "page_check", "kept", "entries", "row_check"],
}
OTHERS: dict[str, Callable[[Any], object]] = {
    "a flipped bit": lambda value: value[:-1] + bytes([value[-1] ^ 64]) if isinstance(value, bytes) else value ^ 64,
    "a lost end": lambda value: value[:-1] if isinstance(value, bytes) else value >> 8,
    "a text": lambda _value: "lost",
    "a fraction": lambda _value: 0.5,
}


@pytest.mark.parametrize("table", COLUMNS)
def test_a_row_that_is_not_as_it_was_written_is_named(state, table):
    sound = (state / "index.db").read_bytes()
    rows = sql(state, f"SELECT * FROM {table}")
    columns = [name for _, name, *_ in sql(state, f"SELECT * FROM pragma_table_info('{table}')")]
    row, is_it = rows[len(rows) // 2], " AND ".join(f"{each} = ?" for each in columns)
    for column, what in product(COLUMNS[table], OTHERS):
        wrong = OTHERS[what](row[columns.index(column)])
        sql(state, f"UPDATE OR REPLACE {table} SET {column} = ? WHERE {is_it}", wrong, *row)
        with pytest.raises(Broken) as alone:
            list(map(ONE_BY_ONE[table], sql(state, f"SELECT * FROM {table}")))
        with pytest.raises(Broken) as in_bulk:
            read(state)
        assert str(in_bulk.value) == str(alone.value), (column, what)
        (state / "index.db").write_bytes(sound)
