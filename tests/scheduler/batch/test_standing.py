"""The standing run: files join and leave it, and no step waits for what only Python can decide.

Steps are held by the test, and what they compute is that the next token is the last one and one more. A program is a
real channel, whose rings the test reads and writes itself.
"""

import copy
import errno
import math
import os
import re
import stat
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from kvfs.facts import xattrs
from kvfs.names.tree import Credentials
from kvfs.pages.accounts import AccountLimits
from libsym.abi import Finish, Op
from libsym.channel.hot import HOT_FUNCTIONS
from libsym.channel.server import Request
from libsym.errors import OverQuota
from scheduler._loop import ffi, lib
from scheduler.batch import aside, batch_scheduler, standing
from scheduler.batch.accounting import TIME_BOUNDS_S
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import Decision
from scheduler.batch.cost_model import CostModel
from scheduler.batch.generation import Draft
from scheduler.batch.policy import StepLimits
from scheduler.batch.standing import StandingRun
from scheduler.programs.limits import NO_LIMITS, ProgramLimits
from tests.decoder.foreign_threads import foreign_threads, have_ended
from tests.patches import guard
from tests.scheduler.bench import ME, VOCAB_SIZE, Bench, Program
from tests.scheduler.standing_bench import Standing

COLD = -1
DEAR = {"rows_ns": [10**10] * 11}
"""Cost of steps that take so long that waiting is worth it."""


@pytest.fixture
def bench(tmp_path, request):
    return Standing(tmp_path, getattr(request, "param", None))


def seats(num):
    """Steps hold so many calls."""
    return pytest.mark.parametrize("bench", [StepLimits(max_calls=num)], indirect=True, ids=[f"{num} seats"])


