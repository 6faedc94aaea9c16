"""A daemon that starts over a damaged state serves what is whole, and leaves the rest to fsck."""

import errno
import random

import pytest

from kvfs.durable import restore
from kvfs.durable.fsck import fsck
from kvfs.durable.scrub import scrub
from libsym.errors import SymError
from tests.kvfs.durable.damage import (
    DAMAGES,
    PLAIN,
    SHARED,
    TOKENS,
    copy_of,
    damage_record,
    flip,
    root_page_of,
    slots_of,
    sql,
    zero_page,
)
from tests.kvfs.durable.house import ROOT, House, failing, plain_of, running

NEW = list(range(900, 960))
KEEPS_IT_DOWN = {
    "a flipped bit in a superblock",
    "a directory in itself",
    "a slot file without a superblock",
    "a slot file that is gone",
    "an index without its first page",
    "an index that is gone",
    "an empty index",
    "an index of garbage",
}
"""Damage of no row: there is no telling what else is whole."""


async def look(house: House) -> dict[str, int]:
    """The errno that each file gives which gives nothing; all that is given is right."""
    wrong: dict[str, int] = {}
    for path in [*TOKENS, *PLAIN][1:]:
        try:
            if path in PLAIN:
                inode = house.fs.find(ROOT, path.lstrip("/"))
                assert plain_of(inode).is_lost or house.read(inode) == PLAIN[path]
                continue
            file = await house.open(path.lstrip("/"))
        except SymError as error:
            wrong[path] = error.errno or 0
        else:
            assert house.tokens(file) == TOKENS[path]
            assert house.is_right(file)
            house.fs.kv_close(file)
    return wrong


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
async def test_what_is_whole_is_served_and_the_rest_is_refused(damage, state, caplog):
    damage.plant(state)
    found = [each for each in fsck(state, quick=True).findings if each.kind not in {"count", "about"}]
    wrong: dict[str, int] = {}

    refusal = ""
    try:
        async with running(House(state)) as house:
            wrong.update(await look(house))
            house.create("new.kv", NEW)
            try:
                await house.sync("new.kv")
            except SymError as error:
                assert error.errno == errno.EIO  # noqa: PT017
                assert "symphony fsck" in str(error)  # noqa: PT017
            is_told = "fsck" in house.keeper.statistics().damage
            assert is_told == ("the index is damaged" in caplog.text)
            assert is_told or not wrong or set(wrong.values()) == {errno.EIO}
    except SymError as error:
        refusal = str(error)
    assert not refusal or ("symphony fsck" in refusal and "--repair" in refusal and "\n" not in refusal)
    assert bool(refusal) == (str(damage) in KEEPS_IT_DOWN)
    assert set(wrong.values()) <= {errno.EIO, errno.ENOENT}
    assert all(path in caplog.text for path, code in wrong.items() if code == errno.EIO and path.count("/") == 1)
    assert errno.ENOENT not in wrong.values() or "files that no name leads to" in caplog.text
    assert "Traceback" not in caplog.text
    if "the index is damaged" in caplog.text:
        left = fsck(state, quick=True).findings
        assert [each for each in found if each not in left and each.is_damage] == []


@pytest.mark.parametrize("table", ["inodes", "versions"])
async def test_one_damaged_row_refuses_one_file(table, state, caplog):
    damage_record(table, "/dir/b.kv")(state)
    async with running(House(state), drain=True) as house:
        assert await look(house) == {"/dir/b.kv": errno.EIO}
        for use in (
            lambda: house.fs.kv_remove(ROOT, "dir/b.kv"),
            lambda: house.fs.kv_create(ROOT, "dir/b.kv"),
            lambda: house.tree.rename(house.tree.root, b"a.kv", house.fs.find(ROOT, "dir"), b"b.kv"),
            lambda: house.tree.child(house.fs.find(ROOT, "dir"), b"b.kv"),
        ):
            with failing(errno.EIO):
                use()
        assert house.fs.find(ROOT, "dir").entries[b"b.kv"].kind == "damaged"
        house.create("new.kv", NEW)
        await house.sync("new.kv")
        assert [each.paths for each in (await scrub(house.volume, house.keeper)).findings] == [("/dir/b.kv",)]
    assert caplog.text.count("/dir/b.kv is damaged in the index and refused") == 1
    assert "names that are refused: 1" in caplog.text
    assert {path for each in fsck(state).findings for path in each.paths} == {"/dir/b.kv"}
    fsck(state, repair=True)
    async with running(House(state)) as house:
        await house.require("new.kv", NEW)
        if table == "inodes":  # no slot that its entries need was taken for the new file
            await house.require("dir/b.kv", TOKENS["/dir/b.kv"])


async def test_all_names_of_a_damaged_file_are_refused(state):
    async with running(House(state), drain=True) as house:
        house.tree.link(house.fs.find(ROOT, "a.kv"), house.fs.find(ROOT, "dir"), b"again.kv")
    damage_record("inodes", "/a.kv")(state)
    async with running(House(state), drain=True) as house:
        assert await look(house) == {"/a.kv": errno.EIO}
        with failing(errno.EIO):
            house.fs.find(ROOT, "dir/again.kv")


