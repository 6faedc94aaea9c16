"""Daemons that are killed, and the findings of the next daemon."""

import json
import os
import signal
import sys

import pytest

from kvfs.names.sums import EXTENT_BYTES
from tests import forked
from tests.kvfs.durable.damage import flip
from tests.symphony.launchers import ROOT


def test_what_was_synced_is_there_after_a_kill_unchecked_where_it_was_written_since(start_daemon):
    """A generation goes on from the copy of a page: pages come back in other places of memory than their numbers."""
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M")
    daemon.run(
        """
        with sym.kv_create("base.kv") as kv:
            sym.kv_write(kv, range(1, 101))
            kv.fork("fork.kv").close()
            sym.kv_write(kv, [101])  # in their last page: the fork has to copy it when it goes on
        """
    )
    daemon.symphony("sync")
    state, path, data = daemon.mount.parent / "state", daemon.mount / "note", os.urandom(3 * EXTENT_BYTES)
    before = set((state / "files").iterdir())
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    with path.open("r+b", buffering=0) as file:
        file.seek(EXTENT_BYTES + 100)
        file.write(b"overwritten")
    daemon.stop(signal.SIGKILL)
    (backing,) = set((state / "files").iterdir()) - before
    flip(backing, 2 * EXTENT_BYTES)
    daemon = start_daemon("--model", "tiny", "--kv-memory", "8M")
    left = data[: EXTENT_BYTES + 100] + b"overwritten" + data[EXTENT_BYTES + 111 : 2 * EXTENT_BYTES]
    with path.open("rb") as file:
        assert file.read(2 * EXTENT_BYTES) == left
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(file.fileno(), 100, 2 * EXTENT_BYTES + 100)
    assert f"damaged on disk: /note: bytes {2 * EXTENT_BYTES} to {3 * EXTENT_BYTES}" in daemon.log.read_text()
    daemon.run(
        """
        sym.kv_write(sym.kv_create("other.kv"), range(50, 150))
        with sym.kv_open("fork.kv", "rw") as kv:
            list(sym.generate(kv, [7], stop_at_end=False, max_tokens=20))
            tokens = kv.read()[0]
        with sym.kv_create("again.kv") as kv:
            sym.kv_write(kv, tokens)
        """
    )
    assert (daemon.mount / "fork.kv").read_bytes() == (daemon.mount / "again.kv").read_bytes()
    assert daemon.stop() == 0
    told = daemon.symphony("fsck", "--state", str(state), check=False)
    assert (told.returncode, told.stdout.startswith("/note: damaged on disk: bytes")) == (1, True)


@pytest.mark.slow
def test_what_was_synced_outlives_fifteen_daemons_that_are_killed(tmp_path):
    options = ["--kills=15", "--life=0.12", "--clients=2", "--forked", "--json", "--state", tmp_path]
    command = [sys.executable, ROOT / "scripts/soak/crashes.py", *options]
    done = forked.run(command, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 15
    assert found["syncs"] > 15
