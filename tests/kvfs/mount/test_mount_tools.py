"""Everyday programs on the mount: copies in and out are equal, editors save, databases and repositories work."""

from __future__ import annotations

import hashlib
import os
import pty
import random
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kvfs.mounted import Mount, a_kv_file, mounted, needs_mount

pytestmark = [needs_mount, pytest.mark.slow]


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"NOT TESTED: there is no {program} here")


def manifest(root: Path, *, to_the_second: bool = False) -> dict[str, Any]:
    """All there is to know of a tree but what no copy keeps."""
    found: dict[str, Any] = {}
    first_name: dict[int, str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        status = path.lstat()
        mtime = status.st_mtime_ns // 10**9 if to_the_second else status.st_mtime_ns
        what: list[Any] = [oct(status.st_mode), mtime, status.st_uid, status.st_gid]
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
        "cp -a --reflink=auto tree {to}",
        pytest.param("rsync -aH tree/ {to}", marks=needs("rsync")),
        pytest.param("rsync -aHS --inplace --no-sparse tree/ {to} || rsync -aHS tree/ {to}", marks=needs("rsync")),
        "mkdir {to}; tar cpSf - -C tree . | tar xpf - -C {to}",
        "mkdir {to}; tar cpf - --format=pax -C tree . | tar xpf - -C {to}",
    ],
)
def test_a_tree_copied_out_and_in_again_is_the_same(mount: Mount, tree: Path, command: str) -> None:
    to_the_second = "tar" in command and "pax" not in command
    original = manifest(tree, to_the_second=to_the_second)
    assert len(original) == 24
    mount.sh(command.replace("{to}", "inside"))
    mount.sh(command.replace("{to}", "$OUT/tree"))
    mount.sh(f"cd $OUT; {command.replace('{to}', f'{mount.path}/back')}")
    for copy in (mount.path / "inside", mount.outside / "tree", mount.path / "back"):
        found = manifest(copy, to_the_second=to_the_second)
        for path, what in original.items():
            assert found.get(path) == what, f"{copy.name}: {path!r}"
        assert found.keys() == original.keys()
    for directory in ("inside", "back"):
        assert mount.call("tokens_of", f"{directory}/deep/b.kv") == list(range(1, 33))
        assert mount.call("stat", f"{directory}/empty.kv")["kind"] == "kv"


@needs("rsync")
def test_rsync_finds_nothing_left_to_do(mount: Mount, tree: Path) -> None:
    mount.sh("rsync -aH tree/ $OUT/copy; rsync -aH $OUT/copy/ again")
    for command in ("rsync -aHi tree/ $OUT/copy", "rsync -aHic $OUT/copy/ again", "rsync -aHi --delete tree/ again"):
        assert mount.sh(command) == "", command
    (tree / "deep/er/text").write_text("another text\n")
    assert mount.sh("rsync -aHi tree/ again").split() == [">f.st......", "deep/er/text"]
    assert (mount.path / "again/deep/er/text").read_text() == "another text\n"


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
        ("cp -a a.kv $OUT/a", "cp -a $OUT/a b.kv"),
        ("cp -a a.kv $OUT/a", "mv $OUT/a b.kv"),
        ("tar cf $OUT/t --xattrs a.kv", "mkdir back; tar xf $OUT/t --xattrs -C back; mv back/a.kv b.kv"),
        pytest.param("rsync -aX a.kv $OUT/a", "rsync -aX $OUT/a b.kv", marks=needs("rsync")),
        pytest.param("rsync -aX --inplace a.kv $OUT/a", "rsync -aX --inplace $OUT/a b.kv", marks=needs("rsync")),
        ("cp -a a.kv $OUT/a", f"echo '{BORG}' > $OUT/borg.py; python3 $OUT/borg.py $OUT/a b.kv"),
    ],
    ids=["cp", "mv", "tar", "rsync", "rsync in place", "borg's order"],
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


