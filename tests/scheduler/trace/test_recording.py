"""TRACE over a real scheduler: records of calls and steps, the right to them, and the state after a recorder's end."""

import errno
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from libsym.abi import NO_TIMEOUT, Op
from libsym.channel.server import Request
from libsym.errors import StepFailed
from scheduler.batch.prefill import TextPrefill
from scheduler.operations import trace as operation
from scheduler.trace.records import Block, BlockKind, CallKind
from tests.scheduler.bench import Program


def trace(number, timeout_ms=NO_TIMEOUT):
    return Request(Op.TRACE, 0, number, 0, (timeout_ms, 0, 0, 0), b"")


@asynccontextmanager
async def traced(bench, lip):
    """Record with TRACE call 1."""
    async with trio.open_nursery() as nursery:
        bench.gate.handle(lip, trace(1), nursery)
        await trio.testing.wait_all_tasks_blocked()
        yield
        bench.gate.handle(lip, Request(Op.CANCEL, 0, 99, 0, (1, 0, 0, 0), b""), nursery)
        await ended(lip, 1)


def blocks_of(lip, number):
    """Return the blocks of a TRACE call, without its header and its end."""
    found = [(args, payload) for args, payload, _ in lip.channel.replies[number][1:] if payload and args]
    return [Block.parse(BlockKind(kind), num, num_details, payload) for (kind, num, num_details, *_), payload in found]


def joined(lip, number, kind):
    found = [block.records for block in blocks_of(lip, number) if block.kind is kind]
    return np.concatenate(found) if found else np.zeros(0)


def seats(lip, number):
    return np.concatenate([block.details for block in blocks_of(lip, number) if block.kind is BlockKind.STEPS])


async def until(condition):
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - what it waits for is a program's view, which has no event
            await trio.sleep(0.001)


async def ended(lip, number):
    await until(lambda: number in lip.channel.over)


async def test_all_calls_and_all_their_rows_are_in_a_trace(bench):
    lip = bench.lip()
    async with traced(bench, lip):
        program = Program(77, 1234)
        first, second = bench.file(), bench.file()
        results = [
            bench.submit(first, range(200), program=program),
            bench.submit(second, [5], program=program),
            bench.submit(first, [6], program=program),
        ]
        for result in results:
            await result.wait()
        bench.steps.failure = OSError("the decoder is out of order")
        results.append(bench.submit(second, [7], program=program))
        with pytest.raises(StepFailed):
            await results[3].wait()
    assert lip.channel.errors[1] == errno.ECANCELED
    header = json.loads(lip.channel.replies[1][0][1])
    assert header["model"] == "tiny"
    assert header.keys() >= {"backend", "precision", "processor", "clock"}

    arrivals = joined(lip, 1, BlockKind.ARRIVALS)
    assert arrivals["num_tokens"].tolist() == [200, 1, 1, 1]
    assert set(arrivals["pid"]) == {77}
    assert set(arrivals["uid"]) == {1234}
    assert arrivals["file"].tolist() == [each.inode.number for each in (first, second, first, second)]
    assert set(arrivals["kind"]) == {CallKind.PREDICTION}
    assert len(set(arrivals["call"].tolist())) == 4

    answers = {int(each["call"]): each for each in joined(lip, 1, BlockKind.ANSWERS)}
    found = [answers[call] for call in arrivals["call"].tolist()]
    assert [each["errno"] for each in found] == [0, 0, 0, errno.EIO]
    assert [each["num_entries"] for each in found] == [200, 1, 1, 0]

    steps, members = joined(lip, 1, BlockKind.STEPS), seats(lip, 1)
    assert len(steps) == bench.batches.statistics.num_steps
    assert steps["num_rows"].sum() == bench.batches.statistics.num_tokens == members["num_now"].sum()
    assert steps["num_prefill_rows"].sum() == 200
    assert steps["num_calls"].sum() == len(members)
    assert (steps["ended_ns"] >= steps["began_ns"]).all()
    of_first = members[members["call"] == arrivals["call"][0]]
    assert of_first["length"].tolist() == np.cumsum([0, *of_first["num_now"][:-1]]).tolist()
    pairs = sum(row + 1 for row in range(200))
    assert steps["num_pairs"].sum() == pairs


