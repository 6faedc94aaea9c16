# ruff: noqa: PTH116, PTH208 - the system calls themselves are what is tested here
"""Trouble on the mount: defects, kills, mounts that make no sense."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvfs.mounted import PAGE_BYTES, CommandFailed, Mount, a_kv_file, mounted, needs_mount, opened

pytestmark = needs_mount


def test_a_defect_in_a_handler_is_an_io_error_and_the_mount_goes_on(mount: Mount) -> None:
    a_kv_file(mount)
    mount.call("break_model")
    try:
        with pytest.raises(OSError, match="Input/output error"):
            os.getxattr(mount.path / "a.kv", "user.kv.model")
    finally:
        mount.call("mend_model")
    assert "ERROR kvfs.mount.requests: request getxattr(" in mount.log()
    assert "AttributeError: planted" in mount.log()
    assert os.getxattr(mount.path / "a.kv", "user.kv.model") == b"fake"


class _FileHandle(ctypes.Structure):
    _fields_ = (("num_bytes", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 128))


@pytest.mark.slow
def test_a_file_is_found_again_by_its_handle_when_the_kernel_has_forgotten_it(mount: Mount) -> None:
    mount.sh("mkdir d; echo text > d/plain")
    a_kv_file(mount, "d/a.kv")
    libc = ctypes.CDLL(None, use_errno=True)
    handles = {name: _FileHandle(num_bytes=128) for name in ("d", "d/plain", "d/a.kv")}
    for name, handle in handles.items():
        path = os.fsencode(mount.path / name)
        assert libc.name_to_handle_at(-1, path, ctypes.byref(handle), ctypes.byref(ctypes.c_int()), 0) == 0
    Path("/proc/sys/vm/drop_caches").write_text("2")
    mount.settle()
    for name, handle in handles.items():
        with opened(mount.path) as directory:
            fd = libc.open_by_handle_at(directory, ctypes.byref(handle), os.O_RDONLY)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        try:
            assert os.fstat(fd).st_ino == os.stat(mount.path / name).st_ino
            assert name != "d/plain" or os.read(fd, 10) == b"text\n"
        finally:
            os.close(fd)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Mount]:
    """A daemon of its own, which a test may end in any way."""
    mount = Mount(tmp_path, 16, PAGE_BYTES)
    try:
        mount.wait_mounted()
        yield mount
    finally:
        mount.dismiss()


@pytest.mark.slow
def test_a_killed_daemon_leaves_a_mount_that_the_next_one_clears(daemon: Mount, tmp_path: Path) -> None:
    daemon.sh("echo x > f")
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    with pytest.raises(OSError, match="not connected"):
        os.stat(daemon.path)
    with mounted(tmp_path, num_pages=16) as again:
        assert again.sh("ls") == ""
        assert "daemon that is gone" in again.log()


@pytest.mark.slow
def test_a_mount_that_somebody_else_takes_away_ends_the_daemon_with_a_reason(daemon: Mount) -> None:
    subprocess.run(["umount", daemon.path], check=True)
    assert daemon.process.wait(timeout=20) == 1
    assert "was unmounted by somebody else" in daemon.log()


@pytest.mark.slow
def test_a_mount_is_known_by_its_real_path_and_by_the_one_that_was_given_and_ends_with_files_open(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "sub").mkdir()
    with mounted(tmp_path / "link" / "sub" / "..", num_pages=16) as mount:
        a_kv_file(mount)
        real = tmp_path / "real" / "kv"
        assert mount.call("mountpoint") == str(real)
        for path in (real, tmp_path / "link" / "kv", mount.path):
            assert mount.call("stat", str(path / "a.kv"))["tokens"] == 100
        with pytest.raises(CommandFailed, match="does not lie in"):
            mount.call("stat", str(tmp_path / "other" / "kv" / "a.kv"))
        for name in ("second", "deep"):
            (tmp_path / name).mkdir()
        (tmp_path / "second" / "kv").symlink_to(real)
        assert "something is mounted there" in refusal(tmp_path / "second")
        mount.call("reset")
        fd = os.open(mount.path / "a.kv", os.O_RDONLY)
        os.pread(fd, 10, 0)
    with pytest.raises(OSError, match="Errno"):
        os.pread(fd, 100, 5000)
    os.close(fd)
    assert "unmounting" in mount.log()
    assert os.listdir(mount.path) == []
    (real / "x").touch()
    assert "not empty" in refusal(tmp_path / "real")
    (real / "x").unlink()
    real.rmdir()
    real.touch()
    assert "not a directory" in refusal(tmp_path / "real")
    (tmp_path / "deep" / "kv").symlink_to(tmp_path / "no" / "where")
    assert "can't make the mount point" in refusal(tmp_path / "deep")


def refusal(base: Path) -> str:
    mount = Mount(base, 16, PAGE_BYTES)
    try:
        with pytest.raises(CommandFailed) as caught:
            mount.wait_mounted()
    finally:
        mount.dismiss()
    return str(caught.value)


@pytest.mark.slow
def test_a_missing_fusermount3_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no fusermount3: install the package fuse3" in refusal(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a capability to lose")
def test_root_without_the_capability_to_mount_is_told_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec setpriv --bounding-set -sys_admin "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "give the container the capability (--cap-add SYS_ADMIN)" in refusal(tmp_path)
