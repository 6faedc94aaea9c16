"""`symphony trace`, from a daemon to a timeline."""

import errno
import json
import os
import signal
import subprocess

import pytest

import libsym as sym
from scheduler.trace.file import read_trace
from symphony.cli import main
from symphony.traces.trace_calls import calls_of
from tests.symphony.daemons import SYMPHONY
from tests.symphony.launchers import eventually
from tests.symphony.traces.trace_maker import TraceMaker

TEXT = "a text that is written"


def recording(daemon, *words):
    """`symphony trace record`, under way."""
    command = [*SYMPHONY, "trace", "record", *map(str, words)]
    return subprocess.Popen(command, env=daemon.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path):
    """Wait for the header in a trace's file: all later events will be in the file, too."""
    eventually(lambda: path.exists() and path.stat().st_size)


@pytest.mark.slow
def test_what_programs_did_is_recorded_dumped_summed_up_and_shown(shared, symphony, tmp_path):
    path = tmp_path / "x.trace"
    process = recording(shared, "-o", path)
    wait_for(path)
    with sym.kv_create() as kv:
        token = sym.pred(kv, range(1, 100)).argmax()
        for _ in range(20):
            token = sym.pred(kv, [token]).argmax()
        assert len(list(sym.generate(kv, [token], max_tokens=10, stop_at_end=False))) == 10
    with sym.kv_create("named.kv") as base:
        sym.pred(base, [1, 2, 3])
        with sym.kv_fork(base) as fork:
            sym.pred(fork, [7])
            numbers = sym.kv_stat(base).ino, sym.kv_stat(fork).ino
    sym.kv_remove("named.kv")
    (shared.mount / ".symphony/text/t.kv").write_text(TEXT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert err.startswith(f"{path}: ")
    assert err.count("\n") == 1
    assert path.stat().st_mode & 0o777 == 0o600

    trace = read_trace(path)
    assert (trace.torn_at, trace.num_lost) == (None, 0)
    mine = trace.arrivals[trace.arrivals["pid"] == os.getpid()]
    # Of a loop's later tokens those that came by the gate are here, the others in seats alone.
    assert set(mine["num_tokens"].tolist()) == {1, 3, len(sym.tokenize(TEXT)), 99}
    assert set(mine["uid"].tolist()) == {os.getuid()}
    calls = calls_of(trace)
    assert calls.is_over.all()
    assert (calls.errno == 0).all()
    assert (calls.num_rows > 0).all()
    assert (calls.compute_ns <= calls.ended_ns - calls.arrived_ns).all()
    # 99 and 20, the generation's first and nine of its ten tokens, four of the named file and its fork, and the text's.
    assert trace.steps["num_rows"].sum() == 99 + 20 + 10 + 4 + len(sym.tokenize(TEXT))
    told = {each["file"]: (each["source"], each["num_shared"], each["is_named"]) for each in trace.files}
    assert (told[numbers[0]], told[numbers[1]]) == ((0, 0, 1), (numbers[0], 3, 0))

    status, out, err = symphony("trace", "dump", path)
    lines = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert (lines[0]["record"], lines[0]["model"]) == ("header", "tiny")
    assert {line["record"] for line in lines[1:]} == {"arrival", "answer", "step", "file"}
    assert sum(len(line["seats"]) for line in lines if line["record"] == "step") == len(trace.seats)
    assert {line["kind"] for line in lines if line["record"] == "arrival"} == {"pred", "generate", "text"}
    status, out, _ = symphony("trace", "summary", "--json", path)
    assert (status, json.loads(out)["calls"]["pred"]["num"]) == (0, 23)
    status, out, _ = symphony("trace", "summary", path)
    assert (status, "generate  1 calls, 0 failed" in out) == (0, True)

    status, out, err = symphony("trace", "show", path)
    timeline = tmp_path / "x.json"
    assert (status, out, err) == (0, f"{timeline}\n", "")
    assert json.loads(timeline.read_text())["traceEvents"]
    assert symphony("trace", "show", path, "-o", tmp_path / "y.json")[0] == 0
    assert (tmp_path / "y.json").read_bytes() == timeline.read_bytes()


@pytest.mark.slow
def test_it_ends_after_its_seconds_and_calls_in_flight_are_in_it_and_go_on(shared, symphony, tmp_path):
    path = tmp_path / "x.trace"
    generations = [sym.generate(sym.kv_create(), [1], max_tokens=3000, stop_at_end=False) for _ in range(30)]
    next(iter(generations[0]))
    status, _, err = symphony("trace", "record", "-o", path, "--seconds", "0.5")
    assert (status, "30 calls" in err) == (0, True)
    for generation in generations[1:]:
        generation.cancel()
    assert len(list(generations[0])) > 2000
    trace = read_trace(path)
    assert trace.arrivals["pid"].tolist() == [os.getpid()] * 30
    assert (len(trace.steps) > 0, len(trace.answers)) == (True, 0)
    assert set(trace.seats["call"].tolist()) == set(trace.arrivals["call"].tolist())


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED as another user: only root can become one")
def test_another_user_may_not_record(shared):
    for directory in (shared.socket.parent, *shared.socket.parent.parents[:2]):
        directory.chmod(0o755)
    told = shared.run("""
        os.seteuid(65534)
        from libsym.calls.trace import DaemonTrace
        try: DaemonTrace()
        except sym.SymError as error: print(error.errno)
    """)
    assert told == f"{errno.EPERM}\n"


def test_a_daemon_that_ends_leaves_what_was_recorded(start_daemon, symphony, tmp_path):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "16M")
    path = tmp_path / "x.trace"
    process = recording(daemon, "-o", path)
    wait_for(path)
    daemon.run("with sym.kv_create() as kv: sym.pred(kv, [1, 2, 3])")
    eventually(lambda: len(read_trace(path).steps))
    daemon.process.kill()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "is gone" in err
    assert read_trace(path).steps["num_rows"].sum() == 3


