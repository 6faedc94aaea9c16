"""Advice on files: who gives it, where it shows, and files that go when nobody uses them."""

import logging
import os
from dataclasses import replace

import pytest
import trio

from kvfs.facts import xattrs
from kvfs.fs import FileSystem
from kvfs.names.tree import Credentials
from libsym.abi import Advice
from libsym.errors import Invalid, NoAccess, NotFound, NotPermitted, NotSupported, SymError
from tests.kvfs.clocks import while_alarms_go_off
from tests.kvfs.fakes import commit_all, listing

ROOT = Credentials(0, 0)
ANN = Credentials(1000, 1000)
BOB = Credentials(1001, 1001)


def make(fs: FileSystem, name: str, mode: int = 0o600) -> None:
    fs.kv_close(fs.kv_create(ANN, name, mode))


def ttl(seconds: float) -> list[tuple[int, int]]:
    return [(Advice.TTL, int(seconds * 1000))]


def names(fs: FileSystem) -> set[str]:
    return {entry.name for entry in listing(fs, ROOT, "")}


def attribute(fs: FileSystem, path: str, name: str) -> str:
    inode = fs.volume.tree.child(fs.volume.tree.root, os.fsencode(path))
    return xattrs.get(fs.volume, inode, f"user.kv.{name}".encode()).decode()


def set_attribute(fs: FileSystem, path: str, name: str, value: str, uid: int = ANN.uid) -> None:
    inode = fs.volume.tree.child(fs.volume.tree.root, os.fsencode(path))
    xattrs.put(fs.volume, inode, f"user.kv.{name}".encode(), value.encode(), uid)


@while_alarms_go_off
async def test_advice_shows_in_stat_and_in_attributes(fs: FileSystem) -> None:
    make(fs, "a.kv")
    assert [attribute(fs, "a.kv", name) for name in ("pinned", "ttl", "priority")] == ["0", "0", "0"]
    fs.kv_advise(ANN, "a.kv", [(Advice.PIN, 0), (Advice.TTL, 1500), (Advice.PRIORITY, -7)])
    stat = fs.kv_stat(ANN, "a.kv")
    assert (stat.pinned, stat.ttl_s, stat.priority) == (True, 1.5, -7)
    assert [attribute(fs, "a.kv", name) for name in ("pinned", "ttl", "priority")] == ["1", "1.5", "-7"]
    handle = fs.kv_open(ANN, "a.kv", write=False)
    fs.kv_advise_open(ANN, handle, [(Advice.UNPIN, 0), (Advice.TTL, 0)])
    stat = fs.kv_stat_open(handle)
    assert (stat.pinned, stat.ttl_s, stat.priority) == (False, 0, -7)
    fork = fs.kv_stat_open(fs.kv_fork(ANN, handle, "b.kv"))
    assert fork.priority == 0, "a fork is another file"
    for name, value in (("pinned", "1"), ("ttl", "3600"), ("ttl", "0.25"), ("priority", "100")):
        set_attribute(fs, "a.kv", name, value)
        assert attribute(fs, "a.kv", name) == value
        assert f"user.kv.{name}".encode() in xattrs.names(fs.volume, handle.inode)
    for name in ("pinned", "ttl", "priority"):
        xattrs.remove(fs.volume, handle.inode, f"user.kv.{name}".encode(), ANN.uid)
        assert attribute(fs, "a.kv", name) == "0"


@while_alarms_go_off
async def test_a_plain_file_does_not_expire_before_it_is_a_kv_file(fs: FileSystem) -> None:
    source = fs.kv_create(ANN, "source.kv")
    volume = fs.volume
    inode = volume.make_plain(volume.tree.root, b"a.kv", 0o600, ANN.uid, ANN.gid)
    set_attribute(fs, "a.kv", "ttl", "5")
    set_attribute(fs, "a.kv", "pinned", "1")
    await trio.sleep(60)
    volume.tree.opened(inode)
    snapshot = volume.open_snapshot(source.content)
    volume.fork_into(snapshot, source.inode, source.content, inode)
    volume.close_snapshot(snapshot)
    volume.tree.closed(inode)
    stat = fs.kv_stat(ANN, "a.kv")
    assert (stat.kind, stat.pinned, stat.ttl_s) == ("kv", True, 5)
    await trio.sleep(60)
    set_attribute(fs, "a.kv", "pinned", "0")
    await trio.sleep(4)
    assert "a.kv" in names(fs)
    await trio.sleep(2)
    assert "a.kv" not in names(fs)


