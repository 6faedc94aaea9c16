"""Random loads for the fake machine: programs that arrive, think, prefill and decode."""

import random

import trio

from scheduler.batch.policy import NO_DEADLINE, StepLimits
from tests.scheduler.fake_machine import SECOND, Account, Call, Machine, Tree, now_ns


def random_load(seed: int, num_steps: int = 30) -> Machine:
    """Return the machine after this many steps of a load; it has checked all of them."""
    chance = random.Random(seed)
    users = [
        [chance.choice((1, 1, 2, 8)) for _ in range(chance.choice((1, 1, 2)))] for _ in range(chance.choice((1, 2, 3)))
    ]
    tree = Tree([[float(weight) for weight in each] for each in users], [chance.choice((1.0, 1.0, 4.0)) for _ in users])
    min_chunk = chance.choice((1, 4, 16))
    limits = StepLimits(
        max_tokens=chance.choice((16, 64)),
        max_calls=chance.choice((2, 4, 8, 64)),
        max_digested=16,
        min_chunk=min_chunk,
        step_s=chance.choice((0.01, 0.1, 1.0)),
    )
    programs = [chance.choice(tree.accounts) for _ in range(chance.randrange(1, 12))]
    starts = [Program(chance.randrange(1 << 30), account, tree.new_program(account)) for account in programs]
    machine = Machine(tree, limits, row_ms=chance.choice((0.1, 5.0, 50.0)), base_ms=chance.choice((0.0, 5.0, 500.0)))
    run_programs(machine, starts, num_steps)
    return machine


def stubborn_load(seed: int, num_steps: int = 400) -> Machine:
    """Every account wants more than there is, of all kinds: slow steps, so that fair queueing has debts to forget."""
    chance = random.Random(seed)
    tree = Tree([[1.0, 3.0][: chance.randrange(1, 3)] for _ in range(chance.randrange(1, 4))])
    programs: list[Saturating] = []
    for account in tree.accounts:
        for count, left in ((chance.choice((0, 1, 12)), 1), (1, chance.choice((2, 30))), (chance.randrange(3), 300)):
            share, priority = tree.new_program(account), chance.choice((-100, 0, 100))
            is_digested = left > 1 and chance.random() < 0.2
            deadline_s = chance.choice((None, 20.0))
            programs.append(Saturating(account, share, count, left, priority, is_digested, deadline_s))
    limits = StepLimits(max_tokens=64, max_calls=chance.choice((8, 64)), max_digested=16, min_chunk=16, step_s=0.1)
    machine = Machine(tree, limits, row_ms=chance.choice((10.0, 50.0)))
    run_programs(machine, programs, num_steps)
    return machine


def burst_load(seed: int, num_steps: int = 60) -> Machine:
    """Crowds of one account arrive together again and again, sometimes beside a program of another account."""
    chance = random.Random(seed)
    tree = Tree([[1.0], [1.0]])
    limits = StepLimits(max_tokens=64, max_calls=chance.choice((16, 64)), max_digested=16, min_chunk=4, step_s=0.02)
    crowd, every_s, priorities = (
        tree.accounts[0],
        chance.choice((0.5, 5.0)),
        chance.choice(((0,), (0,), (-100, 0, 100))),
    )
    programs: list[Program | InCrowd] = [
        InCrowd(chance.randrange(1 << 30), crowd, tree.new_program(crowd), every_s, chance.choice(priorities))
        for _ in range(chance.choice((4, 20, 60)))
    ]
    if chance.random() < 0.3:
        other = tree.accounts[1]
        programs.append(Program(chance.randrange(1 << 30), other, tree.new_program(other)))
    machine = Machine(tree, limits, row_ms=chance.choice((0.2, 2.0, 10.0, 30.0)), base_ms=chance.choice((0.0, 5.0)))
    run_programs(machine, programs, num_steps)
    return machine


def run_programs(machine: Machine, programs: list, num_steps: int) -> None:
    async def main():
        async with trio.open_nursery() as nursery:
            for program in programs:
                nursery.start_soon(program.run, machine)
            await machine.run(num_steps)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class Program:
    """Goes on for ever: thinks, prefills, decodes, with some calls beside each other."""

    def __init__(self, seed: int, account: Account, share: int) -> None:
        self._chance = random.Random(seed)
        self._account, self._share = account, share
        self._think_s = self._chance.choice((0.0, 0.0, 0.01, 1.0))
        self._priority = self._chance.choice((-100, 0, 0, 0, 100))
        self._deadline_s = self._chance.choice((None, None, 0.1, 10.0))
        self._longest = self._chance.choice((1, 5, 100))
        self._num_decodes = self._chance.choice((0, 5, 1000))
        self._is_digested = self._chance.random() < 0.1
        self._num_threads = self._chance.choice((1, 1, 4))

    async def run(self, machine: Machine) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self._num_threads):
                nursery.start_soon(self._run_thread, machine)

    async def _run_thread(self, machine: Machine) -> None:
        await trio.sleep(self._chance.random() * self._think_s)
        while True:
            call = await self._call(machine, self._chance.randrange(self._longest) + 1, 0)
            for _ in range(self._num_decodes):
                call = await self._call(machine, 1, call.length)
            await trio.sleep(self._chance.expovariate(1) * self._think_s)

    async def _call(self, machine: Machine, left: int, length: int) -> Call:
        deadline_ns = NO_DEADLINE if self._deadline_s is None else now_ns() + round(self._deadline_s * SECOND)
        is_digested = self._is_digested and left > 1
        call = Call(self._account, self._share, left, length, self._priority, deadline_ns, is_digested)
        await machine.compute(call)
        return call


class InCrowd:
    """Begins with the others of its crowd, decodes for a while, and waits for the next time."""

    def __init__(self, seed: int, account: Account, share: int, every_s: float, priority: int) -> None:
        self._chance = random.Random(seed)
        self._account, self._share, self._every_s, self._priority = account, share, every_s, priority
        self._left = self._chance.choice((2, 16, 20, 64, 100, 300))
        self._length = self._chance.choice((0,) * 10 + (1000, 30_000))
        self._deadline_s = self._chance.choice((None,) * 10 + (2.0, 600.0))

    async def run(self, machine: Machine) -> None:
        while True:
            await trio.sleep(self._every_s - trio.current_time() % self._every_s + self._chance.random() * 0.1)
            length, begun_ns = self._length, 0
            for left in (self._left, *[1] * self._chance.choice((5, 50))):
                deadline_ns = NO_DEADLINE if self._deadline_s is None else now_ns() + round(self._deadline_s * SECOND)
                call = Call(self._account, self._share, left, length, self._priority, deadline_ns, begun_ns=begun_ns)
                await machine.compute(call)
                length, begun_ns = length + left, begun_ns or now_ns()


class Saturating:
    """Always has so many calls of so many entries."""

    def __init__(
        self,
        account: Account,
        share: int,
        count: int,
        left: int,
        priority: int = 0,
        is_digested: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        self._account, self._share, self._count, self._left = account, share, count, left
        self._priority, self._is_digested, self._deadline_s = priority, is_digested, deadline_s

    async def run(self, machine: Machine) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(self._count):
                nursery.start_soon(self._run_one, machine)

    async def _run_one(self, machine: Machine) -> None:
        while True:
            call = Call(self._account, self._share, self._left, 0, self._priority, is_digested=self._is_digested)
            if self._deadline_s is not None:
                call.deadline_ns = now_ns() + round(self._deadline_s * SECOND)
            await machine.compute(call)
