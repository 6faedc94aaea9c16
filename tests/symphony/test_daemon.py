"""Starts and stops of the daemon: refusals, and files left behind."""

import ctypes
import gc
import os
import signal
import socket as listener
import struct
import subprocess
import threading
from contextlib import closing

import pytest

from decoder.memory import total_memory_bytes
from symphony.daemon import daemon
from tests.symphony.daemons import SYMPHONY

TINY = ("--model", "tiny", "--kv-memory", "8M")

pytestmark = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing or closed to this user"
)


def serve(directory, *options):
    """Start a daemon that is expected to refuse; return its exit status and its output."""
    done = subprocess.run(
        [
            *SYMPHONY,
            "serve",
            "--mount",
            directory / "kv",
            "--state",
            directory / "state",
            "--socket",
            directory / "s",
            *options,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def test_a_stopped_daemon_leaves_no_mount_no_socket_and_no_error(start_daemon):
    daemon = start_daemon(*TINY)
    assert os.path.ismount(daemon.mount)
    assert daemon.stop() == 0
    assert not os.path.ismount(daemon.mount)
    assert not daemon.socket.exists()


@pytest.mark.slow
def test_whoever_sees_the_socket_finds_the_mount(tmp_path):
    """A script starts the daemon and waits for its socket. A killed daemon has left its own socket there."""
    socket, mount = tmp_path / "s", tmp_path / "kv"
    words = ["serve", *TINY, "--socket", socket, "--state", tmp_path / "state", "--mount", mount]
    with closing(listener.socket(listener.AF_UNIX)) as left_behind:
        left_behind.bind(str(socket))
    before = socket.stat().st_mtime_ns

    def is_there() -> bool:
        try:
            return socket.stat().st_mtime_ns != before
        except FileNotFoundError:
            return False

    process = subprocess.Popen([*SYMPHONY, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pause = threading.Event()
        while not is_there():
            assert process.poll() is None
            pause.wait(0.0005)
        assert os.path.ismount(mount)
        with closing(listener.socket(listener.AF_UNIX)) as connection:
            connection.connect(str(socket))
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_socket_goes_before_the_mount(start_daemon):
    """So a program that finds the socket finds the mount, at the end as well. One queue of inotify(7) has the order."""
    in_delete, in_unmount = 0x200, 0x2000
    libc = ctypes.CDLL(None)
    daemon = start_daemon(*TINY)
    with os.fdopen(libc.inotify_init(), "rb", buffering=0) as queue:
        for path in (daemon.socket.parent, daemon.mount):
            assert libc.inotify_add_watch(queue.fileno(), os.fsencode(path), in_delete | in_unmount) > 0
        assert daemon.stop() == 0
        data, seen = queue.read(1 << 16), []
    while data:
        _, mask, _, length = struct.unpack_from("iIII", data)
        name = data[16 : 16 + length].rstrip(b"\0")
        if mask & in_unmount or name == daemon.socket.name.encode():
            seen.append("mount" if mask & in_unmount else "socket")
        data = data[16 + length :]
    assert seen == ["socket", "mount"]


@pytest.mark.slow
def test_ctrl_c_stops_it_as_well_while_a_program_waits(start_daemon):
    daemon = start_daemon(*TINY)
    program = daemon.program("""
        kv = sym.kv_create()
        try:
            print("ready", flush=True)
            while True:
                sym.pred(kv, [1])
                sym.kv_truncate(kv, 0)
        except sym.NotConnected as error:
            print(error)
    """)
    assert program.stdout.readline() == "ready\n"
    assert daemon.stop(signal.SIGINT) == 0
    out, err = program.communicate(timeout=20)
    assert "gone" in out, err
    assert not os.path.ismount(daemon.mount)


@pytest.mark.slow
def test_a_second_daemon_on_the_same_state_or_socket_is_refused(start_daemon, tmp_path):
    daemon = start_daemon(*TINY)
    status, said = serve(tmp_path, *TINY)
    assert status == 1
    assert "another daemon" in said
    other = tmp_path / "other"
    other.mkdir()
    status, said = serve(other, *TINY, "--socket", str(daemon.socket))
    assert status == 1
    assert "already listens" in said
    assert daemon.stat()["model"]


@pytest.mark.slow
def test_a_file_at_the_sockets_place_is_kept(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    words = [
        "serve",
        "--model",
        "tiny",
        "--socket",
        precious,
        "--state",
        tmp_path / "state",
        "--mount",
        tmp_path / "kv",
    ]
    done = subprocess.run([*SYMPHONY, *words], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("symphony: ")
    assert "no socket" in done.stderr
    assert precious.read_text() == "mine"


@pytest.mark.slow
def test_a_killed_daemon_leaves_a_mount_that_the_next_one_clears(start_daemon):
    daemon = start_daemon(*TINY)
    daemon.process.kill()
    daemon.process.wait()
    daemon.process.stdout.close()
    again = start_daemon(*TINY)
    assert again.shell(f"ls {again.mount}").stdout == ""
    assert again.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "/no/such/model.gguf"), "/no/such/model.gguf"),
        (("--model", "tiny", "--kv-memory", "lots"), "lots"),
        (("--model", "tiny", "--kv-memory", "1K"), "page"),
        (("--model", "tiny", "--threads", "0"), "threads"),
        (("--model", "tiny", "--precision", "fp8"), "'fp8' is not one of float32, bf16, int8, int4"),
        (("--model", "tiny", "--precision", "int4"), "int4 runs 4-bit weights"),
        (("--model", "tiny", "--config", "/no/such.toml"), "/no/such.toml"),
        (("--model", "tiny", "--config", "/etc"), "directory"),
        (("--model", "tiny", "--kv-memory", "1e20"), "no machine has so much"),
        (("--model", "tiny", "--kv-memory", "1e17"), "smaller --kv-memory"),
        (("--model", "tiny", "--kv-memory", str(total_memory_bytes() + 4096)), "is more than all memory"),
        (("--model", "tiny", "--mount", "/etc"), "not empty"),
        (("--model", "tiny", "--mount", "/etc/passwd/kv"), "/etc/passwd/kv"),
        (("--model", "tiny", "--socket", "/tmp/" + "s" * 120), "too long; choose another --socket"),
        (("--model", "tiny", "--socket", "/etc/passwd/s"), "can't listen on /etc/passwd/s: "),
        (("--model", "tiny", "--socket", "/proc/none/s"), "can't listen on /proc/none/s: "),
        (("--model", "tiny", "--state", "/etc/passwd/state"), "can't use the state directory /etc/passwd/state: "),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing(tmp_path, options, message):
    status, said = serve(tmp_path, *options)
    assert status == 1
    assert message in said
    assert [line for line in said.splitlines() if " INFO " not in line] == [said.splitlines()[-1]]
    assert said.splitlines()[-1].startswith("symphony: ")
    assert not (tmp_path / "s").exists()
    assert not os.path.ismount(tmp_path / "kv")


@pytest.mark.slow
def test_kv_of_one_precision_is_refused_by_another(start_daemon, tmp_path):
    image = tmp_path / "context.kv"
    daemon = start_daemon(*TINY, "--precision", "int8")
    assert daemon.stat()["precision"] == "int8"
    assert "int8" in daemon.run("print(sym.model_info().backend)")
    daemon.run(f"""
        with sym.kv_create("{daemon.mount}/context.kv") as kv:
            sym.pred(kv, list(range(40)))
    """)
    daemon.shell(
        f"cp {daemon.mount}/context.kv {image}; cp {image} {daemon.mount}/again.kv; cmp {image} {daemon.mount}/again.kv"
    )
    assert daemon.stop() == 0
    other = start_daemon(*TINY)
    assert other.stat()["precision"] == "bf16"
    refused = other.shell(f"cp {image} {other.mount}/context.kv", check=False)
    assert refused.returncode == 1
    assert "Invalid argument" in refused.stderr
    assert "precision" in other.log.read_text()
    assert other.stop() == 0


@pytest.mark.slow
def test_a_configuration_file_says_what_the_options_say(start_daemon, tmp_path):
    config = tmp_path / "symphony.toml"
    config.write_text('model = "tiny"\nkv_memory = "8M"\nthreads = 1\n')
    daemon = start_daemon("--config", str(config))
    assert daemon.stat()["model"].startswith("tiny")
    assert daemon.stop() == 0
    config.write_text('modle = "tiny"\n')
    status, said = serve(tmp_path, "--config", str(config))
    assert (status, "modle" in said) == (1, True)


@pytest.mark.parametrize("command", [["stat"], ["du"], ["run", __file__]])
def test_commands_without_a_daemon_say_so_in_one_line(tmp_path, command):
    done = subprocess.run(
        [*SYMPHONY, command[0], "--socket", tmp_path / "nobody", *command[1:]],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == (125 if command[0] == "run" else 1)
    assert "symphony serve" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_long_collection_of_garbage_is_the_last_that_looks_at_its_objects(monkeypatch):
    """In a daemon with a million files each full collection took 3.6 s of the trio thread."""
    monkeypatch.setattr(daemon, "LONG_COLLECTION_S", 60)
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
        gc.unfreeze()
