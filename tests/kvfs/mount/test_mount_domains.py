"""Quotas and domains in a shell."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kvfs.mounted import NUM_PAGES, PAGE_BYTES, Mount, a_kv_file, needs_mount, opened

pytestmark = needs_mount

ANN = 12345


def as_user(mount: Mount, command: str, uid: int = ANN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=mount.path,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
        user=uid,
        group=uid,
        extra_groups=[],
    )


@pytest.fixture
def domain(mount: Mount) -> Iterator[str]:
    """`d`, of ann's, with room for six pages and four files; `a.kv` of root has four pages."""
    mount.call("close", a_kv_file(mount))
    mount.sh(f"mkdir -m 700 d; chown {ANN} d; chmod 644 a.kv; cp a.kv $OUT/x; chmod 644 $OUT/x")
    done = as_user(mount, f"setfattr -n user.kv.quota -v {6 * PAGE_BYTES} d && setfattr -n user.kv.quota_files -v 4 d")
    assert not done.stderr
    return "d"


def test_a_domain_shows_its_quota_and_what_is_used(mount: Mount, domain: str) -> None:
    mount.sh("cp a.kv d/a.kv; cp a.kv d/b.kv; echo plain > d/plain")
    shown = mount.sh("getfattr -d d").splitlines()
    assert {*shown[1:5]} == {
        f'user.kv.quota="{6 * PAGE_BYTES}"',
        'user.kv.quota_files="4"',
        f'user.kv.used="{4 * PAGE_BYTES + 6}"',
        'user.kv.used_files="3"',
    }
    mount.sh("rm d/*")
    assert os.getxattr(mount.path / "d", "user.kv.used") == b"0"


def test_cp_says_that_the_quota_is_used_up_at_once_and_all_is_well_again_after_rm(mount: Mount, domain: str) -> None:
    mount.sh("cp $OUT/x d/1.kv; cp d/1.kv d/2.kv")
    other = mount.call("create", "other.kv")
    mount.call("append", other, 100, 500)  # other tokens than in x, whose pages are there
    mount.call("close", other)
    for command in ("cp other.kv d/3.kv", "cat other.kv > $OUT/other; cp $OUT/other d/3.kv"):
        done = mount.run(command)
        assert "Disk quota exceeded" in done.stderr
        mount.sh("rm d/3.kv; cp other.kv outside.kv; rm outside.kv")
    mount.sh("rm d/1.kv d/2.kv; cp $OUT/other d/3.kv; cmp $OUT/other d/3.kv")
    assert mount.call("stat", "d/3.kv")["kind"] == "kv"


@pytest.mark.parametrize(
    "command",
    ["touch d/5", "mkdir d/5", "ln -s x d/5", "mkfifo d/5", "cp a.kv d/5", "mknod d/5 p", "> d/5", "ln d/1 d/5"],
)
def test_no_file_of_any_kind_is_made_beyond_the_quota(mount: Mount, domain: str, command: str) -> None:
    mount.sh("touch d/1; mkdir d/2; ln -s x d/3; mkfifo d/4")
    done = mount.run(command)
    assert "Disk quota exceeded" in done.stderr
    assert mount.sh("ls d").split() == ["1", "2", "3", "4"]
    mount.sh(f"rm d/4; {command}")


@pytest.mark.parametrize(
    ("make", "remove"),
    [(Path.touch, Path.unlink), (Path.mkdir, Path.rmdir), (lambda new: new.symlink_to("x"), Path.unlink)],
)
def test_at_the_quota_a_file_is_made_as_soon_as_one_was_removed(
    mount: Mount, domain: str, make: Callable[[Path], None], remove: Callable[[Path], None]
) -> None:
    mount.sh("touch d/1 d/2 d/3")
    name = mount.path / "d/4"
    make(name)
    for _ in range(200):
        remove(name)
        make(name)


def test_mv_across_the_boundary_copies_and_ln_does_not_cross(mount: Mount, domain: str) -> None:
    before = (mount.path / "a.kv").stat().st_ino
    mount.sh("cp -p a.kv keep.kv; mv a.kv d/a.kv; cmp keep.kv d/a.kv; [ ! -e a.kv ]")
    assert (mount.path / "d/a.kv").stat().st_ino != before
    assert mount.call("pages_of", "d/a.kv")[:3] == mount.call("pages_of", "keep.kv")[:3], "mv forks"
    mount.sh("mkdir -p sub/x; touch sub/x/y; mv sub d/; [ -e d/sub/x/y ]; mv d/sub .")
    for action in (
        lambda: os.link(mount.path / "d/a.kv", mount.path / "hard.kv"),
        lambda: (mount.path / "d/a.kv").rename(mount.path / "b.kv"),
        lambda: (mount.path / "keep.kv").rename(mount.path / "d/b.kv"),
    ):
        with pytest.raises(OSError, match="Errno") as caught:
            action()
        assert caught.value.errno == errno.EXDEV


