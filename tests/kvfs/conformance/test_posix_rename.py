"""Renames: every kind over every kind, with and without flags; and what may not move where."""

import pytest

from tests.kvfs.conformance.kinds import FILES
from tests.kvfs.conformance.twins import Twins
from tests.kvfs.mounted import needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

RENAMES = """rename f t; renameat2 f t 0; renameat2 f t NOREPLACE; renameat2 f t EXCHANGE;
    renameat2 f t NOREPLACE,EXCHANGE"""
OVER = "make {source} f\n make {target} t\n {line} -> *\n lstat f -> *\n lstat t -> *"


def test_every_kind_over_every_kind(twins: Twins) -> None:
    targets = (*FILES, "none")
    found = twins.compare(OVER, source=FILES, target=targets, line=RENAMES)
    assert len(found) == len(FILES) * len(targets) * 5
    within = OVER.replace(" f", " d/f").replace(" t", " e/t")
    twins.compare("mkdir d 0755\n mkdir e 0755\n" + within, source=FILES, target=targets, line="rename d/f e/t")
    twins.compare(OVER, source="char; dir", target="block; symlink", line=RENAMES)


def test_directories_over_directories(twins: Twins) -> None:
    twins.compare(
        "mkdir d 0755\n mkdir e 0755\n make regular e/x\n rename d e -> ENOTEMPTY\n rename e d -> ok\n list d -> ['x']",
        "mkdir d 0755\n mkdir d/s 0755\n mkdir e 0755\n rename d e -> ok\n lstat e/s -> ok",
        "mkdir d 0755\n rename d d -> ok\n rename d d/x -> EINVAL\n rename d d/x/y -> ENOENT",
        "mkdir d 0755\n mkdir d/e 0755\n mkdir d/e/f 0755\n rename d d/e/f -> EINVAL\n rename d d/e/f/g -> EINVAL",
        "mkdir d 0755\n mkdir d/e 0755\n rename d/e d -> ENOTEMPTY\n renameat2 d/e d EXCHANGE -> *",
        "mkdir d 0755\n mkdir d/e 0755\n renameat2 d d/e EXCHANGE -> EINVAL\n renameat2 d/e . EXCHANGE -> *",
    )


def test_names_of_one_file(twins: Twins) -> None:
    """POSIX: then nothing happens, and both names stay."""
    twins.compare(
        "make regular f\n link f g\n rename f g -> ok\n lstat f -> ok\n lstat g -> ok\n rename f f -> ok",
        "make regular f\n link f g\n renameat2 f g EXCHANGE -> ok\n renameat2 f g NOREPLACE -> EEXIST",
        "symlink t l\n link l m\n rename l m -> ok\n lstat l -> ok",
        "make regular f\n symlink f l\n rename f l -> ok\n lstat l -> ok\n lstat f -> ENOENT",
    )


def test_what_is_replaced_loses_a_name(twins: Twins) -> None:
    start = (
        "make {kind} f\n make {kind} t\n link t u\n utimens f 5 6\n rename f t -> ok\n lstat u -> ok\n lstat t -> ok\n"
    )
    twins.compare(start + "rename t u -> ok\n lstat u -> ok", kind="regular; fifo; socket")
