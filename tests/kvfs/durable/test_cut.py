"""A commit that meets an inode it can't write leaves that one out; one that fails otherwise ends the storage whole."""

import errno
import logging
import sqlite3
from collections.abc import Awaitable
from typing import Any

import pytest
import trio

from kvfs.durable import cut, keeper
from kvfs.durable.cut import Cut, Cutter
from kvfs.durable.index import Index
from kvfs.durable.keeper import Keeper
from kvfs.durable.pages_out import PagesOut
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from libsym.errors import SymError
from tests.kvfs.durable.house import ROOT, House, running

ENTRIES = list(range(40))
PROMPT_S = 5.0
"""The storage may take 30 s for a disk that hangs; nothing here hangs."""


class Planted(Exception):
    """No error that anything expects."""


class Plant:
    """A function of the cut raises while it writes an inode that is bad."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
        self.bad: set[Inode] = set()
        writing: list[Inode] = []
        write, real = Cutter._write, getattr(cut, part)

        def noted(cutter: Cutter, taken: Cut, inode: Inode) -> None:
            writing[:] = [inode]
            try:
                write(cutter, taken, inode)
            finally:
                writing.clear()

        def planted(*arguments: Any, **named: Any) -> Any:
            if self.bad.intersection(writing):
                raise Planted(part)
            return real(*arguments, **named)

        monkeypatch.setattr(Cutter, "_write", noted)
        monkeypatch.setattr(cut, part, planted)


def make(house: House, kind: str, name: str) -> Inode:
    if kind == "kv":
        return house.create(name, ENTRIES).inode
    if kind == "plain":
        inode = house.volume.make_plain(house.tree.root, name.encode(), 0o644, 0, 0)
        house.write(inode, b"bytes")
        return inode
    house.fs.kv_mkdir(ROOT, name, 0o755)
    return house.fs.find(ROOT, name)


async def change(house: House, inode: Inode, kind: str) -> None:
    if kind == "kv":
        house.append(await house.open("bad", write=True), ENTRIES)
    inode.mode = 0o640
    inode.changed()


async def is_refused(sync: Awaitable[None]) -> None:
    """EIO that names the file, and soon."""
    with trio.fail_after(PROMPT_S), pytest.raises(SymError, match="/bad") as raised:
        await sync
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("kind", "part", "is_known"),
    [
        *(("kv", part, part != "record_of") for part in ("record_of", "marks_within", "encode_version")),
        *(("kv", "slot_check", is_known) for is_known in (False, True)),
        ("plain", "record_of", True),
        *(("plain", "encode_inode", is_known) for is_known in (False, True)),
        ("directory", "encode_inode", False),
    ],
)
async def test_what_can_not_be_written_is_left_out_and_the_rest_is_kept(
    tmp_path, monkeypatch, caplog, kind, part, is_known
):
    plant = Plant(monkeypatch, part)
    async with running(House(tmp_path)) as house:
        bad = make(house, kind, "bad")
        if is_known:
            await house.keeper.sync_all()
            await change(house, bad, kind)
        plant.bad.add(bad)
        make(house, "kv", "second.kv")
        await house.sync("second.kv")
        await is_refused(house.sync("bad"))
        make(house, "plain", "third")
        await is_refused(house.keeper.sync_all())
        await house.sync("second.kv")
        await is_refused(house.keeper.sync_all())
        assert "/bad is left out" in house.keeper.statistics().error
        assert "/bad" in house.keeper.unsynced_names()
        assert not {"/second.kv", "/third"}.intersection(house.keeper.unsynced_names())
        told = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert ["/bad is left out" in each.getMessage() for each in told] == [True], "once, not with each commit"
        with trio.fail_after(PROMPT_S):
            assert "/bad" in await house.keeper.drain()
    async with running(House(tmp_path)) as house:
        # The name of a new file may be kept before any of its slots has to be.
        has_name = is_known or part == "slot_check"
        assert {*house.names()} - {"/"} == {"/second.kv", "/third", *(["/bad"] if has_name else [])}
        assert house.read(house.fs.find(ROOT, "third")) == b"bytes"
        assert house.is_right(await house.open("second.kv"))
        if is_known and kind == "kv":
            assert house.tokens(await house.open("bad")) == ENTRIES


@pytest.mark.parametrize("heals", ["written", "removed", "replaced"])
async def test_what_was_left_out_is_kept_as_soon_as_it_can_be(tmp_path, monkeypatch, heals):
    plant = Plant(monkeypatch, "encode_inode")
    async with running(House(tmp_path)) as house:
        bad = make(house, "kv", "bad")
        plant.bad.add(bad)
        await is_refused(house.sync("bad"))
        house.fs.kv_rename(ROOT, "bad", "bad-1")
        make(house, "plain", "other")
        await is_refused(house.keeper.sync_all())
        if heals == "written":
            plant.bad.clear()
        elif heals == "removed":
            house.fs.kv_remove(ROOT, "bad-1")
        else:
            make(house, "kv", "good")
            house.fs.kv_rename(ROOT, "good", "bad-1")
        await house.keeper.sync_all()
        assert house.keeper.statistics().error == ""
        assert house.keeper.unsynced_names() == []
        assert await house.keeper.drain() == []
    async with running(House(tmp_path)) as house:
        names = {"/", "/other"} if heals == "removed" else {"/", "/other", "/bad-1"}
        assert {*house.names()} | {"/"} == names


async def test_what_lies_in_a_directory_that_can_not_be_written_waits_and_nothing_else(tmp_path, monkeypatch):
    plant = Plant(monkeypatch, "encode_inode")
    async with running(House(tmp_path)) as house:
        plant.bad.add(make(house, "directory", "bad"))
        for number in range(100):  # more than a commit takes
            make(house, "kv" if number % 10 == 0 else "plain", f"bad-{number}")
            plant.bad.add(house.fs.find(ROOT, f"bad-{number}"))
        house.create("bad/in.kv", ENTRIES)
        house.create("before.kv", ENTRIES)
        house.fs.kv_rename(ROOT, "before.kv", "after.kv")
        await is_refused(house.sync("bad/in.kv"))
        await house.sync("after.kv")
        with trio.fail_after(2 * PROMPT_S):
            make(house, "plain", "last")
            await is_refused(house.keeper.sync_all())
    async with running(House(tmp_path)) as house:
        assert {*house.names()} - {"/"} == {"/after.kv", "/last"}


def plant_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    real = getattr(owner, name)

    def planted(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        raise error

    monkeypatch.setattr(owner, name, planted)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Index, "commit", OverflowError("too large")),
        (Index, "_write", sqlite3.DataError("too big")),
        (Keeper, "_sync_slots", MemoryError()),
        (keeper, "sync_directory", Planted("?")),
        (PlainFile, "sync", Planted("?")),
    ],
)
async def test_what_a_worker_of_a_commit_raises_is_told_to_who_waits_and_the_next_commit_has_it_all(
    tmp_path, monkeypatch, owner, name, error
):
    async with running(House(tmp_path)) as house:
        make(house, "kv", "a.kv")
        make(house, "plain", "plain")
        plant_once(monkeypatch, owner, name, error)
        with trio.fail_after(PROMPT_S), pytest.raises(SymError) as raised:
            await (house.sync("plain") if owner is PlainFile else house.keeper.sync_all())
        assert raised.value.errno == errno.EIO
        await house.keeper.sync_all()
        assert house.keeper.statistics().error == ""
    async with running(House(tmp_path)) as house:
        assert house.is_right(await house.open("a.kv"))
        assert house.read(house.fs.find(ROOT, "plain")) == b"bytes"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Cutter, "take"),
        (Cutter, "_take_names"),
        (Cutter, "succeeded"),
        (PagesOut, "begin_sync"),
        (Keeper, "_free"),
        (Keeper, "_make_durable"),
    ],
)
async def test_an_error_in_a_commit_itself_ends_the_storage_at_once_and_the_log_has_the_names(
    tmp_path, monkeypatch, caplog, owner, name
):
    """Files that were kept before are there at the next start."""

    async def live() -> None:
        house = House(tmp_path)
        async with trio.open_nursery() as nursery:
            await nursery.start(house.keeper.run)
            make(house, "kv", "kept.kv")
            await house.sync("kept.kv")
            make(house, "kv", "lost.kv")
            plant_once(monkeypatch, owner, name, Planted(name))
            try:
                await house.keeper.sync_all()
            finally:
                with trio.CancelScope(shield=True):
                    assert "/lost.kv" in await house.keeper.drain()
                    assert await house.keeper.is_at_rest(PROMPT_S)
                    house.keeper.close()

    with pytest.raises(ExceptionGroup) as raised, trio.fail_after(PROMPT_S):
        await live()
    assert raised.group_contains(Planted)
    assert "not kept: /lost.kv: an error has ended the storage" in caplog.text
    async with running(House(tmp_path)) as house:
        assert house.is_right(await house.open("kept.kv"))
