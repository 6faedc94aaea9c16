"""`symphony policy replay`: the reading of a trace, the simulation of memory and disk, and the report."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvfs.tiers.loading import NAMES, load
from libsym.errors import NoSpace
from scheduler.trace.file import TraceWriter, read_trace
from scheduler.trace.records import ANSWER, ARRIVAL, FILE, NO_DEADLINE, Block, BlockKind, CallKind
from symphony.cli import main
from symphony.policy.machine import cpu, h100, machine_of
from symphony.policy.simulation import Simulation
from symphony.policy.workload import workload_of

TRACES = Path(__file__).resolve().parents[3] / "scripts" / "traces"


class Making:
    """A trace of version 2: calls that are turns, and files."""

    def __init__(self, *turns, files=()):
        """A turn: when it began and ended, its file, entries before, given and generated, its pid and priority."""
        self.calls, self.files = [*turns], [*files]

    def turn(self, *numbers):
        self.calls.append(numbers)

    def write(self, path):
        arrivals, answers = np.zeros(len(self.calls), ARRIVAL), np.zeros(len(self.calls), ANSWER)
        for number, (began_s, ended_s, inode, before, appended, generated, *who) in enumerate(self.calls):
            pid, priority = who + [1, 0][len(who) :]
            numbers = (inode, before, appended, pid, 0, 0, 0, CallKind.GENERATION, priority)
            arrivals[number] = (number + 1, began_s * 1e9, NO_DEADLINE, *numbers)
            answers[number] = (number + 1, ended_s * 1e9, appended + generated, 0)
        with path.open("wb") as file:
            writer = TraceWriter(file, {"model": "made", "clock": {"monotonic_ns": 0}})
            if self.files:
                writer.add(Block.of(BlockKind.FILES, np.array(self.files, FILE)))
            writer.add(Block.of(BlockKind.ARRIVALS, arrivals))
            writer.add(Block.of(BlockKind.ANSWERS, answers))
        return path

    def workload(self, tmp_path):
        return workload_of(read_trace(self.write(tmp_path / "made.trace")))


def two_that_take_turns(num_turns=6, length=320):
    """Return a trace of two programs with a file each; they go on by turns, with pauses of 10 s."""
    making = Making()
    for number in range(num_turns):
        for pid in (1, 2):
            began = number * 10 + pid * 5
            making.turn(began, began + 0.5, pid, number * length, length - 4, 4, pid)
    return making


def named(*numbers):
    """Files with names, which share nothing."""
    return [(number, 0, 0, True) for number in numbers]


def run(workload, num_pages, rank, machine=None):
    return Simulation(workload, machine or cpu(), num_pages, load(rank) if rank else None).run()


# ---- what a trace becomes ----


def test_a_program_is_a_row_of_turns_with_the_pauses_between(tmp_path):
    workload = two_that_take_turns(3).workload(tmp_path)
    assert [len(program.turns) for program in workload.programs] == [3, 3]
    first, second = workload.programs
    assert [turn.pause_s for turn in first.turns] == pytest.approx([0, 9.5, 9.5])
    assert [turn.pause_s for turn in second.turns] == pytest.approx([5, 9.5, 9.5])
    assert [(turn.before, turn.num_appended, turn.num_generated) for turn in first.turns] == [
        (0, 316, 4),
        (320, 316, 4),
        (640, 316, 4),
    ]
    assert [segment.size for segment in workload.segments] == [960, 960]


def test_forks_share_what_their_source_had_and_grow_apart(tmp_path):
    files = [*named(9), (1, 9, 100, False), (2, 9, 60, False)]
    turns = (0, 1, 1, 100, 10, 5, 1), (1, 2, 2, 60, 20, 5, 2), (2, 3, 1, 115, 10, 5, 1)
    workload = Making(*turns, files=files).workload(tmp_path)
    (first, third), (second,) = (program.turns for program in workload.programs)
    sizes = [segment.size for segment in workload.segments]
    assert [sizes[each] for each in first.chain] == [60, 40, 30]
    assert [sizes[each] for each in second.chain] == [60, 25]
    assert third.chain == first.chain
    assert first.chain[0] == second.chain[0]
    with_names = {place for place, segment in enumerate(workload.segments) if segment.is_named}
    assert with_names >= set(first.chain[:2])
    assert not with_names & {first.chain[2], second.chain[1]}


def test_a_file_that_is_cut_is_written_anew_from_there(tmp_path):
    (program,) = Making((0, 1, 1, 0, 90, 10), (2, 3, 1, 40, 30, 10)).workload(tmp_path).programs
    assert [turn.after for turn in program.turns] == [100, 80]
    assert program.turns[0].chain[0] == program.turns[1].chain[0]
    assert len({*program.turns[0].chain, *program.turns[1].chain}) == 3


def test_calls_that_follow_each_other_at_once_are_one_turn(tmp_path):
    quick = [(1 + number * 0.01, 1.009 + number * 0.01, 1, 50 + number, 1, 0) for number in range(8)]
    (program,) = Making((0, 1, 1, 0, 50, 0), *quick, (3, 4, 1, 58, 1, 0)).workload(tmp_path).programs
    assert [(turn.num_appended, turn.num_generated) for turn in program.turns] == [(50, 8), (1, 0)]


def test_files_that_a_process_has_at_once_are_programs_beside_each_other(tmp_path):
    workload = Making((0, 5, 1, 0, 50, 5), (1, 2, 2, 0, 50, 5), (6, 7, 3, 0, 50, 5)).workload(tmp_path)
    assert sorted(len(program.turns) for program in workload.programs) == [1, 2]


# ---- what memory and disk do to it ----


def test_what_fits_is_neither_read_nor_written_nor_computed_again(tmp_path):
    found = run(two_that_take_turns().workload(tmp_path), 200, "lru")
    assert (found.num_in, found.num_out, found.num_again) == (0, 0, 0)
    assert (found.num_resumes, found.num_hidden) == (10, 10)
    assert found.most_used == 60 + 50  # the first file is gone when the second has its last turn
    assert len(found.latency_s) == 12


def test_a_turn_takes_what_the_cost_model_says_and_the_disk_needs(tmp_path):
    machine, making = cpu(), Making((0, 1, 1, 320, 30, 3), files=named(1))
    found = run(making.workload(tmp_path), 100, "lru", machine)
    read_s = float(machine.bring_s(np.array(10.0)))
    pairs = sum(range(321, 351))
    prefill_s = machine.step_s(num_rows=30, num_wanted=1, num_pairs=pairs)
    decode_s = sum(machine.step_s(1, 1, length, length) for length in (350, 351, 352))
    assert found.latency_s.tolist() == pytest.approx([read_s + prefill_s + decode_s], rel=0.01)
    assert (found.num_in, found.num_hidden, found.num_resumes, found.num_steps) == (10, 0, 1, 4)


def test_what_does_not_fit_goes_and_comes_back_written_once_or_is_computed_again_without_tiers(tmp_path):
    workload = two_that_take_turns().workload(tmp_path)
    found, without = run(workload, 70, "lru"), run(workload, 70, None)
    assert found.num_in > 0 == found.num_again
    assert found.num_hidden < found.num_resumes
    assert found.most_used <= 70
    assert found.num_out <= 2 * 60 + 12  # a page is written again when it has got entries
    assert (without.num_in, without.num_out, without.num_again > 0) == (0, 0, True)
    assert without.latency_s.sum() > found.latency_s.sum()


def test_the_last_of_a_file_without_a_name_frees_its_pages(tmp_path):
    turns = [(number, number + 0.5, number + 1, 0, 310, 10) for number in range(5)]
    for files, num_out in (([], 0), (named(*range(1, 6)), 40)):
        assert run(Making(*turns, files=files).workload(tmp_path), 10, "lru").num_out == num_out


def test_lower_priorities_go_first_whatever_the_policy_says(tmp_path):
    turns = (
        (0, 1, 1, 0, 310, 10, 1, 1),
        (5, 6, 2, 0, 310, 10, 2),
        (10, 11, 3, 0, 310, 10, 3),
        (15, 16, 1, 320, 20, 0, 1, 1),
    )
    assert run(Making(*turns, files=named(1, 2)).workload(tmp_path), 21, "lru").num_in == 0


def test_a_turn_alone_that_is_larger_than_the_memory_is_refused(tmp_path):
    with pytest.raises(NoSpace, match="a turn on 1,920 entries does not fit"):
        run(two_that_take_turns().workload(tmp_path), 55, "lru")


def test_many_programs_in_little_memory_all_finish_and_books_are_right(tmp_path):
    rng = np.random.default_rng(3)
    making = Making(files=named(1000))
    for pid in range(1, 16):
        making.files.append((pid, 1000, 200, False))
        length = 200
        for number in range(8):
            count, began_s = int(rng.integers(2, 90)), number * 3 + pid / 50
            making.turn(began_s, began_s + 1, pid, length, count, 5, pid, int(rng.integers(3)))
            length += count + 5
    workload = making.workload(tmp_path)
    for rank in (*NAMES, None):
        simulation = Simulation(workload, cpu(), 40, load(rank) if rank else None)
        found = simulation.run()
        assert len(found.latency_s) == 120
        assert found.most_used <= 40
        assert (found.latency_s > 0).all()
        held = int(simulation._memory._resident.sum())
        assert held + simulation._memory.num_free == 40
        assert not simulation._memory._users.any()
        assert simulation._num_entries == 0


# ---- what is shipped, and what is told ----


@pytest.mark.slow
def test_the_shipped_traces_are_what_their_script_writes_bit_for_bit(tmp_path):
    command = [sys.executable, TRACES / "make.py", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in TRACES.glob("*.trace")}
    assert sorted(made) == ["agents.trace", "chat.trace", "mixed.trace", "rag.trace"]
    assert max(map(len, made.values())) < 300_000


@pytest.mark.slow
def test_under_pressure_every_policy_of_ours_is_better_than_computing_again():
    workload = workload_of(read_trace(TRACES / "rag.trace"))
    workload, machine = replace(workload, programs=workload.programs[:12]), h100()
    frames = (4 << 30) // machine.page_bytes
    mean_s = {name: run(workload, frames, name, machine).latency_s.mean() for name in NAMES}
    nothing_s = run(workload, frames, None, machine).latency_s.mean()
    assert max(mean_s.values()) < nothing_s
    assert mean_s["cost"] == min(mean_s.values())


def test_the_command_compares_policies_in_a_table_for_scripts_and_in_a_picture(tmp_path, capsys):
    trace, picture = two_that_take_turns().write(tmp_path / "made.trace"), tmp_path / "x.svg"
    mine = tmp_path / "mine.py"
    mine.write_text("def rank(files, gaps):\n    return -files.num_pages\n")
    words = ["policy", "replay", str(trace), "--memory", "60%", "--plot", str(picture)]
    words += ["--policy", "none", "cost", str(mine)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert [line.split()[0] for line in lines[4:]] == ["policy", "unbounded", "none", "cost", str(mine)]
    assert {element.tag.rpartition("}")[2] for element in ET.parse(picture).iter()} >= {"rect", "text"}
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["policies"]) == ["unbounded", "none", "cost", str(mine)]
    assert told["policies"]["none"]["tokens_again"] > 0
    assert told["memory_bytes"] == 66 * told["page_bytes"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{trace}", "--policy", "lfu"], "'lfu' is no policy"),
        (["{trace}", "--policy", "{bad}"], "ZeroDivisionError"),
        (["{trace}", "--policy", "{late}"], "late.py:4: KeyError: 'later'"),
        (["{trace}", "--cost", "none.json"], "is neither cpu nor h100 nor a file of costs"),
        (["{trace}", "--cost", "{bad}"], "holds no costs"),
        (["{trace}", "--memory", "1M"], "does not fit into the memory"),
        (["{trace}", "--memory", "100%", "--plot", "/none/x.svg"], "/none/x.svg: No such file"),
        (["none.trace"], "none.trace: No such file"),
        (["{bad}"], "is no trace"),
        (["{empty}"], "nothing to replay"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, capsys, words, told):
    names = {
        "bad": tmp_path / "bad.py",
        "late": tmp_path / "late.py",
        "empty": Making().write(tmp_path / "empty.trace"),
    }
    names["trace"] = two_that_take_turns().write(tmp_path / "made.trace")
    names["bad"].write_text("1 / 0\n")
    names["late"].write_text(
        "def rank(files, gaps):\n    if files.bring_s[0] == 1:\n        return files.idle_s\n    return {}['later']\n"
    )
    assert main(["policy", "replay", *(word.format(**names) for word in words)]) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), told in err) == (1, True), err


@pytest.mark.parametrize("memory", ["0%", "101%", "x%", "x"])
def test_a_memory_that_is_none_is_refused(capsys, memory):
    with pytest.raises(SystemExit):
        main(["policy", "replay", "x.trace", "--memory", memory])
    assert memory in capsys.readouterr().err


def test_a_daemons_costs_are_a_machine(tmp_path):
    from scheduler.batch.cost_model import RECORD, CostModel

    costs = CostModel("cpu (bf16, 2 threads)", "bf16", tmp_path / "costs.json", model="tiny")
    steps = np.zeros(50, RECORD)
    steps["num_rows"] = steps["num_wanted"] = 1
    steps["ns"] = 3_000_000
    costs.observe(steps)
    costs.save()
    machine = machine_of(str(tmp_path / "costs.json"), {"model": "tiny", "precision": "bf16", "page_bytes": 3200})
    assert machine.step_s(1, 1) == pytest.approx(0.003, rel=0.05)
    assert machine.entry_bytes == 100
    assert "of 50 steps" in machine.about
