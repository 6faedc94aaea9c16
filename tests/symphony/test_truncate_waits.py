"""`truncate` from a shell, of a file that a program appends to: it waits for its turn, and can be interrupted.

`tests/kvfs/test_waiting_changes.py` proves when a change is made, and what becomes of one that waits in vain.
"""

import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import libsym as sym
from tests.symphony.launchers import eventually

ENTRIES = 5
FTRUNCATE = {"x86_64": "77", "aarch64": "46"}[os.uname().machine]


def image_bytes(daemon, entries):
    with sym.kv_create("sized.kv") as kv:
        sym.kv_write(kv, list(range(entries)))
        size = (daemon.mount / "sized.kv").stat().st_size
    sym.kv_remove("sized.kv")
    return size


@contextmanager
def again_and_again(work):
    """Work in a thread that goes on meanwhile."""
    over, errors = threading.Event(), []

    def go_on():
        try:
            while not over.is_set():
                work()
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    yield
    over.set()
    thread.join()
    assert errors == []


@pytest.mark.parametrize("how", ["image", "text"])
def test_a_file_that_is_generated_into_in_a_loop_is_cut_in_its_turn(emptied, how):
    path, size = {
        "image": (emptied.mount / "a.kv", image_bytes(emptied, ENTRIES)),
        "text": (emptied.mount / ".symphony/text/a.kv", ENTRIES),
    }[how]
    with sym.kv_create("a.kv") as kv:
        sym.kv_write(kv, list(b"ten bytes!"))

        def generate():
            list(sym.generate(kv, [5, 6], max_tokens=40, stop_at_end=False))
            if kv.len() > 3000:
                kv.truncate(100)

        with again_and_again(generate):
            eventually(lambda: kv.len() >= 200)
            for _ in range(10):
                emptied.shell(["truncate", "-s", str(size), str(path)])
            assert sym.kv_read("a.kv", 0, ENTRIES)[0] == list(b"ten b")


def test_a_program_that_only_thinks_does_not_keep_its_file_from_being_cut(emptied):
    """The other file's steps follow each other all the time, and entries are reserved for both."""
    size = image_bytes(emptied, ENTRIES)
    with sym.kv_create("thinking.kv") as thinking, sym.kv_create() as decoding:

        def decode():
            sym.pred(decoding, [7])
            if decoding.len() > 3000:
                decoding.truncate(0)

        with again_and_again(decode):
            for token in range(20):
                sym.pred(thinking, [token])
            emptied.shell(["truncate", "-s", str(size), str(emptied.mount / "thinking.kv")])
            assert len(thinking) == ENTRIES


def num_waiting():
    return sym.daemon_stat()["waiting_calls"]


def test_a_truncation_that_waits_ends_at_a_signal_and_emptying_waits_for_nobody(emptied):
    size, path = image_bytes(emptied, 1), emptied.mount / "held.kv"
    cutting, going, threads = sym.kv_create("held.kv"), [], []
    for _ in range(20):  # a second or more each, one after the other
        going.append(sym.generate(sym.kv_open("held.kv", "rw"), [5, 6], stop="no such text", stop_at_end=False))
        threads.append(threading.Thread(target=sym.kv_truncate, args=(cutting, 0)))
        threads[-1].start()
        eventually(lambda: num_waiting() >= len(going))
    truncating = subprocess.Popen(["truncate", "-s", str(size), str(path)])
    eventually(lambda: Path(f"/proc/{truncating.pid}/syscall").read_text().split()[0] == FTRUNCATE)
    assert path.stat().st_size >= size, "it can be looked at"
    truncating.send_signal(signal.SIGINT)
    assert truncating.wait(20) == -signal.SIGINT
    path.write_bytes(b"")
    assert path.stat().st_size == 0
    assert num_waiting() > 10, "what both had to wait for is there still"
    for generation in going:
        generation.cancel()
    for thread in threads:
        thread.join()
