# ruff: noqa: PTH102, PTH108, PTH208 - the system calls themselves are what is tested here
"""The mount as a user meets it: names, modes and plain files, with real commands."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import struct
import subprocess
from pathlib import Path

import pytest

from kvfs.mount.session import READ_AHEAD_KB
from tests.kvfs.mounted import (
    NUM_PAGES,
    Mount,
    a_kv_file,
    needs_mount,
    opened,
)

pytestmark = needs_mount


def test_the_usual_commands_work_as_anywhere(mount: Mount) -> None:
    a_kv_file(mount)
    mount.sh("mkdir -p deep/er; touch deep/plain; ln a.kv deep/hard; ln -s ../a.kv deep/soft; echo hi > deep/er/text")
    listing = mount.sh("ls -lR")
    for name in ("a.kv", "hard", "soft -> ../a.kv", "plain", "text"):
        assert name in listing
    assert mount.sh("stat -c '%h %F %a' a.kv").strip() == "2 regular file 600"
    assert mount.sh("stat -c %h deep .").split() == ["3", "3"]
    assert mount.sh("cat deep/er/text") == "hi\n"
    mount.sh("cmp a.kv deep/hard; cmp a.kv deep/soft; mv deep moved; rm moved/hard; rmdir moved/er || rm -r moved/er")
    assert mount.sh("stat -c %h a.kv").strip() == "1"
    assert mount.run("rmdir moved").returncode == 1
    mount.sh("mv moved/plain b; mv -f b moved/plain; rm -r moved")
    assert mount.sh("ls -A").split() == ["a.kv"]


def test_modes_owners_and_times_are_kept(mount: Mount) -> None:
    mount.sh("touch f; chmod 4751 f; touch -d '2001-02-03 04:05:06.123456789 UTC' f")
    assert mount.sh("TZ=UTC stat -c '%a %y' f").strip() == "4751 2001-02-03 04:05:06.123456789 +0000"
    mount.sh("chown 12:34 f")
    assert mount.sh("stat -c '%a %u %g' f").strip() == "751 12 34", "a new owner loses the setuid bit"
    mount.sh("mkdir d; chgrp 34 d; chmod 2775 d; touch d/f; mkdir d/d")
    assert mount.sh("stat -c '%a %g' d/f d/d").split() == ["644", "34", "2755", "34"]


@pytest.mark.parametrize(
    ("date", "nearest"),
    [
        ("2262-04-11 23:47:16.5 UTC", "2262-04-11 23:47:16.500000000"),
        ("2300-01-01 UTC", "2262-04-11 23:47:16.854775807"),
        ("@9223372036854775807", "2262-04-11 23:47:16.854775807"),
        ("1600-01-01 UTC", "1677-09-21 00:12:43.145224192"),
        ("@-9223372036854775808", "1677-09-21 00:12:43.145224192"),
    ],
)
def test_a_time_beyond_what_is_kept_becomes_the_nearest(mount: Mount, date: str, nearest: str) -> None:
    mount.sh(f"touch f; touch -d '{date}' f")
    assert mount.sh("TZ=UTC stat -c '%x %y' f").strip() == f"{nearest} +0000 {nearest} +0000"
    mount.sh(f"touch g; touch -a -d '{date}' g")
    assert mount.sh("TZ=UTC stat -c %x g").strip() == f"{nearest} +0000"


def test_permissions_are_the_modes(mount: Mount) -> None:
    a_kv_file(mount)
    mount.sh("mkdir -m 1777 tmp; touch tmp/mine; mkdir -m 700 private; touch private/f; chmod 755 .")

    def as_nobody(command: str) -> subprocess.CompletedProcess[str]:
        return mount.run(f"setpriv --reuid 65534 --regid 65534 --clear-groups bash -c '{command}'")

    assert "Permission denied" in as_nobody("cat a.kv").stderr
    assert "Permission denied" in as_nobody("cat private/f").stderr
    assert "Permission denied" in as_nobody("touch here").stderr
    assert "Operation not permitted" in as_nobody("rm -f tmp/mine").stderr
    assert "Operation not permitted" in as_nobody("chmod 777 a.kv").stderr
    assert as_nobody("touch tmp/own; rm tmp/own").returncode == 0
    mount.sh("chmod 604 a.kv")
    assert as_nobody("cp a.kv tmp/fork").returncode == 0, "who may read may fork"
    assert mount.sh("stat -c %u tmp/fork").strip() == "65534"


@pytest.mark.slow
def test_the_gate_and_the_kernel_agree_on_who_may_open_what(mount: Mount) -> None:
    users = [(0, 0, []), (1000, 1000, []), (1001, 1001, [1000]), (1002, 1002, [])]
    paths = []
    for directory_mode in (0o711, 0o750, 0o700, 0o666):
        directory = f"d{directory_mode:o}"
        mount.sh(f"mkdir {directory}; chmod {directory_mode:o} {directory}; chown 1000:1000 {directory}")
        for owner in range(8):
            for other in (0, 4, 6):
                path = f"{directory}/{owner}{other}"
                mount.call("close", mount.call("create", path, owner << 6 | (owner ^ 6) << 3 | other))
                os.chown(mount.path / path, 1000, 1000)
                paths.append(path)
    for uid, gid, groups in users:
        kernel = as_user(uid, gid, groups, mount.path, paths)
        gate = {
            path: [mount.call("may_open", uid, gid, groups, path, write) for write in (False, True)] for path in paths
        }
        assert kernel == gate, f"uid {uid}"
    assert any(0 in answers for answers in kernel.values())
    assert any(errno.EACCES in answers for answers in kernel.values())


def as_user(uid: int, gid: int, groups: list[int], root: Path, paths: list[str]) -> dict[str, list[int]]:
    """The errno of opening each path for reading, and for reading and writing, in a process of that user."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        found = {path: [_errno_of_open(root / path, flags) for flags in (os.O_RDONLY, os.O_RDWR)] for path in paths}
        with os.fdopen(write_end, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer: dict[str, list[int]] = json.load(pipe)
    os.waitpid(child, 0)
    return answer


def _errno_of_open(path: Path, flags: int) -> int:
    try:
        os.close(os.open(path, flags))
    except OSError as error:
        return error.errno or 0
    return 0


def test_rename_replaces_atomically_and_refuses_loops(mount: Mount) -> None:
    mount.sh("echo one > a; echo two > b; mv a b; mkdir -p d/e")
    assert mount.sh("cat b; ls -A").split() == ["one", "b", "d"]
    for command, code in (
        ("os.rename('d', 'd/e/f')", errno.EINVAL),
        ("os.rename('b', 'd')", errno.EISDIR),
        ("os.rename('d/e', 'b')", errno.ENOTDIR),
        ("os.rename('d/e', 'd')", errno.ENOTEMPTY),
        ("os.rename('nothing', 'x')", errno.ENOENT),
    ):
        with pytest.raises(OSError, match="Errno") as caught:
            eval(command.replace("('", f"('{mount.path}/").replace(", '", f", '{mount.path}/"))
        assert caught.value.errno == code, command
    assert mount.run("mv -n b d/e").returncode == 0


def test_names_are_bytes_and_have_a_limit(mount: Mount) -> None:
    root = os.fsencode(mount.path)
    longest = b"\xff" * 255
    os.close(os.open(root + b"/" + longest, os.O_CREAT | os.O_WRONLY))
    assert os.listdir(root) == [longest]
    with pytest.raises(OSError, match="too long") as caught:
        os.mkdir(root + b"/" + b"x" * 256)
    assert caught.value.errno == errno.ENAMETOOLONG


def test_o_excl_creates_once(mount: Mount) -> None:
    with opened(mount.path / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY):
        pass
    with pytest.raises(FileExistsError):
        os.open(mount.path / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY)


def test_an_unlinked_file_lives_until_it_is_closed(mount: Mount) -> None:
    a_kv_file(mount)
    mount.call("reset")
    whole = (mount.path / "a.kv").read_bytes()
    with opened(mount.path / "a.kv") as fd, opened(mount.path / "p", os.O_CREAT | os.O_RDWR) as plain:
        os.unlink(mount.path / "a.kv")
        os.unlink(mount.path / "p")
        os.write(plain, b"still here")
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, len(whole), 0) == whole
        assert os.pread(plain, 100, 0) == b"still here"
        assert mount.call("free") == NUM_PAGES - 4
    assert mount.all_free()


