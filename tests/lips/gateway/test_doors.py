"""Doors of a gateway without a file of keys: its account and root come in, all others bring its key."""

import contextlib
import errno
import os
import random
import re
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from lips.gateway import origins, peers, server
from lips.gateway.errors import ApiError
from lips.gateway.keys import VARIABLE, KeyFileError, OneKey, one_key
from tests.lips.gateway.test_odd_clients import connected as connected_to

OTHER = 4242
ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "scripts/systemd/symphony-gateway.service"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root, to be several users")
LONG = "x" * 16


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/symphony/gateway.key"


def test_of_gateways_that_start_at_once_all_have_one_key_which_is_kept_where_nobody_else_reads_it(state):
    gate = threading.Barrier(8)

    def start(_):
        gate.wait()
        return one_key(None).text

    with ThreadPoolExecutor(8) as threads:
        (made,) = set(threads.map(start, range(8)))
    assert made.startswith("sk-sym-")
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert state.stat().st_nlink == 1
    assert list(state.parent.iterdir()) == [state]
    assert one_key(None).text == made


def test_a_key_is_read_from_a_units_directory_the_environment_or_a_file_instead(state, tmp_path, monkeypatch):
    text = UNIT.read_text()
    assert re.search(r"^StateDirectory=symphony-gateway$", text, re.MULTILINE)
    assert re.search(r"^RestrictAddressFamilies=.*\bAF_NETLINK\b", text, re.MULTILINE), "it asks whose a connection is"
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "of_unit"))
    assert one_key(None).where == str(tmp_path / "of_unit/gateway.key")
    monkeypatch.setenv(VARIABLE, "of-the-environment")
    assert one_key(None).text == "of-the-environment"
    path = tmp_path / "key"
    path.write_text("of-a-key-file-0123\n")
    path.chmod(0o600)
    assert one_key(path).text == "of-a-key-file-0123"
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        one_key(tmp_path)
    assert not state.exists()


@pytest.mark.parametrize("text", ["", "none", "fifteen-letters", "sixteen letters!", "ä" * 16, "x" * 513])
def test_a_key_that_can_be_guessed_or_not_be_sent_is_refused(text):
    with pytest.raises(KeyFileError, match="16 to 512"):
        OneKey(text, VARIABLE)


def test_a_kept_key_that_others_know_or_have_put_there_is_refused(state):
    def is_refused(says):
        with pytest.raises(KeyFileError, match=says):
            one_key(None)

    one_key(None)
    state.chmod(0o640)
    is_refused("chmod 600")
    elsewhere = state.with_name("elsewhere")
    elsewhere.write_text(LONG)
    elsewhere.chmod(0o600)
    state.unlink()
    state.symlink_to(elsewhere)
    is_refused("no key is kept")
    if os.geteuid() == 0:
        elsewhere.rename(state)
        os.chown(state, OTHER, OTHER)
        is_refused(f"uid {OTHER}")


V4, V6 = ("127.0.0.1", "127.0.0.1"), ("::1", "::1")
MAPPED, BOTH_MAPPED = ("127.0.0.1", "::ffff:127.0.0.1"), ("::", "::ffff:127.0.0.1")


