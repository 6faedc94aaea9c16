"""The choice of a machine, as a function of a table."""

import numpy as np

from symphony.fleet.placement import EVICT_BYTES_S, LINK_BYTES_S, TABLE, TYPICAL_STEPS, ProgramNeeds, Table, choose

ENTRY_BYTES = 23_040
PREFIX = ProgramNeeds(7000, ENTRY_BYTES)
GIB = 1 << 30


def machines(count: int, **columns: object) -> Table:
    """Machines alike, with 7 ms a step and 0.5 ms a row, but for the columns that are given."""
    table = np.zeros(count, TABLE)
    table["can"], table["free_bytes"], table["step_s"], table["row_s"] = True, GIB, 7e-3, 5e-4
    for name, column in columns.items():
        table[name] = column
    return table


def rows(table: Table, wanted: ProgramNeeds) -> set[int]:
    """The rows that any of many seeds chooses."""
    seeds = range(200)
    return {choose(table, ProgramNeeds(wanted.num_entries, wanted.entry_bytes, seed)).row for seed in seeds}


def test_a_program_runs_where_its_pages_are():
    assert rows(machines(3, held=(0, 7000, 0)), PREFIX) == {1}
    assert rows(machines(3, held=(3000, 0, 6999)), PREFIX) == {2}


def test_a_program_runs_elsewhere_when_the_load_costs_more_than_the_pages():
    fetch_s = 7000 * ENTRY_BYTES / LINK_BYTES_S
    for more_s, expected in ((0.5 * fetch_s, {0}), (4 * fetch_s, {1})):
        busy = (7e-3 + more_s / TYPICAL_STEPS, 7e-3)
        assert rows(machines(2, held=(7000, 0), step_s=busy), PREFIX) == expected
        assert rows(machines(2, held=(7000, 0), backlog_s=(more_s, 0)), PREFIX) == expected


def test_entries_that_are_computed_count_more_than_entries_that_are_fetched():
    table = machines(2, held=(7000, 0), backlog_s=(4.0, 0))
    assert rows(table, PREFIX) == {1}
    assert rows(table, ProgramNeeds(7000)) == {0}


def test_programs_that_were_just_placed_count_as_load():
    assert rows(machines(3, placed=(1, 0, 2)), ProgramNeeds()) == {1}
    many = machines(2, held=(7000, 0), placed=(8, 0))
    assert rows(many, PREFIX) == {1}


def test_a_seed_draws_one_of_the_machines_that_are_as_good_as_the_best():
    table = machines(4, step_s=(7e-3, 7.05e-3, 9e-3, 7e-3))
    assert rows(table, ProgramNeeds()) == {0, 1, 3}
    assert len({choose(table, ProgramNeeds(seed=5)).row for _ in range(5)}) == 1


def test_programs_of_many_daemons_spread_over_equal_machines():
    counts = np.bincount([choose(machines(10), ProgramNeeds(seed=seed)).row for seed in range(2000)])
    assert counts.min() > 140
    assert counts.max() < 260


def test_a_machine_without_memory_for_the_missing_entries_pays_for_it():
    evict_s = 7000 * ENTRY_BYTES / EVICT_BYTES_S
    assert rows(machines(2, free_bytes=(0, GIB), backlog_s=(0, 0.9 * evict_s)), PREFIX) == {1}
    assert rows(machines(2, free_bytes=(0, GIB), backlog_s=(0, 1.2 * evict_s)), PREFIX) == {0}
    assert rows(machines(2, free_bytes=(0, GIB), held=(7000, 0)), PREFIX) == {0}, "the holder needs no memory"
    assert rows(machines(2, free_bytes=0, held=(7000, 0), backlog_s=(30, 0)), PREFIX) == {1}, "load still counts"


def test_a_machine_that_can_not_run_the_program_is_never_chosen():
    table = machines(3, can=(False, True, False), held=(7000, 0, 0), backlog_s=(0, 100, 0))
    assert rows(table, PREFIX) == {1}
    assert np.isinf(choose(table, PREFIX).delays_s).tolist() == [True, False, True]
    assert choose(machines(2, can=False), PREFIX).row == -1
    assert choose(machines(0), PREFIX).row == -1


def test_more_entries_than_the_files_have_give_no_advantage():
    assert rows(machines(2, held=(9000, 7000)), PREFIX) == {0, 1}
