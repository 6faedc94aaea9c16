"""Streams: when a call that is about to come is waited for, and how long. All times are the tests' own."""

import pytest

from scheduler._loop import ffi, lib

MS = 1_000_000
STEP, QUARTER = 10 * MS, 2_500_000
SHARES = (-1, 0, 1, 0, 3)
"""Parent of each share: the root, an account with one program, another account with one."""
MINE, HERS = 2, 4
ALONE, BOTH = 1, lib.SYM_SEVERAL


def ns(ms):
    return int((10_000 + ms) * MS)  # no time of a clock is 0


class Table:
    """Streams of two programs; a step takes STEP, whatever it holds."""

    def __init__(self):
        self.streams = ffi.gc(lib.sym_streams_new(), lib.sym_streams_free)
        self.mine, self.hers = (lib.sym_streams_connect(self.streams) for _ in range(2))
        self.shares = ffi.new("sym_share[5]", [(0, 0, 1, (0, 0), parent, 0) for parent in SHARES])
        self.cost = ffi.new("sym_cost *")
        self.cost.rows_ns = [STEP] * len(self.cost.rows_ns)

    def called(self, stream, ms, until_ms=None, *, share=MINE):
        """A call has come at a time, or between two."""
        at = ns(ms)
        latest = at if until_ms is None else ns(until_ms)
        connection = self.mine if share == MINE else self.hers
        return lib.sym_streams_called(self.streams, connection, stream, share, at, latest)

    def answered(self, stream, ms, *, share=MINE, is_answered=1):
        connection = self.mine if share == MINE else self.hers
        lib.sym_streams_over(self.streams, connection, stream, is_answered, ns(ms))

    def charge(self, ready, ms):
        lib.sym_streams_charge(self.streams, ready, self.shares, ns(ms))
        return [share.used / MS for share in self.shares]

    def thinks(self, stream, ms, *, share=MINE, times=3):
        """Have a stream come back so often, each time after so long. Its latest call is answered at 0."""
        began = -times * (ms + 20)
        self.called(stream, began, share=share)
        for _ in range(times):
            self.answered(stream, began + 20, share=share)
            began += 20 + ms
            self.called(stream, began, share=share)
        self.answered(stream, 0, share=share)

    def ready(self, num_calls, *, account=ALONE, began_ms=0.0, is_hurried=0):
        return ffi.new("sym_ready *", (num_calls, account, is_hurried, ns(began_ms)))

    def batch(self, stream, num, *began_ms, last_answered=1):
        """Batches of so many calls of one stream, each answered after 25 ms, the last call of the last one perhaps."""
        for began in began_ms:
            for _ in range(num):
                self.called(stream, began)
            for index in range(num):
                is_last = index == num - 1 and began == began_ms[-1]
                self.answered(stream, began + 25, is_answered=last_answered if is_last else 1)

    def ready_since(self, num, ms=-1):
        """Calls of so many streams, from 1 on."""
        for stream in range(1, num + 1):
            self.called(stream, ms)

    def waits_ms(self, num_calls, now_ms=0.0, **ready):
        """Return how long a step is put off from now on; its calls are ready since then, or `began_ms`."""
        now, limits = ns(now_ms), ffi.new("sym_limits *", {"max_calls": 256})
        wait, work = ffi.new("sym_wait *", (25, 300_000, 20 * MS)), ffi.new("sym_work *")
        ready = self.ready(num_calls, **({"began_ms": now_ms} | ready))
        until = lib.sym_streams_wait_until(self.streams, ready, wait, limits, self.cost, work, 1, self.shares, now)
        return (until - now) / MS


@pytest.fixture
def table():
    return Table()


@pytest.fixture
def others():
    """A second table."""
    return Table()


def test_a_stream_is_waited_for_where_that_brings_more_calls_a_second(table, others):
    for each, think_ms in ((table, 4), (others, 11)):
        each.called(1, 0)
        each.thinks(2, think_ms)
    assert 4 <= table.waits_ms(1) <= 6, "two calls in 4 + 10 ms are more than one in 10"
    assert others.waits_ms(1) == 0, "two calls in 11 + 10 ms are not"
    table.thinks(3, 2, share=HERS)
    assert 4 <= table.waits_ms(1) <= 6, "of another connection: three calls in 4 + 10 ms are more than two in 2 + 10"


