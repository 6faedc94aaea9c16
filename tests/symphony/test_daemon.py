"""Starts and stops of the daemon: refusals, and files left behind."""

import ctypes
import gc
import json
import os
import socket as listener
import struct
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from symphony.daemon import daemon
from tests.symphony.daemons import SYMPHONY

TINY = ("--model", "tiny", "--kv-memory", "8M")
IN_DELETE, IN_UNMOUNT = 0x200, 0x2000

pytestmark = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed to this user"
)


@pytest.mark.slow
def test_whoever_sees_the_socket_finds_the_mount_from_its_first_moment_to_its_last(tmp_path):
    """A script starts the daemon and waits for its socket. A killed daemon has left its own socket there.

    One queue of inotify(7) has the order of the ends.
    """
    socket, mount, libc = tmp_path / "s", tmp_path / "kv", ctypes.CDLL(None)
    with closing(listener.socket(listener.AF_UNIX)) as left_behind:
        left_behind.bind(str(socket))
    before = socket.stat().st_mtime_ns

    def is_there() -> bool:
        try:
            return socket.stat().st_mtime_ns != before
        except FileNotFoundError:
            return False

    words = ["serve", *TINY, "--socket", socket, "--state", tmp_path / "state", "--mount", mount]
    process = subprocess.Popen([*SYMPHONY, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pause = threading.Event()
        while not is_there():
            assert process.poll() is None
            pause.wait(0.0005)
        assert os.path.ismount(mount)
        with closing(listener.socket(listener.AF_UNIX)) as connection:
            connection.connect(str(socket))
        with os.fdopen(libc.inotify_init(), "rb", buffering=0) as queue:
            for path in (socket.parent, mount):
                assert libc.inotify_add_watch(queue.fileno(), os.fsencode(path), IN_DELETE | IN_UNMOUNT) > 0
            process.terminate()
            assert process.wait(30) == 0
            data, seen = queue.read(1 << 16), []
    finally:
        process.kill()
        process.wait()
    while data:
        _, mask, _, length = struct.unpack_from("iIII", data)
        name = data[16 : 16 + length].rstrip(b"\0")
        if mask & IN_UNMOUNT or name == socket.name.encode():
            seen.append("mount" if mask & IN_UNMOUNT else "socket")
        data = data[16 + length :]
    assert seen == ["socket", "mount"]
    assert not os.path.ismount(mount)


SERVE = """
import json, sys
from symphony.cli import main
for line in sys.stdin:
    status = main(["serve", *json.loads(line)])
    print("status", status, file=sys.stderr, flush=True)
"""
"""Several starts, one after the other, in a process: each is expected to refuse."""


def test_wrong_options_are_one_line_and_leave_nothing(tmp_path, start_daemon):
    daemon, precious = start_daemon(*TINY), tmp_path / "precious"
    precious.write_text("mine")
    rows = [
        (("--model", "/no/such/model.gguf"), "/no/such/model.gguf"),
        (("--model", f"chat={'x' * 256}"), "not found: File name too long"),
        (("--model", "~nobody-of-this-name/a.gguf"), "not found: "),
        (("--model", "a=tiny", "--model", "b=tiny"), "a daemon serves one model, and 2 are given: a=tiny, b=tiny"),
        (("--kv-memory", "1K"), "page"),
        (("--precision", "int5"), "'int5' is not one of"),
        (("--config", "/no/such.toml"), "/no/such.toml"),
        (("--config", "/etc"), "directory"),
        (("--kv-memory", "1e17"), "smaller --kv-memory"),
        (("--mount", "/etc"), "not empty"),
        (("--mount", "/etc/passwd/kv"), "/etc/passwd/kv"),
        (("--socket", "/tmp/" + "s" * 120), "too long; choose another --socket"),
        (("--socket", "/etc/passwd/s"), "can't listen on /etc/passwd/s: "),
        (("--socket", "/proc/none/s"), "can't listen on /proc/none/s: "),
        (("--socket", str(precious)), "no socket"),
        (("--socket", str(daemon.socket)), "already listens"),
        (("--state", "/etc/passwd/state"), "can't use the state directory /etc/passwd/state: "),
        (("--state", str(tmp_path / "state")), "another daemon"),
    ]
    places = [f"--mount={tmp_path}/other", f"--state={tmp_path}/others", f"--socket={tmp_path}/s"]
    given = "".join(
        json.dumps([*places, *(() if "--model" in options else ("--model", "tiny")), *options]) + "\n"
        for options, _ in rows
    )
    done = subprocess.run(
        [sys.executable, "-c", SERVE], input=given, capture_output=True, text=True, check=False, timeout=100
    )
    *found, rest = done.stderr.split("status 1\n")
    assert (len(found), rest) == (len(rows), "")
    for said, (options, message) in zip(found, rows, strict=True):
        (line,) = [line for line in said.splitlines() if " INFO " not in line]
        assert message in line, options
        assert line.startswith("symphony: ")
    assert not (tmp_path / "s").exists()
    assert not os.path.ismount(tmp_path / "other")
    assert precious.read_text() == "mine"
    assert daemon.stat()["model"].startswith("tiny"), "the other daemon is as it was"


@pytest.mark.parametrize("words", [["stat"], ["du"], ["run", __file__]], ids=lambda words: words[0])
def test_commands_without_a_daemon_say_so_in_one_line(tmp_path, words, symphony, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    status, _, said = symphony(words[0], "--socket", tmp_path / "nobody", *words[1:])
    assert status == (125 if words[0] == "run" else 1)
    assert "symphony serve" in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_long_collection_of_garbage_is_the_last_that_looks_at_its_objects(monkeypatch):
    """In a daemon with a million files each full collection took 3.6 s of the trio thread."""
    monkeypatch.setattr(daemon, "LONG_COLLECTION_S", 60)
    gc.collect()  # garbage of tests before this one holds objects that rest
    num_before = gc.get_freeze_count()
    try:
        with daemon._old_objects_rest():
            gc.collect()
            assert gc.get_freeze_count() == num_before
            monkeypatch.setattr(daemon, "LONG_COLLECTION_S", 0)
            gc.collect(1)
            assert gc.get_freeze_count() == num_before
            gc.collect()
            assert gc.get_freeze_count() > num_before
            gc.unfreeze()
        gc.collect()
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as after the collection of tests
