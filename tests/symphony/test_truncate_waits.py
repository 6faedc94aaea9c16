"""`truncate` from a shell, of a file that programs append to: it waits for its turn, and can be interrupted.

`tests/kvfs/mount/test_waiting_changes.py` proves when a change is made, and what becomes of one that waits in vain.
"""

import os
import signal
import subprocess
import threading
from pathlib import Path

import libsym as sym
from tests.symphony.launchers import eventually

FTRUNCATE = {"x86_64": "77", "aarch64": "46"}[os.uname().machine]


def num_waiting():
    return sym.daemon_stat()["waiting_calls"]


def test_a_truncation_that_waits_ends_at_a_signal_and_emptying_waits_for_nobody(emptied):
    path, going, threads = emptied.mount / "held.kv", [], []
    with sym.kv_create("sized.kv") as kv:
        sym.kv_write(kv, [1])
        size = (emptied.mount / "sized.kv").stat().st_size
    cutting = sym.kv_create("held.kv")
    for _ in range(20):  # a second or more each, one after the other
        going.append(sym.generate(sym.kv_open("held.kv", "rw"), [5, 6], stop="no such text", stop_at_end=False))
        threads.append(threading.Thread(target=sym.kv_truncate, args=(cutting, 0)))
        threads[-1].start()
    eventually(lambda: num_waiting() > 30)
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