async def test_entries_of_pages_that_decodes_share_count_once(bench):
    lip = bench.lip()
    base = bench.file()
    await bench.submit(base, range(40)).wait()
    fork = bench.fs.kv_fork(lip.credentials, base, None, 0o600)
    other = await bench.held(lambda: bench.submit(bench.file(), [1]))  # so that both decodes are in the next one
    async with traced(bench, lip):
        results = [bench.submit(each, [9]) for each in (base, fork)]
        await bench.finish(other, *results)
    arrivals = joined(lip, 1, BlockKind.ARRIVALS)
    assert len(arrivals) == 3, "also that of the call that was in flight"
    both = joined(lip, 1, BlockKind.STEPS)[-1]
    assert both["num_calls"] == 2
    assert both["num_entries"] == 32 + 9 + 9, "a page is shared; of the last one each has its own, and its new entry"


async def test_a_trace_ends_by_itself_after_its_time_and_is_for_those_who_run_the_daemon(bench):
    for uid, timeout_ms, code in ((0, 0, 0), (1000, NO_TIMEOUT, errno.EPERM)):
        lip = bench.lip(uid)
        async with trio.open_nursery() as nursery:
            bench.gate.handle(lip, trace(1, timeout_ms), nursery)
            await ended(lip, 1)
        assert lip.channel.errors[1] == code
        assert not bench.batches.recorder.is_on


async def test_a_wrong_time_and_one_trace_too_many_are_refused(bench):
    lip = bench.lip()
    async with trio.open_nursery() as nursery:
        bench.gate.handle(lip, trace(1, -2), nursery)
        for number in range(2, 2 + operation.MAX_RECORDINGS):
            bench.gate.handle(lip, trace(number), nursery)
        await trio.testing.wait_all_tasks_blocked()
        bench.gate.handle(lip, trace(99), nursery)
        await ended(lip, 99)
        assert lip.channel.errors == {1: errno.EINVAL, 99: errno.EBUSY}
        nursery.cancel_scope.cancel()
    assert not bench.batches.recorder.is_on, "their program has gone"


async def test_to_one_who_does_not_read_nothing_more_is_sent_until_the_end(bench):
    lip = bench.lip()
    async with traced(bench, lip):
        lip.channel.num_waiting_replies = 1
        await bench.submit(bench.file(), [1, 2, 3]).wait()
        await trio.sleep(3 * operation.DRAIN_S)
        assert len(lip.channel.replies[1]) == 1, "the header alone"
    assert joined(lip, 1, BlockKind.STEPS)["num_rows"].sum() == 3


async def test_a_call_whose_program_goes_is_over_in_the_trace(bench):
    lip, program = bench.lip(), Program(5)
    async with traced(bench, lip):
        await bench.held(lambda: bench.submit(bench.file(), [1], program=program))
        bench.batches.drop(program)
        bench.steps.gate.set()
        await until(lambda: not bench.batches.num_waiting)
    assert joined(lip, 1, BlockKind.ANSWERS)["errno"].tolist() == [errno.ECONNRESET]


async def test_a_text_that_is_written_is_told_as_one(bench):
    lip = bench.lip()
    async with traced(bench, lip):
        prefill = TextPrefill(bench.batches, bench.file(), 4242, Program(4242).program, print)
        prefill.append(range(20))
        await prefill.wait(0)
    (arrival,) = joined(lip, 1, BlockKind.ARRIVALS)
    assert (arrival["kind"], arrival["pid"], arrival["num_tokens"]) == (CallKind.WRITTEN_TEXT, 4242, 20)
