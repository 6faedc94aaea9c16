"""A user's Ray cluster: it runs the user's commands on the machines of a fleet.

The cluster belongs to one user. A person who has its token can run code as this user on all of its machines, so only
the user may read the token. Ray starts programs, and the user's launchers own them. So programs run on if Ray ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from socket import SOCK_STREAM, create_connection, getaddrinfo, gethostname
from typing import Any, TextIO

from libsym.errors import Invalid, NotConnected, NotFound, SymError
from symphony.fleet.link import AUTHORITY, CERTIFICATE, KEY, private
from symphony.fleet.runner import ERRORS, OUTPUT, STATUS, Request, Runner
from symphony.launcher.common.places import find_places, make
from symphony.launcher.machine.system import die_with_parent
from symphony.settings.kinds import address

NAMESPACE = "symphony"
START_S, PAUSE_S = 120.0, 0.2
"""Time that Ray gets to start on a machine, and the pause between two looks."""
END_S = 3.0
"""Time that Ray gets to end."""
PROBE_S = 5.0
"""Time in which the first machine must take a connection."""
LOOK_S = 10.0
"""Time between two looks at a runner on a Ray that runs without Symphony."""
ANSWER_S = 30.0
"""Time in which a runner must take a command. Ray itself would wait for ever for a machine that has died."""
STORE_BYTES = 80 << 20
"""Memory for Ray's own objects, about the least that Ray accepts: outputs of programs are small."""
MAX_CALLS = 256
"""Maximum number of concurrent commands of a runner. A program that is followed takes one."""
MAX_EVENTS = 64
"""Maximum number of a command's outputs that are under way. Then the command waits, as at a full pipe."""
_QUIET = {"log_to_driver": False, "logging_level": "CRITICAL", "configure_logging": True}
_QUIETLY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a thread that asks after the end of the connection joins any cluster
}
_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USE_TLS": "1",
    **_QUIETLY,
    "RAY_worker_niceness": "0",  # else a launcher that the runner starts, and all its programs, have a niceness of 15
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray ends its runner when the daemon has filled the memory
    "RAY_ROTATION_MAX_BYTES": str(1 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
_CONNECTING = {"RAY_gcs_server_port_wait_time_s": "5"}
"""Attempts, one a second, after which the token counts as refused. Ray itself would make 20."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The files of a user's cluster on this machine."""

    directory: Path
    theirs: dict[str, str] | None = None
    """Ray's variables for a cluster that runs without Symphony. None: Symphony's commands run Ray, by the token."""

    @classmethod
    def of_user(cls) -> Cluster:
        """Return the cluster of this process's user."""
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        directory = Path(state) / "symphony" / "fleet"
        noted = directory / _RUNNING
        return cls(directory, json.loads(noted.read_text()) if noted.exists() else None)

    @property
    def token(self) -> Path:
        return self.directory / "token"

    def log_of(self, machine: str) -> Path:
        return self.directory / f"ray-{machine}.log"

    def make_token(self) -> None:
        """Make the token of a new cluster, unless there is one."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self.directory / f".token-{secrets.token_hex(8)}"
        with open(new, "x", opener=private) as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(new, self.token)
        new.unlink()

    def note(self, where: str) -> None:
        """Note the cluster, for the programs that are submitted here. `where`: the address of the first machine."""
        (self.directory / "address").write_text(where)
        if self.theirs is None:
            (self.directory / _RUNNING).unlink(missing_ok=True)
            return
        new = self.directory / f".{_RUNNING}-{secrets.token_hex(8)}"  # commands may read the old one meanwhile
        with open(new, "x", opener=private) as file:
            json.dump(self.theirs, file)
        new.rename(self.directory / _RUNNING)

    @property
    def keys(self) -> Path:
        """Directory of this machine's keys. Machines may share the user's home directory."""
        return self.directory / f"keys-{gethostname()}"

    def environment(self) -> dict[str, str]:
        """Return the variables for Ray. NotFound, Invalid: there is no token that only the user may read."""
        if self.theirs is not None:
            return {**self.theirs, **_QUIETLY}
        try:
            found = self.token.stat()
        except OSError:
            raise NotFound(f"there is no {self.token}: copy it from the first machine, with the mode 0600") from None
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise Invalid(f"{self.token} must belong to you, and only you may read it (0600)")
        return {
            **_SETTINGS,
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_TLS_CA_CERT": str(self.keys / AUTHORITY),
            "RAY_TLS_SERVER_CERT": str(self.keys / CERTIFICATE),
            "RAY_TLS_SERVER_KEY": str(self.keys / KEY),
        }

    def imported(self) -> Any:
        """Return the module `ray`, which reads its settings when it is imported. NotConnected: it is not installed.

        The user's own settings of Ray are for another cluster: RAY_AUTH_TOKEN would replace the token.
        """
        settings = self.environment()
        for name in [each for each in os.environ if each.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(settings)
        try:
            import ray  # noqa: PLC0415 - a package that few installations have
        except ImportError:
            raise NotConnected("Ray is not installed: pip install 'symphony-os[fleet]'") from None
        return ray

    def first_machine(self) -> str | None:
        """Return the address of the first machine. None: this machine is in no cluster."""
        noted = self.directory / "address"
        is_known = self.theirs is not None or (self.keys / _HOST).exists()
        return noted.read_text() if noted.exists() and is_known else None

    def connected(self, where: str | None = None) -> Any:
        """Connect to the cluster, and return the module `ray`. NotConnected: Ray does not answer."""
        where = where or self.first_machine()
        if where is None:
            raise NotConnected("this machine is in no Ray cluster of yours: symphony fleet up, or symphony fleet join")
        ray = self.imported()
        self.probe(where)
        try:
            os.environ.update(_CONNECTING)
            host = (self.keys / _HOST).read_text() if self.theirs is None else None
            ray.init(where, namespace=NAMESPACE, _node_ip_address=host, **_QUIET)
        except UnicodeEncodeError:
            raise Invalid("Ray takes no command line that is not UTF-8") from None
        except (OSError, RuntimeError, ValueError) as error:
            cause = error.__cause__ or error
            if "Version mismatch" in str(cause):
                versions = " ".join(str(cause).split())
                raise NotConnected(f"Ray at {where} and Ray here must have equal versions: {versions}") from None
            raise NotConnected(f"Ray at {where} does not answer: {_one_line(cause)}") from None
        return ray

    def probe(self, where: str) -> None:
        """Exchange certificates with the first machine, since Ray itself would try for minutes.

        NotConnected: the machine does not answer, or has another token.
        """
        try:
            host, port = address(where)
            tls = self._tls()
            with create_connection((host, port), PROBE_S) as plain:
                if tls is not None:
                    tls.wrap_socket(plain, server_hostname=host).close()
                    return
                plain.sendall(_HTTP2)
                answers = plain.recv(4)[3:] == b"\x04"  # with settings
        except ssl.SSLCertVerificationError as error:
            raise NotConnected(f"Ray at {where} shows no certificate of this token: {error.verify_message}") from None
        except (OSError, ValueError) as error:
            raise NotConnected(f"Ray at {where} does not answer: {_one_line(error)}") from None
        if not answers:
            raise NotConnected(f"Ray at {where} uses TLS: set RAY_USE_TLS=1 and the variables of its keys")

    def _tls(self) -> ssl.SSLContext | None:
        """Return the context with the keys of this machine. None: the cluster uses no TLS."""
        files = [str(self.keys / each) for each in (AUTHORITY, CERTIFICATE, KEY)]
        if self.theirs is not None:
            if self.theirs.get("RAY_USE_TLS", "0").lower() not in {"1", "true"}:
                return None
            files = [self.theirs.get(f"RAY_TLS_{each}", "") for each in ("CA_CERT", "SERVER_CERT", "SERVER_KEY")]
        context = ssl.create_default_context(cafile=files[0])
        context.load_cert_chain(files[1], files[2])
        context.set_alpn_protocols(["h2"])
        return context

    @contextmanager
    def connection(self, where: str | None = None) -> Iterator[Connection]:
        """Connect to the cluster for a while. NotConnected: Ray does not answer.

        Ray prints messages of its own to standard output, for instance when a machine dies. They go to standard error.
        """
        ray, out = self.connected(where), sys.stdout
        try:
            with redirect_stdout(sys.stderr):
                yield Connection(ray, out)
        finally:
            ray.shutdown()


_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of a client of HTTP/2: a preface, and a frame with no settings."""
_HOST = "host"
"""File beside the keys: the address at which Ray listens here, for which the certificate is."""
_RUNNING = "running"
"""File with the variables of a cluster that runs without Symphony."""
_RESOURCE = "symphony-"
"""Beginning of the resource by which Ray knows a machine. The machine's name follows."""


def _one_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- Ray on a machine


def serve_node(cluster: Cluster, machine: str, socket: str, listen: str, head: str | None) -> int:
    """Run Ray on this machine until a signal arrives. `head`: address of the first machine. None: this is the first."""
    from symphony.fleet.keys import make_keys_of_token  # noqa: PLC0415 - `fleet status` needs no package of the extra

    host, where = _addresses(listen, head)
    directory, variables = _directory(socket), _variables(socket)
    if head is None:
        cluster.make_token()
    cluster.imported()
    try:
        _end_by_signals()
        with _lock(directory, machine) as lock, open(cluster.log_of(machine), "wb", opener=private) as log:
            make_keys_of_token(cluster.keys, cluster.token.read_bytes().strip(), host)  # as Ray reads it
            (cluster.keys / _HOST).write_text(host)
            if head is not None:
                cluster.probe(where)
            shutil.rmtree(directory, ignore_errors=True)  # of a Ray that was killed
            node = subprocess.Popen(
                _words(machine, host, where, directory, is_first=head is None),
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],  # Ray lives on for a while if this process is killed
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - no thread has begun
            )
            try:
                # before Ray has this socket, its own connecting would wait for half a minute
                _wait(cluster, node, machine, lambda: any(directory.glob("session_2*/sockets/raylet*")))
                with cluster.connection(where) as connection:
                    _end_earlier(connection.ray, machine, host)
                    resource = f"{_RESOURCE}{machine}"
                    _runner(connection.ray, cluster, machine, variables, resource, lifetime="detached")
                _end_by_signals()  # Ray has put its own handler in place of ours
                cluster.note(where)
                print(f"symphony: {machine} is in the Ray cluster at {where}", flush=True)
                status = node.wait()
            finally:
                _end(node)
                shutil.rmtree(directory, ignore_errors=True)
    except _Over:
        return 0
    raise SymError(f"Ray has ended with {status}: see {cluster.log_of(machine)}")


