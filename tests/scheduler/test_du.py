"""kv_du at the gate: any number of files in any tree, in windows, and a sum in which each page counts once."""

import json
import os
import random
import stat
from typing import Any

import pytest
import trio

from kvfs.names.tree import Credentials
from libsym.abi import Du, Op
from libsym.channel.server import PAYLOAD_BYTES, Request
from libsym.errors import Invalid, NotFound
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.du import DiskUsage
from tests.kvfs.fakes import commit_all
from tests.scheduler.bench import Bench

ME, OTHER = Credentials(1000, 1000), Credentials(1001, 1001)
NO_CHANNEL: Any = None


class Trees(Bench):
    def __init__(self, tmp_path):
        super().__init__(tmp_path, num_pages=256)
        self.tree.root.mode = 0o777
        self.usage = DiskUsage(self.fs)

    def directory(self, path, mode=0o700):
        parent, _, name = path.rpartition("/")
        above = self.fs.find(ME, parent or ".")
        return self.tree.make(above, os.fsencode(name), stat.S_IFDIR, mode=mode, uid=1000, gid=1000)

    def make(self, path, num_entries=0):
        file = self.fs.kv_create(ME, path)
        if num_entries:
            commit_all(self.fs.reserve(file, [1] * num_entries, range(num_entries)))
        self.fs.kv_close(file)

    def begin(self, what, payload, creds=ME):
        return self.usage.du(
            SystemCall(Lip(1, creds, NO_CHANNEL), Request(Op.KV_DU, 0, 1, 0, (what, 0, 0, 0), payload))
        )

    def ask(self, what, path, last="", creds=ME):
        rest = self.begin(what, f"{path}\0{last}".encode("utf-8", "surrogateescape"), creds)
        reply = trio.run(lambda: rest)
        assert len(reply.payload) <= PAYLOAD_BYTES
        return reply.args[:1] == (1,), json.loads(reply.payload)

    def rows(self, path=".", creds=ME):
        """Return all rows, and the number of windows that they came in."""
        rows, denied, last, num_windows, more = [], [], "", 0, True
        while more:
            more, window = self.ask(Du.ROWS, path, last, creds)
            rows += window["rows"]
            denied += window["denied"]
            last = window["last"]
            num_windows += 1
        return rows, denied, num_windows

    def total(self, path=".", creds=ME):
        return self.ask(Du.TOTAL, path, creds=creds)[1]


@pytest.fixture
def bench(tmp_path):
    return Trees(tmp_path)


def test_rows_of_a_tree_come_in_the_order_of_names_and_say_what_each_file_costs(bench):
    bench.directory("d")
    bench.directory("d/in")
    for path, length in (("d/z.kv", 33), ("d/in/a.kv", 1), ("d/a.kv", 0)):
        bench.make(path, length)
    rows, denied, _ = bench.rows("d")
    assert [(row["path"], row["tokens"], row["pages"]) for row in rows] == [
        ("d/a.kv", 0, 0),
        ("d/in/a.kv", 1, 1),
        ("d/z.kv", 33, 2),
    ]
    assert denied == []
    assert bench.total("d") == {
        "path": "d",
        "tokens": 34,
        "pages": 3,
        "exclusive_pages": 3,
        "shared_pages": 0,
        "disk_bytes": 0,
        "exclusive_bytes": 3 * bench.fs.pool.page_bytes,
        "shared_bytes": 0,
        "plain_bytes": 0,
    }
    assert bench.rows("d/z.kv")[0] == [rows[2]]
    assert bench.total("d/z.kv")["pages"] == 2


def test_the_sum_of_a_model_has_its_name_and_precision_in_place_of_a_path(bench):
    bench.make("a.kv", 33)
    bench.make("b.kv", 1)
    (found,) = bench.ask(Du.MODELS, ".")[1]["rows"]
    assert found == bench.total() | {"path": "tiny float32"}


def test_the_model_of_a_file_is_told_to_its_readers_alone(bench):
    bench.make("secret.kv", 64)
    assert bench.ask(Du.MODELS, ".", creds=OTHER)[1] == {"rows": []}
    assert bench.total(creds=OTHER)["tokens"] == 64


def test_what_the_caller_may_not_read_is_named_and_not_counted(bench):
    bench.directory("mine", 0o700)
    bench.directory("open", 0o755)
    bench.make("mine/a.kv", 5)
    bench.make("open/b.kv", 40)
    rows, denied, _ = bench.rows(creds=OTHER)
    assert [row["path"] for row in rows] == ["./open/b.kv"]
    assert denied == ["./mine"]
    assert bench.total(creds=OTHER)["pages"] == 2
    assert bench.rows("mine", OTHER)[1] == ["mine"]


