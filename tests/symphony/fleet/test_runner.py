"""Runners of a user's Ray cluster, without Ray: commands that they get and refuse."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

from libsym.errors import Invalid, NotFound
from symphony.fleet.cluster import Cluster, serve_node
from symphony.fleet.runner import ERRORS, OUTPUT, STATUS, Request, Runner, Source, run_options


def done(runner: Runner, *words: str, uid: int | None = None, source: Source | None = None) -> dict[int, bytes]:
    """Run a command. Return its streams."""
    written = {STATUS: b"", OUTPUT: b"", ERRORS: b""}
    for stream, content in runner.call(Request(os.getuid() if uid is None else uid, words, source)):
        written[stream] += content
    return written


def test_options_are_given_on_as_words():
    given = [("name", "a b"), ("venv", None), ("bind", ["/x:ro", "/y"]), ("tokens", 5), ("env", [])]
    assert run_options(given) == ("--name=a b", "--bind=/x:ro", "--bind=/y", "--tokens=5")


def test_another_uid_is_refused(tmp_path: Path):
    with pytest.raises(RuntimeError, match=rf"uid {os.getuid() + 1} asks, .* belongs to uid {os.getuid()}$"):
        done(Runner(str(tmp_path)), "--version", uid=os.getuid() + 1)
    assert not [*tmp_path.iterdir()]


def test_a_runner_says_that_it_is_there_before_a_command_writes(tmp_path: Path):
    assert next(Runner(str(tmp_path)).call(Request(os.getuid(), ("wait", "nobody")))) == (OUTPUT, b"")


def test_output_errors_and_status_of_a_command_are_apart(tmp_path: Path):
    runner = Runner(str(tmp_path / "programs"))
    assert done(runner, "--version")[OUTPUT].startswith(b"symphony ")
    failed = done(runner, "no-such-command")
    assert (failed[STATUS], failed[OUTPUT]) == (b"2", b"")
    assert b"no-such-command" in failed[ERRORS]


def test_a_programs_file_is_written_once_and_keeps_whether_it_is_executable(tmp_path: Path):
    runner = Runner(str(tmp_path / "programs"))
    plain, executable = (Source("json.py", b"print()", each) for each in (False, True))
    for source in (plain, executable, plain):
        assert done(runner, "--version", source=source)[STATUS] == b"0"  # `json.py` is not the command's json
    files = [*tmp_path.glob("programs/*/json.py")]
    assert sorted(stat.S_IMODE(file.stat().st_mode) for file in files) == [0o600, 0o700]
    assert {stat.S_IMODE(file.parent.stat().st_mode) for file in files} == {0o700}
    assert len([*tmp_path.glob("programs/*")]) == 2


def test_commands_do_not_see_the_variables_of_ray(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/token")
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("env",))
    names = {line.partition(b"=")[0] for line in done(Runner(str(tmp_path)))[OUTPUT].splitlines()}
    assert b"PATH" in names
    assert names & {b"RAY_AUTH_TOKEN_PATH", b"PYTHONBREAKPOINT"} == set()


def test_a_command_without_a_file_sees_no_files_of_programs(tmp_path: Path, monkeypatch):
    runner = Runner(str(tmp_path))
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("ls", "-A"))
    assert done(runner, source=Source("a.py", b"secret", is_executable=False))[OUTPUT] == b"a.py\n"
    assert done(runner)[OUTPUT] == b""


def test_a_command_ends_when_its_caller_goes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("symphony.fleet.runner.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("sh", "-c", "echo $$; exec sleep 600"))
    events = Runner(str(tmp_path)).call(Request(os.getuid(), ()))
    number = int(b"".join(next(events)[1] for _ in range(2)) or next(events)[1])
    assert next(events) == (OUTPUT, b"")
    events.close()
    assert not Path(f"/proc/{number}").exists()


def test_the_users_own_settings_of_ray_do_not_count(tmp_path: Path, monkeypatch):
    cluster = Cluster(tmp_path)
    cluster.make_token()
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "other", "PATH": "/bin"})
    monkeypatch.setitem(sys.modules, "ray", ray := ModuleType("ray"))
    assert cluster.imported() is ray
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(cluster.token)
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_token_is_the_users_alone(tmp_path: Path):
    cluster = Cluster(tmp_path / "fleet")
    with pytest.raises(NotFound, match="copy it from the first machine"):
        cluster.environment()
    cluster.make_token()
    token = cluster.token.read_text()
    cluster.make_token()
    assert cluster.token.read_text() == token
    assert len(token) == 64
    assert [*cluster.directory.iterdir()] == [cluster.token]
    assert cluster.environment()["RAY_AUTH_TOKEN_PATH"] == str(cluster.token)
    cluster.token.chmod(0o640)
    with pytest.raises(Invalid, match="only you may read it"):
        cluster.environment()


@pytest.mark.parametrize(("listen", "head"), [("127.0.0.1:6379", None), ("localhost", "10.0.0.1:6379")])
def test_ray_gets_no_loopback_address(tmp_path: Path, monkeypatch, listen: str, head: str | None):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(Invalid, match="Ray uses no loopback address"):
        serve_node(Cluster(tmp_path), "east", "socket", listen, head)


@pytest.mark.parametrize(("listen", "head"), [("10.0.0.1", None), ("10.0.0.2", "10.0.0.1")])
def test_an_address_without_a_port_is_refused(tmp_path: Path, monkeypatch, listen: str, head: str | None):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(Invalid, match=r"10\.0\.0\.1 is no HOST:PORT"):
        serve_node(Cluster(tmp_path), "east", "socket", listen, head)
