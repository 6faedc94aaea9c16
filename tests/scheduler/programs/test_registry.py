"""Programs that come and go: their identities, the records kept of them, and the cost of a damaged file."""

import errno
import os
import subprocess
from contextlib import suppress

import pytest
import trio

from libsym.abi import Op
from libsym.errors import Invalid, WouldBlock
from scheduler.programs import registry
from scheduler.programs.admission import Admission
from scheduler.programs.kept import KeptPrograms, record
from scheduler.programs.limits import NO_LIMITS, OverLimit, ProgramLimits
from scheduler.programs.link import Link
from scheduler.programs.registry import MAX_ENDED, Programs
from scheduler.programs.watch import ProgramWatch
from tests.scheduler.bench import Bench

ID = "1f2e3d4c"


def save(programs):
    """Save the registry as the daemon does at its end."""
    programs.save(
        KeptPrograms([record(each) for each in programs.living.values()], [record(each) for each in programs.ended])
    )


@pytest.fixture
def sleeper():
    """Starts processes; all end with the test."""
    started = []

    def start():
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def programs_at(tmp_path):
    return Programs(path=tmp_path / "programs.json")


def started(programs, number=ID, *, link=None, limits=NO_LIMITS, **fields):
    return programs.start(link or Link(0, 0), number, "prog", limits=limits, **fields)


class Connection:
    """Stand-in for a connection of a process, with the attributes that a registry reads."""

    num_bytes, handles, waits_for = (100, 10), (), dict[Op, int]()

    def __init__(self, pid, uid=0):
        self.pid, self.uid, self.gid = pid, uid, uid


def test_connections_of_a_process_are_of_one_program_and_those_of_others_of_others(sleeper):
    programs = Programs()
    one, other = sleeper().pid, sleeper().pid
    first = programs.join(Connection(one))
    assert programs.join(Connection(one)) is first
    assert programs.join(Connection(other)) is not first
    assert programs.join(Connection(one, uid=7)) is not first, "a process may connect under several uids"
    assert programs.join(Connection(0)) is not programs.join(Connection(0)), "what can't be seen is not known again"
    assert first.name == "sleep"


def test_a_program_ends_with_its_process_and_not_with_its_connection(sleeper):
    programs, process = Programs(), sleeper()
    connection = Connection(process.pid)
    program = programs.join(connection)
    programs.leave(connection, program)
    programs.end_if_gone(program)
    assert program.id in programs.living
    again = Connection(process.pid)
    assert programs.join(again) is program
    programs.leave(again, program)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    programs.end_if_gone(program)
    assert program.id not in programs.living
    assert [each.ended and each.ended.reason for each in programs.ended] == ["gone"]
    assert (program.used.bytes_in, programs.users[0].bytes_in) == (200, 200)


def test_what_uses_the_model_last_says_that_a_program_has_gone(sleeper):
    gone = list[object]()
    programs = Programs(gone=gone.append)
    program, connection = started(programs), Connection(sleeper().pid)
    programs.join(connection, program)
    programs.end(program, 0, "exit")
    assert gone == []
    programs.leave(connection, program)
    assert gone == [program]


def test_the_number_of_a_process_that_has_ended_is_another_program(sleeper):
    programs, process = Programs(), sleeper()
    program = started(programs, pid=process.pid)
    assert programs.join(Connection(process.pid)) is program, "it went round its own socket"
    programs.end(program, 0, "exit")
    assert programs.join(Connection(process.pid)) is not program


def test_a_program_whose_launcher_is_lost_ends_when_its_process_has(sleeper, monkeypatch):
    monkeypatch.setattr(registry, "LOST_AFTER_S", 0.0)
    programs, process = Programs(), sleeper()
    link = Link(0, 0)
    program = started(programs, link=link, pid=process.pid)
    programs.launcher_gone(link)
    programs.end_if_gone(program)
    assert not program.ended, "it runs"
    process.kill()
    process.wait()
    programs.end_if_gone(program)
    assert (program.ended.reason, program.ended.status) == ("lost", None)
    assert programs.admission.num_refused == 0


def test_living_programs_go_on_where_they_were(tmp_path, sleeper):
    programs = programs_at(tmp_path)
    limits = ProgramLimits(tokens=100, page_seconds=1.5)
    program = programs.start(Link(0, 0), ID, "prog", pid=sleeper().pid, parent="00000001", limits=limits)
    program.used.tokens, program.used.compute_s = 42, 1.25
    program.measure(3.5)
    save(programs)
    again = programs_at(tmp_path)
    found = again.start(Link(0, 0), ID, "prog", limits=limits, again=True)
    assert found.facts() == program.facts()
    assert found.measure().page_seconds == 3.5
    with pytest.raises(OverLimit):
        found.require(59, 0)
    assert again.users[0].tokens == 0, "those of users begin with the daemon"


def test_a_program_that_was_started_again_while_no_daemon_ran_is_the_process_that_it_is_now(tmp_path, sleeper):
    programs = programs_at(tmp_path)
    before, now = sleeper().pid, sleeper().pid
    started(programs, pid=before)
    save(programs)
    again = programs_at(tmp_path)
    program = started(again, pid=now, again=True)
    assert program.pid == now
    assert again.of_process(now, 0, 0) is program
    assert again.of_process(before, 0, 0) is not program


