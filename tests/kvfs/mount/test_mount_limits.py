"""Limits of the mount: operations that it lacks, sizes that are too large, and places in a directory."""

import ctypes
import errno
import fcntl
import os
import random
import subprocess
import sys

from tests.kvfs.mounted import Mount, a_kv_file, needs_mount, opened, refused

pytestmark = needs_mount


def test_what_is_not_done_says_so(mount: Mount) -> None:
    a_kv_file(mount)
    libc = ctypes.CDLL(None, use_errno=True)

    def fallocate(fd: int, mode: int) -> None:
        if libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096)):
            raise OSError(ctypes.get_errno(), "fallocate")

    with opened(mount.path / "a.kv", os.O_RDWR) as kv, opened(mount.path / "f", os.O_RDWR | os.O_CREAT) as fd:
        refused(errno.EOPNOTSUPP, fallocate, kv, 0)
        refused(errno.EOPNOTSUPP, fallocate, fd, 3)  # punch a hole, keep the size
        refused(errno.ENOTTY, fcntl.ioctl, fd, 0x80086601, bytearray(8))  # FS_IOC_GETFLAGS
        refused(errno.EOPNOTSUPP, fcntl.ioctl, fd, 0x40049409, fd)  # FICLONE
    refused(errno.EOPNOTSUPP, os.open, mount.path, os.O_TMPFILE | os.O_RDWR)
    assert os.pathconf(mount.path, "PC_NAME_MAX") == 255


_BEYOND = """
import os, resource, signal
received = []
signal.signal(signal.SIGXFSZ, lambda *_: received.append("SIGXFSZ"))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, -1))
fd = os.open("f", os.O_RDWR | os.O_CREAT)
for at, size in (8192, 1), (0, 100_000), (0, 8192), (4096, 4097), (0, 100):
    try:
        os.posix_fallocate(fd, at, size)
    except OSError as error:
        received.append(error.errno)
    print(sorted(map(str, received)), os.fstat(fd).st_size)
    received.clear()
"""


def test_fallocate_grows_a_file_as_far_as_its_caller_may(mount: Mount) -> None:
    """The limit is the caller's, as on any file system, not the daemon's."""
    outputs = [
        subprocess.run([sys.executable, "-c", _BEYOND], cwd=where, capture_output=True, text=True, check=True).stdout
        for where in (mount.path, mount.outside)
    ]
    too_big = f"['{errno.EFBIG}', 'SIGXFSZ']"
    assert outputs[0].splitlines() == [f"{too_big} 0", f"{too_big} 0", "[] 8192", f"{too_big} 8192", "[] 8192"]
    assert outputs[0] == outputs[1]
    assert (mount.path / "f").read_bytes() == bytes(8192)


def test_what_a_caller_asked_too_much_of_is_told_to_the_caller_and_not_to_the_log(mount: Mount) -> None:
    before = mount.log()
    with opened(mount.path / "f", os.O_RDWR | os.O_CREAT) as fd:
        refused(errno.EFBIG, os.pwrite, fd, b"x", 1 << 60)
        refused(errno.EFBIG, os.ftruncate, fd, 1 << 60)
        refused(errno.EFBIG, os.posix_fallocate, fd, 1 << 60, 1)
    assert mount.log() == before
    assert (mount.path / "f").stat().st_size == 0


def test_places_in_a_directory_can_be_gone_back_to(mount: Mount) -> None:
    """telldir, seekdir, rewinddir: also when names before the place are gone."""
    mount.sh("mkdir d; cd d; touch $(seq 200)")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    directory = ctypes.c_void_p(libc.opendir(os.fsencode(mount.path / "d")))

    def next_name() -> bytes | None:
        entry = libc.readdir(directory)
        return ctypes.string_at(entry + 19) if entry else None  # after d_ino, d_off, d_reclen, d_type

    places: dict[bytes, int] = {}
    place = libc.telldir(directory)
    while name := next_name():
        places[name] = place
        place = libc.telldir(directory)
    assert len(places) == 202
    for name in random.Random(5).sample(sorted(places), 30):
        libc.seekdir(directory, ctypes.c_long(places[name]))
        assert next_name() == name
    libc.seekdir(directory, ctypes.c_long(places[b"150"]))
    mount.sh("cd d; rm $(seq 99)")
    assert next_name() == b"150"
    mount.sh("touch d/new")
    libc.rewinddir(directory)
    found = set()
    while name := next_name():
        found.add(name)
    assert len(found) == 104, "rewinddir looks again"
    assert b"new" in found
    libc.closedir(directory)
