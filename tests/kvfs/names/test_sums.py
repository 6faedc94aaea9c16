"""Checksums of a plain file: a commit takes no sum of bytes that a change may be writing."""

from kvfs.names.sums import EXTENT_BYTES, Sums


def test_a_commit_takes_the_sum_of_new_bytes_when_no_change_is_under_way():
    sums, data = Sums(), bytes(EXTENT_BYTES)
    sums.begin(0, EXTENT_BYTES)
    sums.wrote(0, data)
    sums.end()
    sums.begin(EXTENT_BYTES, EXTENT_BYTES + 1)
    assert sums.take(EXTENT_BYTES, is_synced=True, is_quiet=True) is None
    sums.end()
    taken = sums.take(EXTENT_BYTES, is_synced=True, is_quiet=True)
    assert taken is not None
    assert len(taken.kept) == 1
