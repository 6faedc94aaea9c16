"""Whether a log of SQLite's has lost commits: logs are made here by hand, as sqlite.org/walformat.html says."""

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

    def change(self, frame: int, place: int, data: bytes) -> None:
        start = 32 + frame * FRAME_BYTES + place
        self.bytes[start : start + len(data)] = data


def an_older_log_behind(log: Log) -> None:
    older = Log((6, 12))
    for _ in range(6):
        older.commit(3)
    log.bytes += older.bytes[len(log.bytes) :]


def failed_commits(log: Log) -> None:
    log.commit(9, fails=True)
    log.commit(6, fails=True)
    log.commit(2)


@pytest.mark.parametrize(
    ("happens", "is_loss"),
    [
        pytest.param(lambda _log: None, False, id="nothing"),
        pytest.param(failed_commits, False, id="failed commits"),
        pytest.param(an_older_log_behind, False, id="an older log behind it"),
        pytest.param(lambda log: log.change(10, 0, bytes(FRAME_BYTES)), False, id="a commit that the power cut"),
        pytest.param(lambda log: log.change(7, 1000, b"x"), True, id="a changed byte"),
        pytest.param(lambda log: log.change(4, 0, bytes(2 * FRAME_BYTES)), True, id="a lost block"),
    ],
)
def test_commits_behind_what_the_disk_has_changed_are_lost_and_a_crash_loses_none(happens, is_loss, tmp_path):
    log = Log()
    for _ in range(4):
        log.commit(3)
    happens(log)
    (tmp_path / "log").write_bytes(log.bytes)
    assert has_lost_commits(tmp_path / "log") == is_loss
