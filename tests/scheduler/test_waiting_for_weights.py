"""Calls that come before the decoder has its weights."""

import errno
from functools import cached_property

import pytest
import trio
import trio.testing

from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import PredCall
from tests.scheduler.bench import LIMITS, ME, Bench, Program


class EarlyBench(Bench):
    """A bench whose scheduler runs before there is a decoder."""

    @cached_property
    def batches(self):
        config = self.model.config
        return BatchScheduler(self.fs, None, config.max_positions, config.vocab_size, LIMITS)


@pytest.fixture
def bench(tmp_path):
    return EarlyBench(tmp_path)


async def test_calls_wait_for_the_decoder_in_the_order_of_their_arrival(bench):
    file = bench.file()
    results = [bench.submit(file, [token], program=Program(token)) for token in (1, 2, 3)]
    await trio.testing.wait_all_tasks_blocked()
    assert not any(result.is_over for result in results)
    assert bench.batches.num_waiting == 3
    assert bench.fs.kv_fork(ME, file, None).table.length == 0
    assert not bench.batches.has_decoder
    bench.batches.provide(bench.steps)
    (row,) = await results[-1].wait()
    assert bench.batches.has_decoder
    assert file.table.read()[0].tolist() == [1, 2, 3]
    assert (row == (await bench.submit(bench.file(), [1, 2, 3]).wait())[0]).all()


async def test_a_call_that_waits_for_the_decoder_can_be_cancelled(bench):
    file, errors = bench.file(), []
    free = bench.fs.statfs().num_free_pages
    call = PredCall(Program(), file, [1, 2], None, 0, errors.append)
    bench.batches.submit(call)
    await trio.testing.wait_all_tasks_blocked()
    bench.batches.cancel(call)
    assert [error.errno for error in errors] == [errno.ECANCELED]
    assert file.table.length == 0
    assert bench.fs.statfs().num_free_pages == free
    bench.batches.provide(bench.steps)
    await bench.submit(file, [7]).wait()
    assert file.table.read()[0].tolist() == [7]


async def test_a_program_that_goes_while_it_waits_for_the_decoder_costs_nobody_anything(bench):
    file, program = bench.file(), Program()
    free = bench.fs.statfs().num_free_pages
    result = bench.submit(file, list(range(100)), program=program)
    await trio.testing.wait_all_tasks_blocked()
    bench.batches.drop(program)
    assert bench.fs.statfs().num_free_pages == free
    bench.batches.provide(bench.steps)
    await bench.submit(file, [7]).wait()
    assert file.table.length == 1
    assert not result.is_over
