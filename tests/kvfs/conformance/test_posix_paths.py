"""Errors of paths, for every operation that takes a path."""

from __future__ import annotations

import pytest

from tests.kvfs.conformance.kinds import (
    EVERY_PATH_OPERATION,
    MAKES,
    NEEDS_EXISTING,
    OTHER,
    USERS,
    on,
)
from tests.kvfs.conformance.script import LONG, case, cases, every
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

NO_DIRECTORIES = [
    "regular",
    "fifo",
    "socket",
    "block",
    "char",
]


@pytest.mark.parametrize("kind", NO_DIRECTORIES)
def test_what_is_no_directory_holds_no_names(twins: Twins, kind: str) -> None:
    scripts = every("make regular f\n make {kind} n0\n {line} -> ENOTDIR", line=on(EVERY_PATH_OPERATION, "n0/x"))
    twins.compare(case(str(script).replace("{kind}", kind)) for script in scripts)


def test_a_directory_that_is_not_there(twins: Twins) -> None:
    twins.compare(every("make regular f\n {line} -> ENOENT", line=on(EVERY_PATH_OPERATION, "missing/x")))


def test_a_name_that_is_not_there(twins: Twins) -> None:
    twins.compare(every("make regular f\n {line} -> ENOENT", line=on(NEEDS_EXISTING, "missing")))
    twins.compare(every("make regular f\n mkdir d 0755\n {line} -> ENOENT", line=on(NEEDS_EXISTING, "d/missing")))


def test_the_empty_path_names_nothing(twins: Twins) -> None:
    twins.compare(every("make regular f\n {line} -> ENOENT", line=on(EVERY_PATH_OPERATION, "%empty")))


def test_a_name_of_255_bytes_is_as_good_as_any(twins: Twins) -> None:
    twins.compare(every("make regular f\n {line} -> ok", line=on(MAKES, "%255")))
    twins.compare(every("make regular f\n mkdir d 0755\n {line} -> ok", line=on(MAKES, "d/%255")))
    twins.compare(every("make {kind} %255\n {line} -> *", kind=("regular", "dir"), line=on(NEEDS_EXISTING, "%255")))


def test_a_name_of_every_byte_is_as_good_as_any(twins: Twins) -> None:
    twins.compare(every("make regular f\n {line} -> ok\n list . -> ok", line=on(MAKES, "%bytes")))
    twins.compare(every("make regular %bytes\n {line} -> *", line=on(NEEDS_EXISTING, "%bytes")))


def test_a_name_of_256_bytes_is_too_long(twins: Twins) -> None:
    twins.compare(every("make regular f\n {line} -> ENAMETOOLONG", line=on(EVERY_PATH_OPERATION, "%256")))
    twins.compare(
        every("make regular f\n mkdir d 0755\n {line} -> ENAMETOOLONG", line=on(EVERY_PATH_OPERATION, "d/%256"))
    )
    twins.compare(every("make regular f\n {line} -> ENAMETOOLONG", line=on(EVERY_PATH_OPERATION, "%256/x")))


def test_a_path_may_have_4095_bytes(twins: Twins) -> None:
    existing = on({name: line for name, line in NEEDS_EXISTING.items() if "rmdir" not in name}, "%path4095")
    twins.compare(every("make regular f\n {line} -> *", line=existing))
    twins.compare(every("make regular f\n {line} -> ENAMETOOLONG", line=on(EVERY_PATH_OPERATION, "%path4096")))


def test_thirty_directories_with_long_names(twins: Twins) -> None:
    names = LONG["%dirs"].split("/")
    deep = "\n".join(f"mkdir {'/'.join(names[: i + 1])} 0755" for i in range(len(names)))
    twins.compare(
        every(
            f"make regular f\n {deep}\n {{line}} -> ok\n stat %dirs/f -> ENOENT",
            line=("mkdir %dirs/x 0755", "link f %dirs/x"),
        )
    )


