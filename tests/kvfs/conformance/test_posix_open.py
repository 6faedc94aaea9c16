# ruff: noqa: E501 - a script reads best on one line
"""Opening, truncating, times and extended attributes."""

from __future__ import annotations

import pytest

from tests.kvfs.conformance.kinds import DEVICES, FILES, USERS, over_kinds
from tests.kvfs.conformance.script import cases, every
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

HOW = ("O_RDONLY", "O_WRONLY", "O_RDWR")
EXTRA = (
    "0",
    "O_CREAT",
    "O_CREAT,O_EXCL",
    "O_TRUNC",
    "O_CREAT,O_TRUNC",
    "O_CREAT,O_EXCL,O_TRUNC",
    "O_APPEND",
    "O_DIRECTORY",
    "O_CREAT,O_DIRECTORY",
    "O_NOFOLLOW",
    "O_CREAT,O_NOFOLLOW",
    "O_DIRECTORY,O_NOFOLLOW",
    "O_PATH",
    "O_PATH,O_NOFOLLOW",
    "O_SYNC",
    "O_DSYNC,O_CREAT",
    "O_NOATIME",
)


def test_every_flag_on_every_kind(twins: Twins) -> None:
    _flags(twins, (*FILES, "none"))


def test_every_flag_on_devices(twins: Twins) -> None:
    _flags(twins, DEVICES)


def _flags(twins: Twins, kinds: tuple[str, ...]) -> None:
    script = "umask 022\n make {kind} f\n open f {how},O_NONBLOCK,{extra} 0666 -> *"
    twins.compare(every(script, kind=kinds, how=HOW, extra=EXTRA))
    script = "umask 022\n make {kind} f\n symlink f l\n open l {how},O_NONBLOCK,{extra} 0666 -> *\n lstat f -> *"
    twins.compare(every(script, kind=kinds, how=HOW, extra=EXTRA))


def test_a_fifo_needs_a_reader_and_a_socket_is_not_opened(twins: Twins) -> None:
    twins.compare(cases("mkfifo f 0644\n open f O_WRONLY,O_NONBLOCK -> ENXIO", "bind f\n open f O_RDWR -> ENXIO"))
    twins.compare(
        cases("mkfifo f 0644\n hold h f O_RDONLY,O_NONBLOCK\n append f abc\n pread h 3 0 -> ESPIPE\n fstat h -> *")
    )


def test_truncating_by_opening(twins: Twins) -> None:
    script = (
        "make regular f\n write f 0123456789\n utimens f 5 6\n chmod f {mode}\n open f {flags} -> ok\n stat f -> ok"
    )
    flags = ("O_WRONLY,O_TRUNC", "O_RDWR,O_TRUNC", "O_CREAT,O_WRONLY,O_TRUNC", "O_RDONLY,O_TRUNC")
    twins.compare(every(script, mode=("0644", "0777"), flags=flags))
    twins.compare(every("make regular f\n utimens f 5 6\n open f {flags} -> ok\n stat f -> ok", flags=flags))


def test_truncating(twins: Twins) -> None:
    start = "make regular f\n write f 0123456789\n utimens f 5 6\n utimens . 5 6\n"
    sizes = ("0", "3", "10", "12345", "1048577")
    twins.compare(every(start + "truncate f {size} -> ok\n stat f -> ok\n read f -> *", size=sizes))
    twins.compare(
        every(start + "hold h f O_RDWR\n ftruncate h {size} -> ok\n fstat h -> ok\n pread h 20 0 -> ok", size=sizes)
    )
    twins.compare(every(start + "hold h f O_WRONLY\n unlink f\n ftruncate h {size} -> ok\n fstat h -> ok", size=sizes))
    twins.compare(
        cases(
            start + "hold h f O_RDONLY\n ftruncate h 5 -> EINVAL\n fstat h -> ok",
            start + "hold h f O_RDWR\n ftruncate h -1 -> EINVAL",
            start + "truncate f -1 -> EINVAL",
            "mkdir d 0755\n truncate d 0 -> EISDIR",
            "mkdir d 0755\n hold h d O_RDONLY\n ftruncate h 0 -> EINVAL",
            "mkfifo d 0755\n truncate d 0 -> EINVAL",
            "bind d\n truncate d 0 -> *",
            start + "ann: hold h f O_RDONLY\n ann: ftruncate h 0 -> EINVAL\n ann: truncate f 0 -> EACCES",
        )
    )


