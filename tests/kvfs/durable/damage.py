"""A state with one of everything, and ways to damage it: for tests of fsck and of what a daemon does without it."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import trio

from kvfs.durable.records import (
    SlotRecord,
    decode_inode,
    decode_version,
    encode_inode,
    encode_version,
    name_check,
    slot_check,
    text_check,
)
from tests.kvfs.durable.house import ROOT, House, running
from tests.kvfs.fakes import FakeFacts, fake_identity

PAGE = 4096
"""A slot of the fake model, and a page of the index."""
OTHER_FACTS = FakeFacts(name="other", identity=fake_identity("other"))

TOKENS = {
    "/other.kv": list(range(40)),
    "/a.kv": list(range(1, 301)),
    "/dir/b.kv": list(range(500, 570)),
    "/dir/fork.kv": [*range(1, 301), 7, 8],
    "/dir/deep/c.kv": list(range(10)),
}
"""Tokens of the KV files. The first file is of another model than the running one. a.kv has slots 0 to 9 of 2.kv."""
PLAIN = {"/note.txt": b"a note"}
SHARED = ("/a.kv", "/dir/fork.kv")


def make_state(directory: Path) -> None:
    """Make a state that was drained, with all of its log in the index."""

    async def other() -> None:
        async with running(House(directory, OTHER_FACTS), drain=True) as house:
            house.create("other.kv", TOKENS["/other.kv"])

    async def own() -> None:
        async with running(House(directory), drain=True) as house:
            source = house.create("a.kv", TOKENS["/a.kv"])
            await house.sync("a.kv")
            house.fs.kv_mkdir(ROOT, "dir", 0o755)
            house.fs.kv_mkdir(ROOT, "dir/deep", 0o755)
            house.create("dir/b.kv", TOKENS["/dir/b.kv"])
            house.append(house.fs.kv_fork(ROOT, source, "dir/fork.kv"), [7, 8])
            house.create("dir/deep/c.kv", TOKENS["/dir/deep/c.kv"])
            house.make_plain("note.txt", PLAIN["/note.txt"])

    trio.run(other)
    trio.run(own)
    for path, num_slots in ((directory / "slots/1.kv", 2), (own_slots(directory), 15)):
        os.truncate(path, slot_at(num_slots))  # quick to copy: files of slots grow by 16 MiB


def sql(directory: Path, statement: str, *values: object) -> list[tuple]:
    """Run a statement on the index; the contents of its log are taken in."""
    database = sqlite3.connect(directory / "index.db", isolation_level=None)
    try:
        return database.execute(statement, values).fetchall()
    finally:
        database.close()


def number_of(directory: Path, path: str) -> int:
    number = 1
    for name in path.strip("/").split("/"):
        found = sql(directory, "SELECT number FROM names WHERE directory = ? AND name = ?", number, name.encode())
        ((number,),) = found
    return number


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def slot_at(slot: int) -> int:
    return PAGE + slot * PAGE


def own_slots(directory: Path) -> Path:
    return directory / "slots" / "2.kv"


def read_slot(directory: Path, slot: int) -> bytes:
    with own_slots(directory).open("rb") as file:
        file.seek(slot_at(slot))
        return file.read(PAGE)


def write_slot(directory: Path, slot: int, data: bytes) -> None:
    with own_slots(directory).open("r+b") as file:
        file.seek(slot_at(slot))
        file.write(data)


def slots_of(directory: Path, path: str) -> list[int]:
    number = number_of(directory, path)
    record = sql(directory, "SELECT record FROM versions WHERE number = ?", number)[0][0]
    return decode_version(number, record).slots.tolist()


def root_page_of(directory: Path, table: str) -> int:
    return sql(directory, "SELECT rootpage FROM sqlite_master WHERE name = ?", table)[0][0]


def swap_slots(directory: Path) -> None:
    one, other = read_slot(directory, 1), read_slot(directory, 4)
    write_slot(directory, 1, other)
    write_slot(directory, 4, one)


def damage_record(table: str, path: str) -> Callable[[Path], None]:
    def flipped(_number: int, record: bytes) -> bytes:
        place = len(record) // 2
        return record[:place] + bytes([record[place] ^ 8]) + record[place + 1 :]

    return change_record(table, path, flipped)


def lose_row(table: str, path: str) -> Callable[[Path], object]:
    return lambda directory: sql(directory, f"DELETE FROM {table} WHERE number = ?", number_of(directory, path))


def exchange_versions(directory: Path) -> None:
    """Exchange two rows of versions: each is as it was written, but for another inode."""
    one, other = number_of(directory, "/a.kv"), number_of(directory, "/dir/b.kv")
    sql(directory, "UPDATE versions SET number = -1 WHERE number = ?", one)
    sql(directory, "UPDATE versions SET number = ? WHERE number = ?", one, other)
    sql(directory, "UPDATE versions SET number = ? WHERE number = -1", other)


def lose_slot_row(directory: Path) -> None:
    sql(directory, "DELETE FROM slots WHERE identity = 2 AND slot = 5")


def damage_slot_row(directory: Path) -> None:
    sql(directory, "UPDATE slots SET page_check = page_check + 1 WHERE identity = 2 AND slot = 5")


def say_less_is_kept(directory: Path) -> None:
    """Note fewer kept entries in a slot's row, with the right checksum."""
    check, entries = sql(directory, "SELECT page_check, entries FROM slots WHERE identity = 2 AND slot = 5")[0]
    row_check = slot_check(2, SlotRecord(5, check & (1 << 64) - 1, 20, entries))
    sql(directory, "UPDATE slots SET kept = 20, row_check = ? WHERE identity = 2 AND slot = 5", row_check)


