"""Imports on the mount: bytes that are an image, and bytes that are not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kvfs.mount_server import facts_for
from tests.kvfs.mounted import PAGE_BYTES, CommandFailed, Mount, a_kv_file, header_of, needs_mount, opened

pytestmark = needs_mount


@pytest.fixture
def whole(mount: Mount) -> bytes:
    """The image of the file `a.kv`."""
    a_kv_file(mount)
    return (mount.path / "a.kv").read_bytes()


def kind(mount: Mount, name: str = "b.kv") -> str:
    return mount.call("stat", name)["kind"]


def test_a_broken_image_is_refused_and_stays_a_plain_file(mount: Mount, whole: bytes) -> None:
    free = mount.call("free")
    header = header_of(whole)
    other = facts_for(PAGE_BYTES).identity["model"].encode()
    for name, data, reason in (
        ("short", whole[:-1], "cut short"),
        ("model", whole.replace(other, b"0" * len(other), 1), "image is of model 000000000000… (this daemon runs"),
        ("bytes", whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:], "another digest"),
        ("header", whole.replace(header, header.replace(b'"version":"2"', b'"version":"3"')), "version"),
    ):
        (mount.outside / name).write_bytes(data)
        done = mount.run(f"cp $OUT/{name} {name}.kv")
        assert done.returncode == 1
        assert "Invalid argument" in done.stderr, name
        assert reason in mount.log().splitlines()[-1], name
        assert f"/{name}.kv stays a plain file" in mount.log().splitlines()[-1]
        assert (mount.path / f"{name}.kv").read_bytes() == data, "the bytes stay"
        assert kind(mount, f"{name}.kv") == "file"
    assert mount.call("free") == free
    with pytest.raises(CommandFailed, match="not a KV file"):
        mount.call("open", "short.kv")
    with opened(mount.path / "short.kv", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, whole[-1:])
    assert kind(mount, "short.kv") == "kv", "writing may go on"


def test_each_close_tests_and_the_last_one_decides(mount: Mount, whole: bytes) -> None:
    fd = os.open(mount.path / "b.kv", os.O_CREAT | os.O_WRONLY)
    os.close(os.dup(fd))  # nothing written yet: fine
    os.write(fd, whole[:5000])
    with pytest.raises(OSError, match="Invalid argument"):
        os.close(os.dup(fd))
    os.write(fd, whole[5000:])
    os.close(fd)
    assert kind(mount) == "kv"
    mount.sh("touch a.kv b.kv; cmp a.kv b.kv")


def _allocate(path: Path, size: int) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.posix_fallocate(fd, 0, size)


@pytest.mark.parametrize("make_room", [os.truncate, _allocate])
def test_a_file_that_is_restored_in_pieces_is_closed_between_them(
    mount: Mount, whole: bytes, make_room: Callable[[Path, int], None]
) -> None:
    """restic restores this way: the file gets its size first, and is closed and opened again for each of its parts."""
    path = mount.path / "b.kv"
    path.touch()
    make_room(path, len(whole))
    for start, stop in ((0, 5000), (len(whole) - 100, len(whole)), (5000, 9000), (9000, len(whole) - 100)):
        assert kind(mount) == "file"
        with opened(path, os.O_WRONLY) as fd:
            os.pwrite(fd, whole[start:stop], start)
            os.close(os.dup(fd))
    assert kind(mount) == "kv"
    mount.sh("cmp a.kv b.kv")


def test_the_last_of_two_writers_is_told(mount: Mount, whole: bytes) -> None:
    first, second = (os.open(mount.path / "b.kv", os.O_CREAT | os.O_WRONLY) for _ in range(2))
    os.write(first, whole[:5000])
    os.pwrite(second, whole[5000:9000], 5000)
    os.close(first)
    with pytest.raises(OSError, match="Invalid argument"):
        os.close(second)


def test_an_image_whose_pages_are_there_needs_no_room(mount: Mount) -> None:
    a_kv_file(mount, count=32 * 100)
    mount.sh("cp a.kv $OUT/x")
    a_kv_file(mount, "b.kv", count=32 * 156)
    assert mount.call("free") == 0
    mount.sh("cp $OUT/x c.kv; cmp $OUT/x c.kv")
    assert kind(mount, "c.kv") == "kv"
    assert mount.call("free") == 0