def test_what_a_file_shares_is_told_to_its_readers_alone(bench):
    """Users who may not read a file get the figures that stat(2) tells; the sum reveals nothing more."""
    bench.make("secret.kv", 64)
    source = bench.fs.kv_open(ME, "secret.kv", write=False)
    bench.fs.kv_close(bench.fs.kv_fork(ME, source, "open.kv", 0o644))
    bench.fs.kv_close(bench.fs.kv_fork(ME, source, "also.kv"))
    bench.fs.kv_close(source)
    rows, _, _ = bench.rows(creds=OTHER)
    shown = {row["path"]: (row["tokens"], row["pages"], row["exclusive_pages"], row["shared_pages"]) for row in rows}
    assert shown == {"./also.kv": (64, 2, None, None), "./open.kv": (64, 2, 0, 2), "./secret.kv": (64, 2, None, None)}
    found = bench.total(creds=OTHER)
    assert (found["pages"], found["exclusive_pages"], found["shared_pages"]) == (6, 0, 2)
    assert bench.rows("secret.kv", OTHER)[0] == [row | {"path": "secret.kv"} for row in rows[2:]]


def test_plain_files_are_shown_with_their_bytes(bench):
    file = bench.fs.volume.make_plain(bench.tree.root, b"a.txt", 0o600, 1000, 1000)
    with bench.fs.volume.charged_for(file, file.content, 1234):
        file.content.resize(1234)
    bench.tree.link(file, bench.tree.root, b"hard.txt")
    bench.make("b.kv", 1)
    rows, _, _ = bench.rows(creds=OTHER)
    assert [(row["path"], row["pages"], row["plain_bytes"]) for row in rows] == [
        ("./a.txt", 0, 1234),
        ("./b.kv", 1, 0),
        ("./hard.txt", 0, 1234),
    ]
    assert bench.total()["plain_bytes"] == 1234
    assert bench.total("a.txt")["plain_bytes"] == 1234


def test_a_page_that_forks_share_counts_once_in_the_sum(bench):
    bench.make("a.kv", 64)
    source = bench.fs.kv_open(ME, "a.kv", write=False)
    bench.fs.kv_fork(ME, source, "b.kv")
    bench.tree.link(source.inode, bench.tree.root, b"hard.kv")
    assert [row["shared_pages"] for row in bench.rows()[0]] == [2, 2, 2]
    found = bench.total()
    assert (found["pages"], found["exclusive_pages"], found["tokens"]) == (2, 2, 128)


# ---- windows


def test_more_files_than_a_message_holds_come_in_windows_each_once_while_others_have_their_turn(bench):
    names = [f"{index:05}" + "\udc80" * 240 + ".kv" for index in range(1200)]  # each byte is told by six
    bench.directory("d")
    for name in names:
        bench.make(f"d/{name}")
    rows, _, num_windows = bench.rows("d")
    assert [row["path"] for row in rows] == [f"d/{name}" for name in names]
    assert num_windows > 1
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await bench.begin(Du.TOTAL, b"d")
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert turns > 4


@pytest.fixture
def narrow(bench, monkeypatch):
    """A bench whose windows are small."""
    monkeypatch.setattr("scheduler.operations.du.PAYLOAD_BYTES", 1000)
    return bench


@pytest.mark.slow
def test_windows_join_wherever_they_end_in_a_tree_of_odd_names(narrow):
    chance, directories, wanted = random.Random(7), [""], set()
    for _ in range(12):
        path = chance.choice(directories) + chance.choice(["d", "e e", "\udcff\udcfe", "0", "z.kv", "\u20ac"]) + "x"
        if path + "/" not in directories:
            narrow.directory(path)
            directories.append(path + "/")
    for number in range(120):
        path = f"{chance.choice(directories)}{chance.choice(['a', 'dx.kv', 'dy', '~'])}{number}\udc80.kv"
        narrow.make(path, number % 3)
        wanted.add(f"./{path}")
    rows, _, num_windows = narrow.rows()
    assert len(rows) == len(wanted)
    assert {row["path"] for row in rows} == wanted
    assert num_windows > 10
    top = next(path for path in directories if path)[:-1]
    below, _, _ = narrow.rows(top)
    assert below == [row | {"path": row["path"][2:]} for row in rows if row["path"].startswith(f"./{top}/")]


def test_what_is_removed_between_two_windows_does_not_matter(narrow):
    narrow.directory("d")
    for index in range(20):
        narrow.make(f"d/{index:02}.kv")
    more, window = narrow.ask(Du.ROWS, ".")
    assert more
    narrow.fs.kv_remove(ME, window["last"])
    _, following = narrow.ask(Du.ROWS, ".", window["last"])
    assert following["rows"][0]["path"] == f"./d/{len(window['rows']):02}.kv"


def test_a_tree_deeper_than_a_path_is_named_where_it_becomes_so(bench):
    above = bench.tree.root
    for _ in range(20):
        above = bench.tree.make(above, b"n" * 255, stat.S_IFDIR, mode=0o700, uid=1000, gid=1000)
    assert len(bench.rows()[1]) == 1


def test_what_makes_no_sense_is_refused_before_anything_is_begun(bench):
    for what, payload, error in ((3, b".", Invalid), (Du.ROWS, b"none", NotFound), (Du.ROWS, b".\0else", Invalid)):
        with pytest.raises(error):
            bench.begin(what, payload)