@pytest.mark.parametrize(("lost", "gone"), [SHARED, SHARED[::-1]])
@pytest.mark.parametrize("what", ["inode", "slot"])
async def test_pages_that_a_refused_file_shares_outlive_the_file_that_is_served(what, lost, gone, state):
    last = slots_of(state, lost)[-1]
    damage_record("inodes", lost)(state) if what == "inode" else sql(state, "DELETE FROM slots WHERE slot = ?", last)
    tokens = TOKENS[lost] if what == "inode" else TOKENS[lost][: 32 * (len(slots_of(state, lost)) - 1)]
    async with running(House(state), drain=True) as house:
        assert await look(house) == {lost: errno.EIO}
        house.fs.kv_remove(ROOT, gone.lstrip("/"))
        await house.keeper.sync_all()
        house.create("new.kv", list(range(5000, 5400)))
        await house.sync("new.kv")
    fsck(state, repair=True)
    async with running(House(state)) as house:
        await house.require(lost.lstrip("/"), tokens)


@pytest.mark.parametrize("name", ["a.kv", "note.txt"])
async def test_a_name_below_what_is_lost_keeps_a_file_whose_other_name_is_removed(name, state):
    large = b"x" * 3000
    async with running(House(state), drain=True) as house:
        inode = house.fs.find(ROOT, name)
        inode.note(b"user.large", large)
        house.tree.link(inode, house.fs.find(ROOT, "dir"), b"again")
    damage_record("inodes", "/dir")(state)
    async with running(House(state), drain=True) as house:
        house.tree.unlink(house.tree.root, name.encode())
        await house.keeper.sync_all()
        house.create("new.kv", NEW)
    fsck(state, repair=True)
    async with running(House(state)) as house:
        inode = house.fs.find(ROOT, "dir/again")
        await house.keeper.bring_xattrs(inode)
        assert inode.xattrs[b"user.large"] == large
        if name == "note.txt":
            assert house.read(inode) == PLAIN["/note.txt"]
        else:
            await house.require("dir/again", TOKENS["/a.kv"])


async def test_a_domain_whose_attributes_are_damaged_is_refused(state):
    async with running(House(state), drain=True) as house:
        house.fs.kv_mkdir(ROOT, "domain", 0o755)
        domain = house.fs.find(ROOT, "domain")
        house.volume.domains.set_limit(domain, b"user.kv.quota", b"1M", 0)
        domain.note(b"user.large", b"x" * 3000)
    damage_record("xattrs", "/domain")(state)
    async with running(House(state)) as house:
        assert await look(house) == {}
        with failing(errno.EIO):
            house.fs.find(ROOT, "domain")


async def test_a_damaged_row_of_the_root_stays_as_it_is(state):
    async with running(House(state), drain=True) as house:
        house.tree.root.mode = 0o711
        house.tree.root.changed()
    damage_record("inodes", "/")(state)
    row = sql(state, "SELECT record FROM inodes WHERE number = 1")
    async with running(House(state), drain=True) as house:
        assert await look(house) == {}
        assert house.tree.root.mode == 0o700  # nobody gets more than he had
        house.create("new.kv", NEW)
        await house.sync("new.kv")
    assert sql(state, "SELECT record FROM inodes WHERE number = 1") == row


async def test_of_an_index_with_a_page_that_is_none_nothing_is_written(state):
    zero_page(state, root_page_of(state, "versions"))
    async with running(House(state)) as house:
        house.create("new.kv", NEW)
        with failing(errno.EIO, r"nothing is kept.*symphony fsck"):
            await house.sync("new.kv")
        assert "nothing is kept" in house.keeper.statistics().damage
    assert not sql(state, "SELECT 1 FROM names WHERE name = ?", b"new.kv")


async def test_of_many_damaged_files_the_log_names_some_and_tells_how_many_there_are(state, caplog, monkeypatch):
    zero_page(state, root_page_of(state, "inodes"))
    monkeypatch.setattr(restore, "MOST_TOLD", 2)
    async with running(House(state)) as house:
        assert set((await look(house)).values()) == {errno.EIO}
    assert caplog.text.count("damaged in the index and refused") == 2
    assert "names that are refused: 4" in caplog.text


@pytest.mark.slow
async def test_a_flipped_byte_anywhere_in_the_index_gives_no_wrong_byte(sound, tmp_path):
    chosen, size = random.Random(52), (sound / "index.db").stat().st_size
    num_started = num_refusing = 0
    for offset in [*range(100, size, size // 12), *(chosen.randrange(100, size) for _ in range(12))]:
        state = copy_of(sound, tmp_path / str(offset))
        flip(state / "index.db", offset, chosen.randrange(8))
        try:
            house = House(state)
        except SymError as error:
            assert "symphony fsck" in str(error)  # noqa: PT017
            continue
        async with running(house):
            wrong = await look(house)
        assert {*wrong.values()} <= {errno.EIO, errno.ENOENT}
        num_started, num_refusing = num_started + 1, num_refusing + bool(wrong)
    assert num_started > 20
    assert num_refusing > 0
