"""Admission: requests are answered now, wait, or are refused with an advice to come again."""

import pytest
import trio
import trio.testing

from lips.gateway.admission import NO_LIMITS, Admission, TenantLimits
from lips.gateway.errors import ApiError


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


async def ask(admission, name, order, end, limits=NO_LIMITS):
    admission.count(name, limits)
    async with admission.enter(name, limits):
        order.append(name)
        await end.wait()


def run(scenario):
    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0.01))


def test_tenants_take_turns_however_many_requests_one_has():
    async def scenario():
        admission, order, ends = Admission(1, 100, 1000.0), [], [trio.Event() for _ in range(7)]
        async with trio.open_nursery() as nursery:
            for name, end in zip(["a", "a", "a", "a", "b", "c", "b"], ends, strict=True):
                nursery.start_soon(ask, admission, name, order, end)
                await trio.testing.wait_all_tasks_blocked()
            assert order == ["a"]
            for end in ends:
                end.set()
        assert order[:4] == ["a", "a", "b", "c"]
        assert sorted(order) == ["a", "a", "a", "a", "b", "b", "c"]
        assert admission.num_running == admission.num_waiting == 0

    run(scenario)


def test_more_than_may_wait_are_refused_and_so_is_who_has_waited_for_long():
    async def scenario():
        admission, order, end = Admission(1, 1, 30.0), [], trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, admission, "a", order, end)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(refused_later, admission)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ApiError) as refused:
                await ask(admission, "b", order, end)
            assert refused.value.status == 429
            assert refused.value.retry_after_s >= 1
            await trio.sleep(31)
            assert admission.num_waiting == 0
            end.set()
        assert order == ["a"]
        assert admission.num_refused == 2

    async def refused_later(admission):
        with pytest.raises(ApiError, match="waited"):
            await ask(admission, "a", [], trio.Event())

    run(scenario)


def test_who_gives_up_leaves_the_queue_and_its_turn_goes_on():
    async def scenario():
        admission, order, end, other = Admission(1, 10, 1000.0), [], trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, admission, "a", order, end)
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as given_up:
                given_up.start_soon(ask, admission, "b", order, other)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(ask, admission, "c", order, other)
                await trio.testing.wait_all_tasks_blocked()
                end.set()  # b's turn comes, and b goes in the same moment
                given_up.cancel_scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert order[-1] == "c"
            other.set()
        assert admission.num_running == admission.num_waiting == 0

    run(scenario)


def test_a_key_has_no_more_at_once_than_its_limit_and_others_pass_it():
    async def scenario():
        admission, order, end = Admission(10, 10, 1000.0), [], trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, admission, "a", order, end, TenantLimits(concurrent=1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, admission, "b", order, end)
            await trio.testing.wait_all_tasks_blocked()
            assert sorted(order) == ["a", "b"], "b does not wait behind those of a"
            end.set()
        assert sorted(order) == ["a", "a", "a", "b"]

    run(scenario)


def test_rates_fill_up_again_as_time_goes_by():
    async def scenario():
        clock = Clock()
        admission = Admission(10, 10, 1.0, clock)
        limits = TenantLimits(requests_per_min=2, tokens_per_min=100)

        def passes():
            try:
                admission.count("a", limits)
            except ApiError as error:
                return error.retry_after_s
            return True

        assert [passes(), passes()] == [True, True]
        assert passes() == pytest.approx(30)
        clock.now_s = 31
        assert passes() is True
        admission.charge("a", 200)
        clock.now_s = 62
        assert passes() == pytest.approx(60 - 31 + 0.6, abs=0.1)
        clock.now_s = 130
        assert passes() is True

    run(scenario)


def test_limits_that_change_hold_for_what_is_running_too():
    async def scenario():
        admission, order, ends = Admission(10, 100, 1000.0), [], [trio.Event() for _ in range(3)]
        one, two = TenantLimits(concurrent=1), TenantLimits(concurrent=2)
        async with trio.open_nursery() as nursery:
            for limits, end in zip([one, two, two], ends, strict=True):
                nursery.start_soon(ask, admission, "a", order, end, limits)
                await trio.testing.wait_all_tasks_blocked()
            assert (len(order), admission.num_waiting) == (2, 1)
            for end in ends:
                end.set()
        assert len(order) == 3
        async with trio.open_nursery() as nursery:  # nobody has kept a place
            for end in ends:
                nursery.start_soon(ask, admission, "a", order, end, two)
            with trio.fail_after(1):
                await trio.testing.wait_all_tasks_blocked()
        assert len(order) == 6

    run(scenario)


def test_a_request_is_counted_whatever_comes_of_it_and_its_bytes_are_held_until_it_has_ended():
    clock = Clock()
    admission = Admission(10, 10, 1.0, clock, max_bytes=100)
    for name in "ab":
        admission.count(name, TenantLimits(requests_per_min=1))
    admission.hold("a", 60)
    with pytest.raises(ApiError, match="60 bytes") as refused:
        admission.hold("a", 41)
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    admission.hold("a", 40)
    admission.hold("b", 100)
    admission.release("a", 60)
    admission.hold("a", 60)
    with pytest.raises(ApiError, match="1 requests a minute"):
        admission.count("a", TenantLimits(requests_per_min=1))
