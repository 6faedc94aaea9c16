"""`truncate` from a shell, of a file that a program appends to: it waits for its turn, and can be interrupted."""

import signal
import subprocess
import time
from contextlib import contextmanager

import pytest

import libsym as sym

pytestmark = pytest.mark.usefixtures("connected")

ENTRIES = 5


@contextmanager
def program(daemon, source, *arguments):
    """A program that has said `ready`, and is ended by a line."""
    process = daemon.program(source, *arguments)
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        yield
    except BaseException:
        process.kill()
        process.communicate()
        raise
    out, err = process.communicate("end\n", timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


def image_bytes(daemon, entries):
    kv = sym.kv_create("sized.kv")
    sym.kv_write(kv, list(range(entries)))
    size = (daemon.mount / "sized.kv").stat().st_size
    kv.remove()
    return size


def num_entries(path):
    return sym.kv_stat(path).tokens


GENERATES = """
    kv = sym.kv_create(sys.argv[1])
    sym.kv_write(kv, list(b"ten bytes!"))
    more, appended = True, 10
    def generate():
        global appended
        while more:
            list(sym.generate(kv, [5, 6], max_tokens=40, stop_at_end=False))
            appended += 41
            if kv.len() > 3000:
                kv.truncate(100)
    thread = threading.Thread(target=generate)
    thread.start()
    while kv.len() < 200:
        time.sleep(0.001)
    print("ready", flush=True)
    sys.stdin.readline()
    more = False
    thread.join()
    assert kv.len() <= appended - 190
"""


@pytest.mark.parametrize("how", ["image", "text"])
def test_a_file_that_is_generated_into_in_a_loop_is_cut_in_its_turn(daemon, how):
    name = f"{how}.kv"
    path, size = {
        "image": (daemon.mount / name, image_bytes(daemon, ENTRIES)),
        "text": (daemon.mount / ".symphony/text" / name, ENTRIES),
    }[how]
    with program(daemon, GENERATES, name):
        for _ in range(20):
            daemon.shell(["truncate", "-s", str(size), str(path)])
        tokens = sym.kv_read(sym.kv_open(name), 0, ENTRIES)[0]
        assert tokens == list(b"ten b")


THINKS = """
    decoding, thinking = sym.kv_create("decoding.kv"), sym.kv_create("thinking.kv")
    more = True
    def decode():
        while more:
            sym.pred(decoding, [7])
            if decoding.len() > 3000:
                decoding.truncate(0)
    thread = threading.Thread(target=decode)
    thread.start()
    for token in range(20):
        sym.pred(thinking, [token])
    print("ready", flush=True)
    sys.stdin.readline()
    more = False
    thread.join()
"""


def test_a_program_that_only_thinks_does_not_keep_its_file_from_being_cut(daemon):
    """The other file's steps follow each other all the time, and entries are reserved for both."""
    size = image_bytes(daemon, ENTRIES)
    with program(daemon, THINKS):
        daemon.shell(["truncate", "-s", str(size), str(daemon.mount / "thinking.kv")])
        assert num_entries("thinking.kv") == ENTRIES


HELD = """
    name = sys.argv[1]
    cutting = sym.kv_create(name)
    going, threads = [], []
    for _ in range(20):  # a second or more each, one after the other
        kv = sym.kv_open(name, "rw")
        going.append((kv, sym.generate(kv, [5, 6], stop="no such text", stop_at_end=False)))
        threads.append(threading.Thread(target=sym.kv_truncate, args=(cutting, 0)))
        threads[-1].start()
        while sym.daemon_stat()["waiting_calls"] < len(going):
            time.sleep(0.001)
    print("ready", flush=True)
    sys.stdin.readline()
    for _, generation in going:
        generation.cancel()
    for thread in threads:
        thread.join()
"""


def wait_for_calls(count):
    while sym.daemon_stat()["waiting_calls"] < count:
        time.sleep(0.001)


def test_a_truncation_that_waits_ends_at_a_signal_and_changes_nothing(daemon):
    size = image_bytes(daemon, 1)
    path = daemon.mount / "held.kv"
    with program(daemon, HELD, "held.kv"):
        before = sym.daemon_stat()["waiting_calls"]
        truncating = subprocess.Popen(["truncate", "-s", str(size), str(path)])
        wait_for_calls(before + 1)
        assert truncating.poll() is None
        assert path.stat().st_size >= size, "it can be looked at"
        with sym.kv_open("held.kv") as kv:
            assert kv.len() >= 0
        truncating.send_signal(signal.SIGINT)
        assert truncating.wait(20) == -signal.SIGINT
        assert sym.daemon_stat()["waiting_calls"] > 20, "what it had to wait for is there still"
    assert num_entries("held.kv") == 0, "the last cut is the program's own"


def test_emptying_a_file_waits_for_nobody(daemon):
    with program(daemon, HELD, "emptied.kv"):
        path = daemon.mount / "emptied.kv"
        path.write_bytes(b"")
        assert path.stat().st_size == 0
        assert sym.daemon_stat()["waiting_calls"] > 20