def change_record(table: str, path: str, change: Callable[[int, bytes], bytes]) -> Callable[[Path], None]:
    def plant(directory: Path) -> None:
        number = number_of(directory, path) if path != "/" else 1
        ((record,),) = sql(directory, f"SELECT record FROM {table} WHERE number = ?", number)
        sql(directory, f"UPDATE {table} SET record = ? WHERE number = ?", change(number, record), number)

    return plant


def more_entries(path: str) -> Callable[[Path], None]:
    """A length that its slots do not hold, with a checksum that is right."""

    def longer(number: int, record: bytes) -> bytes:
        return encode_version(number, decode_version(number, record)._replace(length=90, full_length=90))

    return change_record("versions", path, longer)


def put_name(directory: Path, parent: int, name: bytes, number: int) -> None:
    check = name_check(parent, name, number)
    sql(directory, "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", parent, name, number, check)


def take_name(directory: Path, path: str) -> None:
    parent, _, name = path.rpartition("/")
    number = number_of(directory, parent) if parent else 1
    sql(directory, "DELETE FROM names WHERE directory = ? AND name = ?", number, name.encode())


def damage_name(directory: Path) -> None:
    sql(directory, "UPDATE names SET number = number + 1000 WHERE name = ?", b"b.kv")


def make_loop(directory: Path) -> None:
    """`dir` lies in its own `deep`, and nowhere else."""
    top, deep = number_of(directory, "/dir"), number_of(directory, "/dir/deep")
    take_name(directory, "/dir")
    put_name(directory, deep, b"dir", top)


def no_directory(directory: Path) -> None:
    """A link in place of a directory: the names in it lie nowhere."""

    def link(number: int, record: bytes) -> bytes:
        return encode_inode(number, decode_inode(number, record)._replace(file_type=0o120000))

    change_record("inodes", "/dir/deep", link)(directory)


def name_in_a_file(directory: Path) -> None:
    put_name(directory, number_of(directory, "/a.kv"), b"x", number_of(directory, "/dir/b.kv"))


def damage_identity(directory: Path) -> None:
    sql(directory, "UPDATE identities SET facts = replace(facts, 'fake', 'fate') WHERE id = 2")