def test_a_stream_is_due_by_its_mean_and_half_its_error_and_ever_later_once_it_is_late(table, others):
    for each in (table, others):
        each.called(1, 0)
    table.thinks(2, 4, times=20)
    assert 4 <= table.waits_ms(1) <= 4.1, "it has always been punctual"
    assert table.waits_ms(1, 10) == 3, "half of what it is late by"
    others.thinks(2, 8)
    others.called(2, 1)
    others.answered(2, 10)
    assert others.waits_ms(1, 10) <= 5, "one short pause counts for as much as four long ones"


def test_one_straggler_is_worth_less_the_more_calls_are_ready(table):
    table.ready_since(7)
    table.thinks(8, 4)
    assert table.waits_ms(1) > 0
    assert table.waits_ms(7) == 0


def test_a_batch_whose_last_call_was_cancelled_leaves_its_stream_one_call(table):
    table.ready_since(16)
    table.batch(99, 16, -120, -90, last_answered=0)
    table.called(99, -60)
    table.answered(99, -1)
    assert table.waits_ms(16, -1) == 0


@pytest.mark.parametrize(("num_ready", "num", "is_worth_it"), [(128, 129, True), (16, 16, True), (16, 1, False)])
def test_a_batch_is_worth_the_wait_for_all_its_calls_that_have_seats(table, num_ready, num, is_worth_it):
    """16 and so many calls in 2 + 10 ms."""
    table.ready_since(num_ready)
    table.batch(999, num, -60, -30)
    assert (table.waits_ms(num_ready, -1) > 0) == is_worth_it


def test_who_is_due_after_the_longest_wait_or_sleeps_is_not_waited_for_at_all(table, others):
    table.called(1, -1)
    for stream in range(2, 9):
        table.thinks(stream, 12)
    assert table.waits_ms(1) == 0, "it would go without them after 10 ms"
    others.thinks(1, 30)
    assert others.waits_ms(0, account=lib.SYM_NOBODY) == 0, "who sleeps is woken"


def test_a_text_that_is_written_has_no_stream_and_is_not_waited_for(table):
    table.called(1, 0)
    table.thinks(lib.SYM_NO_STREAM, 4)
    assert table.waits_ms(1) == 0


def test_calls_that_name_no_stream_are_those_of_their_connections_answers(table):
    names = [table.called(0, -30) for _ in range(2)]
    for at in (-26, -13):
        for name in names:
            table.answered(name, at)
        assert [table.called(0, at + 4) for _ in names] == names, "the answer that came first is followed first"
    table.answered(names[1], 0)
    assert 4 <= table.waits_ms(1) <= 6
    assert table.called(0, 1000) == names[1]
    assert len({*names, table.called(0, 1000)}) == 3, "all answers have been followed"


def test_an_answer_that_nothing_follows_leaves_calls_that_name_no_stream_expected_when_they_come(table):
    names = [table.called(0, -1000) for _ in range(2)]
    for at in range(-990, 10, 10):
        for name in names:
            table.answered(name, at)
        if at < 0:
            names = [table.called(0, at + 4) for _ in range(2 if at < -500 else 1)]
    assert 4 <= table.waits_ms(1) <= 6


def test_a_fresh_stream_is_not_expected_before_it_has_come_back_once(table):
    table.called(1, 0)
    table.called(2, -10)
    table.answered(2, 0)
    assert table.waits_ms(1) == 0
    table.called(2, 2)
    table.answered(2, 12)
    assert table.waits_ms(1, 12) > 0


def test_a_stream_that_does_not_come_is_waited_for_less_and_less(table):
    table.called(1, 0)
    table.thinks(2, 1)
    assert table.waits_ms(1) > 0
    assert table.waits_ms(1, 25, began_ms=24) == 0, "it may be gone"
    assert table.waits_ms(0, 25, began_ms=24, account=lib.SYM_NOBODY) == 0, "so nobody looks at rings for it"


