"""A state of an older release opens; one of a newer release is refused."""

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from kvfs.durable.index import FORMAT_VERSION
from kvfs.durable.state import State
from libsym.errors import Invalid
from tests.kvfs.durable.house import ROOT, House, plain_of, running

FORMATS = Path(__file__).with_name("formats")
"""A state of each older format, as a release of its time left it."""


FIRST_WITH_LARGE = 3
"""First format whose a.kv has large attributes, in the record of the inode."""
FIRST_WITH_PLAIN = 4
"""First format with a note.txt; its bytes have no checksums."""


def names_of(older: int) -> list[str]:
    """The names in the state of a format."""
    return ["/a.kv", "/dir", "/dir/fork.kv", "/empty.kv", *(["/note.txt"] if older >= FIRST_WITH_PLAIN else [])]


def test_there_is_a_state_of_every_older_format():
    assert sorted(path.name for path in FORMATS.iterdir()) == [f"{each}.tar.xz" for each in range(1, FORMAT_VERSION)]


def extracted(older: int, directory: Path) -> Path:
    with tarfile.open(FORMATS / f"{older}.tar.xz") as planted:
        planted.extractall(directory, filter="data")
    return directory / "state"


@pytest.mark.parametrize("older", range(1, FORMAT_VERSION))
async def test_a_state_of_an_older_format_is_opened_with_all_that_it_has(older, tmp_path):
    async with running(House(extracted(older, tmp_path)), drain=True) as house:
        assert house.names() == names_of(older)
        assert house.tree.root.xattrs == {b"user.note": b"kept"}
        assert house.tree.child(house.tree.root, b"dir").mode == 0o750
        file, fork = await house.open("a.kv", write=True), await house.open("dir/fork.kv")
        assert house.tokens(file) == [*range(1, 41), 5, 6]
        assert house.tokens(fork) == [*range(1, 41)]
        assert house.is_right(file)
        assert house.is_right(fork)
        assert house.fs.kv_stat(ROOT, "empty.kv").tokens == 0
        house.append(file, [7])
        inode = house.fs.find(ROOT, "a.kv")
        large = {b"user.large": bytes(range(256)) * 200, b"user.small": b"1"} if older == FIRST_WITH_LARGE else {}
        assert inode.xattrs.is_away == bool(large), "a migration puts them apart"
        await house.keeper.bring_xattrs(inode)
        assert inode.xattrs == large
        if older >= FIRST_WITH_PLAIN:
            note = house.fs.find(ROOT, "note.txt")
            assert house.read(note) == b"a note"
            await house.keeper.sync(note)
            await house.keeper.summer.sum(plain_of(note))
            assert plain_of(note).sums.expected(0).num_bytes == len(b"a note"), "it gets them now"
    again = House(tmp_path / "state")
    assert again.fs.kv_stat(ROOT, "a.kv").tokens == 43
    again.keeper.close()


def test_a_state_of_a_newer_format_is_refused_and_left_alone(tmp_path):
    State(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "index.db")) as database:
        database.execute(f"PRAGMA user_version={FORMAT_VERSION + 1}")
    before = (tmp_path / "index.db").read_bytes()
    with pytest.raises(Invalid, match=f"of format {FORMAT_VERSION + 1}, and this release knows formats up to"):
        State(tmp_path)
    assert (tmp_path / "index.db").read_bytes() == before


def test_a_database_of_something_else_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "index.db")) as database:
        database.execute("CREATE TABLE mine (a)")
    with pytest.raises(Invalid, match="a database of something else"):
        State(tmp_path)