ALLOWED: Any = np.full(-(-VOCAB_SIZE // 32), 0xFFFFFFFF, np.uint32)


class SlowGrammar:
    """Allows everything, but each decision waits to be let go. `forced`: tokens that follow a token."""

    def __init__(self, num_let_go=0, *, is_over_after=100, forced=()):
        self.asked = []
        self._forced = dict(forced)
        self._is_over_after = is_over_after
        self.gate = threading.Semaphore(num_let_go)

    def decide(self, token):
        self.asked.append(token)
        assert self.gate.acquire(timeout=20)
        is_over = len(self.asked) > self._is_over_after
        forced = np.array(self._forced.get(token, []), np.int32)
        return Decision(forced, None if is_over else memoryview(ALLOWED), is_over=is_over)


def used_by(caller):
    """Return a copy of the program's usage until now."""
    return copy.copy(caller.program.used)


def computes(bench, num_calls):
    return bench.until(lambda: used_by(bench.program).calls == num_calls)


def noted(found, value):
    found.append(value)
    return 0


# ---- whom the run waits for


@pytest.fixture
def replace(bench, monkeypatch):
    """Puts a function of the test's in place of one of libsym's; it gets the true one before its arguments."""
    hot = ffi.new("sym_hot_functions *", ffi.cast("sym_hot_functions *", HOT_FUNCTIONS)[0])
    monkeypatch.setattr(standing, "HOT_FUNCTIONS", int(ffi.cast("uintptr_t", hot)))
    monkeypatch.setattr(batch_scheduler, "LEARNS_EACH_S", math.inf)  # steps cost what the test says
    bench.batches = BatchScheduler(bench.fs, bench.steps, 2048, VOCAB_SIZE)
    callbacks = []

    def put(name, function):
        true = getattr(hot, name)
        callbacks.append(ffi.callback(ffi.typeof(true), partial(function, true)))
        setattr(hot, name, callbacks[-1])

    yield put
    callbacks.clear()


async def test_who_says_whom_to_wait_for_does_not_wait_for_the_run(bench, replace):
    at_ring, said, waited = threading.Event(), threading.Event(), list[bool]()

    def take(true, *arguments):
        at_ring.set()
        waited.append(said.wait(5))
        return true(*arguments)

    replace("take", take)
    bench.decode(bench.file(), 1)
    await trio.to_thread.run_sync(at_ring.wait, 20)
    bench.batches._run.expect(1)
    bench.batches._run.expect(-1)
    said.set()
    await bench.answered()
    assert all(waited), "its lock was taken"


class Looks:
    """Two files have come back before, and a step with both is held: what the run finds in their ring is the test's."""

    def __init__(self, bench, replace):
        self.bench = bench
        self.find = lambda true, *arguments: true(*arguments)
        self.asked = None
        """Handles that were asked for, once the step that is held has begun."""
        replace("take", self.take)
        replace("watch", lambda _true, _server: 1)

    def take(self, true, server, handle, *arguments):
        if self.asked is None:
            return true(server, handle, *arguments)
        self.asked.append(handle)
        return self.find(true, server, handle, *arguments)

    async def begin(self):
        bench = self.bench
        bench.batches._run.set_cost(ffi.new("sym_cost *", DEAR))
        self.handles = [bench.decode(bench.file(), number) for number in (1, 2)]
        await computes(bench, 2)
        for round_number in (1, 2):
            await trio.sleep(0.05)  # they think for longer than any of them is late by: none is taken for gone
            await bench.held(lambda: bench.submit(bench.file(), [1]))
            for number, handle in enumerate(self.handles):
                bench.decode_on(handle, 10 * round_number + number, 7 + round_number)
            bench.steps.hold_next()
            await bench.steps.wait_entered()
            if round_number == 1:
                bench.steps.gate.set()
                await computes(bench, 4)
        self.asked = []

    async def first_calls(self):
        """The first one's call is in the ring. Return the steps until one of both is answered."""
        bench, num_steps = self.bench, len(self.bench.steps.batches)
        bench.ring(self.handles[0], 30, 10)
        bench.steps.gate.set()
        await bench.until(lambda: {number for number, *_ in bench.replies()} & {30, 31})
        return bench.steps.batches[num_steps:]


@pytest.fixture
def looks(bench, replace):
    return Looks(bench, replace)


@pytest.mark.slow
async def test_who_comes_behind_a_call_of_the_gates_is_waited_for_and_that_is_handed_on_at_once(bench, looks, replace):
    handed_on = list[int]()
    replace("unwatch", lambda *_: noted(handed_on, len(looks.asked or [])))

    def find(true, server, handle, *arguments):
        if len(looks.asked) == 2:
            return COLD
        if len(looks.asked) == 3:
            bench.ring(looks.handles[1], 31, 10)
        return true(server, handle, *arguments)

    looks.find = find
    await looks.begin()
    handed_on.clear()
    steps = await looks.first_calls()
    first, second = looks.handles
    assert handed_on[0] == 2
    assert looks.asked[:3] == [first, second, second]
    assert len(steps[-1]) == 2, "it went without the one that came"


@pytest.mark.slow
async def test_a_call_of_a_file_that_is_not_in_the_run_is_handed_on_at_the_first_look(bench, looks, replace):
    handed_on = list[int]()
    replace("unwatch", lambda *_: noted(handed_on, len(looks.asked or [])))
    await looks.begin()
    handed_on.clear()
    bench.ring(looks.handles[1] + 1, 30, 10)
    bench.steps.gate.set()
    await bench.until(lambda: handed_on)
    assert handed_on[0] == 2, "others were waited for first"


@pytest.mark.slow
async def test_a_step_of_one_call_is_expected_to_take_what_one_of_the_latest_took(bench, looks):
    """Else a wait, which is bounded by that step, would be longer the more calls there were before."""

    def find(true, server, handle, *arguments):
        if len(looks.asked) == 4:
            bench.ring(looks.handles[1], 31, 10)
        return true(server, handle, *arguments)

    looks.find = find
    await looks.begin()
    three_entries_ns = 3 * 10**9  # a call's of the latest step: one row and these take nothing
    rows_ns = [-three_entries_ns, *[-10 * three_entries_ns] * 10]
    bench.batches._run.set_cost(ffi.new("sym_cost *", {"rows_ns": rows_ns, "entry_ns": 10**9}))
    assert (await looks.first_calls())[0] == [(3, 1)], "it waited for the other one"


async def test_a_ring_that_no_member_of_the_run_looks_at_is_the_gates_at_once(bench, replace):
    """A program computes one call; another thread's next one is in the ring, and is just what the run waits for."""
    handed_on, other = list[int](), bench.file()

    def submit_other(token):
        bench.program.stream = 77
        return bench.submit(other, [token], program=bench.program)

    bench.batches._run.set_cost(ffi.new("sym_cost *", DEAR))
    handle = bench.decode(bench.file(), 1)
    await submit_other(1).wait()
    await trio.sleep(0.1)  # the thread thinks for so long
    bench.steps.hold()
    result = submit_other(2)
    bench.decode_on(handle, 2)
    await bench.steps.wait_entered()
    bench.ring(handle, 3, 9)
    bench.ring(handle + 1, 4, 9)
    replace("watch", lambda *_: 1)
    replace("unwatch", lambda *_: noted(handed_on, 1))
    num_steps = len(bench.steps.batches)
    bench.steps.gate.set()
    await result.wait()
    await bench.until(lambda: handed_on)
    await submit_other(3).wait()
    assert len(bench.steps.batches[num_steps]) == 2, "it went without the other thread's call"


async def test_a_program_is_woken_for_a_call_that_the_run_finds_in_its_ring_and_leaves_to_the_gate(bench):
    bench.program.channel.arm()
    handle = await bench.held(lambda: bench.decode(bench.file(), 1))
    bench.ring(handle + 1, 2, 9)
    bench.steps.gate.set()
    with trio.fail_after(5), bench.program.nap:
        await trio.sleep_forever()


async def decoding_again(bench, think_s):
    """A program has thought for so long; its second call is in a step that is held. Return its handle."""
    handle = bench.decode(bench.file(), 1)
    await computes(bench, 1)
    await trio.sleep(think_s)
    await bench.held(lambda: bench.decode_on(handle, 2))
    return handle


async def test_a_generation_is_ready_as_soon_as_it_is_decided_what_it_may_draw(bench, replace, monkeypatch):
    """The run waits for nobody whom it would not wait for beside any other call."""
    grammar, is_decided, looks = SlowGrammar(1), threading.Event(), list[int]()

    class Native:
        def __getattr__(self, name):
            return getattr(lib, name)

        def sym_loop_decide(self, *arguments):
            lib.sym_loop_decide(*arguments)
            if len(grammar.asked) == 2:
                is_decided.set()

    def take(true, *arguments):
        if len(bench.steps.batches) == num_steps + 2:  # its second token is computed
            if not looks:
                grammar.gate.release(20)
            if not looks or is_decided.is_set():
                looks.append(1)
            if len(looks) == 3:
                bench.ring(handle, 3, 9)
        return true(*arguments)

    num_steps = 0
    replace("take", take)
    handle = await decoding_again(bench, 0.1)
    num_steps = len(bench.steps.batches)
    monkeypatch.setattr(aside, "lib", Native())
    bench.program.stream = 9
    bench.generate(bench.file(), [50], 9, max_tokens=3, decide=grammar)
    bench.steps.gate.set()
    await bench.until(lambda: len(bench.steps.batches) == num_steps + 3)
    assert len(bench.steps.batches[-1]) == 1, "it waited for the loop"


@pytest.mark.slow
async def test_a_call_is_not_put_off_for_a_program_of_another_account_that_thinks_for_long(bench, replace):
    """The run knows whose calls are ready: for its own account a call would be put off until that program is back."""
    others, looks = bench.fs.kv_create(Credentials(1001, 1001), None), []

    def take(true, *arguments):
        looks.append(1)
        if len(looks) == 2:
            bench.ring(handle, 3, 9)
        return true(*arguments)

    bench.batches._run.set_cost(ffi.new("sym_cost *", DEAR))
    handle = await decoding_again(bench, 0.5)
    num_steps = len(bench.steps.batches)
    result = bench.submit(others, [5], program=Program(2, 1001))
    replace("take", take)
    bench.steps.gate.set()
    await result.wait()
    assert len(bench.steps.batches[num_steps]) == 1, "it was put off"


def test_draws_for_a_decoder_that_lends_no_threads_are_done_by_several_at_once(bench, replace, monkeypatch):
    monkeypatch.setattr(standing, "available_cores", lambda: 3)
    both, seen, before, crew = threading.Barrier(2), set(), foreign_threads(), set()

    def draw(true, *arguments):
        if len(bench.steps.batches[-1]) == 2:
            both.wait(20)  # raises where one thread draws both
        seen.add(threading.get_native_id())
        return true(*arguments)

    replace("draw", draw)

    async def scenario():
        await bench.held(lambda: bench.generate(bench.file(), [5], 1, max_tokens=40))
        bench.generate(bench.file(), [50], 2, max_tokens=39)
        await bench.go_on()
        assert bench.tokens_of(1) == list(range(6, 46))
        assert bench.tokens_of(2) == list(range(51, 90))
        crew.update(foreign_threads() - before)
        assert len(crew) == 2
        assert crew & seen

    bench.run_test(scenario)
    assert have_ended(crew)


# ---- loops, and others at their files


async def test_a_loop_goes_on_by_the_ring_without_the_scheduler(bench):
    file = bench.file()
    handle = bench.decode(file, 1)
    for number in range(2, 30):
        await bench.answered()
        bench.ring(handle, number, number)
        bench.program.channel.arm()
        # Should the run have stopped looking, the gate would bring it:
        for request in bench.program.channel.receive():
            bench.ask(request)
    await bench.answered()
    bench.batches.sync()
    assert file.table.read()[0].tolist() == [7, *range(2, 30)]
    assert bench.batches.statistics.num_calls == 29
    bench.batches.exclusive(file, lambda: bench.fs.kv_truncate(file, 3))
    assert file.table.length == 3, "a program that thinks keeps nobody from its file"
    await bench.settled()
    assert bench.program.channel.num_held_slots == 29, "rows of answered calls stay the program's"


async def both_answered(bench):
    """Two calls are answered, and nobody has looked at the run."""
    with trio.fail_after(20):
        while len(bench.heard) < 2:
            await trio.sleep(0.001)
            bench.replies()


def handled(bench, op, handle=0):
    bench.gate.handle(bench.program, Request(op, 0, 3, handle, (0, 0, 0, 0), b""), None)  # it needs no task


@pytest.mark.parametrize("limits", [NO_LIMITS, ProgramLimits(tokens=9)], ids=["no limit", "a limit on tokens"])
async def test_a_call_brings_up_to_date_what_it_looks_at(bench, limits):
    """A file; where the program has limits, all that it has computed; and all files, if the call names none."""
    bench.gate.welcome(bench.program)
    bench.program.program.limits = limits
    mine, other = bench.file(), bench.file()
    handle = bench.decode(mine, 1)
    bench.decode(other, 2)
    await both_answered(bench)
    assert (mine.table.length, other.table.length) == (0, 0)
    handled(bench, Op.KV_READ, handle)
    assert (mine.table.length, other.table.length) == (1, 1 if limits.is_any else 0)
    handled(bench, Op.PING)
    assert (mine.table.length, other.table.length) == (1, 1)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_call_that_the_run_computes_can_be_cancelled(bench, is_first):
    file, number = bench.file(), 1 if is_first else 2
    if is_first:
        await bench.held(lambda: bench.decode(file, 1))
    else:
        handle = bench.decode(file, 1)
        await bench.answered()
        await bench.held(lambda: bench.decode_on(handle, 2))
    assert bench.batches.cancel_taken(bench.program.channel, number)
    assert not bench.batches.cancel_taken(bench.program.channel, 77)
    await bench.go_on()
    assert bench.replies()[-1][:2] == (number, errno.ECANCELED)
    assert file.table.length == number - 1
    assert not bench.program.channel.num_lent_slots


async def test_a_call_that_comes_after_one_that_is_cancelled_is_not(bench):
    file, run = bench.file(), bench.batches._run
    handle = bench.decode(file, 1)
    await bench.answered()
    await bench.held(lambda: bench.decode_on(handle, 2))
    member = run.member_of(file.table)
    run.find_taken = lambda _channel, _id: iter([member])  # call 99 was found, and answered in the next moment
    assert bench.batches.cancel_taken(bench.program.channel, 99)
    bench.steps.gate.set()
    await bench.until(lambda: file.table.length == 2)
    assert [(number, err) for number, err, *_ in bench.replies()] == [(2, 0)]


async def test_a_handle_is_closed_when_its_call_is_answered_and_at_once_while_its_program_thinks(bench):
    file, closed, lengths = bench.file(), trio.Event(), []
    await bench.held(lambda: bench.submit(file, [1, 2, 3]))
    bench.decode(file, 1)  # it has not begun
    bench.batches.when_unused(file, closed.set)
    bench.steps.gate.set()
    with trio.fail_after(5):
        await closed.wait()
    assert [number for number, *_ in bench.replies()] == [1]
    other = bench.file()
    bench.decode(other, 2)
    await bench.answered()
    bench.batches.when_unused(other, lambda: lengths.append(other.table.length))
    assert lengths == [1]
    await bench.settled()


# ---- seats, shares and times


@seats(2)
async def test_a_weight_that_is_changed_counts_for_calls_that_are_in_the_run(bench):
    may_step, volume, names = threading.Semaphore(0), bench.fs.volume, ("one", "other")
    bench.steps.before = lambda _batch: may_step.acquire(timeout=20)
    make = partial(bench.tree.make, bench.tree.root, mode=0o700, uid=0, gid=0)
    domains = [make(name.encode(), stat.S_IFDIR) for name in names]
    for domain in domains:
        xattrs.put(volume, domain, b"user.kv.quota", b"64M", 0)
    files = [bench.fs.kv_create(ME, f"{name}/{each}.kv") for name in names for each in range(2)]
    calls = [bench.generate(file, [5], number, max_tokens=200) for number, file in enumerate(files, 1)]

    async def had_after(num_steps):
        """Return the entries that each domain had got after this many more steps."""
        before = [call.file.table.length for call in calls]
        may_step.release(num_steps)
        await bench.until(lambda: sum(call.file.table.length for call in calls) == sum(before) + 2 * num_steps)
        had = [call.file.table.length - old for call, old in zip(calls, before, strict=True)]
        return sum(had[:2]), sum(had[2:])

    await had_after(1)
    assert await had_after(40) == pytest.approx((40, 40), abs=10)
    xattrs.put(volume, domains[0], b"user.kv.weight", b"3", 0)
    assert await had_after(80) == pytest.approx((120, 40), abs=10)
    xattrs.remove(volume, domains[0], b"user.kv.weight", 0)
    assert await had_after(40) == pytest.approx((40, 40), abs=10)
    may_step.release(1000)
    await bench.settled()


HELD_S = 0.1


async def computed_in_a_held_step(bench, *numbers):
    """Compute generations, the first of whose steps is held. Return usage in queues and in steps, and passed time."""
    asked_s, before = time.monotonic(), used_by(bench.program)
    bench.steps.hold()
    for number in numbers:
        bench.generate(bench.file(), [number], number, max_tokens=3)
    await bench.steps.wait_entered()
    await trio.sleep(HELD_S)
    await bench.go_on()
    after = used_by(bench.program)
    return after.queue_s - before.queue_s, after.compute_s - before.compute_s, time.monotonic() - asked_s


@seats(2)
async def test_who_waits_for_a_seat_has_queue_time_and_who_is_alone_next_to_none(bench):
    queue_s, compute_s, passed_s = await computed_in_a_held_step(bench, 1)
    assert compute_s >= HELD_S
    assert queue_s <= passed_s - compute_s
    queue_s, compute_s, passed_s = await computed_in_a_held_step(bench, 2, 3, 4, 5)
    assert queue_s > 2 * HELD_S, "a step has two seats, and four wanted one"
    assert queue_s + compute_s <= 4 * passed_s
    assert abs(bench.batches.statistics.queue_s - used_by(bench.program).queue_s) < 1e-6


async def test_how_long_the_first_call_of_a_loop_waited_for_its_file_is_counted_once(bench):
    file, asked_s = bench.file(), time.monotonic()
    await bench.held(lambda: bench.submit(file, [1]))
    handle = bench.decode(file, 1)
    await trio.sleep(HELD_S)
    bench.steps.gate.set()
    for number in range(2, 12):
        await bench.answered()
        bench.batches.sync()  # counts it
        bench.decode_on(handle, number)
    await bench.answered()
    assert HELD_S <= used_by(bench.program).queue_s <= time.monotonic() - asked_s


def beyond(times, seconds):
    """Count the times that are longer."""
    return sum(times.nums[bisect_left(TIME_BOUNDS_S, seconds) :])


def test_each_bound_is_the_square_root_of_two_times_the_one_before():
    assert (TIME_BOUNDS_S[0], TIME_BOUNDS_S[-1]) == (2**16 / 1e9, 2**36 / 1e9)
    assert [above / below for below, above in pairwise(TIME_BOUNDS_S)] == pytest.approx([2**0.5] * 40, rel=1e-3)


async def test_a_call_that_waits_for_a_step_of_others_has_waited_for_as_long_as_that_took(bench):
    first = await bench.held(lambda: bench.submit(bench.file(), [1, 2, 3]))
    second = bench.submit(bench.file(), [4], program=Program(2))
    await trio.sleep(2 * HELD_S)  # the step takes so long
    bench.steps.gate.set()
    await first.wait()
    await second.wait()
    numbers = bench.batches.statistics
    steps, stretches, waits = numbers.step_times, numbers.stretch_times, numbers.wait_times
    assert (sum(steps.nums), sum(stretches.nums), sum(waits.nums)) == (2, 2, 2)
    assert beyond(steps, HELD_S) >= 1
    assert beyond(stretches, HELD_S) == 2, "the one that was computed so long, and the one that waited"
    assert beyond(waits, HELD_S) >= 1
    assert stretches.total_s - waits.total_s > HELD_S < waits.total_s


async def test_how_long_prefills_may_make_a_step_can_change_while_it_runs(bench, monkeypatch):
    """A row takes a millisecond, so the step's limit bounds a prefill's rows beside a call that decodes."""

    async def chunk_within(step_s: float) -> int:
        """Return the number of a prefill's rows in the first step beside a call that decodes."""
        bench.batches.set_step(step_s)
        decodes = await bench.held(lambda: bench.generate(bench.file(), [5, 6], 1, max_tokens=1000))
        bench.steps.hold_next()
        await bench.steps.wait_entered()  # its first token is there
        prefill = bench.submit(bench.file(), [7] * 200, program=Program(2), priority=-1)
        first = len(bench.steps.batches)
        bench.steps.gate.set()
        await prefill.wait()
        bench.batches.cancel(decodes)
        await bench.settled()
        sizes = [sorted(size for _, size in batch) for batch in bench.steps.batches[first:]]
        return next(batch[-1] for batch in sizes if len(batch) == 2)

    monkeypatch.setattr(bench.batches.cost, "observe", guard(lambda records: None))  # no time at all
    cost = bench.batches.cost.coefficients
    cost.rows_ns = [2**knot * 1e6 for knot in range(len(cost.rows_ns))]
    bench.batches._run.set_cost(cost)
    wide, narrow = await chunk_within(0.06), await chunk_within(0.02)
    assert 20 < wide < 60
    assert narrow < 20


# ---- drafts and grammars


async def test_a_draft_is_in_each_step_and_saves_some(bench):
    """The next token is always the last one and one more, and the draft has seen most of them."""
    draft = Draft(4, 2, np.arange(40, 60, dtype=np.int32))
    call = bench.generate(bench.file(), [50], 1, max_tokens=30, draft=draft)
    await bench.settled()
    assert bench.tokens_of(1) == list(range(51, 81))
    assert call.file.table.read()[0].tolist() == list(range(50, 80))
    sizes = [size for ((_, size),) in bench.steps.batches]
    assert sizes == [1, 1, 5, 5] + [1] * 20, "50; 51; 52 to 56; 57 to 59, and two that are wrong; 60 to 79"
    assert call.num_rejected == 2


async def test_what_a_draft_has_rows_of_is_drawn_while_others_compute(bench):
    """The draft is 53 to 56, and each of its rows waits for what the grammar says of the token before."""
    grammar, draft = SlowGrammar(2), Draft(4, 2, np.arange(40, 60, dtype=np.int32))
    bench.generate(bench.file(), [50], 1, max_tokens=20, decide=grammar, draft=draft)
    await bench.until(lambda: len(grammar.asked) == 3)
    bench.generate(bench.file(), [5], 2, max_tokens=1000)
    await bench.until(lambda: bench.batches.statistics.num_undecided > 3)
    bench.steps.hold()
    await bench.steps.wait_entered()
    grammar.gate.release(5)
    await bench.until(lambda: bench.tokens_of(1)[-1:] == [57])
    assert bench.tokens_of(1) == list(range(51, 58))
    assert len(bench.steps.batches[-1]) == 1, "the step is the other's"
    grammar.gate.release(40)
    await bench.go_on()


async def test_guesses_do_not_make_a_step_with_other_decodes_longer_than_it_may_be(bench, monkeypatch):
    """Five rows of 4 ms each take 20 ms. Each of two drafts gets its part."""
    before = np.array([7, *range(100, 164)] * 2, np.int32)  # 64 guesses follow each 7, and none is right
    cost = ffi.new("sym_cost *")
    cost.rows_ns = [4e6 * 2**knot for knot in range(len(cost.rows_ns))]

    def drafted(number):
        return bench.generate(bench.file(), [6], number, max_tokens=90, draft=Draft(64, 1, before))

    bench.batches._run.set_cost(cost)
    monkeypatch.setattr(bench.batches._run, "set_cost", guard(lambda _cost: None))
    await bench.held(lambda: drafted(1))
    drafted(2)
    await bench.go_on()
    drafted(3)
    await bench.settled()
    sizes = [[size for _, size in batch] for batch in bench.steps.batches]
    assert max(sum(each) for each in sizes if len(each) == 2) == 5
    assert max(sum(each) for each in sizes if len(each) == 1) == 65, "alone it delays nobody"


async def test_a_grammar_that_is_slow_costs_its_own_generation_steps_and_no_other(bench):
    slow = SlowGrammar()
    guided = bench.generate(bench.file(), [50], 1, max_tokens=3, decide=slow)
    plain = bench.generate(bench.file(), [5], 2, max_tokens=40)
    await bench.until(lambda: plain.file.table.length == 40)
    await bench.until(lambda: len(slow.asked) == 1)
    assert guided.file.table.length == 0, "what comes of its row is not decided"
    slow.gate.release(10)
    await bench.settled()
    assert bench.tokens_of(1) == [51, 52, 53]
    assert bench.tokens_of(2) == list(range(6, 46))
    assert slow.asked == [-1, 51, 52]
    assert bench.batches.statistics.num_undecided > 30


async def test_what_a_grammar_forces_is_computed_once_behind_the_token_before_and_is_no_prefill(bench):
    grammar, forced = SlowGrammar(20, forced={51: [60] * 299 + [70]}), [51, *[60] * 299, 70]
    call = bench.generate(bench.file(), [50], 1, max_tokens=303, decide=grammar)
    await bench.settled()
    assert bench.tokens_of(1) == [*forced, 71, 72]
    assert [start + k for ((start, size),) in bench.steps.batches for k in range(size)] == [*range(303)]
    assert call.file.table.read()[0].tolist() == [50, *forced, 71]
    assert grammar.asked == [-1, 51, 71]
    assert bench.batches.statistics.num_prefill_tokens == 0


async def test_with_a_draft_what_a_grammar_forces_is_computed_with_the_token_before(bench):
    """The grammar must take no longer than the run waits, which a busy machine may not allow each time."""
    sizes = []
    for number in range(1, 51):
        grammar, first = SlowGrammar(20, forced={51: [60, 70]}), len(bench.steps.batches)
        draft = Draft(1, 1, np.empty(0, np.int32))
        call = bench.generate(bench.file(), [50], number, max_tokens=5, decide=grammar, draft=draft)
        await bench.settled()
        assert bench.tokens_of(number) == [51, 60, 70, 71, 72]
        assert call.file.table.read()[0].tolist() == [50, 51, 60, 70, 71]
        sizes.append([size for ((_, size),) in bench.steps.batches[first:]])
        if sizes[-1] == [1, 3, 1]:
            break
    assert sizes[-1] == [1, 3, 1], sizes


class Strict:
    """Allows nothing behind a token."""

    def decide(self, token):
        return Decision(np.empty(0, np.int32), memoryview(ALLOWED if token < 0 else 0 * ALLOWED), is_over=False)


class Broken:
    def decide(self, token):
        raise RuntimeError("planted")


async def test_a_grammar_that_allows_nothing_or_fails_ends_its_own_generation(bench):
    call = bench.generate(bench.file(), [50], 1, decide=Strict())
    await bench.settled()
    token, length, (_, err, *_) = bench.replies()
    assert (token[3][:2], length[3][:2], err) == ((1, 1), (0, 2), errno.EINVAL)
    assert call.file.table.read()[0].tolist() == [50, 51]
    bench.generate(bench.file(), [5], 2, decide=Broken())
    bench.generate(bench.file(), [50], 3, max_tokens=3, decide=SlowGrammar(20))
    with trio.fail_after(5):
        await bench.settled()
    assert bench.tokens_of(3) == [51, 52, 53]
    assert [err for number, err, more, *_ in bench.heard if number == 2 and not more] == [errno.EIO]


async def test_a_token_that_turns_out_to_be_the_end_is_no_entry(bench):
    """The end token was computed before the grammar had told that it is the end."""
    guided = bench.generate(bench.file(), [50], 1, max_tokens=9, decide=SlowGrammar(3, is_over_after=2))
    await bench.settled()
    assert bench.tokens_of(1) == [51, 52]
    assert bench.heard[-1][3][1:3] == (2, Finish.GRAMMAR)
    assert guided.file.table.read()[0].tolist() == [50, 51]


# ---- failures


@pytest.mark.slow
async def test_a_step_that_hangs_is_named_in_the_log_once(bench, monkeypatch, caplog):
    monkeypatch.setattr(batch_scheduler, "HANGS_AFTER_S", 0.2)
    began_s = time.monotonic()
    await bench.held(lambda: bench.generate(bench.file(), [5], 1, max_tokens=2))
    await bench.until(lambda: "the decoder hangs" in caplog.text)
    await trio.sleep(0.3)
    await bench.go_on()
    (said,) = [record.getMessage() for record in caplog.records if "hangs" in record.getMessage()]
    found = re.match(rf"a step of 1 calls, of programs {os.getpid()}, has been computed for (\d+) s", said)
    assert found is not None, said
    assert int(found[1]) <= time.monotonic() - began_s + 1


async def test_what_is_told_to_somebody_else_first_is_settled_all_the_same(bench):
    """A reader of files takes the news of all members, and the run does not ring for these any more."""
    await bench.held(lambda: bench.generate(bench.file(), [5], 1, max_tokens=1))
    bench.steps.gate.set()
    while True:
        with suppress(BlockingIOError):  # it rings, and nobody hears it
            os.eventfd_read(bench.batches._run._wake_fd)
            break
    bench.batches.sync()
    with trio.move_on_after(5):
        while bench.batches.num_waiting:  # noqa: ASYNC110 - nobody may `sync`
            await trio.sleep(0.001)
    assert bench.batches.num_waiting == 0
    assert bench.tokens_of(1) == [6]


async def test_what_is_asked_for_beside_the_run_has_its_turn_among_those_that_draw(bench, monkeypatch):
    class AlwaysDrawn:
        def sym_loop_drawn(self, _loop, drawn, _max):
            drawn[1] = 0  # of a call that has left
            return 0 if is_enough.is_set() else 1

    done, is_enough = threading.Event(), threading.Event()
    monkeypatch.setattr(aside, "lib", AlwaysDrawn())
    bench.batches._run.aside.ask(done.set, lambda _error: None)
    had_its_turn = await trio.to_thread.run_sync(done.wait, 5)
    is_enough.set()
    assert had_its_turn


def test_what_a_program_was_sent_is_in_its_file_when_the_run_ends_in_the_step_after_it_has_gone(bench):
    file, sent = bench.file(), []

    async def scenario():
        await bench.held(lambda: bench.generate(file, [7], 1, max_tokens=40))
        for _ in range(4):
            bench.steps.gate.set()
            bench.steps.gate.clear()
            await bench.steps.wait_entered()
        sent.extend(bench.tokens_of(1))
        bench.batches.drop(bench.program)
        threading.Timer(0.1, bench.steps.gate.set).start()  # when the run ends and waits for that step

    Bench.run_test(bench, scenario)
    length = file.table.length
    bench.close()
    assert sent == [8, 9, 10, 11]
    assert length >= 4  # the prompt and what was sent, but for the last one, which is pending


def test_a_full_disk_does_not_end_the_run_that_can_not_keep_what_it_has_learnt(tmp_path, caplog):
    (tmp_path / "file").touch()
    bench = Bench(tmp_path)
    config = bench.model.config
    cost = CostModel("cpu", "float32", tmp_path / "file" / "costs.json", model="tiny")
    batches = BatchScheduler(bench.fs, bench.steps, config.max_positions, config.vocab_size, cost=cost)
    trio.run(batches.close)
    assert "the cost model of steps can't be saved: " in caplog.text


# ---- room


async def test_a_file_that_grows_page_by_page_never_leaves_the_run(bench):
    call = bench.generate(bench.file(), [5], 1, max_tokens=250)
    await bench.settled()
    assert call.file.table.length == call.num_appended == bench.batches.statistics.num_steps == 250
    assert call.file.table.read()[1].tolist() == list(range(250))
    assert bench.batches.statistics.num_wakes < 30, "one for each time that it needed room, and its end"


def filling(bench, num_entries):
    """A prefill that takes so many entries of memory."""
    return bench.submit(bench.file(), [1] * num_entries, rows="none", program=Program(2), positions=[0] * num_entries)


async def test_what_is_reserved_and_not_used_comes_back_for_a_call_that_finds_no_room(bench):
    num_pages = bench.fs.pool.num_free
    bench.steps.hold()
    for number in range(1, 4):
        bench.generate(bench.file(), [5], number, max_tokens=100)
    await bench.steps.wait_entered()
    assert num_pages - bench.fs.pool.num_free == 9
    prefill = filling(bench, (num_pages - 3) * 32)
    bench.steps.gate.set()
    await prefill.wait()
    await bench.settled()
    ends = [err for _, err, more, *_ in bench.replies() if not more]
    assert len(ends) == 3
    assert set(ends) <= {0, errno.ENOSPC}


async def test_a_member_is_given_room_once_however_often_its_news_are_taken(bench):
    may_step = threading.Semaphore(0)
    bench.steps.before = lambda batch: batch.chunks[0].start < 60 or may_step.acquire(timeout=20)
    call = bench.generate(bench.file(), [5], 1, max_tokens=90)
    await bench.until(lambda: call.file.table.length == 60)
    for _ in range(10):  # within one turn of this thread
        may_step.release()
        time.sleep(0.005)  # noqa: ASYNC251 - nothing else of this thread may run
        bench.batches.sync()
    await trio.sleep(0.01)
    assert call.file.table.length + len(call.reservation.tokens) == 96 + 64
    may_step.release(30)
    await bench.settled()


async def test_room_that_is_being_zeroed_is_given_back_afterwards(bench, monkeypatch):
    """Else it may be somebody else's by then, and be zeroed there."""
    pool = bench.fs.pool
    pool._bytes_in[:] = 7  # a user's who is not there any more
    at_work, go_on, num_zeroed = threading.Event(), threading.Event(), []

    def zero(_store, page):
        num_zeroed.append(page)
        if len(num_zeroed) > 3:
            at_work.set()
            assert go_on.wait(20)

    monkeypatch.setattr(type(pool.store), "zero", zero)
    bench.steps.before = lambda batch: batch.chunks[0].start < 70 or at_work.wait(20)
    call = bench.generate(bench.file(), [5], 1, max_tokens=96)
    await bench.until(lambda: call.file.table.length == 96)
    for _ in range(20):
        await trio.sleep(0.001)
    taken = num_zeroed[-1]
    assert pool.refcount[taken] == 1
    go_on.set()
    await bench.settled()
    assert pool.refcount[taken] == 0
    assert call.file.table.reservation is None
    assert bench.tokens_of(1)[-1] == (5 + 96) % VOCAB_SIZE


async def test_who_is_over_quota_takes_nobody_elses_room(bench, monkeypatch):
    ann, asked, leave = Credentials(1001, 1001), list[tuple](), StandingRun.leave
    monkeypatch.setattr(StandingRun, "leave", guard(lambda *words: noted(asked, words) or leave(*words)))
    bench.fs.pool.accounts.of(1001).limits = AccountLimits(num_bytes=2 * bench.fs.pool.page_bytes)
    going = bench.generate(bench.file(), [5], 1, max_tokens=250)
    theirs = bench.fs.kv_create(ann, None)
    for _ in range(5):
        with pytest.raises(OverQuota):
            await bench.submit(theirs, [1] * 100, rows="none", program=Program(2, 1001)).wait()
    await bench.settled()
    assert bench.tokens_of(1)[-1] == (5 + 250) % VOCAB_SIZE
    assert going.num_appended == 250
    assert not asked, "nobody had to leave"