def unnamed_version(directory: Path) -> None:
    """A version that no inode and no name knows."""
    number = number_of(directory, "/dir/b.kv")
    take_name(directory, "/dir/b.kv")
    sql(directory, "DELETE FROM inodes WHERE number = ?", number)


def low_next_inode(directory: Path) -> None:
    check = text_check("next_inode", "3")
    sql(directory, "UPDATE about SET value = '3', row_check = ? WHERE key = 'next_inode'", check)


def zero_page(directory: Path, page: int) -> None:
    with (directory / "index.db").open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(bytes(PAGE))


def backing_of(directory: Path) -> Path:
    (path,) = (directory / "files").iterdir()
    return path


Left: TypeAlias = dict[str, int | None]


@dataclass(frozen=True)
class Damage:
    """A way to damage that state, with the expected findings and repair."""

    name: str
    plant: Callable[[Path], object]
    paths: tuple[str, ...] = ()
    """Paths that fsck has to name."""
    left: Left = field(default_factory=dict)
    """Entries that are left after a repair, where not all are; None: the name is gone."""
    moved: dict[str, str] = field(default_factory=dict)
    """New paths of files that a repair moves, with `{}` for the inode's number before."""
    is_damage: bool = True

    def __str__(self) -> str:
        return self.name


CUT_AT_5: Left = {"/a.kv": 160, "/dir/fork.kv": 160}
ALL_OWN: Left = dict.fromkeys(list(TOKENS)[1:], 0)
NO_ENTRIES: Left = dict.fromkeys(TOKENS, 0)
GONE: Left = dict.fromkeys(TOKENS)
FOUND = "/lost+found/#{}"
BELOW_LOST_DIR = {path: path.replace("/dir", "/lost+found/#{/dir}", 1) for path in TOKENS if path.startswith("/dir")}


def lost(path: str) -> str:
    return f"/lost+found/#{{{path}}}"


def zeroed(table: str) -> Callable[[Path], None]:
    return lambda directory: zero_page(directory, root_page_of(directory, table))


def flipped_slot(slot: int, offset: int) -> Callable[[Path], None]:
    return lambda directory: flip(own_slots(directory), slot_at(slot) + offset)


