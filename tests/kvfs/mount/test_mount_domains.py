"""Quotas and domains in a shell."""

import os
import subprocess

import pytest

from tests.kvfs.mounted import NUM_PAGES, PAGE_BYTES, Mount, a_kv_file, needs_mount, opened

ANN = 12345
pytestmark = [needs_mount, pytest.mark.usefixtures("domain")]


def as_user(mount: Mount, command: str, uid: int = ANN) -> subprocess.CompletedProcess[str]:
    return mount.run(f"setpriv --reuid {uid} --regid {uid} --clear-groups bash -c '{command}'")


@pytest.fixture
def domain(mount: Mount) -> None:
    """`d`, of ann's, with room for six pages and four files; `a.kv` of root has four pages."""
    mount.call("close", a_kv_file(mount))
    mount.sh(f"mkdir -m 700 d; chown {ANN} d; chmod 644 a.kv; cp a.kv $OUT/x; chmod 644 $OUT/x")
    done = as_user(mount, f"setfattr -n user.kv.quota -v {6 * PAGE_BYTES} d && setfattr -n user.kv.quota_files -v 4 d")
    assert not done.stderr


def used(mount: Mount) -> int:
    return int(os.getxattr(mount.path / "d", "user.kv.used"))


def denied(mount: Mount, *commands: str, why: str = "Disk quota exceeded") -> None:
    for command in commands:
        assert why in mount.run(command).stderr, command


def test_cp_says_that_the_quota_is_used_up_at_once_and_all_is_well_again_after_rm(mount: Mount) -> None:
    mount.sh("cp $OUT/x d/1.kv; cp d/1.kv d/2.kv; echo plain > d/plain")
    shown = dict(line.split("=") for line in mount.sh("getfattr -d d").splitlines()[1:5])
    quotas = {"quota": 6 * PAGE_BYTES, "quota_files": 4, "used": 4 * PAGE_BYTES + 6, "used_files": 3}
    assert shown == {f"user.kv.{name}": f'"{value}"' for name, value in quotas.items()}
    other = mount.call("create", "other.kv")
    mount.call("append", other, 100, 500)  # other tokens than in x, whose pages are there
    mount.call("close", other)
    for command in ("cp other.kv d/3.kv", "cat other.kv > $OUT/other; cp $OUT/other d/3.kv"):
        denied(mount, command)
        mount.sh("rm d/3.kv; cp other.kv outside.kv; rm outside.kv")
    mount.sh("rm d/*; cp $OUT/other d/3.kv; cmp $OUT/other d/3.kv")
    assert mount.call("stat", "d/3.kv")["kind"] == "kv"
    assert used(mount) == 4 * PAGE_BYTES, "an image that comes in is charged once: no six pages hold it twice"
    mount.sh("cat $OUT/x > d/3.kv")
    assert used(mount) == 4 * PAGE_BYTES
    mount.sh(": > d/3.kv")
    assert used(mount) == 0


def test_no_file_of_any_kind_is_made_beyond_the_quota(mount: Mount) -> None:
    mount.sh("touch d/1; mkdir d/2; ln -s x d/3; mkfifo d/4")
    makes = ["touch d/5", "mkdir d/5", "ln -s x d/5", "mkfifo d/5", "cp a.kv d/5", "mknod d/5 p", "ln d/1 d/5"]
    denied(mount, *makes)
    assert mount.sh("ls d").split() == ["1", "2", "3", "4"]
    mount.sh("echo x > f; chmod 666 f; chmod 777 .")
    assert "Operation not permitted" in as_user(mount, "ln f g").stderr, "a name is charged to the file's owner"
    mount.sh("chmod 755 .; rm d/4; " + "; ".join(f"{make}; rm -r d/5" for make in makes))


def test_at_the_quota_a_file_is_made_as_soon_as_one_was_removed(mount: Mount) -> None:
    mount.sh("touch d/1 d/2 d/3")
    name = mount.path / "d/4"
    for _ in range(20):
        name.touch()
        name.unlink()
        name.mkdir()
        name.rmdir()
        name.symlink_to("x")
        name.unlink()


def test_no_byte_of_a_plain_file_is_written_beyond_the_quota(mount: Mount) -> None:
    """The domain has room for 24,576 bytes."""
    mount.sh("head -c 30000 /dev/zero > $OUT/f")
    for command in (
        "dd if=/dev/zero of=d/f bs=1k count=50",
        "truncate -s 1T d/f",
        "cat $OUT/f $OUT/f | tee d/f > /dev/null",
    ):
        denied(mount, command)
        assert used(mount) == (mount.path / "d/f").stat().st_size <= 6 * PAGE_BYTES, command
        mount.call("check")
        mount.sh("rm d/f")
    mount.sh("head -c 24576 /dev/zero > d/f; : > d/f; head -c 24576 /dev/zero > d/f")
    denied(mount, "printf x >> d/f")
    mount.sh("printf x | dd of=d/f conv=notrunc seek=10 status=none")  # what was there may be written over


def test_no_byte_is_copied_into_a_domain_beyond_its_quota(mount: Mount) -> None:
    mount.sh("head -c 30000 /dev/zero > f; head -c 20000 f > d/f")
    with opened(mount.path / "f") as source, opened(mount.path / "d/f", os.O_WRONLY) as target:
        with pytest.raises(OSError, match="quota"):
            os.copy_file_range(source, target, 30000, 0, 20000)
        assert os.copy_file_range(source, target, 4576, 0, 20000) == 4576
    assert used(mount) == 24576


def test_df_of_a_domain_is_for_everybody_its_attributes_for_its_readers_and_its_quota_for_its_owner(
    mount: Mount,
) -> None:
    quota = 6 * PAGE_BYTES
    mount.sh("cp a.kv d/a.kv; head -c 1024 /dev/zero > d/f")
    for path in ("d", "d/f", "d/a.kv"):
        shown = mount.sh(f"df -B1 --output=size,used,avail,itotal,iused {path}").splitlines()[1].split()
        assert [int(each) for each in shown] == [quota, 4 * PAGE_BYTES + 1024, 2 * PAGE_BYTES - 1024, 4, 2]
    assert int(mount.sh("df -B1 --output=size . | tail -1")) == NUM_PAGES * PAGE_BYTES
    mount.sh("chmod 777 d")
    assert "Operation not permitted" in as_user(mount, "setfattr -n user.kv.quota -v 1G d", ANN + 1).stderr
    mount.sh("chmod 700 d")
    assert as_user(mount, "df -B1 --output=size d | tail -1", ANN + 1).stdout.strip() == str(quota)
    assert "Permission denied" in as_user(mount, "getfattr -n user.kv.used d", ANN + 1).stderr
    assert "user.kv.used=" in as_user(mount, "getfattr -n user.kv.used d").stdout
    assert "Permission denied" in as_user(mount, "df d/f", ANN + 1).stderr
