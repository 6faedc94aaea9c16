"""Errors of paths, for every operation that takes a path."""

import pytest

from tests.kvfs.conformance.kinds import EVERY_PATH_OPERATION, MAKES, NEEDS_EXISTING, on
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]


def test_a_path(twins: Twins) -> None:
    for operations, path, expected in (
        (EVERY_PATH_OPERATION, "f/x", "ENOTDIR"),
        (EVERY_PATH_OPERATION, "missing/x", "ENOENT"),
        (NEEDS_EXISTING, "d/missing", "ENOENT"),
        (MAKES, "%255", "ok"),
        (MAKES, "%bytes", "ok\n list . -> ok"),
        (EVERY_PATH_OPERATION, "%256", "ENAMETOOLONG"),
        (EVERY_PATH_OPERATION, "%256/x", "ENAMETOOLONG"),
    ):
        twins.compare(f"make regular f\n mkdir d 0755\n {{line}} -> {expected}", line=on(operations, path))


def test_names_at_their_limits_are_as_good_as_any(twins: Twins) -> None:
    twins.compare("make {kind} %255\n {line} -> *", kind="regular; dir", line=on(NEEDS_EXISTING, "%255"))
    twins.compare("make regular %bytes\n {line} -> *", line=on(NEEDS_EXISTING, "%bytes"))


def test_links_are_followed_by_those_who_follow(twins: Twins) -> None:
    targets = "regular; dir; none"
    script = "make regular f\n make {target} t\n symlink t l\n {line} -> *\n stat t -> *"
    twins.compare(script, target=targets, line=on(EVERY_PATH_OPERATION, "l"))
    script = "make regular f\n mkdir d 0755\n make {target} d/t\n symlink ../d e\n symlink d m\n {line} -> *"
    twins.compare(script, target=targets, line=on(EVERY_PATH_OPERATION, "m/t"))
