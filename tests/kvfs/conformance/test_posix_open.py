# ruff: noqa: E501 - a script reads best on one line
"""Opening, truncating, times and extended attributes."""

import pytest

from tests.kvfs.conformance.kinds import ALL, FILES
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

HOW = "O_RDONLY; O_WRONLY; O_RDWR"
EXTRA = "0; O_CREAT; O_CREAT,O_EXCL; O_TRUNC; O_CREAT,O_TRUNC; O_APPEND; O_DIRECTORY; O_NOFOLLOW; O_PATH; O_SYNC"
DIGITS = "make regular f\n write f 0123456789\n"
OLD = DIGITS + "utimens f 5 6\n"


def test_every_flag_on_every_kind(twins: Twins) -> None:
    twins.compare(
        "umask 022\n make {kind} f\n open f {how},O_NONBLOCK,{extra} 0666 -> *",
        "umask 022\n make {kind} f\n symlink f l\n open l {how},O_NONBLOCK,{extra} 0666 -> *\n lstat f -> *",
        kind=(*FILES, "none"),
        how=HOW,
        extra=EXTRA,
    )


def test_truncating_by_opening(twins: Twins) -> None:
    flags = "O_WRONLY,O_TRUNC; O_RDWR,O_TRUNC; O_CREAT,O_WRONLY,O_TRUNC; O_RDONLY,O_TRUNC"
    twins.compare(OLD + "chmod f {mode}\n open f {flags} -> ok\n stat f -> ok", mode="0644; 0777", flags=flags)
    twins.compare("make regular f\n utimens f 5 6\n open f {flags} -> ok\n stat f -> ok", flags=flags)


def test_truncating(twins: Twins) -> None:
    start = OLD + "utimens . 5 6\n"
    twins.compare(
        start + "truncate f {size} -> ok\n stat f -> ok\n read f -> *",
        start + "hold h f O_RDWR\n ftruncate h {size} -> ok\n fstat h -> ok\n pread h 20 0 -> ok",
        start + "hold h f O_WRONLY\n unlink f\n ftruncate h {size} -> ok\n fstat h -> ok",
        size="0; 3; 10; 1048577",
    )
    twins.compare(
        start + "hold h f O_RDONLY\n ftruncate h 5 -> EINVAL\n fstat h -> ok", "mkdir d 0755\n truncate d 0 -> EISDIR"
    )


def test_times(twins: Twins) -> None:
    """Times lie between long before 1970 and long after 2^33, to the nanosecond. Those after 2262 are cut."""
    times = "0; 0.999999999; 2147483648.5; 4294967296.000000001; 9200000000.1; -1; -2147483649"
    twins.compare("make {kind} f\n lutimens f {a} {m} -> ok", kind=ALL, a="omit; now; 7", m="omit; now; 7")
    twins.compare("make regular f\n utimens f {a} 1900000000.123456789 -> ok", a=times)
    twins.compare("make regular f\n utimens f 0.999999999 {m} -> ok", m=times)
    twins.compare("make {kind} f\n lutimens f null null -> ok", kind=FILES)


def test_what_changes_which_time(twins: Twins) -> None:
    twins.compare(
        OLD
        + "read f -> ok\n write f x -> ok\n read f -> ok\n append f y -> ok\n chmod f 0600 -> ok\n chown f -1 -1 -> ok",
        OLD + "chown f ann ann -> ok\n link f g -> ok\n rename g h -> ok\n unlink h -> ok\n setxattr f user.x y -> ok",
        OLD
        + "open f O_RDONLY -> ok\n open f O_WRONLY -> ok\n open f O_WRONLY,O_CREAT -> ok\n open f O_WRONLY,O_TRUNC -> ok",
        OLD
        + "hold h f O_RDWR\n pwrite h 20 z -> 1\n fstat h -> ok\n pread h 5 0 -> ok\n fsync h -> ok\n release h -> ok\n stat f -> ok",
        "mkdir d 0755\n utimens d 5 6\n list d -> []\n make regular d/f -> ok\n write d/f x -> ok\n chmod d/f 0600 -> ok\n unlink d/f -> ok",
        "symlink t l\n lutimens l 5 6 -> ok\n readlink l -> t\n lstat l -> ok\n lchown l ann ann -> ok",
    )


def test_reserving_room(twins: Twins) -> None:
    start = DIGITS + "hold h f O_RDWR\n"
    twins.compare(start + "fallocate h {at} {size} -> ok\n fstat h -> ok", at="5; 100", size="10; 5000")
    twins.compare(
        start + "ftruncate h 0\n fallocate h 0 3000000 -> ok\n fstat h -> ok\n pread h 5 2999998 -> ok",
        start + "fallocate h 0 10 -> ok",  # the room is there: the times are set all the same
    )


def test_copying_a_range_and_seeking(twins: Twins) -> None:
    start = DIGITS + "make regular g\n hold a f O_RDWR\n hold b g O_RDWR\n"
    twins.compare(
        start
        + "copy a b 4 -> 4\n copy a b 100 -> 6\n copy a b 100 -> 0\n fstat b -> ok\n pread b 20 0 -> b'0123456789'",
        start + "seek a 5 0 -> 5\n copy a b 3 -> 3\n pread b 20 0 -> b'567'",
        start + "seek a 100 0 -> 100\n copy a b 3 -> 0\n seek b 20 0\n seek a 0 0\n copy a b 3 -> 3\n fstat b -> ok",
        start + "hold c f O_WRONLY\n copy c b 3 -> EBADF\n hold d g O_RDONLY\n copy a d 3 -> EBADF",
        start + "hold c g O_WRONLY,O_APPEND\n copy a c 3 -> EBADF",
        start + "seek a 0 3 -> 0\n seek a 0 4 -> 10\n seek a 10 3 -> ENXIO\n seek a 11 4 -> ENXIO",
        "mkdir d 0755\n make regular g\n hold a d O_RDONLY\n hold b g O_RDWR\n copy a b 3 -> EISDIR\n copy b a 3 -> *",
    )


def test_extended_attributes(twins: Twins) -> None:
    start = "make {kind} f\n chown f ann ann\n chmod f {mode}\n"
    kinds = "regular; dir"
    users = "ann; bob; root"
    script = start + "setxattr f user.x y\n {user}: getxattr f user.x -> *"
    twins.compare(script, kind=kinds, mode="0644; 0600", user=users)
    twins.compare(start + "{user}: setxattr f user.x y -> *", kind=kinds, mode="0644; 0666", user=users)
    twins.compare("make {kind} f\n setxattr f user.x y -> EPERM", kind="fifo; socket")
    twins.compare(
        "make regular f\n getxattr f user.none -> ENODATA",
        "make regular f\n setxattr f user. y -> EINVAL",
        "make regular f\n setxattr f bad y -> EOPNOTSUPP",
    )