def test_a_handle_keeps_the_rights_it_was_opened_with(twins: Twins) -> None:
    twins.compare(
        cases(
            "make regular f\n chown f ann ann\n ann: hold h f O_RDWR\n chmod f 0 -> ok\n ann: pwrite h 0 abc -> 3\n ann: pread h 3 0 -> ok"
            "\n ann: ftruncate h 1 -> ok\n ann: open f O_RDONLY -> EACCES\n ann: fchmod h 0600 -> ok\n ann: open f O_RDONLY -> ok",
            "make regular f\n ann: hold h f O_RDONLY\n chmod f 0\n ann: pread h 3 0 -> b''\n ann: pwrite h 0 a -> EBADF\n ann: fchmod h 0 -> EPERM"
            "\n ann: fchown h ann ann -> EPERM\n ann: futimens h 1 1 -> EPERM\n ann: futimens h null null -> EACCES",
            "umask 0\n hold h f O_CREAT,O_RDWR 0\n pwrite h 0 abc -> 3\n fstat h -> ok",
            "chmod . 0777\n ann: hold h f O_CREAT,O_RDWR 0\n ann: pwrite h 0 abc -> 3\n ann: open f O_RDONLY -> EACCES",
        )
    )


@over_kinds
def test_times(twins: Twins, kinds: tuple[str, ...]) -> None:
    """Times lie between long before 1970 and long after 2^33, to the nanosecond. Those after 2262 are cut."""
    times = (
        "0",
        "1",
        "0.999999999",
        "1900000000.123456789",
        "2147483648.5",
        "4294967296.000000001",
        "9200000000.1",
        "-1",
        "-2147483649",
    )
    for line in ("utimens f {a} {m}", "lutimens f {a} {m}", "utimensat . f {a} {m}"):
        if "symlink" in kinds and line.startswith("utimens f"):
            plain = tuple(kind for kind in kinds if kind != "symlink")
        else:
            plain = kinds
        twins.compare(every(f"make {{kind}} f\n {line} -> ok", kind=plain, a=times[2:4], m=times))
        twins.compare(every(f"make {{kind}} f\n {line} -> ok", kind=plain, a=times, m=("omit", "now", "7")))
        twins.compare(
            every(f"make {{kind}} f\n {line} -> ok", kind=plain, a=("omit", "now", "7"), m=("omit", "now", "7"))
        )
    twins.compare(every("make {kind} f\n lutimens f null null -> ok", kind=kinds))


def test_times_that_are_none(twins: Twins) -> None:
    twins.compare(every("make regular f\n utimens f {a} {m} -> EINVAL", a=("0.1000000000", "5.-1"), m=("1", "omit")))
    twins.compare(every("make regular f\n utimens f {a} {m} -> EINVAL", a=("1", "now", "omit"), m=("0.2000000000",)))


def test_who_may_set_which_times(twins: Twins) -> None:
    """Now takes write permission, anything else takes the owner."""
    script = "make {kind} f\n chown f ann ann\n chmod f {mode}\n {user}: utimens f {a} {m} -> *"
    some = ("omit", "now", "7")
    twins.compare(every(script, kind=("regular",), mode=("0444", "0666"), user=USERS, a=some, m=some))
    twins.compare(every(script, kind=("dir", "fifo"), mode=("0444", "0666"), user=USERS, a=("now",), m=some))


