"""How often a program's memory is looked at."""

from symphony.launcher.supervising.watch import LEAST_S, MOST_S, pause_s

GIB = 1 << 30


def test_a_program_far_from_its_limit_is_looked_at_rarely():
    pauses = [pause_s(used, 12 * GIB) for used in (0, 12 * GIB - 1000, 12 * GIB, 12 * GIB + 1)]
    assert pauses == [MOST_S, LEAST_S, LEAST_S, 0]


def test_no_process_gets_beyond_its_limit_before_the_next_look_at_it():
    assert pause_s(8 * GIB, 12 * GIB) <= 4 * GIB / 4e9