def serve_runner(cluster: Cluster, machine: str, socket: str, where: str) -> int:
    """Have the Ray that runs on this machine run commands here, until a signal arrives. `where`: address of the first
    machine of its cluster. The runner ends with this process.
    """
    try:
        address(where)
    except ValueError:
        raise Invalid(f"{where} is no HOST:PORT") from None
    variables = _variables(socket)
    cluster.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _end_by_signals()
        with _lock(_directory(socket), machine), cluster.connection(where) as connection:
            _end_by_signals()
            ray = connection.ray
            node = ray._private.worker.global_worker.node  # noqa: SLF001 - Ray has no public name for it
            _check_owner(node.raylet_socket_name, machine)
            runner = _runner(ray, cluster, machine, variables, f"node:{ray.util.get_node_ip_address()}")
            _try(connection, machine)
            cluster.note(where)
            print(f"symphony: {machine} is in the Ray cluster at {where}", file=connection.out, flush=True)
            asked = runner.__ray_ready__.remote()
            while True:
                time.sleep(LOOK_S)
                cluster.probe(where)  # else Ray would end this process after a minute
                asked = _look(ray, runner, asked, machine)
    except _Over:
        return 0


def _check_owner(raylet: str, machine: str) -> None:
    """Invalid: Ray on this machine belongs to another user, who must not get this user's variables."""
    owner = Path(raylet).stat().st_uid
    if owner != os.geteuid():
        raise Invalid(f"Ray on {machine} belongs to uid {owner}, and you are uid {os.geteuid()}")