DAMAGES = (
    Damage("a flipped bit in a page", flipped_slot(5, 77), SHARED, CUT_AT_5),
    Damage("a flipped bit in the tail of one", flipped_slot(12, 0), ("/dir/b.kv",), {"/dir/b.kv": 64}),
    Damage(
        "a flipped bit in a page of another model",
        lambda d: flip(d / "slots/1.kv", slot_at(0) + 9),
        ("/other.kv",),
        {"/other.kv": 0},
    ),
    Damage("a flipped bit in a superblock", lambda d: flip(own_slots(d), 99), tuple(ALL_OWN)),
    Damage("swapped slots", swap_slots, SHARED, {"/a.kv": 32, "/dir/fork.kv": 32}),
    Damage("a lost row of a slot", lose_slot_row, SHARED, CUT_AT_5),
    Damage("a damaged row of a slot", damage_slot_row, SHARED, CUT_AT_5),
    Damage("a count too low in a slot's row", say_less_is_kept, SHARED, {"/a.kv": 180, "/dir/fork.kv": 180}),
    Damage("a length too high", more_entries("/dir/b.kv"), ("/dir/b.kv",), {"/dir/b.kv": 70}),
    Damage("a damaged list of entries", damage_record("versions", "/a.kv"), ("/a.kv",), {"/a.kv": 0}),
    Damage("a lost list of entries", lose_row("versions", "/a.kv"), ("/a.kv",), {"/a.kv": 0}),
    Damage("exchanged lists of entries", exchange_versions, ("/a.kv", "/dir/b.kv"), {"/a.kv": 0, "/dir/b.kv": 0}),
    Damage("a lost inode of a KV file", lose_row("inodes", "/a.kv"), ("/a.kv",)),
    Damage("a lost inode of a plain file", lose_row("inodes", "/note.txt"), ("/note.txt",)),
    Damage("a lost inode of a directory", lose_row("inodes", "/dir"), ("/dir",)),
    Damage("a damaged inode of the root", damage_record("inodes", "/"), ("/",)),
    Damage("a version that nothing leads to", unnamed_version, (lost("/dir/b.kv"),), moved={"/dir/b.kv": FOUND}),
    Damage("a damaged name", damage_name, ("/dir/b.kv", lost("/dir/b.kv")), moved={"/dir/b.kv": FOUND}),
    Damage("a lost name", lambda d: take_name(d, "/a.kv"), (lost("/a.kv"),), moved={"/a.kv": FOUND}),
    Damage("a lost name of a directory", lambda d: take_name(d, "/dir"), (lost("/dir"),), moved=BELOW_LOST_DIR),
    Damage("a name that leads nowhere", lambda d: put_name(d, 1, b"ghost", 777), ("/ghost",)),
    Damage("a name in a file", name_in_a_file, ("/a.kv/x",)),
    Damage("names in what is no directory", no_directory, ("/dir/deep/c.kv",), moved={"/dir/deep/c.kv": FOUND}),
    Damage(
        "a second name of a directory",
        lambda d: put_name(d, 1, b"other", number_of(d, "/dir/deep")),
        ("/dir/deep",),
        moved={"/dir/deep/c.kv": "/other/c.kv"},
    ),
    Damage("a directory in itself", make_loop, (lost("/dir"),), moved=BELOW_LOST_DIR),
    Damage("an impossible name", lambda d: put_name(d, 1, b"x/y", number_of(d, "/a.kv")), ("/x/y",)),
    Damage("a damaged identity", damage_identity),
    Damage("a damaged uuid", lambda d: sql(d, "UPDATE about SET value = 'x' WHERE key = 'uuid'")),
    Damage("a lost uuid", lambda d: sql(d, "DELETE FROM about WHERE key = 'uuid'")),
    Damage("a next inode that there is already", low_next_inode),
    Damage(
        "a slot file cut short",
        lambda d: os.truncate(own_slots(d), slot_at(5) + 100),
        tuple(ALL_OWN),
        {**CUT_AT_5, "/dir/b.kv": 0, "/dir/deep/c.kv": 0},
    ),
    Damage("a slot file without a superblock", lambda d: os.truncate(own_slots(d), 0), tuple(ALL_OWN), ALL_OWN),
    Damage("a slot file that is gone", lambda d: own_slots(d).unlink(), tuple(ALL_OWN), ALL_OWN),
    Damage("a backing file that is gone", lambda d: backing_of(d).unlink(), ("/note.txt",)),
    Damage("a backing file that nobody has", lambda d: (d / "files/77.0.plain").write_bytes(b"x"), is_damage=False),
    Damage("a slot file that nobody has", lambda d: (d / "slots/9.kv").write_bytes(b"x"), is_damage=False),
    Damage("an index without its first page", lambda d: zero_page(d, 1)),
    Damage("an index without its names", zeroed("names"), moved=dict.fromkeys(TOKENS, FOUND)),
    Damage("an index without its versions", zeroed("versions"), tuple(TOKENS), NO_ENTRIES),
    Damage("an index without its inodes", zeroed("inodes"), tuple(TOKENS)),
    Damage("an index without its slots", zeroed("slots"), tuple(TOKENS), NO_ENTRIES),
    Damage("an index that is gone", lambda d: (d / "index.db").unlink(), left=GONE),
    Damage("an empty index", lambda d: os.truncate(d / "index.db", 0), left=GONE),
    Damage("an index of garbage", lambda d: (d / "index.db").write_bytes(os.urandom(3 * PAGE)), left=GONE),
)


def copy_of(state: Path, target: Path) -> Path:
    shutil.copytree(state, target)
    return target
