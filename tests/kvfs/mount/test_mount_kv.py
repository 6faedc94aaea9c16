# ruff: noqa: PTH108, PTH116 - the system calls themselves are what is tested here
"""KV files on the mount: images, forks, attributes, truncation."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.images.format import ImageFormat
from tests.kvfs.mount_server import facts_for
from tests.kvfs.mounted import PAGE_BYTES, Mount, a_kv_file, check_image, mounted, needs_mount, opened, refused

pytestmark = needs_mount

FORMAT = ImageFormat(facts_for(PAGE_BYTES))


def test_os_copy_file_range_forks_a_whole_file_and_copies_a_part(mount: Mount) -> None:
    a_kv_file(mount)
    data = (mount.path / "a.kv").read_bytes()
    with opened(mount.path / "a.kv") as source:
        with opened(mount.path / "fork", os.O_CREAT | os.O_RDWR) as target:
            assert os.copy_file_range(source, target, 1 << 40, 0, 0) == len(data)
            assert os.copy_file_range(source, target, 1 << 40, len(data), len(data)) == 0
            assert os.pread(target, len(data) + 1, 0) == data
        with opened(mount.path / "part", os.O_CREAT | os.O_RDWR) as target:
            assert os.copy_file_range(source, target, 5000, 1000, 0) == 5000
            assert os.copy_file_range(source, target, 100, 0, 5000) == 100
            assert os.pread(target, 10_000, 0) == data[1000:6000] + data[:100]
    assert [mount.call("stat", name)["kind"] for name in ("fork", "part")] == ["kv", "file"]
    with opened(mount.path / "part") as source, opened(mount.path / "copy", os.O_CREAT | os.O_RDWR) as target:
        assert os.copy_file_range(source, target, 1 << 20, 0, 0) == 5100
    mount.sh("cmp part copy")


@pytest.fixture
def a(mount: Mount) -> Iterator[Path]:
    """A KV file of 100 entries."""
    a_kv_file(mount)
    yield mount.path / "a.kv"
    mount.call("reset")


def test_what_a_kv_file_is_shows_in_its_attributes(mount: Mount, a: Path) -> None:
    mount.sh("cp a.kv b.kv")
    values = {name[8:]: os.getxattr(a, name) for name in os.listxattr(a)}
    expected = {"tokens": b"100", "model": b"fake", "exclusive": b"0", "shared": b"4", "positions": b"0-99"}
    assert {**values, **expected} == values
    mount.sh("cat a.kv > /dev/null")
    assert int(os.getxattr(a, "user.kv.hits")) == int(values["hits"]) + 1
    os.unlink(mount.path / "b.kv")
    mount.settle()
    assert os.getxattr(a, "user.kv.exclusive") == b"4"


def test_attributes_of_users_are_kept_and_others_refused(mount: Mount, a: Path) -> None:
    mount.sh("echo hi > plain; ln -s a.kv link")
    os.setxattr(a, "user.note", b"a note")
    assert os.getxattr(a, "user.note") == b"a note"
    os.setxattr(a, "user.large", bytes(65536))  # the longest that Linux takes, beside others
    assert os.getxattr(a, "user.large") == bytes(65536)
    plain = mount.path / "plain"
    assert os.listxattr(plain) == []
    put, get, remove = os.setxattr, os.getxattr, os.removexattr
    for code, call, *arguments in (
        (errno.EEXIST, put, a, "user.note", b"", os.XATTR_CREATE),
        (errno.ENODATA, put, a, "user.other", b"", os.XATTR_REPLACE),
        (errno.EOPNOTSUPP, put, a, "user.kv.tokens", b"7"),
        (errno.EINVAL, put, a, "user.kv.ttl", b"soon"),
        (errno.EINVAL, put, plain, "user.kv.ttl", b"soon"),
        (errno.EOPNOTSUPP, put, mount.path, "user.kv.ttl", b"1"),
        (errno.ENODATA, remove, plain, "user.kv.ttl"),
        (errno.ENOSPC, put, a, "user.larger", bytes(65536)),
        (errno.EOPNOTSUPP, put, a, "trusted.x", b"x"),
        (errno.EOPNOTSUPP, get, a, "system.posix_acl_access"),
        (errno.EOPNOTSUPP, get, a, "security.selinux"),
        (errno.ENODATA, get, plain, "user.kv.tokens"),
        (errno.EOPNOTSUPP, remove, a, "user.kv.tokens"),
    ):
        refused(code, call, *arguments)
    os.removexattr(a, "user.note")
    assert "user.note" not in os.listxattr(a)


def test_advice_waits_on_a_plain_file(mount: Mount, a: Path) -> None:
    b, c = mount.path / "b.kv", mount.path / "c.kv"
    for path in (b, c):
        path.write_bytes(b"not yet")
    for name, value in (("ttl", b"100"), ("tokens", b"7"), ("tier", b"disk"), ("lost", b"3")):
        os.setxattr(b, f"user.kv.{name}", value)
    assert os.listxattr(b) == ["user.kv.ttl"]
    mount.sh("cp a.kv b.kv")
    mount.settle()
    assert [os.getxattr(b, f"user.kv.{name}") for name in ("ttl", "tokens", "tier")] == [b"100", b"100", b"memory"]
    os.setxattr(c, "user.kv.priority", b"100")
    os.removexattr(c, "user.kv.priority")
    assert os.listxattr(c) == []


def test_truncate_keeps_whole_tokens(mount: Mount) -> None:
    handle = a_kv_file(mount)
    found = os.stat(mount.path / "a.kv")
    assert found.st_blocks * 512 >= found.st_size, "less would look like a hole to cp"
    assert found.st_blksize == 1 << 20, "the largest read that the kernel passes on"
    mount.sh(f"truncate -s {FORMAT.image_bytes(40)} a.kv")
    assert mount.call("tokens", handle) == list(range(1, 41))
    mount.sh(f"truncate -s {FORMAT.image_bytes(40) - 1} a.kv; truncate -s +100000 a.kv")
    assert mount.call("tokens", handle) == list(range(1, 40)), "nothing can be added this way"
    check_image((mount.path / "a.kv").read_bytes(), 39)
    assert "Invalid argument" in mount.run("truncate -s 100 a.kv").stderr
    mount.sh("truncate -s 0 a.kv; [ ! -s a.kv ]")
    assert mount.call("stat", "a.kv")["kind"] == "file"
    assert mount.call("tokens", handle) == list(range(1, 40)), "the LIP keeps its version"


@pytest.mark.slow
def test_a_fork_larger_than_the_kernel_copies_at_once_takes_no_page(tmp_path: Path) -> None:
    with mounted(tmp_path, num_pages=5 * 1024, page_bytes=1 << 20) as mount:
        mount.call("grow", mount.call("create", "a.kv"), 32 * 5 * 1024)
        size = os.stat(mount.path / "a.kv").st_size
        assert size > 5 << 30
        with opened(mount.path / "a.kv") as source, opened(mount.path / "b.kv", os.O_CREAT | os.O_WRONLY) as target:
            counts = []
            while count := os.copy_file_range(source, target, 1 << 60):
                counts.append(count)
        assert sum(counts) == size
        assert len(counts) == 2
        assert mount.call("free") == 0
        assert mount.call("pages_of", "b.kv") == list(range(5 * 1024))