def test_what_changes_which_time(twins: Twins) -> None:
    start = "make regular f\n write f 0123456789\n utimens f 5 6\n"
    twins.compare(
        cases(
            start
            + "read f -> ok\n write f x -> ok\n read f -> ok\n append f y -> ok\n chmod f 0600 -> ok\n chown f -1 -1 -> ok",
            start
            + "chown f ann ann -> ok\n link f g -> ok\n rename g h -> ok\n unlink h -> ok\n setxattr f user.x y -> ok",
            start
            + "open f O_RDONLY -> ok\n open f O_WRONLY -> ok\n open f O_WRONLY,O_CREAT -> ok\n open f O_WRONLY,O_TRUNC -> ok",
            start
            + "hold h f O_RDWR\n pwrite h 20 z -> 1\n fstat h -> ok\n pread h 5 0 -> ok\n fsync h -> ok\n release h -> ok\n stat f -> ok",
            "mkdir d 0755\n utimens d 5 6\n list d -> []\n make regular d/f -> ok\n write d/f x -> ok\n chmod d/f 0600 -> ok\n unlink d/f -> ok",
            "symlink t l\n lutimens l 5 6 -> ok\n readlink l -> t\n lstat l -> ok\n lchown l ann ann -> ok",
        )
    )


def test_reserving_room(twins: Twins) -> None:
    start = "make regular f\n write f 0123456789\n hold h f O_RDWR\n"
    twins.compare(every(start + "fallocate h {at} {size} -> ok\n fstat h -> ok", at=("5", "100"), size=("10", "5000")))
    twins.compare(every(start + "fallocate h {at} {size} -> EINVAL", at=("-1", "0"), size=("0", "-1")))
    twins.compare(
        cases(start + "ftruncate h 0\n fallocate h 0 3000000 -> ok\n fstat h -> ok\n pread h 5 2999998 -> ok")
    )


def test_reserving_room_that_is_there_sets_the_times(twins: Twins) -> None:
    twins.compare(cases("make regular f\n write f 0123456789\n hold h f O_RDWR\n fallocate h 0 10 -> ok"))


def test_copying_a_range_and_seeking(twins: Twins) -> None:
    start = "make regular f\n write f 0123456789\n make regular g\n hold a f O_RDWR\n hold b g O_RDWR\n"
    twins.compare(
        cases(
            start
            + "copy a b 4 -> 4\n copy a b 100 -> 6\n copy a b 100 -> 0\n fstat b -> ok\n pread b 20 0 -> b'0123456789'",
            start + "seek a 5 0 -> 5\n copy a b 3 -> 3\n pread b 20 0 -> b'567'",
            start
            + "seek a 100 0 -> 100\n copy a b 3 -> 0\n seek b 20 0\n seek a 0 0\n copy a b 3 -> 3\n fstat b -> ok",
            start + "hold c f O_WRONLY\n copy c b 3 -> EBADF\n hold d g O_RDONLY\n copy a d 3 -> EBADF",
            start + "hold c g O_WRONLY,O_APPEND\n copy a c 3 -> EBADF",
            start + "seek a -1 0 -> EINVAL\n seek a -3 2 -> 7\n seek a 5 1 -> 12\n seek a -100 1 -> EINVAL",
            start + "seek a 0 3 -> 0\n seek a 0 4 -> 10\n seek a 10 3 -> ENXIO\n seek a 11 4 -> ENXIO",
            "mkdir d 0755\n make regular g\n hold a d O_RDONLY\n hold b g O_RDWR\n copy a b 3 -> EISDIR\n copy b a 3 -> *",
        )
    )


def test_extended_attributes(twins: Twins) -> None:
    start = "make {kind} f\n chown f ann ann\n chmod f {mode}\n"
    twins.compare(
        every(
            start + "setxattr f user.x y\n {user}: getxattr f user.x -> *",
            kind=("regular", "dir"),
            mode=("0644", "0600"),
            user=USERS,
        )
    )
    twins.compare(
        every(start + "{user}: setxattr f user.x y -> *", kind=("regular", "dir"), mode=("0644", "0666"), user=USERS)
    )
    twins.compare(every("make {kind} f\n setxattr f user.x y -> EPERM", kind=("fifo", "socket")))
    twins.compare(
        cases("make regular f\n getxattr f user.none -> ENODATA", "make regular f\n setxattr f user. y -> EINVAL")
    )
    twins.compare(
        cases("make regular f\n setxattr f bad y -> EOPNOTSUPP", "make regular f\n setxattr f %xattr256 y -> ERANGE")
    )
