# ruff: noqa: PTH108, PTH116 - the system calls themselves are what is tested here
"""KV files on the mount: images, forks, attributes, truncation."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from kvfs.images.format import ImageFormat
from tests.kvfs.mount_server import facts_for
from tests.kvfs.mounted import (
    NUM_PAGES,
    PAGE_BYTES,
    Mount,
    a_kv_file,
    check_image,
    mounted,
    needs_mount,
    opened,
)

pytestmark = needs_mount


def test_a_kv_file_shows_its_image(mount: Mount) -> None:
    a_kv_file(mount)
    data = (mount.path / "a.kv").read_bytes()
    check_image(data, 100)
    found = os.stat(mount.path / "a.kv")
    assert found.st_size == len(data) == ImageFormat(facts_for(PAGE_BYTES)).image_bytes(100)
    assert found.st_blocks * 512 >= found.st_size, "less would look like a hole to cp"
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_safetensors_reads_a_mounted_file(mount: Mount) -> None:
    a_kv_file(mount)
    with safe_open(mount.path / "a.kv", framework="numpy") as image:
        assert list(image.get_tensor("tokens")) == list(range(1, 101))
        assert list(image.get_tensor("positions")) == list(range(100))
        pages = image.get_tensor("pages")
        assert image.metadata()["format"] == "symphony.kv"
    assert pages.shape == (4, *facts_for(PAGE_BYTES).page_shape)
    entries = pages.reshape(4, 2, 2, 2, 32, -1)
    assert (entries[3, :, :, :, 3] == 100).all()
    assert not entries[3, :, :, :, 4:].any()


def test_cp_inside_is_a_fork(mount: Mount) -> None:
    handle = a_kv_file(mount)
    free = mount.call("free")
    mount.sh("cp a.kv b.kv; cp -a a.kv c.kv; cat a.kv > d.kv; cp b.kv e.kv")
    assert mount.call("free") == free, "a fork takes no page"
    for name in "bcde":
        assert mount.call("pages_of", f"{name}.kv") == mount.call("pages_of", "a.kv")
        mount.sh(f"cmp a.kv {name}.kv")
    assert mount.sh("stat -c '%Y %a' a.kv") == mount.sh("stat -c '%Y %a' c.kv")
    mount.call("append", mount.call("open", "b.kv"), 1, 500)
    mount.call("append", handle, 1, 600)
    assert mount.call("free") == free - 1, "of two that go on, one copies the tail page, and no more"
    check_image((mount.path / "c.kv").read_bytes(), 100)
    assert mount.call("tokens", handle) == [*range(1, 101), 600]
    assert mount.call("tokens_of", "b.kv") == [*range(1, 101), 500]


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
    assert mount.call("stat", "fork")["kind"] == "kv"
    assert mount.call("stat", "part")["kind"] == "file"
    with opened(mount.path / "part") as source, opened(mount.path / "copy", os.O_CREAT | os.O_RDWR) as target:
        assert os.copy_file_range(source, target, 1 << 20, 0, 0) == 5100
    mount.sh("cmp part copy")


def test_export_and_import_keep_every_byte(mount: Mount) -> None:
    a_kv_file(mount)
    a_kv_file(mount, "empty.kv", 1)
    mount.sh("mkdir d; cp a.kv d; cp a.kv $OUT/x; cp $OUT/x back.kv; cmp a.kv back.kv; cmp a.kv $OUT/x")
    assert mount.call("tokens_of", "back.kv") == list(range(1, 101))
    assert mount.call("stat", "back.kv")["kind"] == "kv"
    mount.sh("tar cf $OUT/t.tar a.kv empty.kv d; mkdir t; tar xf $OUT/t.tar -C t; cmp a.kv t/a.kv; cmp a.kv t/d/a.kv")
    assert mount.call("stat", "t/d/a.kv")["kind"] == "kv"
    with tarfile.open(mount.outside / "t.tar") as tar:
        assert tar.getmember("a.kv").size == os.stat(mount.path / "a.kv").st_size
    mount.sh("cat $OUT/x > cat.kv; dd if=$OUT/x of=dd.kv bs=777 status=none; cp --sparse=always $OUT/x sparse.kv")
    shutil.copyfile(mount.outside / "x", mount.path / "sendfile.kv")
    for name in ("cat", "dd", "sparse", "sendfile"):
        assert mount.call("tokens_of", f"{name}.kv") == list(range(1, 101)), name
    if shutil.which("rsync"):
        mount.sh("rsync -a $OUT/x rsync.kv")
        assert mount.call("stat", "rsync.kv")["kind"] == "kv"


def test_rm_frees_pages_and_df_tells(mount: Mount) -> None:
    def free_bytes() -> int:
        mount.settle()
        return int(mount.sh("df -B1 --output=avail .").split()[-1])

    assert int(mount.sh("df -B1 --output=size .").split()[-1]) == NUM_PAGES * PAGE_BYTES
    before = free_bytes()
    a_kv_file(mount)
    mount.call("reset")
    mount.sh("cp a.kv $OUT/x; cp $OUT/x b.kv; cp a.kv c.kv")
    assert free_bytes() == before - 5 * PAGE_BYTES, "the fork shares all pages, the import all but its tail"
    mount.sh("rm a.kv")
    assert free_bytes() == before - 5 * PAGE_BYTES, "the fork holds the pages"
    mount.sh("rm c.kv b.kv")
    assert free_bytes() == before


def test_xattrs(mount: Mount) -> None:
    a_kv_file(mount)
    mount.sh("cp a.kv b.kv; echo hi > plain; ln -s a.kv link")
    a, b = mount.path / "a.kv", mount.path / "b.kv"
    values = {name: os.getxattr(a, name) for name in os.listxattr(a)}
    assert values["user.kv.tokens"] == b"100"
    assert values["user.kv.model"] == b"fake"
    assert values["user.kv.exclusive"] == b"0"
    assert values["user.kv.shared"] == b"4"
    hits = int(values["user.kv.hits"])
    mount.sh("cat a.kv > /dev/null")
    assert int(os.getxattr(mount.path / "a.kv", "user.kv.hits")) == hits + 1
    assert values["user.kv.positions"] == b"0-99"
    os.unlink(b)
    mount.settle()
    assert os.getxattr(a, "user.kv.exclusive") == b"4"
    advice = {"user.kv.pinned": b"1", "user.kv.ttl": b"3600", "user.kv.priority": b"-3"}
    assert [values[name] for name in advice] == [b"0", b"0", b"0"]
    for name, value in advice.items():
        os.setxattr(a, name, value)
        assert os.getxattr(a, name) == value
    mount.sh("cp -a a.kv kept.kv; cp a.kv new.kv")
    assert os.getxattr(mount.path / "kept.kv", "user.kv.ttl") == b"3600", "cp -a copies attributes"
    assert os.getxattr(mount.path / "new.kv", "user.kv.ttl") == b"0"
    for name in advice:
        os.removexattr(a, name)
        assert os.getxattr(a, name) == b"0"
    os.setxattr(a, "user.note", b"a note")
    assert os.getxattr(a, "user.note") == b"a note"
    os.setxattr(a, "user.large", bytes(65536))  # the longest that Linux takes, beside others
    assert os.getxattr(a, "user.large") == bytes(65536)
    for action, code in (
        (lambda: os.setxattr(a, "user.note", b"", os.XATTR_CREATE), errno.EEXIST),
        (lambda: os.setxattr(a, "user.other", b"", os.XATTR_REPLACE), errno.ENODATA),
        (lambda: os.setxattr(a, "user.kv.tokens", b"7"), errno.EOPNOTSUPP),
        (lambda: os.setxattr(a, "user.kv.ttl", b"soon"), errno.EINVAL),
        (lambda: os.setxattr(mount.path / "plain", "user.kv.ttl", b"soon"), errno.EINVAL),
        (lambda: os.setxattr(mount.path, "user.kv.ttl", b"1"), errno.EOPNOTSUPP),
        (lambda: os.removexattr(mount.path / "plain", "user.kv.ttl"), errno.ENODATA),
        (lambda: os.setxattr(a, "user.larger", bytes(65536)), errno.ENOSPC),
        (lambda: os.setxattr(a, "trusted.x", b"x"), errno.EOPNOTSUPP),
        (lambda: os.getxattr(a, "system.posix_acl_access"), errno.EOPNOTSUPP),
        (lambda: os.getxattr(mount.path / "plain", "user.kv.tokens"), errno.ENODATA),
        (lambda: os.getxattr(a, "user.none"), errno.ENODATA),
        (lambda: os.getxattr(a, "security.selinux"), errno.ENODATA),
    ):
        with pytest.raises(OSError, match="Errno") as caught:
            action()
        assert caught.value.errno == code
    os.removexattr(a, "user.note")
    assert "user.note" not in os.listxattr(a)
    assert os.listxattr(mount.path / "plain") == []


def test_attributes_are_refused_before_there_are_too_many_to_list(mount: Mount) -> None:
    a_kv_file(mount)
    a = mount.path / "a.kv"
    computed = os.listxattr(a)
    names = [f"user.{number:0250}" for number in range(300)]
    set_names: list[str] = []

    def set_all() -> None:
        for name in names:
            os.setxattr(a, name, b"")
            set_names.append(name)

    with pytest.raises(OSError, match="No space left"):
        set_all()
    assert set(os.listxattr(a)) == {*computed, *set_names}
    os.setxattr(a, set_names[0], b"one that is there may still change")
    os.removexattr(a, set_names[0])
    os.setxattr(a, names[-1], b"")


def test_truncate_keeps_whole_tokens(mount: Mount) -> None:
    handle = a_kv_file(mount)
    sizes = ImageFormat(facts_for(PAGE_BYTES))
    mount.sh(f"truncate -s {sizes.image_bytes(40)} a.kv")
    assert mount.call("tokens", handle) == list(range(1, 41))
    mount.sh(f"truncate -s {sizes.image_bytes(40) - 1} a.kv")
    assert mount.call("tokens", handle) == list(range(1, 40))
    mount.sh("truncate -s +100000 a.kv")
    assert mount.call("tokens", handle) == list(range(1, 40)), "nothing can be added this way"
    check_image((mount.path / "a.kv").read_bytes(), 39)
    assert "Invalid argument" in mount.run("truncate -s 100 a.kv").stderr
    mount.sh("truncate -s 0 a.kv; [ ! -s a.kv ]")
    assert mount.call("stat", "a.kv")["kind"] == "file"
    assert mount.call("tokens", handle) == list(range(1, 40)), "the LIP keeps its version"


def test_writing_over_a_kv_file(mount: Mount) -> None:
    handle = a_kv_file(mount)
    assert "not supported" in mount.run("echo x >> a.kv").stderr
    assert "not supported" in mount.run("dd if=/dev/zero of=a.kv count=1 conv=notrunc").stderr
    mount.sh("echo hello > a.kv")
    assert mount.sh("cat a.kv") == "hello\n"
    assert mount.call("tokens", handle) == list(range(1, 101)), "the LIP keeps its version"
    mount.call("append", handle, 1, 7)
    assert mount.sh("cat a.kv") == "hello\n"
    b = a_kv_file(mount, "b.kv", 3)
    mount.sh("cp b.kv a.kv; cmp a.kv b.kv")
    assert mount.call("stat", "a.kv")["kind"] == "kv"
    assert mount.call("tokens", b) == [1, 2, 3]


@pytest.mark.slow
def test_a_fork_of_a_gib_takes_no_page(tmp_path: Path) -> None:
    with mounted(tmp_path, num_pages=1030, page_bytes=1 << 20) as mount:
        mount.call("grow", mount.call("create", "gib.kv"), 32 * 1024)
        free = mount.call("free")
        assert free < 1024, "a copy would not fit"
        with opened(mount.path / "gib.kv") as source, opened(mount.path / "f.kv", os.O_CREAT | os.O_WRONLY) as target:
            copied = os.copy_file_range(source, target, 1 << 40)
        assert copied == os.stat(mount.path / "gib.kv").st_size
        mount.sh("cp gib.kv copy.kv; cp -a gib.kv kept.kv")
        assert mount.call("free") == free
        for name in ("f.kv", "copy.kv", "kept.kv"):
            assert mount.call("pages_of", name) == mount.call("pages_of", "gib.kv")


@pytest.mark.slow
def test_a_fork_larger_than_the_kernel_copies_at_once(tmp_path: Path) -> None:
    with mounted(tmp_path, num_pages=5 * 1024, page_bytes=1 << 20) as mount:
        handle = mount.call("create", "a.kv")
        mount.call("grow", handle, 32 * 5 * 1024)
        size = os.stat(mount.path / "a.kv").st_size
        assert size > 5 << 30
        with opened(mount.path / "a.kv") as source, opened(mount.path / "b.kv", os.O_CREAT | os.O_WRONLY) as target:
            counts = []
            while count := os.copy_file_range(source, target, 1 << 60):
                counts.append(count)
        assert sum(counts) == size
        assert len(counts) == 2
        mount.sh("cp a.kv c.kv")
        assert mount.call("free") == 0
        assert mount.call("stat", "c.kv")["tokens"] == 32 * 5 * 1024


def test_values_in_pages_come_through(mount: Mount) -> None:
    a_kv_file(mount, count=64)
    mount.sh("cp a.kv $OUT/x; cp $OUT/x b.kv")
    with safe_open(mount.path / "b.kv", framework="numpy") as image:
        entries = image.get_tensor("pages").reshape(2, 2, 2, 2, 32, -1)
    expected = np.arange(1, 65).reshape(2, 32)
    assert (entries[:, 0, 0, 0, :, 0] == expected).all()
