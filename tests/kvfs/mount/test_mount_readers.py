# ruff: noqa: PTH116 - the system calls themselves are what is tested here
"""Readers on the mount while LIPs append."""

import mmap
import os

import pytest

from tests.kvfs.mounted import Mount, a_kv_file, check_image, needs_mount, opened

pytestmark = needs_mount


def test_a_reader_of_a_file_that_is_emptied_sees_it_empty(mount: Mount) -> None:
    a_kv_file(mount)
    path = mount.path / "a.kv"
    with opened(path) as reader:
        assert os.pread(reader, 8, 0) != b""
        os.truncate(path, 0)
        assert os.pread(reader, 8, 0) == b""
        path.write_bytes(b"text")
        assert os.pread(reader, 8, 0) == b"text"


def test_the_times_of_an_open_file_stay_while_a_lip_appends(mount: Mount) -> None:
    """Else tar says that the file changed as it read it, and fails, though its copy is whole."""
    handle = a_kv_file(mount)
    path = mount.path / "a.kv"
    with opened(path) as fd:
        before = os.fstat(fd)
        mount.call("append", handle, 1)
        after = os.fstat(fd)
        assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
        path.chmod(0o640)
        changed = os.fstat(fd)
        assert changed.st_mtime_ns == before.st_mtime_ns
        assert changed.st_ctime_ns > before.st_ctime_ns
        mount.call("append", handle, 1)
        assert os.fstat(fd).st_ctime_ns == changed.st_ctime_ns, "it does not go back"
    assert os.stat(path).st_mtime_ns > before.st_mtime_ns
    assert os.stat(path).st_ctime_ns > changed.st_ctime_ns


def test_a_writable_mapping_cannot_change_what_others_read(mount: Mount) -> None:
    handle = a_kv_file(mount)
    path = mount.path / "a.kv"
    before = path.read_bytes()
    with opened(path) as reader, mmap.mmap(reader, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        with opened(path, os.O_RDWR) as fd:
            with pytest.raises(OSError, match="No such device"):
                mmap.mmap(fd, 0, mmap.MAP_SHARED)
            with mmap.mmap(fd, 0, mmap.MAP_PRIVATE) as own:
                own[:4] = b"mine"
            with pytest.raises(OSError, match="not supported"):
                os.pwrite(fd, b"spoilt", 0)
            assert os.pread(fd, 1 << 20, 0) == before
        assert mapping[:] == before
    assert path.read_bytes() == before
    with opened(path, os.O_RDWR) as fd:
        mount.call("append", handle, 50, 200)
        check_image(os.pread(fd, 1 << 20, 0), 100)
        os.ftruncate(fd, len(before) - 8)
        check_image(os.pread(fd, 1 << 20, 0), 99)
        os.ftruncate(fd, 0)
        assert os.pread(fd, 1 << 20, 0) == b""
        os.pwrite(fd, before, 0)
        os.close(os.dup(fd))
        assert mount.call("stat", "a.kv")["tokens"] == 100
        assert os.pread(fd, 1 << 20, 0) == before


def test_what_a_mapping_wrote_into_an_image_is_gone_with_it(mount: Mount) -> None:
    a_kv_file(mount)
    image, path = (mount.path / "a.kv").read_bytes(), mount.path / "b.kv"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, len(image))
        with mmap.mmap(fd, 0, mmap.MAP_SHARED) as mapping:
            mapping[:] = image
            mapping.flush()
            os.close(os.dup(fd))
            assert mount.call("stat", "b.kv")["tokens"] == 100
            assert path.read_bytes() == image
            mapping[:4] = b"late"
            with pytest.raises(OSError, match="not supported"):
                mapping.flush()
    mount.settle()
    assert path.read_bytes() == image
