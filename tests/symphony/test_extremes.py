"""Values at their extremes through every door, a commit after each: refused there, or kept as they are shown."""

import ctypes
import errno
import itertools
import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import libsym as sym
from libsym.abi import Advice
from libsym.calls.advice import Advised

TINY = ("--model", "tiny", "--kv-memory", "32M", "--disk", "64M")
FIT = {
    errno.EINVAL, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTSUP, errno.EPERM, errno.E2BIG,
    errno.ERANGE, errno.EOVERFLOW, errno.EEXIST, errno.ENOTEMPTY, errno.EILSEQ, errno.EMSGSIZE,
}  # fmt: skip
"""How a door refuses; EIO would be a defect."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: owners need root")

LIBC = ctypes.CDLL(None, use_errno=True)
SECOND_NS = 10**9


def ends(low, high):
    """Mostly the ends of a range, with what is next to them."""
    near = {low, low + 1, high - 1, high, 0, -1, 1, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, (1 << 32) - 1}
    return st.sampled_from(sorted(each for each in near if low <= each <= high)) | st.integers(low, high)


seconds = ends(-(1 << 63), (1 << 63) - 1) | st.sampled_from([9223372036, 9223372037, -9223372037, -9223372038])
nanoseconds = ends(0, SECOND_NS - 1)
names = st.binary(min_size=1, max_size=260).map(lambda data: data.replace(b"/", b"x").replace(b"\0", b"y"))
texts = st.sampled_from([b"", b"0", b"-1", b"1", b"inf", b"nan", b"1e308", b"9" * 18, b"9" * 4000, b"\xff", b"0.001"])
texts |= st.integers(-(1 << 64), 1 << 64).map(lambda number: b"%d" % number) | st.binary(max_size=70_000)


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class Doors:
    """Ways to make new files on the mount, each with one drawn value."""

    def __init__(self, daemon):
        self.root = daemon.mount
        self._numbers = itertools.count()
        self.made = []

    def _new(self):
        self.made.append(self.root / f"made-{next(self._numbers)}")
        return self.made[-1]

    def _file(self):
        path = self._new()
        path.write_bytes(b"bytes")
        return path

    def _kv(self):
        path = self._new()
        with sym.kv_create(str(path)) as kv:
            sym.kv_write(kv, [1, 2, 3])
        return path

    def times(self, data):
        """Set times by utimensat(2), which takes times that os.utime refuses."""
        path = data.draw(st.sampled_from([self._file, self._kv]))()
        times = (Timespec * 2)(*(Timespec(data.draw(seconds), data.draw(nanoseconds)) for _ in range(2)))
        if LIBC.utimensat(-100, bytes(path), times, 0):
            raise OSError(ctypes.get_errno(), "utimensat")

    def owner(self, data):
        os.chown(self._file(), data.draw(ends(0, (1 << 32) - 2)), data.draw(ends(0, (1 << 32) - 2)))

    def name(self, data):
        name = data.draw(names)
        if name in {b".", b"..", b".symphony"}:
            return
        path = self.root / os.fsdecode(name)
        path.touch()
        self.made.append(path)

    def attribute(self, data):
        path = data.draw(st.sampled_from([self._file, self._kv]))()
        names_ = [b"user.x", b"user." + b"\xff" * 250, b"user.kv.pinned", b"user.kv.ttl", b"user.kv.priority"]
        os.setxattr(path, data.draw(st.sampled_from(names_)), data.draw(texts))

    def domain(self, data):
        path = self._new()
        path.mkdir()
        os.setxattr(path, b"user.kv.quota", b"1M")
        names_ = [b"user.kv.quota", b"user.kv.quota_files", b"user.kv.weight"]
        os.setxattr(path, data.draw(st.sampled_from(names_)), data.draw(texts))

    def advice(self, data):
        """Past libsym's own checks."""
        with sym.kv_open(str(self._kv()), "rw") as kv:
            value = data.draw(ends(-(1 << 63), (1 << 63) - 1))
            sym.kv_advise(kv, Advised(data.draw(st.sampled_from([Advice.TTL, Advice.PRIORITY, Advice.PIN])), value))

    def entries(self, data):
        with sym.kv_open(str(self._kv()), "rw") as kv:
            limit = (1 << 31) - 1
            sym.kv_write(kv, [data.draw(ends(-limit - 1, limit))], [data.draw(ends(-limit - 1, limit))])

    def text(self, data):
        text = data.draw(texts.filter(lambda text: len(text) < 1000))
        (self.root / ".symphony/text" / self._new().name).write_bytes(text)

    def image(self, data):
        """Another file's image with a byte that is another."""
        image = bytearray(self._kv().read_bytes())
        image[data.draw(st.integers(0, 4096))] ^= data.draw(st.integers(1, 255))
        self._new().write_bytes(image)

    def show(self):
        """Return the attributes and contents of the files, as far as they outlive a restart."""
        found = {}
        for path in self.made:
            with suppress(FileNotFoundError, OverflowError):
                fields = os.lstat(path)
                times = fields.st_atime_ns, fields.st_mtime_ns, fields.st_ctime_ns
                mode = fields.st_mode, fields.st_uid, fields.st_gid, fields.st_rdev, fields.st_size
                if path.is_symlink():
                    found[path] = times, mode, path.readlink()
                    continue
                kept = {name: os.getxattr(path, name) for name in os.listxattr(path)}
                if kept.get("user.kv.ttl", b"0") != b"0":
                    continue  # it may be removed any moment
                for name in ("user.kv.tier", "user.kv.hits", "user.kv.pinned"):  # a lease ends with the daemon
                    kept.pop(name, None)
                found[path] = times, mode, kept
        return found


DOORS = [name for name in vars(Doors) if not name.startswith("_") and name != "show"]


def test_extremes_are_refused_or_kept_and_every_commit_is_made(start_daemon):
    daemon = start_daemon(*TINY)
    sym.connect(str(daemon.socket))
    doors = Doors(daemon)
    commits = os.open(daemon.mount, os.O_RDONLY)

    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def through(data, door):
        code = 0
        try:
            getattr(doors, door)(data)
        except (OSError, OverflowError, ValueError) as error:
            code = getattr(error, "errno", errno.EINVAL)
        assert not code or code in FIT, (door, errno.errorcode[code])
        os.fsync(commits)  # of all names in the root
        sym.kv_sync()

    for door in DOORS:
        through(door=door)
    os.close(commits)
    shown = doors.show()
    sym.daemon_check()
    sym.close()
    assert daemon.stat()["disk"]["error"] == ""
    assert daemon.stop() == 0
    start_daemon(*TINY)
    assert doors.show() == shown
