"""The mount of an ordinary user, made through fusermount3.

The test runs this module in a mount namespace, in which the device is open and the configuration says what it does.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvfs.mounted import REPOSITORY, CommandFailed, Mount, mounted, needs_mount

pytestmark = needs_mount

NOBODY = 65534


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory of nobody's, which everybody may enter."""
    os.chown(tmp_path, NOBODY, NOBODY)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and parent != Path("/tmp") and Path("/tmp") in parent.parents:
            parent.chmod(0o755)
    return tmp_path


def mount_as_nobody(base: Path, *, others: bool) -> None:
    with mounted(base, num_pages=16, user=NOBODY, allow_other=others) as mount:
        mount.call("append", mount.call("create", "a.kv"), 10)
        mount.call("append", mount.call("create", "open.kv", 0o644), 10)

        def succeeds(command: str, user: int) -> bool:
            done = subprocess.run(["sh", "-c", f"cd {mount.path} && {command}"], check=False, user=user, group=user)
            return done.returncode == 0

        assert succeeds("cp a.kv b.kv && cmp a.kv b.kv", NOBODY)
        assert succeeds("cat open.kv > /dev/null", 1234) == others
        assert not succeeds("cat a.kv > /dev/null", 1234)
        mount.call("check")
    if not others:
        expect_refusal(base, "user_allow_other")


def expect_refusal(base: Path, reason: str) -> None:
    mount = Mount(base, 16, 4096, user=NOBODY, allow_other=True)
    try:
        with pytest.raises(CommandFailed, match=reason):
            mount.wait_mounted()
    finally:
        mount.dismiss()


def test_a_closed_device_is_named(base: Path) -> None:
    if stat.S_IMODE(Path("/dev/fuse").stat().st_mode) & 0o666 == 0o666:
        pytest.skip("/dev/fuse is open to everybody here")
    expect_refusal(base, "/dev/fuse may not be opened by uid 65534")


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


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["mount_max = 100\\n", "user_allow_other\\n"])
def test_a_user_mounts_without_root_and_others_enter_where_the_administrator_allows_it(
    base: Path, configuration: str
) -> None:
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
    nested = [sys.executable, "-m", __name__, str(base), configuration]
    done = subprocess.run([*enter, *nested], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    mount_as_nobody(Path(sys.argv[1]), others="user_allow_other" in sys.argv[2])