def family_of(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connected(listens_at, connects_to):
    where, is_dual = (listens_at, 0), listens_at == "::"
    with socket.create_server(where, family=family_of(listens_at), dualstack_ipv6=is_dual) as at:
        client = socket.socket(family_of(connects_to))
        # The kernel gives other processes no port of this range: the client's stays free when the client has closed.
        client.bind(("", random.randrange(20_000, 32_000)))
        client.connect((connects_to, at.getsockname()[1]))
        return client, at.accept()[0]


@pytest.mark.parametrize("place", [V4, V6, MAPPED, BOTH_MAPPED], ids=str)
def test_the_kernel_tells_whose_a_connection_is_as_long_as_it_is_open(place):
    client, ours = connected(*place)
    with client, ours:
        assert peers.uid_of(ours) == os.geteuid()
        client.shutdown(socket.SHUT_WR)
        assert peers.uid_of(ours) == os.geteuid(), "it waits for its answer"
        client.close()
        assert peers.uid_of(ours) is None, "shown with uid 0 and inode 0"


@pytest.mark.parametrize("place", [V4, V6], ids=str)
def test_a_listener_or_another_connection_with_the_clients_port_is_not_taken_for_it(place):
    client, ours = connected(*place)
    with ours:
        host, port, *_ = client.getsockname()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()  # by a reset: the port is free at once
        with socket.create_server((host, port), family=client.family):
            assert peers.uid_of(ours) is None
        with socket.socket(client.family) as other, socket.create_server(ours.getsockname()[:2], family=ours.family):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((host, port))
            other.connect((host, ours.getsockname()[1]))
            assert peers.uid_of(ours) is None, "our end was reset"


@needs_root
def test_a_socket_of_another_user_is_his(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{tmp_path}")
        local.listen()
        for each in (listener, local):
            os.seteuid(OTHER)
            try:
                client = socket.socket(each.family)
                client.connect(each.getsockname())
            finally:
                os.seteuid(0)
            with client, each.accept()[0] as ours:
                assert peers.uid_of(ours) == OTHER


def test_a_host_is_parsed_as_an_authority():
    found: dict[str, tuple[str, int | None] | None] = {"localhost": ("localhost", None), "[::1]:80": ("::1", 80)}
    found["LocalHost:8080"] = ("localhost", 8080)
    none = ["", ":8080", "localhost:", "localhost:65536", "[::1", "::1"]
    none += [f"localhost{more}evil.com" for more in (":x@", ":80@", "@", "/", " ")]
    found |= dict.fromkeys(none)
    assert {text: origins.authority(text) for text in found} == found


HOST, PAGE = ("host", "localhost:1"), ("origin", "http://localhost:1")


@pytest.mark.parametrize(
    ("headers", "is_answered"),
    [
        ([HOST], True),
        ([HOST, PAGE, ("sec-fetch-site", "same-origin")], True),
        ([HOST, ("sec-fetch-site", "none")], True),
        ([], False),
        *[([("host", host)], False) for host in ("", "evil.example", "localhost:x@evil.com")],
        *[([HOST, ("sec-fetch-site", site)], False) for site in ("cross-site", "same-site")],
        *[([HOST, ("origin", each)], False) for each in ("null", "https://evil.example", "http://localhost:2")],
        ([HOST, PAGE, ("origin", "https://evil.example")], False),
        ([HOST, ("x-forwarded-for", "192.0.2.1")], False),
    ],
)
def test_an_account_lends_its_name_to_no_page_but_the_gateways_own(headers, is_answered):
    request = Request({"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers]})
    if is_answered:
        origins.check_is_own(request)
        return
    with pytest.raises(ApiError, match="without a key this server answers") as refused:
        origins.check_is_own(request)
    assert refused.value.status == 403


def test_both_loopbacks_are_bound_on_one_port_and_an_address_that_is_not_there_is_told():
    bound, (absent,) = server.listening((*server.LOOPBACKS, "192.0.2.1"), 0)
    hosts, ports = zip(*(each.getsockname()[:2] for each in bound), strict=True)
    assert {each.proto for each in bound} == {socket.IPPROTO_TCP}, "else asyncio sets no TCP_NODELAY"
    for each in bound:
        each.close()
    assert (hosts, len({*ports})) == (server.LOOPBACKS, 1)
    assert (absent.errno, absent.filename) == (errno.EADDRNOTAVAIL, f"192.0.2.1 port {ports[0]}")
    with pytest.raises(OSError, match="Cannot assign requested address"):
        server.listening(("192.0.2.1",), 0)


def test_a_port_that_another_has_on_one_of_them_is_refused():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use") as refused:
            server.listening(server.LOOPBACKS, port)
        assert refused.value.filename == f"::1 port {port}"
        with socket.create_server(("127.0.0.1", port)):
            pass  # nothing of the refused start is left


def test_a_journal_is_not_told_the_key(monkeypatch, capfd):
    def said():
        listener: Any = SimpleNamespace(family=socket.AF_INET, getsockname=lambda: ("127.0.0.1", 8080))
        server._tell([listener], [], OneKey(LONG, "the.key"))
        return capfd.readouterr().err

    assert said() == f"gateway: http://127.0.0.1:8080\ngateway: http://127.0.0.1:8080/#key={LONG}\n"
    about = os.fstat(sys.stderr.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{about.st_dev}:{about.st_ino}")
    assert said() == "gateway: http://127.0.0.1:8080\ngateway: the key is in the.key\n"


@needs_root
@pytest.mark.slow
def test_another_account_needs_the_key_and_no_argument_shows_it(gateway):
    def asked(*options, host="127.0.0.1"):
        url = f"http://{host}:{gateway.url.rpartition(':')[2]}/sessions"
        command = ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", *options, url]
        how: dict[str, Any] = {"user": OTHER, "group": OTHER, "extra_groups": []}
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, **how).stdout

    for host in ("127.0.0.1", "[::1]"):
        assert asked(host=host).endswith("\n403")
        assert "Authorization: Bearer KEY" in asked(host=host)
        assert asked("-H", "Authorization: Bearer none", host=host).endswith("\n403")
        assert asked("-H", f"Authorization: Bearer {gateway.key}", host=host).endswith("\n200")
    assert gateway.key not in Path(f"/proc/{gateway.process.pid}/cmdline").read_text()


@pytest.mark.slow
def test_answers_stay_out_of_caches_and_are_what_they_say(http):
    for path in ("/v1/models", "/sessions", "/live", "/health", "/v1/nothing", "/metrics"):
        headers = http.get(path).headers
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff"), path
    assert http.get("/").headers["x-content-type-options"] == "nosniff"


@pytest.mark.slow
def test_a_unix_socket_that_systemd_passes_goes_by_its_peer(gateway_daemon, tmp_path):
    with socket.socket(socket.AF_UNIX) as passed:
        passed.bind(str(tmp_path / "socket"))
        (tmp_path / "socket").chmod(0o666)
        passed.listen()
        shell = f'exec 3<&{passed.fileno()}; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"'
        command = ["bash", "-c", shell, "x", sys.executable, "-m", "lips.gateway"]
        how: dict[str, Any] = {
            "env": gateway_daemon.environment | {VARIABLE: LONG, "PYTHONPATH": str(ROOT)},
            "text": True,
        }
        with subprocess.Popen(command, pass_fds=[passed.fileno()], stderr=subprocess.PIPE, **how) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == f"gateway: unix:{tmp_path}/socket\n"
            transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"))
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                assert client.get("/v1/models").status_code == 200
            process.terminate()
            assert process.wait(60) == 0


@pytest.mark.slow
def test_an_idle_connection_is_closed_whatever_it_speaks(gateway):
    beginnings = {
        "nothing": b"",
        "half a request": b"GET /health HTT",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
        "an upgrade": b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAAAAAAIAAAAA\r\n\r\n",
    }
    opened = {name: connected_to(gateway, text) for name, text in beginnings.items()}
    for name, connection in opened.items():
        with connection, contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                assert not part.startswith(b"HTTP/1.1 101"), name
