"""The tests of an ordinary user's mount, where an administrator keeps /dev/fuse closed or allow_other forbidden.

They run in a mount namespace of their own, in which the device is open and the configuration says what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvfs.mounted import REPOSITORY, needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

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


@pytest.mark.parametrize("configuration", ["mount_max = 100\\n", "user_allow_other\\n"])
def test_users_mount_where_the_device_is_open_to_them(tmp_path: Path, configuration: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("NOT TESTED: no mount namespaces here")
    for directory in (tmp_path, *tmp_path.parents):
        if directory != Path("/tmp") and Path("/tmp") in directory.parents:
            directory.chmod(0o755)
    (tmp_path / "over").mkdir()
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'nested'}"]
    done = subprocess.run(
        [
            *("unshare", "-m", "--propagation", "private", "bash", "-c", _ENTER, "bash"),
            *(str(tmp_path / "over"), configuration, sys.executable, *tests, "tests/kvfs/mount/test_mount_user.py"),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout, done.stdout
