"""The mount of an ordinary user, made through fusermount3."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvfs.mounted import REPOSITORY, CommandFailed, Mount, mounted, needs_mount

NOBODY = 65534


def _why_not() -> str | None:
    if shutil.which("fusermount3") is None:
        return "there is no fusermount3"
    try:
        mode = stat.S_IMODE(Path("/dev/fuse").stat().st_mode)
    except FileNotFoundError:
        return "there is no /dev/fuse"
    if mode & 0o666 != 0o666:
        return f"/dev/fuse has mode {mode:04o}: an ordinary user can't open it (chmod 0666 /dev/fuse)"
    return None


def _others_allowed() -> bool:
    return "user_allow_other" in Path("/etc/fuse.conf").read_text(encoding="utf-8").splitlines()


def _user() -> int | None:
    """Whom to be: root becomes nobody, others stay who they are."""
    return NOBODY if os.geteuid() == 0 else None


needs_user_mount = pytest.mark.skipif(_why_not() is not None, reason=f"NO USER MOUNT TESTED: {_why_not()}")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    if os.geteuid() == 0:
        os.chown(tmp_path, NOBODY, NOBODY)
        tmp_path.chmod(0o755)
        for parent in tmp_path.parents:
            if parent.stat().st_uid == 0 and parent != Path("/tmp") and Path("/tmp") in parent.parents:
                parent.chmod(0o755)
    return tmp_path


@needs_user_mount
def test_a_user_mounts_without_root_and_others_enter_where_the_administrator_allows_it(base: Path) -> None:
    with mounted(base, num_pages=16, user=_user(), allow_other=_others_allowed()) as mount:
        mount.call("append", mount.call("create", "a.kv"), 10)
        mount.call("append", mount.call("create", "open.kv", 0o644), 10)

        def succeeds(command: str, user: int | None) -> bool:
            done = subprocess.run(["sh", "-c", f"cd {mount.path} && {command}"], check=False, user=user, group=user)
            return done.returncode == 0

        assert succeeds("cp a.kv b.kv && cmp a.kv b.kv", _user())
        assert succeeds("cat open.kv > /dev/null", 1234) == _others_allowed()
        assert not succeeds("cat a.kv > /dev/null", 1234)
        mount.call("check")
    if not _others_allowed():
        _expect_refusal(base, "user_allow_other")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody to whom /dev/fuse is closed")
def test_a_closed_device_is_named(base: Path) -> None:
    if stat.S_IMODE(Path("/dev/fuse").stat().st_mode) & 0o666 == 0o666:
        pytest.skip("/dev/fuse is open to everybody here")
    _expect_refusal(base, "/dev/fuse may not be opened by uid 65534")


def _expect_refusal(base: Path, reason: str) -> None:
    mount = Mount(base, 16, 4096, user=_user(), allow_other=True)
    try:
        with pytest.raises(CommandFailed, match=reason):
            mount.wait_mounted()
    finally:
        mount.dismiss()


_ENTER = """
set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
mknod -m 666 "$1/fuse" c 10 229
mount --bind "$1/fuse" /dev/fuse
printf "$2" > "$1/fuse.conf"
mount --bind "$1/fuse.conf" /etc/fuse.conf
shift 2
exec "$@"
"""


@needs_mount
@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["mount_max = 100\\n", "user_allow_other\\n"])
def test_users_mount_where_the_device_is_open_to_them(base: Path, configuration: str) -> None:
    """The tests above run in a mount namespace, in which the device is open and the configuration says what it does."""
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("NOT TESTED: no mount namespaces here")
    (base / "over").mkdir()
    enter = [
        "unshare",
        "-m",
        "--propagation",
        "private",
        "bash",
        "-c",
        _ENTER,
        "bash",
        str(base / "over"),
        configuration,
    ]
    nested = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"--basetemp={base / 'nested'}", __file__]
    done = subprocess.run([*enter, *nested], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout, done.stdout