def test_fifos_sockets_and_locks(mount: Mount) -> None:
    mount.sh("mkfifo p; (echo through > p &); [ $(cat p) = through ]; [ -p p ]")
    mount.sh('mknod dev c 1 3; [ "$(stat -c %t:%T:%F dev)" = "1:3:character special file" ]')
    with opened(mount.path / "f", os.O_CREAT | os.O_RDWR) as one, opened(mount.path / "f", os.O_RDWR) as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_large_directory_is_listed_whole_while_it_changes(mount: Mount) -> None:
    os.mkdir(mount.path / "many")
    directory = os.open(mount.path / "many", os.O_RDONLY)
    mount.call("make_many", "many", 10_000)
    with os.scandir(mount.path / "many") as entries:
        seen = [next(entries).name]
        for i in range(100):  # after the first block was read: change what comes before and after
            os.unlink(f"n{i:05}", dir_fd=directory)
            os.close(os.open(f"new{i}", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        seen += [entry.name for entry in entries]
    os.close(directory)
    assert len(seen) == len(set(seen)), "a name came twice"
    assert {f"n{i:05}" for i in range(100, 10_000)} <= set(seen), "a name was skipped"
    assert len(os.listdir(mount.path / "many")) == 10_000
    mount.call("unmake_many", "many")


def test_the_kernel_reads_ahead_in_large_pieces(mount: Mount) -> None:
    device = mount.path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    if not os.access(setting, os.W_OK):
        pytest.skip(f"READ-AHEAD NOT TESTED: {setting} can't be written here")
    assert int(setting.read_text()) == READ_AHEAD_KB


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root mounts again")
def test_a_mount_becomes_read_only_and_writable_again(mount: Mount) -> None:
    mount.sh("echo one > f; mount -i -o remount,ro .")
    try:
        refused = mount.run("echo two > f")
        assert "Read-only file system" in refused.stderr
        assert mount.sh("cat f") == "one\n"
    finally:
        mount.sh("mount -i -o remount,rw .")
    mount.sh("echo two > f")


@pytest.mark.parametrize("num_bytes", [4096, 1 << 20])
def test_an_asynchronous_direct_write_is_over_when_it_was_submitted(mount: Mount, num_bytes: int) -> None:
    """Only then does the kernel drop the pages that buffered reads brought while the write was on its way."""
    setup, submit, events, destroy = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1)}[platform.machine()]
    system_call = ctypes.CDLL(None).syscall
    path = mount.path / "direct"
    path.write_bytes(bytes(num_bytes))
    context, event = ctypes.c_ulong(), ctypes.create_string_buffer(32)
    assert system_call(setup, 1, ctypes.byref(context)) == 0
    with opened(path, os.O_WRONLY | os.O_DIRECT) as file, mmap.mmap(-1, num_bytes) as data:
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        write = ctypes.create_string_buffer(struct.pack("<QQHhIQQqQQ", 0, 0, 1, 0, file, address, num_bytes, 0, 0, 0))
        writes = ctypes.pointer(ctypes.pointer(write))
        for i in range(1, 51):
            data[:] = bytes([i]) * num_bytes
            assert system_call(submit, context, ctypes.c_long(1), writes) == 1
            assert system_call(events, context, ctypes.c_long(0), ctypes.c_long(1), event, None) == 1
            assert path.read_bytes() == data[:]
    assert system_call(destroy, context) == 0
