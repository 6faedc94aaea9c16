"""The file of a trace: all blocks that are whole come back."""

import io
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from libsym.errors import Invalid
from scheduler.trace import file as trace_file
from scheduler.trace.file import MAGIC, TraceReader, TraceWriter, read_trace
from scheduler.trace.records import (
    ACCOUNT,
    ANSWER,
    ARRIVAL,
    LOST,
    RECORDS,
    SEAT,
    STEP,
    VERSION,
    Block,
    BlockKind,
    block_bytes,
)

HEADER = {"model": "tiny", "clock": {"monotonic_ns": 5, "realtime_ns": 7}}


def some(dtype, count, rng):
    """Records of any bytes, but for floats, which are numbers."""
    found = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    if "predicted_ns" in dtype.names:
        found["predicted_ns"] = rng.random(count)
    return found


def steps(counts, rng):
    records = some(STEP, len(counts), rng)
    records["num_calls"], records["first_seat"] = counts, np.cumsum(counts) - counts
    return Block(BlockKind.STEPS, records, some(SEAT, sum(counts), rng))


def arrivals(counts, rng):
    records = some(ARRIVAL, len(counts), rng)
    records["num_accounts"], records["first_account"] = counts, np.cumsum(counts) - counts
    return Block(BlockKind.ARRIVALS, records, some(ACCOUNT, sum(counts), rng))


@pytest.fixture
def blocks():
    rng = np.random.default_rng(15)
    return [
        arrivals([1, 3, 0, 2], rng),
        steps([2, 0, 5], rng),
        Block.of(BlockKind.ANSWERS, some(ANSWER, 3, rng)),
        steps([1], rng),
        Block.of(BlockKind.LOST, np.array([(9, 4)], LOST)),
        arrivals([1], rng),
    ]


def written(blocks):
    """The bytes of a trace, and how long it was after each block."""
    file = io.BytesIO()
    writer = TraceWriter(file, HEADER)
    ends = [file.tell()]
    for block in blocks:
        writer.add(block)
        ends.append(file.tell())
    return file.getvalue(), ends


def read(data):
    reader = TraceReader(io.BytesIO(data), "x.trace")
    return list(reader.blocks()), reader


def block(head, stored):
    """Return a block with the right checksum."""
    numbers = struct.pack("<4I", *head)
    return struct.pack("<I", zlib.crc32(numbers + stored)) + numbers + stored


def same(block, other):
    return (block.kind, block.tobytes()) == (other.kind, other.tobytes())


def test_what_was_written_comes_back(blocks):
    data, _ = written(blocks)
    found, reader = read(data)
    first, second, _ = data.split(b"\n", 2)
    assert (first, json.loads(second), reader.header) == (CURRENT[:-1], HEADER, HEADER), "head(1) shows it"
    assert reader.torn_at is None
    assert len(found) == len(blocks)
    assert all(map(same, found, blocks))


def test_as_a_whole_details_count_through_the_file(blocks, tmp_path):
    path = tmp_path / "x.trace"
    path.write_bytes(written(blocks)[0])
    trace = read_trace(path)
    assert trace.steps["first_seat"].tolist() == [0, 2, 2, 7]
    assert trace.seats.tobytes() == b"".join(block.details.tobytes() for block in (blocks[1], blocks[3]))
    assert trace.arrivals["first_account"].tolist() == [0, 1, 4, 4, 6]
    assert (trace.num_lost, len(trace.answers), trace.torn_at) == (4, 3, None)
    path.write_bytes(written([])[0])
    trace = read_trace(path)
    assert [len(each) for each in (trace.steps, trace.seats, trace.arrivals, trace.answers)] == [0, 0, 0, 0]


def test_a_file_that_ends_anywhere_gives_the_blocks_that_are_whole(blocks):
    data, ends = written(blocks)
    for length in range(ends[0], len(data)):
        found, reader = read(data[:length])
        num_whole = sum(end <= length for end in ends[1:])
        assert len(found) == num_whole
        assert all(map(same, found, blocks))
        assert reader.torn_at == (None if length in ends else ends[num_whole])


def test_a_damaged_byte_ends_the_trace_there_and_never_changes_what_is_read(blocks):
    data, ends = written(blocks)
    for place in range(ends[0], len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        found, reader = read(bytes(damaged))
        num_before = sum(end <= place for end in ends[1:])
        assert len(found) == num_before
        assert all(map(same, found, blocks))
        assert reader.torn_at == ends[num_before]


BOMB = zlib.compress(bytes(10 << 20))
STRANGE = {
    "many answers": ((3, 2**31, 0, 8), bytes(8)),
    "many details": ((1, 1, 2**31, 8), bytes(8)),
    "many bytes": ((2, 1, 0, 2**31), bytes(64)),
    "another kind": ((77, 1, 0, 8), bytes(8)),
    "nothing": ((0, 0, 0, 0), b""),
    "more than it says": ((BlockKind.ANSWERS, 1, 0, len(BOMB)), BOMB),
}


@pytest.mark.parametrize(("head", "stored"), STRANGE.values(), ids=STRANGE)
def test_a_block_that_says_it_is_enormous_or_strange_is_not_believed(head, stored):
    data, ends = written([])
    found, reader = read(data + block(head, stored))
    assert (found, reader.torn_at) == ([], ends[0])


CURRENT = b"%s%d\n" % (MAGIC, VERSION)
REFUSED = [
    (b"%s%d\n{}\n" % (MAGIC, VERSION + 1), rf"version {VERSION + 1}, {VERSION} is the newest"),
    *(
        (data, r"x\.trace is no trace")
        for data in (b"", b"{}\n", b"symphony trace \n{}\n", b"symphony trace x\n{}\n", b"symphony trace 1")
    ),
    *((CURRENT + line, "without a header") for line in (b"", b"{}", b"[1]\n", b"{'a'}\n", b"\xff\n")),
]


@pytest.mark.parametrize(("data", "words"), REFUSED)
def test_what_does_not_begin_as_a_trace_of_a_known_version_is_refused(data, words):
    with pytest.raises(Invalid, match=words):
        read(data)


def test_a_block_is_cut_between_records_with_their_details(blocks):
    for block in blocks:
        parts = list(block.within(STEP.itemsize + 2 * SEAT.itemsize))
        assert len(parts) > 1 or len(block.records) == 1 or block.num_bytes <= STEP.itemsize + 2 * SEAT.itemsize
        joined = [trace_file._joined(block.kind, parts), trace_file._joined(block.kind, [block])]
        assert [each.tobytes() for each in joined[0]] == [each.tobytes() for each in joined[1]]


def test_records_have_no_padding_and_are_little_endian():
    """A loop in C fills them, and symphony-trace(5) has their offsets."""
    for dtype in (*RECORDS.values(), SEAT, ACCOUNT):
        fields: Any = dtype.fields
        assert sum(each.itemsize for each, *_ in fields.values()) == dtype.itemsize
        assert all(offset % each.itemsize == 0 for each, offset, *_ in fields.values()), "aligned"
    assert [dtype.itemsize for dtype in (ARRIVAL, ANSWER, STEP, SEAT, LOST)] == [56, 24, 64, 24, 16]
    assert block_bytes(BlockKind.STEPS, 2, 3) == 2 * 64 + 3 * 24