NO_ADVICE = [(0, 0), (99, 0), (Advice.TTL, -1), (Advice.TTL, 1 << 60), (Advice.PRIORITY, 101)]
NO_VALUES = {
    "pinned": ["yes"],
    "ttl": ["", "-1", "1e3", "nan", ".", "9" * 19],
    "priority": ["1.5", "-", "1000", "\u0663"],
}


def test_advice_that_makes_no_sense_is_refused_and_changes_nothing(fs: FileSystem) -> None:
    make(fs, "a.kv")
    for advice in NO_ADVICE:
        with pytest.raises(Invalid):
            fs.kv_advise(ANN, "a.kv", [(Advice.PIN, 0), advice])
    for name, values in NO_VALUES.items():
        for value in values:
            with pytest.raises(Invalid):
                set_attribute(fs, "a.kv", name, value)
    stat = fs.kv_stat(ANN, "a.kv")
    assert (stat.pinned, stat.ttl_s, stat.priority) == (False, 0, 0)


def test_only_the_owner_gives_advice_that_is_kept(fs: FileSystem) -> None:
    make(fs, "open.kv", 0o666)
    make(fs, "closed.kv", 0o600)
    for advice in ((Advice.PIN, 0), (Advice.PRIORITY, 1), (Advice.TTL, 1)):
        with pytest.raises(NotPermitted):
            fs.kv_advise(BOB, "open.kv", [advice])
        with pytest.raises(NoAccess):
            fs.kv_advise(BOB, "closed.kv", [advice])
    with pytest.raises(NotPermitted):
        set_attribute(fs, "open.kv", "pinned", "1", BOB.uid)
    fs.kv_advise(BOB, "open.kv", [(Advice.WILLNEED, 0)])
    fs.kv_advise(ROOT, "closed.kv", [(Advice.PIN, 0)])
    assert fs.kv_stat(ANN, "closed.kv").pinned
    assert not fs.kv_stat(ANN, "open.kv").pinned


def test_the_owner_and_writers_of_the_group_may_have_a_file_go(fs: FileSystem) -> None:
    """A reader could put a file to disk again and again, while its user computes with it."""
    member = replace(BOB, groups=frozenset({ANN.gid}))
    make(fs, "read.kv", 0o646)
    make(fs, "team.kv", 0o660)
    for who, path in ((BOB, "read.kv"), (member, "read.kv")):
        with pytest.raises(NotPermitted, match="only its owner, uid 1000, and writers of its group"):
            fs.kv_advise(who, path, [(Advice.COLD, 0)])
    with pytest.raises(NotPermitted):
        fs.kv_advise_open(BOB, fs.kv_open(BOB, "read.kv", write=True), [(Advice.COLD, 0)])
    for who in (ANN, ROOT, member):
        fs.kv_advise(who, "team.kv", [(Advice.COLD, 0)])


def test_there_is_no_advice_on_what_is_no_kv_file(fs: FileSystem) -> None:
    root = fs.volume.tree.root
    fs.volume.make_plain(root, b"plain", 0o644, ANN.uid, ANN.gid)
    with pytest.raises(NotSupported):
        fs.kv_advise(ANN, "plain", [(Advice.PIN, 0)])
    with pytest.raises(SymError, match="no attribute"):
        attribute(fs, "plain", "pinned")
    with pytest.raises(NotPermitted):
        set_attribute(fs, "plain", "pinned", "1", BOB.uid)
    fs.volume.tree.make(root, b"directory", 0o040000, mode=0o755, uid=ANN.uid, gid=ANN.gid)
    with pytest.raises(NotSupported):
        set_attribute(fs, "directory", "pinned", "1")
    with pytest.raises(NotFound):
        fs.kv_advise(ANN, "none", [(Advice.PIN, 0)])