DAMAGED = {
    "nothing": "",
    "a list": "[]",
    "no version": "{}",
    "another version": '{"version": 9, "living": [], "ended": []}',
    "a number": '{"version": 1, "living": [7], "ended": []}',
    "an id that is none": '{"version": 1, "living": [{"id": 7}], "ended": []}',
    "no lists": '{"version": 1, "living": {}, "ended": 3}',
    "depth": '{"version": 1, "living": ' + "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_costs_the_history_and_no_more(tmp_path, caplog, text):
    (tmp_path / "programs.json").write_text(text)
    programs = programs_at(tmp_path)
    assert not programs.living
    assert "the records of programs are ignored" in caplog.text
    save(programs)
    caplog.clear()
    programs_at(tmp_path)
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("tokens", -5, "tokens is -5"), *((name, 10**400, "no number of 64 bits") for name in ("pid", "uid", "began_ns"))],
)
def test_a_kept_number_that_can_be_none_is_damage(tmp_path, caplog, name, value, said):
    programs = programs_at(tmp_path)
    kept = record(started(programs))
    assert name in (kept["used"] if name == "tokens" else kept)
    changed = {"used": kept["used"] | {name: value}} if name == "tokens" else {name: value}
    programs.save(KeptPrograms([kept | changed], []))
    assert not programs_at(tmp_path).living
    assert said in caplog.text


def test_the_last_thousand_that_ended_are_remembered(tmp_path):
    programs = programs_at(tmp_path)
    for number in range(MAX_ENDED + 5):
        programs.end(started(programs, f"{number:08x}"), number % 256, "exit")
    assert len(programs.ended) == MAX_ENDED
    assert programs.ended[0].id == f"{5:08x}"
    save(programs)
    assert (tmp_path / "programs.json").stat().st_size < 1 << 20
    again = programs_at(tmp_path)
    assert [each.id for each in again.ended] == [each.id for each in programs.ended]
    assert again.ended[-1].facts() == programs.ended[-1].facts()


# ---- admission and limits


def test_a_user_has_so_many_programs_at_once_and_others_have_theirs():
    admission = Admission(2, 100)
    admission.admit(1)
    admission.admit(1)
    with pytest.raises(WouldBlock, match="uid 1 has 2 programs"):
        admission.admit(1)
    admission.admit(2)
    admission.ended(1)
    admission.admit(1)
    assert admission.num_refused == 1


def test_starts_of_more_than_a_minute_ago_do_not_count(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("scheduler.programs.admission.time.monotonic", lambda: now[0])
    admission = Admission(100, 2)
    admission.admit(1)
    now[0] += 30
    admission.admit(1)
    with pytest.raises(WouldBlock, match="try again in 30 s") as refused:
        admission.admit(1)
    assert refused.value.errno == errno.EAGAIN
    now[0] += 30
    admission.admit(1)


@pytest.mark.parametrize("wrong", [[], 5, {"tokens": "5"}, {"tokens": True}, {"tokens": 1e9}, {"pages": -1}, {"x": 1}])
def test_limits_are_numbers_of_their_kind(wrong):
    with pytest.raises(Invalid):
        ProgramLimits.read(wrong)
    assert ProgramLimits.read(None) is ProgramLimits.read({}) is ProgramLimits.read({"tokens": None}) is NO_LIMITS


class Watched(Bench):
    """A bench with launched programs that have limits, and are watched."""

    def run_test(self, scenario):
        async def main():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ProgramWatch(self.programs, self.batches.sync, self.batches.stop).run)
                await scenario()
                nursery.cancel_scope.cancel()

        super().run_test(main)

    def launched(self, **limits):
        lip, link = self.lip(), Link(0, 0)
        lip.launched = started(self.programs, link=link, limits=ProgramLimits(**limits))
        self.gate.welcome(lip)
        return lip, link


@pytest.fixture
def bench(tmp_path):
    return Watched(tmp_path)


async def test_calls_of_a_program_that_is_over_end_and_those_of_others_go_on(bench):
    lip, link = bench.launched(tokens=40)
    other = await bench.held(lambda: bench.submit(bench.file(), [1] * 10))
    fits = bench.submit(bench.file(), [1] * 30, program=lip)
    with pytest.raises(OverLimit, match="asks for 41 more"):
        await bench.submit(bench.file(), [1] * 41, program=lip).wait()
    assert await link.next() == b'{"do": "limit", "id": "1f2e3d4c", "what": "tokens"}'
    bench.steps.gate.set()
    with pytest.raises(OverLimit):
        await fits.wait()
    await bench.finish(other, bench.submit(bench.file(), [1] * 50))


async def test_a_launcher_that_can_t_be_told_is_hung_up_on_and_hears_it_when_it_comes_again(bench):
    lip, link = bench.launched(tokens=1)
    for num_bytes in (60_000, 1):
        with suppress(WouldBlock):
            while True:
                link.tell({"do": "x" * num_bytes})
    with pytest.raises(OverLimit):
        await bench.submit(bench.file(), [1, 2], program=lip).wait()
    await link.broken_off.wait()
    link.close()
    bench.programs.launcher_gone(link)
    again = Link(0, 0)
    started(bench.programs, link=again, again=True)
    assert b'"what": "tokens"' in await again.next()