def test_the_quota_is_its_owners_to_set(mount: Mount, domain: str) -> None:
    mount.sh("chmod 777 d")
    stranger = as_user(mount, "setfattr -n user.kv.quota -v 1G d", ANN + 1)
    assert "Operation not permitted" in stranger.stderr
    assert not as_user(mount, "setfattr -n user.kv.quota -v 1G d").stderr
    assert os.getxattr(mount.path / "d", "user.kv.quota") == str(1 << 30).encode()
    mount.sh("touch d/x; mkdir full; touch full/x")
    for command in (
        "setfattr -x user.kv.quota d; setfattr -x user.kv.quota_files d",
        "setfattr -n user.kv.quota -v 1 full",
    ):
        assert "Directory not empty" in mount.run(command).stderr
    assert "Invalid argument" in mount.run("setfattr -n user.kv.quota_files -v many d").stderr
    mount.sh("rm d/x; setfattr -x user.kv.quota_files d")
    assert os.listxattr(mount.path / "d") == []
    mount.sh("touch x; mv x d/x; mv d/x x")


def test_what_was_copied_out_and_in_again_shares_its_pages_whoever_copies(mount: Mount, domain: str) -> None:
    used = 256 - mount.call("free")
    mount.sh("tar cf $OUT/t.tar a.kv; mkdir in; tar xf $OUT/t.tar -C in; rsync $OUT/x in/r.kv; cat $OUT/x > in/c.kv")
    mount.settle()
    assert 256 - mount.call("free") - used == 3, "a tail for each"
    for name in ("a", "r", "c"):
        assert mount.call("pages_of", f"in/{name}.kv")[:3] == mount.call("pages_of", "a.kv")[:3]


def test_nobody_shares_pages_by_content_with_somebody_else(mount: Mount, domain: str) -> None:
    mount.sh("chmod 777 .; cp $OUT/x d/x.kv")
    done = as_user(mount, f"cat {mount.outside}/x > ann.kv")
    mount.sh("chmod 755 .")
    assert not done.stderr
    files = [mount.call("pages_of", name) for name in ("a.kv", "d/x.kv", "ann.kv")]
    assert len({page for pages in files for page in pages}) == sum(map(len, files))


def test_chown_moves_a_file_to_its_new_owners_account(mount: Mount, domain: str) -> None:
    mount.sh("mkdir e; setfattr -n user.kv.quota -v 1M e; cp a.kv e/a.kv")
    mount.sh(f"chown {ANN} a.kv e e/a.kv; chown 0 a.kv e; chown {ANN}:{ANN} e")
    mount.call("check")
    mount.sh("cat a.kv > /dev/null; rm -r e")
    mount.call("check")


def test_many_copies_at_once_into_a_domain_at_its_quota_end_and_hurt_nobody_else(mount: Mount, domain: str) -> None:
    mount.sh(f"setfattr -n user.kv.quota_files -v 100 d; setfattr -n user.kv.quota -v {10 * PAGE_BYTES} d; cp $OUT/x y")
    mount.call("close", a_kv_file(mount, "other.kv", count=150))
    mount.sh("cat other.kv > $OUT/other; rm other.kv y")
    storm = "for i in $(seq 12); do { cp $OUT/x d/$i.kv; cp $OUT/other d/o$i.kv; rm -f d/o$i.kv; } & done; wait"
    with subprocess.Popen(
        ["bash", "-c", storm], cwd=mount.path, env={**os.environ, "OUT": str(mount.outside)}, stderr=subprocess.PIPE
    ) as process:
        for index in range(10):
            mount.sh(f"cp $OUT/x out{index}.kv; cmp $OUT/x out{index}.kv")
        _, err = process.communicate(timeout=60)
    assert b"Disk quota exceeded" in err
    assert int(os.getxattr(mount.path / "d", "user.kv.used")) <= 10 * PAGE_BYTES
    mount.call("check")
    mount.sh("rm d/*; cp $OUT/other d/; cmp $OUT/other d/other")
    assert mount.call("stat", "d/other")["kind"] == "kv"


