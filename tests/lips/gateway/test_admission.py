"""Admission: requests are answered now, wait, or are refused with an advice to come again."""

import pytest
import trio
import trio.testing

from lips.gateway.admission import NO_LIMITS, Admission, TenantLimits
from lips.gateway.errors import ApiError

ONE = TenantLimits(concurrent=1)


class Asked:
    """Requests on a clock that jumps; `order` has those whose turn has come."""

    def __init__(self, *limits):
        self.admission = Admission(*limits)
        self.order = list[str]()

    async def ask(self, name, end, limits=NO_LIMITS):
        self.admission.count(name, limits)
        async with self.admission.enter(name, limits):
            self.order.append(name)
            await end.wait()

    async def begin(self, nursery, name, end, limits=NO_LIMITS):
        nursery.start_soon(self.ask, name, end, limits)
        await trio.testing.wait_all_tasks_blocked()

    @property
    def counts(self):
        return self.admission.num_running, self.admission.num_waiting


def on_a_jumping_clock(scenario):
    def test():
        trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0.01))

    return test


@on_a_jumping_clock
async def test_tenants_take_turns_however_many_requests_one_has():
    asked = Asked(1, 100, 1000.0)
    ends = [trio.Event() for _ in range(7)]
    async with trio.open_nursery() as nursery:
        for name, end in zip("aaaabcb", ends, strict=True):
            await asked.begin(nursery, name, end)
        assert asked.order == ["a"]
        for end in ends:
            end.set()
    assert asked.order[:4] == ["a", "a", "b", "c"]
    assert sorted(asked.order) == [*"aaaabbc"]
    assert asked.counts == (0, 0)


@on_a_jumping_clock
async def test_more_than_may_wait_are_refused_and_so_is_who_has_waited_for_long():
    asked, end = Asked(1, 1, 30.0), trio.Event()

    async def refused_later():
        with pytest.raises(ApiError, match="waited"):
            await asked.ask("a", trio.Event())

    async with trio.open_nursery() as nursery:
        await asked.begin(nursery, "a", end)
        nursery.start_soon(refused_later)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ApiError) as refused:
            await asked.ask("b", end)
        assert refused.value.status == 429
        assert (refused.value.retry_after_s or 0) >= 1
        await trio.sleep(31)
        assert asked.admission.num_waiting == 0
        end.set()
    assert (asked.order, asked.admission.num_refused) == (["a"], 2)


@on_a_jumping_clock
async def test_who_gives_up_leaves_the_queue_and_its_turn_goes_on():
    asked, end, other = Asked(1, 10, 1000.0), trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        await asked.begin(nursery, "a", end)
        async with trio.open_nursery() as given_up:
            await asked.begin(given_up, "b", other)
            await asked.begin(nursery, "c", other)
            end.set()  # b's turn comes, and b goes in the same moment
            given_up.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert asked.order[-1] == "c"
        other.set()
    assert asked.counts == (0, 0)


@on_a_jumping_clock
async def test_limits_that_change_hold_for_what_is_running_too():
    asked, ends, two = Asked(10, 100, 1000.0), [trio.Event() for _ in range(3)], TenantLimits(concurrent=2)
    async with trio.open_nursery() as nursery:
        for limits, end in zip([ONE, two, two], ends, strict=True):
            await asked.begin(nursery, "a", end, limits)
        assert (len(asked.order), *asked.counts) == (2, 2, 1)
        await asked.begin(nursery, "b", ends[0])
        assert asked.order == ["a", "a", "b"], "b does not wait behind those of a"
        for end in ends:
            end.set()
    async with trio.open_nursery() as nursery:  # nobody has kept a place
        for end in ends:
            await asked.begin(nursery, "a", end, two)
    assert len(asked.order) == 7


def test_rates_fill_up_again_as_time_goes_by():
    now_s = 0.0
    admission, limits = Admission(10, 10, 1.0, lambda: now_s), TenantLimits(requests_per_min=2, tokens_per_min=100)

    def waits_s():
        try:
            admission.count("a", limits)
        except ApiError as error:
            return error.retry_after_s
        return None

    assert [waits_s(), waits_s(), waits_s()] == [None, None, pytest.approx(30)]
    now_s = 31
    assert waits_s() is None
    admission.charge("a", 200)
    now_s = 62
    assert waits_s() == pytest.approx(60 - 31 + 0.6, abs=0.1)
    now_s = 130
    assert waits_s() is None


def test_a_request_is_counted_whatever_comes_of_it_and_its_bytes_are_held_until_it_has_ended():
    admission, once = Admission(10, 10, 1.0, lambda: 0.0, max_bytes=100), TenantLimits(requests_per_min=1)
    for name in "ab":
        admission.count(name, once)
    admission.hold("a", 60)
    with pytest.raises(ApiError, match="60 bytes") as refused:
        admission.hold("a", 41)
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    admission.hold("a", 40)
    admission.hold("b", 100)
    admission.release("a", 60)
    admission.hold("a", 60)
    with pytest.raises(ApiError, match="1 requests a minute"):
        admission.count("a", once)
