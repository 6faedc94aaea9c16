"""Runners of a user's Ray cluster, without Ray: commands that they get and refuse."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from libsym.errors import Invalid, NotConnected, NotFound
from symphony.fleet.cluster import Cluster, _check_owner, _end_earlier, _look, serve_node
from symphony.fleet.keys import make_keys_of_token
from symphony.fleet.link import AUTHORITY, CERTIFICATE, KEY
from symphony.fleet.runner import ERRORS, OUTPUT, STATUS, Request, Runner, Source, run_options


def runner_in(directory: Path, **variables: str) -> Runner:
    own = {name: value for name, value in os.environ.items() if name != "COLOR"}
    return Runner(str(directory / "sent"), str(directory / "programs"), {**own, **variables})


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
        done(runner_in(tmp_path), "--version", uid=os.getuid() + 1)
    assert not [*tmp_path.iterdir()]


def test_a_runner_says_that_it_is_there_before_a_command_writes(tmp_path: Path):
    assert next(runner_in(tmp_path).call(Request(os.getuid(), ("wait", "nobody")))) == (OUTPUT, b"")


def test_output_errors_and_status_of_a_command_are_apart(tmp_path: Path):
    runner = runner_in(tmp_path)
    assert done(runner, "--version")[OUTPUT].startswith(b"symphony ")
    failed = done(runner, "no-such-command")
    assert (failed[STATUS], failed[OUTPUT]) == (b"2", b"")
    assert b"no-such-command" in failed[ERRORS]


def text(ident: str, *, is_executable: bool = False) -> Source:
    return Source(ident, "json.py", b"secret", is_executable)


def test_each_program_has_a_directory_of_its_own_with_its_file_alone(tmp_path: Path, monkeypatch):
    runner = runner_in(tmp_path)
    assert done(runner, "--version", source=text("0000000a"))[STATUS] == b"0"  # `json.py` is not the command's json
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("find", ".", "-printf", "%M %P\n"))
    assert done(runner, source=text("0000000b"))[OUTPUT] == b"drwx------ \n-rw------- json.py\n"
    assert done(runner, source=text("0000000c", is_executable=True))[OUTPUT] == b"drwx------ \n-rwx------ json.py\n"
    assert done(runner)[OUTPUT] == b"drwx------ \n"


def test_the_file_of_a_program_is_removed_when_the_launcher_has_forgotten_the_program(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("true",))
    runner = runner_in(tmp_path)
    for ident in ("0000000a", "0000000b"):
        done(runner, source=text(ident))
    (tmp_path / "programs" / "0000000a").mkdir(parents=True)
    monkeypatch.setattr("symphony.fleet.runner.FORGOTTEN_S", -1)
    done(runner, source=text("0000000c"))
    assert sorted(each.name for each in (tmp_path / "sent").iterdir()) == ["0000000a", "0000000c"]


def test_a_command_reads_its_input_from_a_file(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("cat", "/dev/stdin"))
    content = bytes(1 << 20)
    events = runner_in(tmp_path).call(Request(os.getuid(), (), input=content))
    assert b"".join(chunk for stream, chunk in events if stream == OUTPUT) == content


def test_commands_have_the_variables_with_which_their_machine_joined(tmp_path: Path, monkeypatch):
    runner = runner_in(tmp_path, PATH="/bin", COLOR="blue")
    monkeypatch.setenv("COLOR", "red")
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("/bin/env",))
    found = done(runner)[OUTPUT].splitlines()
    assert {b"PATH=/bin", b"COLOR=blue"} <= {*found}
    assert not [each for each in found if each.startswith(b"PYTHONBREAKPOINT")]


def test_a_command_ends_when_its_caller_goes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("symphony.fleet.runner.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("symphony.fleet.runner.SYMPHONY", ("sh", "-c", "echo $$; exec sleep 600"))
    events = runner_in(tmp_path).call(Request(os.getuid(), ()))
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


def test_a_machine_in_no_cluster_is_told_how_it_gets_into_one(tmp_path: Path):
    with pytest.raises(NotConnected, match="in no Ray cluster of yours: symphony fleet up, or symphony fleet join"):
        Cluster(tmp_path).connected()


def test_machines_with_one_token_know_each_other_by_their_addresses(tmp_path: Path):
    for name, token, host in (("east", b"a", "10.0.0.1"), ("west", b"a", "10.0.0.2"), ("other", b"b", "10.0.0.1")):
        make_keys_of_token(tmp_path / name, token, host)
    assert knows(tmp_path / "west", tmp_path / "east", "10.0.0.1")
    assert not knows(tmp_path / "west", tmp_path / "east", "10.0.0.3")
    assert not knows(tmp_path / "west", tmp_path / "other", "10.0.0.1")
    make_keys_of_token(tmp_path / "east", b"a", "10.0.0.3")
    assert knows(tmp_path / "west", tmp_path / "east", "10.0.0.3")


def knows(client: Path, server: Path, host: str) -> bool:
    """Return whether a client believes that a server is at the address, and a server believes the client."""
    sides = list[tuple[ssl.MemoryBIO, ssl.MemoryBIO, ssl.SSLObject]]()
    for keys, is_server in ((client, False), (server, True)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(keys / CERTIFICATE, keys / KEY)
        context.load_verify_locations(keys / AUTHORITY)
        context.verify_mode = ssl.CERT_REQUIRED
        taken, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if is_server else host
        sides.append((taken, sent, context.wrap_bio(taken, sent, server_side=is_server, server_hostname=name)))
    ready = set[int]()
    while len(ready) < len(sides):
        for number, (_, sent, side) in enumerate(sides):
            try:
                side.do_handshake()
                ready.add(number)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError:
                return False
            sides[1 - number][0].write(sent.read())
    return True


def test_a_machine_without_the_extra_fleet_can_look_for_a_cluster():
    looking = "import sys; import symphony.fleet.cluster; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", looking], check=False).returncode == 0


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates"), Invalid, "no command line that is not UTF-8"),
        (RuntimeError("busy\nfor long"), NotConnected, "^Ray at .* does not answer: busy$"),
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.49.1\n    Python: 3.11.2\n"),
            NotConnected,
            "^Ray at .* and Ray here must have equal versions: .* Ray: 2.49.1 Python: 3.11.2$",
        ),
    ],
)
def test_an_error_of_ray_is_one_line(tmp_path: Path, monkeypatch, raised, error, text):
    def init(*_words: object, **_more: object) -> None:
        raise raised

    cluster = Cluster(tmp_path)
    cluster.make_token()
    cluster.keys.mkdir()
    (cluster.keys / "host").write_text("10.0.0.1")
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "ray", ray := ModuleType("ray"))
    monkeypatch.setattr(ray, "init", init, raising=False)
    monkeypatch.setattr(Cluster, "probe", lambda _cluster, _where: None)
    with pytest.raises(error, match=text):
        cluster.connected("10.0.0.1:6379")


def test_a_cluster_that_runs_without_symphony_has_the_variables_with_which_this_machine_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    cluster = replace(Cluster.of_user(), theirs={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"})
    cluster.directory.mkdir(parents=True)
    cluster.note("10.0.0.1:6379")
    assert Cluster.of_user() == cluster
    assert (cluster.directory / "running").stat().st_mode & 0o777 == 0o600
    assert cluster.first_machine() == "10.0.0.1:6379"
    monkeypatch.setattr(os, "environ", {"RAY_USE_TLS": "1", "PATH": "/bin"})
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    cluster.imported()
    assert {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "secret",
        "RAY_ENABLE_AUTO_CONNECT": "0",
    }.items() <= os.environ.items()
    assert "RAY_USE_TLS" not in os.environ
    own = replace(cluster, theirs=None)
    own.note("10.0.0.2:6379")
    assert Cluster(cluster.directory).first_machine() is None, "no machine here has keys"
    assert not (cluster.directory / "running").exists()


def test_noted_variables_are_whole_and_private_whatever_was_there(tmp_path):
    noted, elsewhere = tmp_path / "running", tmp_path / "elsewhere"
    elsewhere.write_text("{}")
    elsewhere.chmod(0o644)
    noted.symlink_to(elsewhere)
    with noted.open() as reader:
        Cluster(tmp_path, {"RAY_AUTH_TOKEN": "secret"}).note("10.0.0.1:6379")
        assert reader.read() == "{}", "a command that reads meanwhile has the old variables"
    assert json.loads(noted.read_text()) == {"RAY_AUTH_TOKEN": "secret"}
    assert noted.lstat().st_mode & 0o777 == 0o600


class Actors:
    """Stand-in for Ray with nodes and named actors. An actor that is killed has its name for a while."""

    def __init__(self, *nodes, looks=0):
        self.nodes = lambda: [
            {"Alive": alive, "NodeManagerAddress": host, "Resources": names} for alive, host, *names in nodes
        ]
        self.looks, self.killed = looks, 0

    def get_actor(self, name, *, namespace):
        self.looks -= 1
        if self.looks < 0:
            raise ValueError(name)
        return name

    def kill(self, _actor):
        self.killed += 1


def test_an_earlier_runner_of_a_machine_ends_before_a_new_one_begins():
    ray = Actors((True, "10.0.0.1", "symphony-west"), (False, "10.0.0.2", "symphony-west"), looks=3)
    _end_earlier(ray, "west", "10.0.0.1")
    assert (ray.killed, ray.looks) == (3, -1)


def test_ray_of_another_user_is_refused_before_it_has_any_variables(tmp_path, monkeypatch):
    _check_owner(str(tmp_path), "west")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(Invalid, match=r"^Ray on west belongs to uid \d+, and you are uid 4711$"):
        _check_owner(str(tmp_path), "west")


class Answers:
    """Stand-in for Ray and a runner: what the runner has answered."""

    exceptions = SimpleNamespace(RayError=ChildProcessError)

    def __init__(self, **answers):
        self.answers = answers
        self.__ray_ready__ = SimpleNamespace(remote=lambda: "next")

    def wait(self, asked, *, timeout):
        return [each for each in asked if each in self.answers], timeout

    def get(self, asked):
        if self.answers[asked]:
            raise ChildProcessError(self.answers[asked])


def test_a_runner_with_all_its_calls_is_left_alone_and_one_that_has_ended_is_told_in_words():
    busy, idle = Answers(), Answers(first="")
    assert _look(busy, busy, "first", "west") == "first"
    assert _look(idle, idle, "first", "west") == "next"
    ended = Answers(first="The actor died.\n\tactor_id: 155a\n\tpid: 7")
    with pytest.raises(NotConnected, match=r"^Ray on west can't run Symphony: The actor died\.$"):
        _look(ended, ended, "first", "west")


def test_two_machines_of_one_name_are_refused_in_a_cluster():
    ray = Actors((True, "10.0.0.1", "symphony-west"), (True, "10.0.0.2", "symphony-west"), looks=1)
    with pytest.raises(Invalid, match=r"^the Ray cluster has a machine west already, at 10\.0\.0\.2$"):
        _end_earlier(ray, "west", "10.0.0.1")
    assert ray.killed == 0


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (bytes((0, 0, 18, 4, 0)), None),
        (b"\x15\x03\x01\x00\x02", r"^Ray at \S+ uses TLS"),
        (b"", r"^Ray at \S+ uses TLS"),
    ],
)
def test_a_cluster_that_was_there_answers_over_http2_or_uses_tls(tmp_path, answer, trouble):
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(64)
                taken.sendall(answer)

        served = pool.submit(serve)
        where = f"127.0.0.1:{listening.getsockname()[1]}"
        if trouble is None:
            Cluster(tmp_path, {}).probe(where)
        else:
            with pytest.raises(NotConnected, match=trouble):
                Cluster(tmp_path, {}).probe(where)
        served.result()


def test_a_cluster_with_tls_needs_its_keys(tmp_path):
    with pytest.raises(NotConnected, match=r"^Ray at 10\.0\.0\.1:6379 does not answer: .*No such file"):
        Cluster(tmp_path, {"RAY_USE_TLS": "1"}).probe("10.0.0.1:6379")


def test_ray_encrypts_with_the_keys_of_this_machine(tmp_path: Path):
    cluster = Cluster(tmp_path)
    cluster.make_token()
    found = cluster.environment()
    assert found["RAY_USE_TLS"] == "1"
    files = [Path(found[f"RAY_TLS_{each}"]) for each in ("CA_CERT", "SERVER_CERT", "SERVER_KEY")]
    assert files == [cluster.keys / each for each in (AUTHORITY, CERTIFICATE, KEY)]


def cluster_with_keys(directory: Path) -> Cluster:
    cluster = Cluster(directory)
    cluster.make_token()
    make_keys_of_token(cluster.keys, cluster.token.read_bytes(), "127.0.0.1")
    return cluster


def test_the_first_machine_answers_when_its_certificate_is_of_the_same_token(tmp_path: Path):
    here, other = cluster_with_keys(tmp_path / "here"), cluster_with_keys(tmp_path / "other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(here.keys / CERTIFICATE, here.keys / KEY)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def exchange() -> None:
            with server.accept()[0] as plain, suppress(OSError):
                context.wrap_socket(plain, server_side=True).close()

        def end() -> None:
            server.accept()[0].close()

        where = f"127.0.0.1:{server.getsockname()[1]}"
        thread.submit(exchange)
        here.probe(where)
        thread.submit(exchange)
        with pytest.raises(NotConnected, match="shows no certificate of this token"):
            other.probe(where)
        thread.submit(end)
        with pytest.raises(NotConnected, match="does not answer"):
            here.probe(where)


@pytest.mark.parametrize(("listen", "head"), [("127.0.0.1:6379", None), ("localhost", "10.0.0.1:6379")])
def test_an_address_that_ray_replaces_is_refused(tmp_path: Path, monkeypatch, listen: str, head: str | None):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(Invalid, match="no other machine reaches this one"):
        serve_node(Cluster(tmp_path), "east", "socket", listen, head)


@pytest.mark.parametrize(("listen", "head"), [("a.invalid:1", None), ("10.0.0.2:1", "10.0.0.1:1"), ("", "10.0.0.1:1")])
def test_a_host_without_an_address_is_refused(tmp_path: Path, monkeypatch, listen: str, head: str | None):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(Invalid, match="is no host with an address"):
        serve_node(Cluster(tmp_path), "east", "socket", listen, head)


@pytest.mark.parametrize(("listen", "head"), [("10.0.0.1", None), ("10.0.0.2", "10.0.0.1")])
def test_an_address_without_a_port_is_refused(tmp_path: Path, monkeypatch, listen: str, head: str | None):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(Invalid, match=r"10\.0\.0\.1 is no HOST:PORT"):
        serve_node(Cluster(tmp_path), "east", "socket", listen, head)
