"""Everyday programs on the mount: copies in and out are equal, and databases work."""

import hashlib
import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kvfs.mounted import Mount, a_kv_file, needs_mount

pytestmark = [needs_mount, pytest.mark.slow]


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"NOT TESTED: there is no {program} here")


def manifest(root: Path) -> dict[str, Any]:
    """All there is to know of a tree but what no copy keeps."""
    found: dict[str, Any] = {}
    first_name: dict[int, str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        status = path.lstat()
        what: list[Any] = [oct(status.st_mode), status.st_mtime_ns, status.st_uid, status.st_gid]
        if stat.S_ISREG(status.st_mode):
            what += [status.st_size, hashlib.blake2b(path.read_bytes()).hexdigest()]
            what += [first_name.setdefault(status.st_ino, name)]  # hard links
        elif stat.S_ISLNK(status.st_mode):
            what += [str(path.readlink())]
        found[name] = what
    return found


@pytest.fixture
def tree(mount: Mount) -> Iterator[Path]:
    """A tree of everything, inside the mount: KV files too."""
    tree = mount.path / "tree"
    dice = random.Random(7)
    for name in ("", "deep", "deep/er", "empty", "0555", "ümläut ☃"):
        (tree / name).mkdir()
    for i, size in enumerate((0, 1, 511, 4096, 70_000, 3 << 20)):
        (tree / f"deep/file{i}").write_bytes(dice.randbytes(size))
    (tree / "deep/er/text").write_text("a line\n" * 1000)
    with (tree / "sparse").open("wb") as sparse:
        sparse.truncate(5 << 20)
        sparse.seek(2 << 20)
        sparse.write(b"in the middle")
    (tree / "program").write_text("#!/bin/sh\necho it runs\n")
    (tree / "program").chmod(0o4755)
    (tree / "deep/hard").hardlink_to(tree / "program")
    (tree / "link").symlink_to("deep/file3")
    (tree / "dangling").symlink_to("/no/where")
    os.mkfifo(tree / "fifo", 0o640)
    (tree / os.fsdecode(b"\xff\xfe bytes\n")).write_bytes(b"odd")
    (tree / ("n" * 255)).write_bytes(b"long")
    a_kv_file(mount, "tree/a.kv", 100)
    a_kv_file(mount, "tree/deep/b.kv", 32)
    mount.call("create", "tree/empty.kv")
    mount.sh("cp tree/a.kv tree/fork.kv; chmod 640 tree/fork.kv")
    os.chown(tree / "deep/file1", 12, 34)
    os.chown(tree / "dangling", 12, 34, follow_symlinks=False)
    (tree / "0555").chmod(0o555)
    for i, path in enumerate(sorted(tree.rglob("*"))):
        os.utime(path, ns=(10**18 + i, 10**18 + i * 1_000_000_007), follow_symlinks=False)
    mount.call("reset")
    yield tree
    mount.sh("chmod -f 755 0555 */0555 $OUT/*/0555; true")


@pytest.mark.parametrize(
    "command",
    [
        "cp -a --sparse=always tree {to}",
        pytest.param("rsync -aHS --inplace --no-sparse tree/ {to} || rsync -aHS tree/ {to}", marks=needs("rsync")),
        "mkdir {to}; tar cpf - --format=pax -C tree . | tar xpf - -C {to}",
    ],
)
def test_a_tree_copied_out_and_in_again_is_the_same(mount: Mount, tree: Path, command: str) -> None:
    original = manifest(tree)
    assert len(original) == 24
    mount.sh(command.replace("{to}", "inside"))
    mount.sh(command.replace("{to}", "$OUT/tree"))
    mount.sh(f"cd $OUT; {command.replace('{to}', f'{mount.path}/back')}")
    for copy in (mount.path / "inside", mount.outside / "tree", mount.path / "back"):
        found = manifest(copy)
        for path, what in original.items():
            assert found.get(path) == what, f"{copy.name}: {path!r}"
        assert found.keys() == original.keys()
    for directory in ("inside", "back"):
        assert mount.call("tokens_of", f"{directory}/deep/b.kv") == list(range(1, 33))
        assert mount.call("stat", f"{directory}/empty.kv")["kind"] == "kv"


BORG = """
import os, sys
source, target = sys.argv[1:]
fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
with open(source, "rb") as data:
    while chunk := data.read(1 << 16):
        os.write(fd, chunk)
for name in os.listxattr(source):
    os.setxattr(fd, name, os.getxattr(source, name))
os.close(fd)
"""
"""A restore in borg's order: attributes before the close."""


@pytest.mark.parametrize(
    ("out", "back"),
    [
        ("cp -a a.kv $OUT/a", "mv $OUT/a b.kv"),
        ("tar cf $OUT/t --xattrs a.kv", "mkdir back; tar xf $OUT/t --xattrs -C back; mv back/a.kv b.kv"),
        pytest.param("rsync -aX a.kv $OUT/a", "rsync -aX $OUT/a b.kv", marks=needs("rsync")),
        pytest.param("rsync -aX --inplace a.kv $OUT/a", "rsync -aX --inplace $OUT/a b.kv", marks=needs("rsync")),
        ("cp -a a.kv $OUT/a", f"echo '{BORG}' > $OUT/borg.py; python3 $OUT/borg.py $OUT/a b.kv"),
    ],
    ids=["mv", "tar", "rsync", "rsync in place", "borg's order"],
)
def test_advice_comes_back_with_the_file(mount: Mount, out: str, back: str) -> None:
    a_kv_file(mount)
    a, b, c = (mount.path / f"{name}.kv" for name in "abc")
    advice = {"user.kv.ttl": b"3600", "user.kv.pinned": b"1", "user.kv.priority": b"-7", "user.note": b"mine"}
    for name, value in advice.items():
        os.setxattr(a, name, value)
    for command in (out, back):
        assert mount.sh(f"({command}) 2>&1") == "", command  # a status that is not 0 raises
    mount.settle()
    assert {name: os.getxattr(b, name) for name in advice} == advice
    assert os.getxattr(b, "user.kv.tokens") == b"100"
    if "rsync" in out:
        mount.sh("rm -rf b.kv back $OUT/*; setfattr -n user.kv.pinned -v 0 a.kv")
        mount.sh("cp a.kv $OUT/bare; rsync -aX $OUT/bare c.kv")  # rsync removes attributes that only c.kv has
        assert os.getxattr(c, "user.kv.priority") == b"0"


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_database_lives_on_the_mount(mount: Mount, journal: str) -> None:
    """Locks, journals, and with wal a file in shared memory of two connections."""
    path = mount.path / "data.db"
    one, other = (sqlite3.connect(path, timeout=0.1, isolation_level=None) for _ in range(2))
    assert one.execute(f"pragma journal_mode={journal}").fetchone()[0] == journal
    one.execute("create table t (n integer primary key, text)")
    one.execute("begin immediate")
    one.executemany("insert into t values (?, ?)", ((n, "x" * n) for n in range(300)))
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("begin immediate")
    one.execute("commit")
    assert other.execute("select count(*), sum(length(text)) from t").fetchone() == (300, 44_850)
    other.execute("delete from t where n % 2")
    one.execute("begin")
    one.execute("delete from t")
    one.execute("rollback")
    one.execute("vacuum")
    assert one.execute("pragma integrity_check").fetchone() == ("ok",)
    assert other.execute("select count(*) from t").fetchone() == (150,)
    one.close()
    other.close()
    assert [path.name for path in mount.path.iterdir() if path.name.endswith(("-wal", "-shm"))] == []