@pytest.mark.parametrize("user", USERS)
def test_every_directory_on_the_way_must_be_searchable(twins: Twins, user: str) -> None:
    """The bits of the class that counts decide, whatever the others have."""
    shift = {"ann": 6, "kim": 3, "eve": 3, "bob": 0, "root": 0}[user]
    start = f"""mkdir d 0777
        make regular f
        chown f {user} {user}
        chmod . 0777
        chown d ann ann"""
    existing = f"{start}\n make regular d/x\n chown d/x {user} {user}\n chmod d {{mode}}\n {user}: {{line}} -> *"
    new = f"{start}\n chmod d {{mode}}\n {user}: {{line}} -> *"
    for digit in (1, 3, 6, 7):
        modes = (f"{0o777 & ~(7 << shift) | digit << shift:04o}", f"{digit << shift:04o}")
        found = twins.compare(every(existing, mode=modes, line=on(NEEDS_EXISTING, "d/x")))
        found += twins.compare(every(new, mode=modes, line=on(MAKES, "d/x")))
        if digit == 6 and user != "root":
            assert set(found) == {"EACCES"}
        elif digit in {3, 7} or user == "root":
            assert "EACCES" not in found


def test_links_that_lead_round(twins: Twins) -> None:
    loop = "symlink l1 l0\n symlink l0 l1\n make regular f\n"
    twins.compare(every(loop + "{line} -> ELOOP", line=on(EVERY_PATH_OPERATION, "l0/x")))
    twins.compare(every(loop + "{line} -> *", line=on(EVERY_PATH_OPERATION, "l0")))
    twins.compare(
        cases(
            loop + "chmod l0 0600 -> ELOOP",
            loop + "chown l0 ann ann -> ELOOP",
            loop + "open l0 O_RDONLY -> ELOOP",
            loop + "open l0 O_CREAT,O_RDWR -> ELOOP",
            loop + "truncate l0 1 -> ELOOP",
            loop + "utimens l0 1 2 -> ELOOP",
            loop + "stat l0 -> ELOOP",
            loop + "lstat l0 -> ok",
            loop + "readlink l0 -> l1",
        )
    )


def test_forty_links_on_the_way_and_no_more(twins: Twins) -> None:
    def chain(length: int) -> str:
        links = [f"symlink l{i + 1} l{i}" for i in range(length)]
        return "\n".join([f"make regular l{length}", *links])

    twins.compare(cases(chain(40) + "\nstat l0 -> ok", chain(41) + "\nstat l0 -> ELOOP"))


@pytest.mark.parametrize("target", ["regular", "dir", "none"])
def test_links_are_followed_by_those_who_follow(twins: Twins, target: str) -> None:
    script = "make regular f\n make {target} t\n symlink t l\n {line} -> *\n stat t -> *"
    twins.compare(every(script.replace("{target}", target), line=on(EVERY_PATH_OPERATION, "l")))
    script = "make regular f\n mkdir d 0755\n make {target} d/t\n symlink ../d e\n symlink d m\n {line} -> *"
    twins.compare(every(script.replace("{target}", target), line=on(EVERY_PATH_OPERATION, "m/t")))


@pytest.mark.parametrize("path", ["x/", "x/.", "x/..", "x//", ".", "..", "./x", "x/../x", "l/", "l/."])
def test_slashes_and_dots(twins: Twins, path: str) -> None:
    for kind in ("regular", "dir", "none"):
        start = f"make regular f\n make {kind} x\n symlink x l\n"
        lines = EVERY_PATH_OPERATION
        if path in {".", ".."}:  # the harness's own directories are of no use to compare
            lines = {name: line for name, line in lines.items() if line.split()[0] in _HARMLESS_ON_DOTS}
        twins.compare(every(start + "{line} -> *", line=on(lines, path)))


_HARMLESS_ON_DOTS = {"rename", "rmdir", "unlink", "mkdir", "link", "symlink", "mkfifo", "open", "readlink", "truncate"}


def test_addresses_where_nothing_is(twins: Twins) -> None:
    operations = (
        "chmod",
        "chown",
        "link",
        "mkdir",
        "mkfifo",
        "open",
        "rename",
        "rmdir",
        "symlink",
        "truncate",
        "unlink",
    )
    twins.compare(every("make regular f\n fault {operation} -> EFAULT", operation=operations))


def test_the_others_have_no_way_into_a_closed_directory(twins: Twins) -> None:
    """The same through a handle on the directory, which was opened before it was closed."""
    script = (
        "mkdir d 0755\n make regular d/x\n hold h d O_RDONLY\n chmod d 0700\n {user}: list d -> EACCES\n flist h -> ok"
    )
    twins.compare(every(script, user=(OTHER, "eve")))