@pytest.mark.parametrize(
    ("out", "back"),
    [
        ("restic init && restic backup a.kv", "restic restore latest --target . --verify"),
        ("borg init -e none $OUT/borg && borg create $OUT/borg::one a.kv", "borg extract $OUT/borg::one"),
    ],
    ids=["restic", "borg"],
)
def test_a_backup_goes_out_and_comes_back(tmp_path: Path, out: str, back: str) -> None:
    """An image of several parts, as restic cuts files."""
    program = out.partition(" ")[0]
    if shutil.which(program) is None:
        pytest.skip(f"NOT TESTED: there is no {program} here")
    with mounted(tmp_path, num_pages=128, page_bytes=1 << 16) as mount:
        mount.call("close", a_kv_file(mount, count=32 * 100))
        settings = "export HOME=$OUT/home RESTIC_REPOSITORY=$OUT/restic RESTIC_PASSWORD=of-a-test; "
        mount.sh(settings + out)
        before = hashlib.blake2b((mount.path / "a.kv").read_bytes()).digest()
        mount.sh("rm a.kv")
        mount.sh(settings + back)
        assert mount.call("stat", "a.kv")["kind"] == "kv"
        assert hashlib.blake2b((mount.path / "a.kv").read_bytes()).digest() == before


@needs("git")
def test_a_repository_is_cloned_in_worked_on_and_cloned_out(mount: Mount) -> None:
    git = "git -c user.name=n -c user.email=e@x -c init.defaultBranch=main -c protocol.file.allow=always"
    mount.sh(
        f"""
        {git} init -q $OUT/origin
        cd $OUT/origin
        for i in $(seq 20); do mkdir -p d$((i % 7)); seq $i 2000 > d$((i % 7))/f$i; done
        ln -s d1 link; echo '#!/bin/sh' > run; chmod +x run
        {git} add -A; {git} commit -qm one
        cd {mount.path}
        {git} clone -q --no-local $OUT/origin work
        {git} clone -q work second
        cd work
        {git} status --porcelain > $OUT/status1
        sed -i s/7/seven/ d*/f*; {git} mv d2 moved; echo new > new; {git} add -A; {git} commit -qm two
        {git} checkout -qb side HEAD~1; echo side > side; {git} add side; {git} commit -qm side
        {git} checkout -q main; {git} merge -q --no-edit side
        {git} gc -q; {git} fsck --strict 2>&1
        {git} status --porcelain > $OUT/status2
        {git} clone -q . $OUT/out
        cd ../second; {git} pull -q --no-rebase; {git} log --oneline > $OUT/log
        """
    )
    assert (mount.outside / "status1").read_text() == (mount.outside / "status2").read_text() == ""
    assert len((mount.outside / "log").read_text().splitlines()) == 4
    trees = [mount.sh(f"git -C {where} rev-parse HEAD^{{tree}}") for where in ("work", "second", "$OUT/out")]
    assert len(set(trees)) == 1
    mount.sh("rm -r work/.git second/.git $OUT/out/.git; diff -r work second; diff -r work $OUT/out")


_LISP = '(while (search-forward "two" nil t) (replace-match "2")) (save-buffer)'
EDITS = {
    "sed -i": "sed -i s/two/2/ f",
    "perl -i with a backup": "perl -i.bak -pe s/two/2/ f; grep -q two f.bak",
    "vim, renaming": "vim -Nes -u NONE -c 'set backupcopy=no backup' -c %s/two/2/ -c wq f",
    "vim, writing over": "vim -Nes -u NONE -c 'set backupcopy=yes backup' -c %s/two/2/ -c wq f",
    "vim with a swap file": "vim -Nes -u NONE -c 'set swapfile directory=.' -c %s/two/2/ -c wq f",
    "emacs": f"emacs -Q --batch f --eval '(progn {_LISP})'",
    "emacs, backing up by a copy": f"emacs -Q --batch f --eval '(let ((backup-by-copying t)) {_LISP})'",
    "ed": r"printf ',s/two/2/\nw\nq\n' | ed -s f",
    "patch": r"printf -- '--- f\n+++ f\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n' | patch -s f",
    "cat, replacing": "cp -p f f~; sed s/two/2/ f > f.bak; sync f.bak; mv f.bak f; chmod 640 f",
    "cat, over itself": 'text=$(sed s/two/2/ f); echo "$text" > f',
    "nano": "",
    "nano -B": "",
}