def test_a_file_that_changes_hands_while_it_is_imported_is_charged_to_whoever_has_it(mount: Mount, domain: str) -> None:
    command = f"for i in $(seq 30); do cp $OUT/x $i.kv & chown {ANN} $i.kv 2> /dev/null; done; wait"
    mount.sh(command)
    mount.call("check")
    assert {mount.call("stat", f"{index}.kv")["kind"] for index in range(1, 31)} == {"kv"}


@pytest.mark.parametrize(
    "command",
    [
        "dd if=/dev/zero of=d/f bs=1k count=50",
        "dd if=/dev/zero of=d/f bs=1M count=5",
        "truncate -s 50M d/f",
        "truncate -s 1T d/f",
        "cp $OUT/f d/f",
        "cat $OUT/f $OUT/f | tee d/f > /dev/null",
    ],
)
def test_no_byte_of_a_plain_file_is_written_beyond_the_quota(mount: Mount, domain: str, command: str) -> None:
    """The domain has room for 24,576 bytes."""
    mount.sh("head -c 30000 /dev/zero > $OUT/f")
    done = mount.run(command)
    assert "Disk quota exceeded" in done.stderr
    size = (mount.path / "d/f").stat().st_size
    assert size <= 6 * PAGE_BYTES
    assert int(os.getxattr(mount.path / "d", "user.kv.used")) == size
    mount.call("check")
    mount.sh("rm d/f; head -c 24576 /dev/zero > d/f; : > d/f; head -c 24576 /dev/zero > d/f")
    done = mount.run("printf x >> d/f")
    assert "Disk quota exceeded" in done.stderr
    mount.sh("printf x | dd of=d/f conv=notrunc seek=10 status=none")  # what was there may be written over


def test_no_byte_is_copied_into_a_domain_beyond_its_quota(mount: Mount, domain: str) -> None:
    mount.sh("head -c 30000 /dev/zero > f; head -c 20000 f > d/f")
    with opened(mount.path / "f") as source, opened(mount.path / "d/f", os.O_WRONLY) as target:
        with pytest.raises(OSError, match="quota"):
            os.copy_file_range(source, target, 30000, 0, 20000)
        assert os.copy_file_range(source, target, 4576, 0, 20000) == 4576
    assert os.getxattr(mount.path / "d", "user.kv.used") == b"24576"


def test_df_of_a_domain_shows_its_quota_and_what_is_left(mount: Mount, domain: str) -> None:
    quota = 6 * PAGE_BYTES
    mount.sh("cp a.kv d/a.kv; head -c 1024 /dev/zero > d/f")
    for path in ("d", "d/f", "d/a.kv"):
        shown = mount.sh(f"df -B1 --output=size,used,avail,itotal,iused {path}").splitlines()[1].split()
        assert [int(each) for each in shown] == [quota, 4 * PAGE_BYTES + 1024, 2 * PAGE_BYTES - 1024, 4, 2]
    assert int(mount.sh("df -B1 --output=size . | tail -1")) == NUM_PAGES * PAGE_BYTES


def test_df_of_a_domain_is_for_everybody_and_its_attributes_for_those_who_may_read_it(
    mount: Mount, domain: str
) -> None:
    mount.sh("chmod 700 d")
    assert as_user(mount, "df -B1 --output=size d | tail -1", ANN + 1).stdout.strip() == str(6 * PAGE_BYTES)
    assert "Permission denied" in as_user(mount, "getfattr -n user.kv.used d", ANN + 1).stderr
    assert "user.kv.used=" in as_user(mount, "getfattr -n user.kv.used d").stdout
    assert "Permission denied" in as_user(mount, "df d/f", ANN + 1).stderr


def test_an_image_that_comes_in_is_charged_once(mount: Mount, domain: str) -> None:
    """Four pages and their header fit into six; both together would not."""
    mount.sh("cp $OUT/x d/x.kv")
    assert int(os.getxattr(mount.path / "d", "user.kv.used")) == 4 * PAGE_BYTES
    mount.sh("cat $OUT/x > d/x.kv")
    assert int(os.getxattr(mount.path / "d", "user.kv.used")) == 4 * PAGE_BYTES
    mount.sh(": > d/x.kv")
    assert int(os.getxattr(mount.path / "d", "user.kv.used")) == 0