def test_what_cannot_be_recorded_or_is_no_trace_is_one_line_and_makes_no_file(shared, symphony, tmp_path):
    (tmp_path / "png").write_bytes(b"PNG")
    for words, why in (
        (("record", "--socket", tmp_path / "none.sock", "-o", tmp_path / "x.trace"), "no daemon listens at"),
        (("record", "--seconds", "1", "-o", tmp_path / "none/x.trace"), "none/x.trace: No such file"),
        (("record", "--seconds", "1", "-o", "/dev/full"), "/dev/full: No space left"),
        (("show", tmp_path / "x.trace"), "No such file"),
        (("summary", tmp_path / "png"), "is no trace"),
    ):
        status, out, err = symphony("trace", *words)
        assert (status, out, err.count("\n"), why in err) == (1, "", 1, True), err
    assert [path.name for path in tmp_path.iterdir()] == ["png"]


@pytest.mark.parametrize("what", ["show", "dump", "summary"])
def test_a_torn_trace_is_shown_as_far_as_it_goes(tmp_path, symphony, what):
    made = TraceMaker()
    made.arrive(1, 0)
    made.step(1, 2, [(1, 1, 0)])
    made.answer(1, 2)
    path = made.write(tmp_path / "x.trace")
    path.write_bytes(path.read_bytes()[:-1])
    status, out, err = symphony("trace", what, path)
    assert status == 0
    assert out
    assert "is torn at byte" in err


def test_a_timeline_takes_the_place_of_another_file_only_where_it_is_named_and_never_of_its_trace(tmp_path, symphony):
    made = TraceMaker()
    made.arrive(1, 0)
    path, other = made.write(tmp_path / "x.trace"), tmp_path / "x.json"
    other.write_text("{}")
    status, out, err = symphony("trace", "show", path)
    assert (status, out) == (1, "")
    assert f"{other} exists: name a file with -o" in err
    assert other.read_text() == "{}"
    assert symphony("trace", "show", path, "-o", other)[:2] == (0, f"{other}\n")
    assert json.loads(other.read_text())["traceEvents"]
    other.write_bytes(path.read_bytes())
    assert symphony("trace", "show", other)[0] == 1
    assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x", "1e99"])
def test_seconds_that_are_none_are_refused(symphony, seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trace", "record", "--seconds", seconds])
    assert ended.value.code == 2
    assert "--seconds" in capsys.readouterr().err