def test_others_files_and_calls_in_between_leave_a_stream_what_it_is(table):
    """An answer, then a close and a fork of whatever else: the stream is due by its own times."""
    table.called(1, 0)
    table.thinks(2, 4)
    table.called(2, 4)
    table.answered(2, 5, is_answered=0)
    assert table.waits_ms(1, 6) == 0, "a call that failed, or goes on, has no answer to come back from"


def test_a_call_that_came_while_a_step_ran_says_nothing_where_it_may_have_come_in_time(table):
    """Rings are looked at when a step ends: else a stream that thinks for 4 ms would seem to need a whole step."""
    table.called(1, 0)
    table.thinks(2, 4)
    for round_ms in range(0, 600, 20):
        table.called(2, round_ms, round_ms + 10)
        table.answered(2, round_ms + 20)
    assert 4 <= table.waits_ms(1, 600) <= 6
    table.called(2, 608, 618)
    table.answered(2, 620)
    assert table.waits_ms(1, 620) > 6, "that one took 8 ms at least"


@pytest.mark.parametrize("num_at_once", [1, 8])
def test_no_more_streams_are_expected_than_a_connection_has_had_calls_at_once(table, num_at_once):
    """A thread may give many names, each of which has come back in 4 ms."""
    for step in range(-4, 1):
        for first in range(0, 8, num_at_once):
            names = range(first, first + num_at_once)
            at = 200 * step + 0.1 * (first - 7)
            for stream in names:
                table.called(100 + stream, at - 6)
            for stream in names:
                table.answered(100 + stream, at - 4)
            for stream in names:
                table.called(100 + stream, at)
            for stream in names:
                table.answered(100 + stream, at)
            table.waits_ms(0, at, account=lib.SYM_NOBODY)  # the run looks at rings
    table.called(1, 0)
    table.cost.rows_ns = [3 * STEP] * len(table.cost.rows_ns)  # longer than what they seem to need
    assert (table.waits_ms(3, 0.5) > 0) == (num_at_once == 8)


def test_calls_of_another_account_and_hurried_ones_wait_a_quarter_of_a_step_at_most(table, others):
    hers = 3
    for each, think_ms in ((table, 4), (others, 2)):
        each.called(1, 0, share=HERS)
        each.thinks(2, think_ms)
    assert table.waits_ms(1, account=hers) == table.waits_ms(2, account=BOTH) == table.waits_ms(1, is_hurried=1) == 0
    assert 2 <= others.waits_ms(1, account=hers) <= QUARTER / MS
    assert 2 <= others.waits_ms(1, is_hurried=1) <= QUARTER / MS


def test_a_wait_in_vain_is_service_of_the_account_that_was_waited_for(table):
    table.called(1, 0, share=HERS)
    table.thinks(2, 1)
    ready = table.ready(1, account=3)
    assert table.waits_ms(1, account=3) > 0
    assert table.charge(ready, 0.5) == [0, 0, 0, 0, 0], "it is not late"
    assert table.waits_ms(1, account=3) > 0
    assert table.charge(ready, 3) == [0, 2, 2, 0, 0]
    assert table.charge(ready, 4) == [0, 2, 2, 0, 0], "that wait was for nobody"
    assert table.waits_ms(1) > 0
    assert table.charge(table.ready(1), 4) == [0, 2, 2, 0, 0], "its own account has nothing to pay"


def test_who_was_not_waited_for_pays_nothing(table):
    table.called(1, 0, share=HERS)
    table.thinks(2, 9)
    table.thinks(3, 4, share=HERS)
    assert 4 <= table.waits_ms(1, account=3) < 9
    assert table.charge(table.ready(1, account=3), 12) == [0, 0, 0, 0, 0]


def test_what_ends_after_its_connection_is_nobodys(table):
    table.called(1, 0)
    gone = table.mine
    lib.sym_streams_disconnect(table.streams, gone)
    table.mine = lib.sym_streams_connect(table.streams)
    assert table.mine != gone
    lib.sym_streams_over(table.streams, gone, 1, 1, ns(1))
    table.called(2, 0)
    table.thinks(3, 4)
    assert table.waits_ms(1) > 0, "the new one has lost nothing"
