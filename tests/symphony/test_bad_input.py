"""Wrong input through the socket: each a clear one-line error with its errno, and nothing lost.

What each operation refuses is in tests/scheduler/operations/test_refusals.py.
"""

import resource
import socket
import struct
from pathlib import Path

import pytest

import libsym as sym
from libsym.channel.handshake import GREETING
from tests.symphony.launchers import eventually


@pytest.mark.usefixtures("shared")
def test_an_error_comes_to_the_program_with_its_class_and_one_line_and_nothing_is_lost():
    kv, closed = sym.kv_create("a.kv"), sym.kv_create()
    sym.kv_write(kv, [1])
    closed.close()
    reading = sym.kv_open("a.kv")
    refused = [
        (sym.NotFound, "no such file", lambda: sym.kv_open("no.kv")),
        (sym.NotFound, r"^\\udc80\\n\\x1b\[31m: ", lambda: sym.kv_open("\udc80\n\x1b[31m")),
        (sym.CrossDevice, "/etc/passwd", lambda: sym.kv_open("/etc/passwd")),
        (sym.Exists, r"a\.kv", lambda: sym.kv_create("a.kv")),
        (sym.NoAccess, "reading", lambda: sym.pred(reading, [2])),
        (sym.BadHandle, "closed", lambda: sym.pred(closed, [1])),
        (sym.Invalid, "100000", lambda: sym.pred(kv, [1, 100_000])),
        (sym.Invalid, "-5", lambda: sym.pred(kv, [1, 2], -5)),
        (sym.Invalid, "at least one token", lambda: sym.pred(kv, [])),
        (sym.TooLarge, "rows", lambda: sym.pred(kv, [1] * 3000, rows="all")),
        (sym.Invalid, "lone surrogate", lambda: sym.chat_tokens([{"role": "user", "content": "\ud800"}])),
    ]
    for kind, words, call in refused:
        with pytest.raises(kind, match=words) as caught:
            call()
        assert str(caught.value).isprintable()
        assert caught.value.errno == kind.code
    assert kv.read() == ([1], [0])


def test_strangers_at_the_socket_are_turned_away_and_leave_no_descriptors(shared):
    descriptors = Path(f"/proc/{shared.process.pid}/fd")
    sym.model_info()
    before = len(list(descriptors.iterdir()))
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("=IIQ", 0x314D5953, 999, 0), *[GREETING] * 50):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(shared.socket))
            stranger.sendall(greeting[:16])
            stranger.settimeout(10)
            assert greeting is GREETING or b"version" in stranger.recv(1000) or greeting.startswith(b"GET")
    eventually(lambda: sym.model_info() and len(list(descriptors.iterdir())) <= before)
    assert sym.daemon_stat()["lips"] == 1


def test_more_connections_than_descriptors_do_not_end_the_daemon(start_daemon):
    daemon = start_daemon("--model", "tiny")
    assert daemon.stat()["lips"] == 1, "it has opened what it needs for itself"
    is_open = Path(f"/proc/{daemon.process.pid}/fd")
    num_open = next(number for number in range(1000) if not (is_open / str(number)).is_symlink())
    _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (num_open, hard))
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(60)]
    for stranger in strangers:
        stranger.connect(str(daemon.socket))
    eventually(lambda: "no connection can be accepted" in daemon.log.read_text())
    for stranger in strangers:
        stranger.close()
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert daemon.stat()["lips"] == 1