def _runner(
    ray: Any, cluster: Cluster, machine: str, variables: dict[str, str], resource: str, **options: object
) -> Any:
    """Make the actor of this machine, where Ray has the resource. Invalid: the cluster has a machine of this name."""
    options |= {"name": machine, "namespace": NAMESPACE, "resources": {resource: 0.001}, "num_cpus": 0}
    programs, sent = find_places(variables["SYMPHONY_SOCKET"]).programs, cluster.directory / f"programs-{machine}"
    actor = ray.remote(Runner).options(**options, max_restarts=-1, max_concurrency=MAX_CALLS)
    try:
        runner = actor.remote(str(sent), str(programs), variables)
    except ValueError:
        raise Invalid(f"the Ray cluster has a machine {machine} already") from None
    _await(ray, runner, machine, START_S)
    return runner


def _end_earlier(ray: Any, machine: str, host: str) -> None:
    """End the runner of an earlier Ray on this machine: it has that Ray's variables, and the cluster may not know yet
    that it is dead. `host`: address of this machine. Invalid: the name is that of another machine.
    """
    for node in ray.nodes():
        if node["Alive"] and f"{_RESOURCE}{machine}" in node["Resources"] and node["NodeManagerAddress"] != host:
            raise Invalid(f"the Ray cluster has a machine {machine} already, at {node['NodeManagerAddress']}")
    with suppress(ValueError):
        while True:  # until Ray knows no actor of this name any more
            ray.kill(ray.get_actor(machine, namespace=NAMESPACE))
            time.sleep(PAUSE_S)


