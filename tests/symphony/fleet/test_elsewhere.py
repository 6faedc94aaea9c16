"""Commands on programs of other machines, without Ray: a stand-in for Ray calls a runner in this process."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import libsym
from libsym.errors import Invalid, NotConnected, SymError
from symphony.cli import build_parser
from symphony.commands import elsewhere, fleet_samples
from symphony.commands.elsewhere import SIGNALS, Elsewhere, act_elsewhere, run_in_fleet
from symphony.commands.fleet_samples import Followed, Heard
from symphony.fleet.cluster import Cluster, Connection, MachineLost
from symphony.fleet.runner import Request, Runner
from symphony.launcher.asking import listing
from symphony.launcher.common.places import Refused
from symphony.launcher.common.statuses import LOST
from tests.symphony.launchers import eventually

COMMAND = """
import json, sys, time
from pathlib import Path
command, *words = sys.argv[1:]
signals = Path("signals")
if command == "run":
    print(json.dumps([words, {each.name: each.read_text() for each in Path().iterdir()}, json.load(sys.stdin)]))
elif command == "ps":
    print('[{"name": "long"}]')
    sys.exit("symphony: the daemon is away")
elif command == "top":
    print('{"rates": null, "programs": [{"name": "long"}]}', flush=True)
    sys.exit("symphony: the daemon is away: trying again")
elif words[-1] == "nobody":
    print("a warning", file=sys.stderr)
    print("symphony: no program nobody", file=sys.stderr)
    sys.exit(3)
elif command == "kill":
    with signals.open("a") as file:
        file.write(words[-3] + " ")
elif command == "logs":
    print("begun", flush=True)
    print("apart", file=sys.stderr, flush=True)
    ident, _, num_signals = words[-1].partition("-")
    while len((signals.read_text() if signals.exists() else "").split()) < int(num_signals or 0):
        time.sleep(0.005)
elif command == "wait":
    print(5)
    sys.exit(5)
