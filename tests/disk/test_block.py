"""A power cut below a real ext4: what it acknowledged is there when its journal has been replayed."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.disk.block import IMAGE, MOUNTED, Ext4, available, mounted
from tests.disk.log import Written
from tests.disk.powercut import State, states


@pytest.fixture(autouse=True)
def _block_devices():
    if why := available():
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "left"), [("defaults", {True}), ("barrier=0", {True, False})])
def test_ext4_keeps_what_was_synced_may_lose_the_rest_and_is_caught_if_it_does_not_flush(tmp_path, options, left):
    contents = [os.urandom(20_000) for _ in range(12)]
    with Ext4(tmp_path, options=options) as ext4:
        for number, content in enumerate(contents):
            with (ext4.path / f"{number}").open("wb", buffering=0) as file:
                file.write(content)
                if number % 2:
                    os.fsync(file)
                    ext4.disk.mark(str(number))
        subprocess.run(["sync", "-f", str(ext4.path)], check=True)
        log = ext4.disk.log()
    assert {operation.path for operation in log if isinstance(operation, Written)} == {IMAGE}
    (tmp_path / "after").mkdir()
    kept, unsynced = set(), set()
    for state in [*states(log, 1, 20, after=MOUNTED), State(log, len(log), 0)]:
        try:
            with mounted(state, tmp_path / "after") as path:
                for number, content in enumerate(contents):
                    is_whole = (path / f"{number}").exists() and (path / f"{number}").read_bytes() == content
                    if str(number) in state.marks:
                        kept.add(is_whole)
                    elif number % 2 == 0:
                        unsynced.add(is_whole)
        except (OSError, RuntimeError):  # the file system can't be mounted, read or checked
            kept.add(False)
    assert kept == left
    assert unsynced == {True, False}
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text(encoding="utf-8")
