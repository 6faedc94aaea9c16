"""Errors of paths, for every operation that takes a path."""

from __future__ import annotations

import pytest

from tests.kvfs.conformance.kinds import CLASS_SHIFT, EVERY_PATH_OPERATION, MAKES, NEEDS_EXISTING, USERS, on
from tests.kvfs.conformance.script import LONG
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]


def test_what_is_no_directory_holds_no_names(twins: Twins) -> None:
    kinds, lines = "regular; fifo; socket; block; char", on(EVERY_PATH_OPERATION, "n0/x")
    twins.compare("make regular f\n make {kind} n0\n {line} -> ENOTDIR", kind=kinds, line=lines)


@pytest.mark.parametrize(
    ("operations", "path", "expected"),
    [
        pytest.param(EVERY_PATH_OPERATION, "missing/x", "ENOENT", id="no directory"),
        pytest.param(NEEDS_EXISTING, "missing", "ENOENT", id="no name"),
        pytest.param(NEEDS_EXISTING, "d/missing", "ENOENT", id="no name in a directory"),
        pytest.param(EVERY_PATH_OPERATION, "%empty", "ENOENT", id="the empty path"),
        pytest.param(MAKES, "%255", "ok", id="255 bytes"),
        pytest.param(MAKES, "d/%255", "ok", id="255 bytes in a directory"),
        pytest.param(MAKES, "%bytes", "ok\n list . -> ok", id="every byte"),
        pytest.param(EVERY_PATH_OPERATION, "%256", "ENAMETOOLONG", id="256 bytes"),
        pytest.param(EVERY_PATH_OPERATION, "d/%256", "ENAMETOOLONG", id="256 bytes in a directory"),
        pytest.param(EVERY_PATH_OPERATION, "%256/x", "ENAMETOOLONG", id="256 bytes on the way"),
        pytest.param(EVERY_PATH_OPERATION, "%path4096", "ENAMETOOLONG", id="a path of 4096 bytes"),
    ],
)
def test_a_path(twins: Twins, operations: str, path: str, expected: str) -> None:
    twins.compare(f"make regular f\n mkdir d 0755\n {{line}} -> {expected}", line=on(operations, path))


def test_names_and_paths_at_their_limits_are_as_good_as_any(twins: Twins) -> None:
    twins.compare("make {kind} %255\n {line} -> *", kind="regular; dir", line=on(NEEDS_EXISTING, "%255"))
    twins.compare("make regular %bytes\n {line} -> *", line=on(NEEDS_EXISTING, "%bytes"))
    existing = [line for line in on(NEEDS_EXISTING, "%path4095") if "rmdir" not in line]
    twins.compare("make regular f\n {line} -> *", line=existing)
    names = LONG["%dirs"].split("/")
    deep = "\n".join(f"mkdir {'/'.join(names[: i + 1])} 0755" for i in range(len(names)))
    script = f"make regular f\n {deep}\n {{line}} -> ok\n stat %dirs/f -> ENOENT"
    twins.compare(script, line="mkdir %dirs/x 0755; link f %dirs/x")


@pytest.mark.parametrize("user", USERS)
def test_every_directory_on_the_way_must_be_searchable(twins: Twins, user: str) -> None:
    """The bits of the class that counts decide, whatever the others have."""
    shift = CLASS_SHIFT[user]
    start = f"mkdir d 0777\n make regular f\n chown f {user} {user}\n chmod . 0777\n chown d ann ann\n"
    existing = f"make regular d/x\n chown d/x {user} {user}\n chmod d {{mode}}\n {user}: {{line}} -> *"
    new = f"chmod d {{mode}}\n {user}: {{line}} -> *"
    for digit in (1, 3, 6):
        modes = (f"{0o777 & ~(7 << shift) | digit << shift:04o}", f"{digit << shift:04o}")
        found = twins.compare(start + existing, mode=modes, line=on(NEEDS_EXISTING, "d/x"))
        found += twins.compare(start + new, mode=modes, line=on(MAKES, "d/x"))
        if digit == 6 and user != "root":
            assert set(found) == {"EACCES"}
        elif digit == 3 or user == "root":
            assert "EACCES" not in found


def test_links_that_lead_round(twins: Twins) -> None:
    loop = "symlink l1 l0\n symlink l0 l1\n make regular f\n"
    twins.compare(loop + "{line} -> ELOOP", line=on(EVERY_PATH_OPERATION, "l0/x"))
    twins.compare(loop + "{line} -> *", line=on(EVERY_PATH_OPERATION, "l0"))
    following = """chmod l0 0600; chown l0 ann ann; open l0 O_RDONLY; open l0 O_CREAT,O_RDWR; truncate l0 1;
        utimens l0 1 2; stat l0"""
    twins.compare(loop + "{line} -> ELOOP", line=following)
    twins.compare(loop + "lstat l0 -> ok\n readlink l0 -> l1")


def test_forty_links_on_the_way_and_no_more(twins: Twins) -> None:
    def chain(length: int) -> str:
        return "\n".join([f"make regular l{length}", *(f"symlink l{i + 1} l{i}" for i in range(length))])

    twins.compare(chain(40) + "\nstat l0 -> ok", chain(41) + "\nstat l0 -> ELOOP")


def test_links_are_followed_by_those_who_follow(twins: Twins) -> None:
    targets = "regular; dir; none"
    script = "make regular f\n make {target} t\n symlink t l\n {line} -> *\n stat t -> *"
    twins.compare(script, target=targets, line=on(EVERY_PATH_OPERATION, "l"))
    script = "make regular f\n mkdir d 0755\n make {target} d/t\n symlink ../d e\n symlink d m\n {line} -> *"
    twins.compare(script, target=targets, line=on(EVERY_PATH_OPERATION, "m/t"))


@pytest.mark.parametrize("path", ["x/", "x/.", "x/..", ".", "..", "x/../x", "l/", "l/."])
def test_slashes_and_dots(twins: Twins, path: str) -> None:
    lines = on(EVERY_PATH_OPERATION, path)
    if path in {".", ".."}:  # the harness's own directories are of no use to compare
        lines = [line for line in lines if line.split()[0] in _HARMLESS_ON_DOTS]
    script = "make regular f\n make {kind} x\n symlink x l\n {line} -> *"
    twins.compare(script, kind="regular; dir; none", line=lines)


_HARMLESS_ON_DOTS = {"rename", "rmdir", "unlink", "mkdir", "link", "symlink", "mkfifo", "open", "readlink", "truncate"}


def test_the_others_have_no_way_into_a_closed_directory(twins: Twins) -> None:
    """The same through a handle on the directory, which was opened before it was closed."""
    start = "mkdir d 0755\n make regular d/x\n hold h d O_RDONLY\n chmod d 0700\n"
    twins.compare(start + "{user}: list d -> EACCES\n flist h -> ok", user="bob; eve")