"""
"""The command `symphony` of the other machine."""


class StandIn:
    """Ray with a runner on the machine `west`, and a machine `north` that has gone."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            def __init__(self, cause: Exception) -> None:
                super().__init__(str(cause))
                self.cause = cause

    def __init__(self, directory: Path) -> None:
        self.asked = list[tuple[str, ...]]()
        self.at_run = list[int]()
        """Signals that arrive when a program is submitted."""
        self._runner = Runner(str(directory), str(directory / "programs"), dict(os.environ))
        self.cancelled = list[Any]()

    def get_actor(self, name: str, *, namespace: str) -> Actor:
        assert namespace == "symphony"
        if name not in {"west", "north", "silent"}:
            raise ValueError(name)
        return Actor(self, name)

    def answers(self, name: str, request: Request) -> Iterator[Any]:
        self.asked.append(request.words)
        if request.words[0] == "run":
            for each in self.at_run:
                os.kill(os.getpid(), each)
        try:
            yield from self._runner.call(request)
            if name == "north":
                yield self.exceptions.RayError("the actor died\nfor a long reason")
        except RuntimeError as error:
            yield self.exceptions.RayTaskError(error)

    def wait(self, calls: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout > 0
        return ([], calls) if calls == [None] else (calls, [])

    def cancel(self, call: Any) -> None:
        self.cancelled.append(call)

    def get(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


class Actor:
    def __init__(self, ray: StandIn, name: str) -> None:
        self._ray, self._name = ray, name

    @property
    def call(self) -> Actor:
        return self

    def options(self, **_options: Any) -> Actor:
        return self

    def remote(self, request: Request) -> Iterator[Any] | None:
        return None if self._name == "silent" else self._ray.answers(self._name, request)


class Terminal(io.TextIOWrapper):
    """Standard output of a command, in memory."""

    def __init__(self) -> None:
        self.memory = io.BytesIO()
        super().__init__(self.memory, write_through=True)

    @property
    def text(self) -> str:
        return self.memory.getvalue().decode()


@pytest.fixture
def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connection:
    command = tmp_path / "command.py"
    command.write_text(COMMAND)
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", (sys.executable, "-SE", str(command)))
    return Connection(StandIn(tmp_path / "programs"), Terminal())


@pytest.fixture
def cluster(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Connection:
    """The connection, as the cluster of this user."""

    @contextmanager
    def connected(_cluster: Cluster) -> Iterator[Connection]:
        yield connection

    monkeypatch.setattr(Cluster, "connection", connected)
    return connection


def text_of(connection: Connection) -> str:
    assert isinstance(connection.out, Terminal)
    return connection.out.text


def parsed(*words: str) -> Any:
    return build_parser().parse_args(words)


def request(*words: str, uid: int | None = None) -> Request:
    return Request(os.getuid() if uid is None else uid, words, input=b"[]")


def signals_of(directory: Path) -> list[int]:
    """Return the signals that the programs of the other machine have got."""
    return [int(each) for each in (directory / "programs" / "empty" / "signals").read_text().split()]


def test_output_and_errors_come_to_their_streams_and_the_status_comes_last(connection, capsys):
    assert Elsewhere(connection, "west").show(request("logs", "long")) == 0
    assert (text_of(connection), capsys.readouterr().err) == ("begun\n", "apart\n")


def test_every_signal_reaches_the_program_and_the_command_has_its_status(connection, tmp_path, monkeypatch):
    class Buffer(io.BytesIO):
        def write(self, content: Any) -> int:
            for each in SIGNALS if b"begun" in content else ():
                os.kill(os.getpid(), each)
            return super().write(content)

    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    before = [signal.getsignal(each) for each in SIGNALS]
    there = Elsewhere(Connection(connection.ray, io.TextIOWrapper(Buffer())), "west")
    try:
        assert there.run(request("run"), f"id-{len(SIGNALS)}", "prog.py") == 5
        assert sorted(signals_of(tmp_path)) == sorted(SIGNALS)
        assert [signal.getsignal(each) for each in SIGNALS] == before
    finally:
        signal.signal(signal.SIGHUP, outside)


def test_signals_that_come_before_the_program_begins_reach_it_when_it_has_begun(connection, tmp_path):
    connection.ray.at_run = [signal.SIGTERM, signal.SIGUSR1]
    assert Elsewhere(connection, "west").run(request("run"), "id-2", "prog.py") == 5
    assert signals_of(tmp_path) == [15, 10]
    assert connection.ray.asked[0] == ("run",)


def test_a_program_whose_output_has_no_reader_is_hung_up(connection, tmp_path):
    class Buffer(io.BytesIO):
        def write(self, _content: Any) -> int:
            raise BrokenPipeError

    out = io.TextIOWrapper(Buffer())
    assert Elsewhere(Connection(connection.ray, out), "west").run(request("run"), "long", "prog.py") == 141
    assert out.closed, "its end would flush it"
    assert signals_of(tmp_path) == [signal.SIGHUP]


def test_a_program_whose_output_can_not_be_written_is_hung_up(connection, tmp_path):
    class Buffer(io.BytesIO):
        def write(self, _content: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    out = io.TextIOWrapper(Buffer())
    with pytest.raises(Refused, match=r"^what the program writes can't be passed on: No space left on device$"):
        Elsewhere(Connection(connection.ray, out), "west").run(request("run"), "long", "prog.py")
    assert out.closed, "its end would flush it"
    assert signals_of(tmp_path) == [signal.SIGHUP]


def test_a_command_with_closed_streams_runs_its_program(connection, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it then
    closed: Any = None
    assert Elsewhere(Connection(connection.ray, closed), "west").run(request("run"), "long", "prog.py") == 5


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Refused), (signal.SIGUSR1, MachineLost)])
def test_a_program_that_was_told_to_end_is_not_lost(connection, number, error):
    connection.ray.at_run = [number]
    with pytest.raises(error):
        Elsewhere(connection, "north").run(request("run"), "long", "prog.py")


def test_under_nohup_the_end_of_the_terminal_does_not_end_the_program(connection):
    seen = []

    class Buffer(io.BytesIO):
        def write(self, content: Any) -> int:
            seen.append(signal.getsignal(signal.SIGHUP))
            return super().write(content)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        there = Elsewhere(Connection(connection.ray, io.TextIOWrapper(Buffer())), "west")
        assert there.run(request("run"), "long", "prog.py") == 5
    finally:
        signal.signal(signal.SIGHUP, before)
    assert {*seen} == {signal.SIG_IGN}


def test_a_refusal_there_names_the_machine_and_has_the_status_of_the_command(connection):
    with pytest.raises(Refused, match=r"^west: no program nobody$") as refused:
        Elsewhere(connection, "west").told(request("logs", "nobody"))
    assert refused.value.status == 3


def test_a_machine_that_does_not_answer_is_named(connection):
    with pytest.raises(NotConnected, match=r"^south is not in your Ray cluster"):
        Elsewhere(connection, "south")
    with pytest.raises(NotConnected, match=r"^silent does not answer$"):
        Elsewhere(connection, "silent").told(request("wait", "long"))
    assert connection.ray.cancelled == [None], "the command would begin later"
    with pytest.raises(NotConnected, match=r"^north does not answer: the actor died$"):
        Elsewhere(connection, "north").told(request("wait", "long"))


def test_a_ray_of_another_user_is_named(connection):
    with pytest.raises(SymError, match=rf"^west: uid 12345 asks, .* belongs to uid {os.getuid()}$"):
        Elsewhere(connection, "west").told(request("wait", "long", uid=12345))


def test_kill_logs_and_wait_take_programs_of_other_machines_and_end_with_the_last_status(cluster, tmp_path, capsys):
    assert act_elsewhere("kill", parsed("kill", "-s", "INT", "west:long", "west:nobody", "west:other")) == 3
    assert signals_of(tmp_path) == [2, 2]
    assert act_elsewhere("logs", parsed("logs", "west:long")) == 0
    assert act_elsewhere("logs", parsed("logs", "west:nobody")) == 3
    assert act_elsewhere("wait", parsed("wait", "south:long", "west:long")) == 5
    assert text_of(cluster) == "begun\nwest:long 5\n"
    errors = capsys.readouterr().err.splitlines()
    assert errors[:2] == ["symphony: west: no program nobody", "apart"]
    assert errors[-1].startswith("symphony: south is not in your Ray cluster")
    with pytest.raises(Invalid, match="here is a program of this machine"):
        act_elsewhere("kill", parsed("kill", "west:long", "here"))


@pytest.mark.parametrize("who", ["west:", ":long", ":"])
def test_a_program_of_another_machine_has_a_machine_and_a_name(who):
    with pytest.raises(Invalid, match="names no program of another machine: give MACHINE:NAME"):
        act_elsewhere("kill", parsed("kill", who))


def test_a_name_there_is_no_option(cluster):
    assert act_elsewhere("wait", parsed("wait", "west:--help")) == 5
    assert cluster.ray.asked == [("wait", "--", "--help")]


def test_a_file_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(elsewhere, "_here", lambda _args: "east")
    with pytest.raises(Invalid, match=r"^/dev/zero has more than 4,194,304 bytes"):
        run_in_fleet(parsed("run", "--on", "west", "/dev/zero"), None)


def test_a_program_goes_to_the_machine_with_its_file_and_its_options(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(elsewhere, "_here", lambda _args: "east")
    monkeypatch.setenv("KEY", "blue")
    file = tmp_path / "prog.py"
    file.write_text("print()")
    options = ("--on", "west", "--detach", "--name", "x", "--memory", "1M", "--env", "A=b c", "--env", "KEY")
    assert run_in_fleet(parsed("run", *options, str(file), "x", "--", "-v"), None) == 0
    words, files, variables = json.loads(text_of(cluster).removeprefix("west:"))
    assert (words[0], words[-4:], files) == ("--detach", ["./prog.py", "x", "--", "-v"], {"prog.py": "print()"})
    assert {"--name=x", "--memory=1048576", "--restart=no", "--env-json=/dev/stdin"} <= {*words}
    assert variables == [["A", "b c"], ["KEY", "blue"]], "other users can read words"
    with pytest.raises(Invalid, match="no terminal here: leave --tty out"):
        run_in_fleet(parsed("run", "--on", "west", "--tty", str(file)), None)


def test_a_program_is_followed_by_its_id_since_others_have_had_its_name(cluster, monkeypatch, tmp_path):
    monkeypatch.setattr(elsewhere, "_here", lambda _args: "east")
    file = tmp_path / "prog.py"
    file.write_text("print()")
    assert run_in_fleet(parsed("run", "--on", "west", str(file)), None) == 5
    begun, *others = cluster.ray.asked
    ident = next(each for each in begun if each.startswith("--id=")).removeprefix("--id=")
    assert others == [("logs", "--follow", "--", ident), ("wait", "--", ident)]


def test_programs_of_a_machine_without_its_daemon_are_listed(cluster, monkeypatch, capsys):
    monkeypatch.setattr(elsewhere, "_here", lambda _args: "east")
    monkeypatch.setattr(listing, "rows", lambda *_args, **_more: ([], None))
    cluster.ray.util = SimpleNamespace(list_named_actors=lambda: ["west", "east"])
    assert elsewhere.ps_in_fleet(parsed("ps", "--fleet", "--json"), None) == 1
    written = capsys.readouterr()
    assert json.loads(written.out) == [{"name": "long", "machine": "west"}]
    assert written.err == "symphony: programs are missing: west: the daemon is away\n"


def test_top_says_of_each_machine_why_it_has_no_programs(cluster, monkeypatch):
    cluster.ray.util = SimpleNamespace(list_named_actors=lambda: ["west", "east", "north", "silent"])
    monkeypatch.setattr(fleet_samples, "LOOK_S", 600)
    followed = Followed("east", 1.0)
    assert followed.news_of("west") == (None, "")
    assert followed.trouble == "Ray is being asked"
    threading.Thread(target=followed.run, daemon=True).start()
    for name, trouble in (
        ("west", "the daemon is away: trying again"),
        ("north", "does not answer: the actor died"),
        ("silent", "does not answer"),
        ("south", "not in your Ray cluster"),
    ):
        eventually(lambda name=name, trouble=trouble: followed.news_of(name) == (None, trouble))
    assert followed.trouble == ""


def test_a_machine_that_prints_more_than_samples_is_named(cluster, monkeypatch):
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("echo", "a greeting\n"))
    followed = Followed("east", 1.0)
    with Cluster.of_user().connection() as connection:
        followed._follow(connection, "west")
    assert followed.news_of("west") == (None, "prints a line that is no sample")


def test_a_machine_whose_samples_stop_does_not_answer():
    followed = Followed("east", 1.0)
    machine = followed.machines["west"] = Heard({"rates": None, "programs": []}, time.monotonic())
    assert followed.news_of("west") == ({"rates": None, "programs": []}, "")
    machine.heard_s -= 7
    assert followed.news_of("west") == (None, "no answer for 7 s")


@pytest.mark.parametrize("is_away", [False, True])
def test_a_line_of_top_has_all_machines_of_the_fleet_and_says_whose_each_program_is(is_away):
    followed = Followed("east", 1.0)
    followed.trouble = ""
    facts = {"rates": {"tokens_per_s": 5.0}, "programs": [{"name": "long"}]}
    followed.machines["west"] = Heard(facts, time.monotonic())
    listed = {"east": {"model": "tiny", "free_bytes": 7, "load": None}, "west": {"model": "tiny", "free_bytes": 8}}
    fleet = {"name": "f", "machine": "east", "trouble": "", "machines": listed, "drained": ["west", "old"]}
    found = fleet_samples.line(fleet, None if is_away else facts, "it is away" if is_away else "", followed)
    east = {"state": "", "trouble": "it is away"} if is_away else {"state": "serves", "trouble": ""}
    assert {name: found["machines"]["east"][name] for name in east} == east
    states = {name: (each["state"], each["trouble"], each["num_programs"]) for name, each in found["machines"].items()}
    assert states["west"] == ("drained", "", 1)
    assert states["old"] == ("drained, away", "not in your Ray cluster", 0)
    assert [each["machine"] for each in found["programs"]] == ["west"] if is_away else ["east", "west"]
    assert found["troubles"] == (["it is away"] if is_away else [])


@pytest.mark.parametrize(
    ("stats", "has_left"),
    [
        ([{"trouble": "", "machines": ["east", "north"]}, {"trouble": "", "machines": ["east"]}], True),
        ([{"trouble": "", "machines": ["north"]}, {"trouble": "etcd does not answer", "machines": ["north"]}], False),
    ],
)
def test_a_program_starts_elsewhere_only_if_its_machine_has_left_the_fleet(
    cluster, tmp_path, monkeypatch, capsys, stats, has_left
):
    placed = iter([("north", "east"), ("west", "east")])
    monkeypatch.setattr(elsewhere, "_machine", lambda _args: next(placed))
    monkeypatch.setattr(elsewhere, "connect", lambda _args: None)
    monkeypatch.setattr("time.sleep", lambda _s: None)
    monkeypatch.setattr(libsym, "daemon_stat", lambda: {"fleet": stats.pop(0)})
    file = tmp_path / "prog.py"
    file.write_text("print()")
    args = parsed("run", "--fleet", "--detach", "--restart", "on-failure", str(file))
    if has_left:
        assert run_in_fleet(args, None) == 0
        assert text_of(cluster).startswith("west:")
        assert capsys.readouterr().err == f"symphony: north does not answer: the actor died; {file} starts again\n"
    else:
        with pytest.raises(Refused, match="north does not answer") as refused:
            run_in_fleet(args, None)
        assert refused.value.status == LOST
    assert stats == []
