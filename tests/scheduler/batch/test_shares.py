"""A program has one share of the steps, however many connections and children it has."""

import pytest

from scheduler.batch.policy import StepLimits
from tests.scheduler.bench import Bench, Program


@pytest.fixture
def bench(tmp_path):
    """Two seats in a step."""
    return Bench(tmp_path, limits=StepLimits(max_calls=2, max_tokens=64))


async def test_the_connections_of_a_program_have_one_share_together(bench):
    many, one = [Program(pid) for pid in (1, 2, 3)], Program(9)
    for each in many:
        each.program = many[0].program
    order = []

    def submit(caller, name):
        result = bench.submit(bench.file(), [1], program=caller)
        finish = result.finish

        def answered(outcome):
            order.append(name)
            finish(outcome)

        result.call._answer = answered
        return result

    bench.steps.hold()
    first = bench.submit(bench.file(), [1], program=Program(5))
    await bench.steps.wait_entered()
    results = [submit(caller, "many") for caller in many for _ in range(2)]
    results += [submit(one, "one") for _ in range(6)]
    bench.steps.gate.set()
    for result in (first, *results):
        await result.wait()
    assert sorted(order[:6]) == ["many"] * 3 + ["one"] * 3


async def test_the_share_goes_with_the_program_and_not_with_a_connection(bench):
    first, second = Program(1), Program(2)
    second.program = first.program
    await bench.submit(bench.file(), [1], program=first).wait()
    shares = bench.batches._run.shares._programs
    held = dict(shares[first.program])
    bench.batches.drop(first)
    await bench.submit(bench.file(), [1], program=second).wait()
    assert dict(shares[first.program]) == held
    bench.batches.drop(second)
    bench.batches.forget(first.program)
    assert first.program not in shares


async def test_a_program_that_goes_during_a_call_is_forgotten_when_the_call_is_over(bench):
    caller, shares = Program(1), bench.batches._run.shares._programs
    bench.steps.hold()
    result = bench.submit(bench.file(), [1], program=caller)
    await bench.steps.wait_entered()
    bench.batches.forget(caller.program)
    assert caller.program in shares
    bench.steps.gate.set()
    await result.wait()
    assert caller.program not in shares