@pytest.mark.parametrize("editor", EDITS)
def test_an_editor_saves_a_file(mount: Mount, editor: str) -> None:
    """The text is the new one, the mode stays, and nothing but backups is left beside it."""
    program = editor.partition(" ")[0].rstrip(",")
    if shutil.which(program) is None:
        pytest.skip(f"NOT TESTED: there is no {program} here")
    (mount.path / "f").write_text("one\ntwo\nthree\n")
    (mount.path / "f").chmod(0o640)
    if program == "nano":
        _edit_by_keys(mount, [*editor.split(), "f"])
    else:  # vim's status says nothing
        mount.run(f"mkdir $OUT/home; export HOME=$OUT/home; {{ {EDITS[editor]}; }} > /dev/null 2>&1")
    assert (mount.path / "f").read_text() == "one\n2\nthree\n"
    assert stat.S_IMODE((mount.path / "f").stat().st_mode) == 0o640
    assert {path.name for path in mount.path.iterdir()} <= {"f", "f~", "f.bak", "f.orig"}


def _edit_by_keys(mount: Mount, command: list[str]) -> None:
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "vt100", "HOME": "/nowhere"}
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=mount.path, env=environment):
        os.close(its)
        screen = b""
        while b"three" not in screen:
            screen += os.read(ours, 65536)
        os.write(ours, b"\x1b[B\x0b2\r\x0f\r\x18")  # down, cut the line, type another, write, yes, exit
        with suppress(OSError):  # EIO when it has gone
            while os.read(ours, 65536):
                pass
    os.close(ours)


@pytest.mark.parametrize("journal", ["delete", "truncate", "persist", "wal"])
def test_a_database_lives_on_the_mount(mount: Mount, journal: str) -> None:
    """Locks, journals, and with wal a file in shared memory of two connections."""
    path = mount.path / "data.db"
    one, other = (sqlite3.connect(path, timeout=0.1, isolation_level=None) for _ in range(2))
    assert one.execute(f"pragma journal_mode={journal}").fetchone()[0] == journal
    one.execute("create table t (n integer primary key, text)")
    one.execute("begin immediate")
    one.executemany("insert into t values (?, ?)", ((n, "x" * n) for n in range(1000)))
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("begin immediate")
    one.execute("commit")
    assert other.execute("select count(*), sum(length(text)) from t").fetchone() == (1000, 499_500)
    other.execute("delete from t where n % 2")
    one.execute("begin")
    one.execute("delete from t")
    one.execute("rollback")
    one.execute("vacuum")
    assert one.execute("pragma integrity_check").fetchone() == ("ok",)
    assert other.execute("select count(*) from t").fetchone() == (500,)
    one.close()
    other.close()
    assert [path.name for path in mount.path.iterdir() if path.name.endswith(("-wal", "-shm"))] == []


FIO = "fio --name=verify --directory=. --size=2M --verify=crc32c --verify_fatal=1 --group_reporting --minimal"


@needs("fio")
@pytest.mark.parametrize(
    "options",
    [
        "--rw=randrw --bsrange=512-128k --bs_unaligned --numjobs=2",
        "--rw=write --bs=1M --direct=1",
        "--rw=randwrite --bs=16k --ioengine=mmap",
        "--rw=randwrite --bs=4k --ioengine=libaio --direct=1 --iodepth=16",
        "--rw=randwrite --bs=8k --ioengine=pvsync --fsync=32 --overwrite=1",
    ],
)
def test_fio_reads_what_it_wrote(mount: Mount, options: str) -> None:
    done = mount.run(f"{FIO} {options}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verify" in mount.sh("ls")