def _await(ray: Any, runner: Any, machine: str, within_s: float) -> None:
    """Wait until a runner answers. NotConnected: it does not answer in time, or has ended."""
    ready = runner.__ray_ready__.remote()
    if not ray.wait([ready], timeout=within_s)[0]:
        raise NotConnected(f"Ray on {machine} does not answer")
    _check(ray, ready, machine)


def _look(ray: Any, runner: Any, asked: Any, machine: str) -> Any:
    """Return the next question to a runner, or `asked` until it is answered: a runner with MAX_CALLS calls answers when
    one of them ends. NotConnected: the runner has ended.
    """
    if not ray.wait([asked], timeout=0)[0]:
        return asked
    _check(ray, asked, machine)
    return runner.__ray_ready__.remote()


def _check(ray: Any, ready: Any, machine: str) -> None:
    """NotConnected: the answer of a runner is an error."""
    try:
        ray.get(ready)
    except ray.exceptions.RayError as error:
        lines = [each for each in str(error).splitlines() if each.strip() and not each.startswith("\t")]
        raise NotConnected(f"Ray on {machine} can't run Symphony: {lines[-1]}") from None


def _try(connection: Connection, machine: str) -> None:
    """Have the runner ask its daemon. NotConnected: Ray can't reach it. SymError: Ray belongs to another uid."""
    written = {STATUS: b"", OUTPUT: b"", ERRORS: b""}
    for stream, content in Remote(connection, machine).call(Request(os.getuid(), ("stat",))):
        written[stream] += content
    if int(written[STATUS]):
        raise NotConnected(f"Ray on {machine} reaches no daemon: {written[ERRORS].decode(errors='replace').strip()}")


def _variables(socket: str) -> dict[str, str]:
    """Return the variables for commands that other machines send: those of this process, without Ray's."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**own, "SYMPHONY_SOCKET": socket}


class _Over(Exception):  # noqa: N818 - the way in which Ray should end
    """A signal has ended the command."""


def _end_by_signals() -> None:
    def end(_number: int, _frame: object) -> None:
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)  # a second one would interrupt the end
        raise _Over

    for each in _ENDING:
        signal.signal(each, end)


_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def _lock(directory: Path, machine: str) -> Iterator[int]:
    """Keep Ray's directory locked. Invalid: Ray of this user runs already on this machine."""
    lock = private(str(directory.with_name(f"{directory.name}.lock")), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise Invalid(f"your Ray runs already on {machine}") from None
    finally:
        os.close(lock)


def _directory(socket: str) -> Path:
    """Return the directory for Ray's sockets and logs, which only the user may enter. By default all users may write
    to Ray's. The path is short, since a socket's path has at most 107 bytes.
    """
    places = find_places(socket)
    make(places)
    return places.directory.with_name(f"ray-{places.directory.name[:6]}")


def _end(node: subprocess.Popen[bytes]) -> None:
    """End Ray on this machine. Ray gives its processes half a minute, which none of them needs: they own no program."""
    node.terminate()
    with suppress(subprocess.TimeoutExpired):
        node.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)  # a session of its own
    node.wait()