@while_alarms_go_off
async def test_an_unused_file_goes_after_its_ttl_with_all_its_names_and_pages(fs: FileSystem) -> None:
    free, left = fs.pool.num_free, list[int]()
    handle = fs.kv_create(ANN, "a.kv")
    commit_all(fs.reserve(handle, range(40), range(40)))
    for number in range(100):
        fs.volume.tree.link(handle.inode, fs.volume.tree.root, b"%d" % number)
    make(fs, "other.kv")
    fs.kv_advise_open(ANN, handle, ttl(10))
    fs.kv_close(handle)
    fs.volume.alarms.set(10, lambda: left.append(len(names(fs))))
    await trio.sleep(9.9)
    assert len(names(fs)) == 102
    fs.check()
    await trio.sleep(0.2)
    assert names(fs) == {"other.kv"}
    assert left[0] > 50, "one alarm removes some names only: the rest is for later turns"
    assert fs.pool.num_free == free
    fs.check()


@while_alarms_go_off
async def test_the_log_names_some_of_the_files_that_expire_at_once_and_counts_the_others(
    fs: FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvfs.volume.expiry")
    for name in [*map(str, range(250)), "last"]:
        if name == "last":
            await trio.sleep(75)
        make(fs, name)
        fs.kv_advise(ANN, name, ttl(10))
    await trio.sleep(75)
    assert not names(fs)
    said = [record.getMessage() for record in caplog.records if record.name == "kvfs.volume.expiry"]
    assert len(said) == 102
    assert said[100] == "150 more files have expired within a minute"
    assert said[101].startswith("/last expires")


@while_alarms_go_off
async def test_use_puts_the_end_off_and_an_open_file_does_not_expire(fs: FileSystem) -> None:
    make(fs, "a.kv")
    fs.kv_advise(ANN, "a.kv", ttl(10))
    await trio.sleep(9)
    handle = fs.kv_open(ANN, "a.kv", write=False)
    await trio.sleep(100)
    fs.kv_close(handle)
    await trio.sleep(9)
    assert names(fs) == {"a.kv"}, "the time runs from the close"
    inode = fs.find(ROOT, "a.kv")
    fs.volume.tree.opened(inode)  # as the mount does
    await trio.sleep(100)
    fs.volume.tree.closed(inode)
    await trio.sleep(9)
    fs.kv_stat(ANN, "a.kv")  # looking is no use
    await trio.sleep(2)
    assert names(fs) == set()


@while_alarms_go_off
async def test_a_file_goes_by_the_last_advice_that_it_was_given(fs: FileSystem) -> None:
    for name in ("longer.kv", "shorter.kv", "none.kv", "pinned.kv", "plain.kv"):
        make(fs, name)
        fs.kv_advise(ANN, name, ttl(10))
    fs.kv_advise(ANN, "pinned.kv", [(Advice.PIN, 0)])
    await trio.sleep(5)
    fs.kv_advise(ANN, "longer.kv", ttl(20))
    fs.kv_advise(ANN, "shorter.kv", ttl(1))
    fs.kv_advise(ANN, "none.kv", ttl(0))
    fs.volume.truncate(fs.find(ANN, "plain.kv"), 0)
    await trio.sleep(2)
    assert names(fs) == {"longer.kv", "none.kv", "pinned.kv", "plain.kv"}
    await trio.sleep(17)
    assert names(fs) == {"longer.kv", "none.kv", "pinned.kv", "plain.kv"}
    fs.kv_advise(ANN, "pinned.kv", [(Advice.UNPIN, 0)])
    await trio.sleep(2)
    assert names(fs) == {"none.kv", "pinned.kv", "plain.kv"}, "the time of what was pinned runs anew"
    await trio.sleep(9)
    assert names(fs) == {"none.kv", "plain.kv"}
    num_alarms = len(fs.volume.alarms)
    for _ in range(1000):
        make(fs, "a.kv")
        fs.kv_advise(ANN, "a.kv", ttl(1e6))
        fs.kv_remove(ANN, "a.kv")
    assert len(fs.volume.alarms) == num_alarms, "a removed file leaves none behind"
