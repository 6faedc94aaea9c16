"""The bytes of a plain file, read by a worker while its owner changes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.names.plain import PlainFile
from libsym.errors import SymError

WHOLE = bytes(range(256)) * 16


@pytest.fixture
def file(tmp_path: Path) -> PlainFile:
    plain = PlainFile(tmp_path, "1.plain")
    plain.write_at(0, WHOLE)
    return plain


def read_with(file: PlainFile, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Read the file; `change` happens when the worker has decided what to read, but has not read it yet."""
    pread = os.pread

    def late(fd: int, size: int, offset: int) -> bytes:
        change()
        return pread(fd, size, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", late)
        return file.read_at(0, len(WHOLE))


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_is_cut_while_it_is_read_ends_where_it_was_cut(
    file: PlainFile, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_with(file, lambda: file.resize(size), monkeypatch) == WHOLE[:size]
    assert file.read_at(0, len(WHOLE)) == WHOLE[:size]


def test_no_read_begins_that_expects_what_is_about_to_be_cut(file: PlainFile, monkeypatch: pytest.MonkeyPatch) -> None:
    ftruncate, found = os.ftruncate, []

    def late(fd: int, size: int) -> None:
        found.append(file.read_at(0, len(WHOLE)))
        ftruncate(fd, size)
        found.append(file.read_at(0, len(WHOLE)))

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", late)
        file.resize(100)
    assert found == [WHOLE[:100]] * 2


def test_a_cut_that_fails_changes_nothing(file: PlainFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, size: int) -> None:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", fail)
        with pytest.raises(Exception, match="can't resize"):
            file.resize(100)
    assert file.read_at(0, 2 * len(WHOLE)) == WHOLE


def test_a_late_reader_of_a_file_that_is_gone_does_not_bring_it_back(
    file: PlainFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left behind, it would never be removed."""
    opened = PlainFile._opened

    def late(plain: PlainFile) -> object:
        file.discard()
        return opened(plain)

    with monkeypatch.context() as patched:
        patched.setattr(PlainFile, "_opened", late)
        assert file.read_at(0, len(WHOLE)) == b""
    assert not file.path.exists()


def test_bytes_that_are_missing_below_are_an_error(file: PlainFile) -> None:
    os.truncate(file.path, 100)
    with pytest.raises(Exception, match=r"gave 100 of 4096 bytes"):
        file.read_at(0, len(WHOLE))


@pytest.mark.parametrize(
    ("code", "level"),
    [(errno.EFBIG, "DEBUG"), (errno.EINVAL, "DEBUG"), (errno.EIO, "WARNING"), (errno.ENOSPC, "WARNING")],
)
def test_the_log_is_for_what_is_wrong_with_the_disk_not_for_what_a_caller_asked(
    file: PlainFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, level: str
) -> None:
    def fail(*_arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    caplog.set_level("DEBUG")
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(SymError) as caught:
        file.write_at(0, b"x")
    assert caught.value.errno == code
    assert [record.levelname for record in caplog.records] == [level]