def _addresses(listen: str, head: str | None) -> tuple[str, str]:
    """Return the address at which Ray listens here, and HOST:PORT of the first machine. Both are numbers, because a
    certificate is for an address. Invalid: Ray can't listen there.
    """
    try:
        name, port = address(listen if head is None else head)
    except ValueError as error:
        raise Invalid(f"{error} is no HOST:PORT") from None
    first = _resolved(name)
    host = first if head is None else _resolved(listen)
    if host in _REPLACED or ip_address(host).is_unspecified:
        raise Invalid(f"--listen {listen}: no other machine reaches this one at {host}")
    return host, f"[{first}]:{port}" if ":" in first else f"{first}:{port}"


def _resolved(name: str) -> str:
    """Return the address of a host."""
    try:
        return str(getaddrinfo(name, None, type=SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Invalid(f"{name} is no host with an address: {error.strerror}") from None


_REPLACED = {"127.0.0.1", "::1"}
"""Addresses in whose place Ray takes another one, for which the certificate is not."""


def _words(machine: str, host: str, where: str, directory: Path, *, is_first: bool) -> list[str]:
    """Return the command that runs Ray on this machine. `where`: HOST:PORT of the first machine."""
    first = ["--head", f"--port={address(where)[1]}", "--include-dashboard=false", "--no-monitor"]
    return [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(first if is_first else [f"--address={where}"]),
        *(f"--node-ip-address={host}", "--num-cpus=0", "--num-gpus=0", "--include-log-monitor=false"),
        *(f"--temp-dir={directory}", f"--object-store-memory={STORE_BYTES}"),
        f"--resources={json.dumps({f'{_RESOURCE}{machine}': 1})}",
    ]


def _wait(cluster: Cluster, node: subprocess.Popen[bytes], machine: str, is_ready: Callable[[], bool]) -> None:
    """Wait until Ray is ready on this machine. NotConnected: Ray has ended, or takes too long."""
    ends_s = time.monotonic() + START_S
    while not is_ready():
        if node.poll() is not None or time.monotonic() > ends_s:
            raise NotConnected(f"Ray does not start on {machine}: see {cluster.log_of(machine)}")
        time.sleep(PAUSE_S)


# ---- commands on other machines


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to the cluster."""

    ray: Any
    out: TextIO
    """Standard output of this command."""

    def machines(self) -> list[str]:
        """Return the machines that are in the cluster, or were and do not answer any more."""
        return sorted(self.ray.util.list_named_actors())


class MachineLost(NotConnected):
    """Error: a machine that had answered does not answer any more."""


class Remote:
    """A machine of the cluster."""

    def __init__(self, connection: Connection, machine: str) -> None:
        """Find the machine's runner. NotConnected: the machine is in no cluster of this user."""
        self._ray = connection.ray
        self._machine = machine
        try:
            self._runner = self._ray.get_actor(machine, namespace=NAMESPACE)
        except ValueError:
            raise NotConnected(f"{machine} is not in your Ray cluster: symphony fleet join, on {machine}") from None

    def call(self, request: Request) -> Iterator[tuple[int, bytes]]:
        """Run a command there, and yield its output and its exit status.

        NotConnected: the machine does not answer, and the command does not run. MachineLost: it may run.
        """
        call = self._runner.call.options(num_returns="streaming", _generator_backpressure_num_objects=MAX_EVENTS)
        events = call.remote(request)
        if not self._ray.wait([events], timeout=ANSWER_S)[0]:
            self._ray.cancel(events)  # else the command would begin later
            raise NotConnected(f"{self._machine} does not answer")
        for event in events:
            yield self._got(event)

    def _got(self, answer: Any) -> tuple[int, bytes]:
        errors = self._ray.exceptions
        try:
            found: tuple[int, bytes] = self._ray.get(answer)
        except errors.RayTaskError as error:
            raise SymError(f"{self._machine}: {_one_line(error.cause)}") from None
        except errors.RayError as error:
            raise MachineLost(f"{self._machine} does not answer: {_one_line(error)}") from None
        return found
