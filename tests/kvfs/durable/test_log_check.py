"""Whether a log of SQLite's has lost commits: logs are made here by hand, as sqlite.org/walformat.html says."""

from __future__ import annotations

import struct

import pytest

from kvfs.durable.log_check import has_lost_commits

SALTS = (7, 11)
PAGE_BYTES = 4096
FRAME_BYTES = 24 + PAGE_BYTES


def sums_after(sums: tuple[int, int], data: bytes) -> tuple[int, int]:
    first, second = sums
    for one, other in struct.iter_unpack("<2I", data):
        first = first + one + second & 0xFFFFFFFF
        second = second + other + first & 0xFFFFFFFF
    return first, second


class Log:
    """A log, as a writer sees it: a commit that fails is written, and the next one goes to its place."""

    def __init__(self, salts: tuple[int, int] = SALTS) -> None:
        header = struct.pack(">6I", 0x377F0682, 3007000, PAGE_BYTES, 0, *salts)
        self.salts, self.sums = salts, sums_after((0, 0), header)
        self.bytes = bytearray(header + struct.pack(">2I", *self.sums))
        self.end = len(self.bytes)

    def commit(self, num_frames: int, *, fails: bool = False) -> None:
        sums, end = self.sums, self.end
        for number in range(num_frames):
            page = bytes([num_frames]) * PAGE_BYTES
            head = struct.pack(">2I", number + 1, 9 if number == num_frames - 1 else 0)
            sums = sums_after(sums, head + page)
            self.bytes[end : end + FRAME_BYTES] = head + struct.pack(">4I", *self.salts, *sums) + page
            end += FRAME_BYTES
        if not fails:
            self.sums, self.end = sums, end

    def lose(self, first_frame: int, num_frames: int) -> None:
        start = 32 + first_frame * FRAME_BYTES
        self.bytes[start : start + num_frames * FRAME_BYTES] = bytes(num_frames * FRAME_BYTES)

    def flip(self, frame: int) -> None:
        self.bytes[32 + frame * FRAME_BYTES + 1000] ^= 1


def whole() -> Log:
    log = Log()
    for _ in range(4):
        log.commit(3)
    return log


def what_failed_commits_left() -> Log:
    log = whole()
    log.commit(9, fails=True)
    log.commit(6, fails=True)
    log.commit(2)
    return log


def an_older_log() -> Log:
    log, older = whole(), Log((6, 12))
    for _ in range(6):
        older.commit(3)
    log.bytes += older.bytes[len(log.bytes) :]
    return log


def a_commit_that_the_power_cut() -> Log:
    log = whole()
    log.lose(10, 1)
    return log


def a_flipped_bit() -> Log:
    log = whole()
    log.flip(7)
    return log


def a_lost_block() -> Log:
    log = whole()
    log.lose(4, 2)
    return log


@pytest.mark.parametrize("make", [whole, what_failed_commits_left, an_older_log, a_commit_that_the_power_cut])
def test_a_log_that_a_crash_may_leave_has_lost_nothing(make, tmp_path):
    (tmp_path / "log").write_bytes(make().bytes)
    assert not has_lost_commits(tmp_path / "log")


@pytest.mark.parametrize("make", [a_flipped_bit, a_lost_block])
def test_commits_behind_what_the_disk_has_changed_are_lost(make, tmp_path):
    (tmp_path / "log").write_bytes(make().bytes)
    assert has_lost_commits(tmp_path / "log")
