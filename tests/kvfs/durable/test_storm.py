"""A short storm: `scripts/soak/tiers.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.disk.recorder import Disk, available
from tests.kvfs.durable.storm import Storm


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_between_memory_and_disk_whatever_is_done(tmp_path: Path, seed: int) -> None:
    storm = Storm(tmp_path / "state", seed)
    trio.run(storm.lives, 3000, 3)
    assert min(storm.counts["num_in"], storm.counts["num_out"], storm.counts["num_waits"]) > 200


@pytest.mark.skipif(bool(available()), reason=available())
def test_nothing_is_lost_on_a_disk_that_fails_hangs_and_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Disk(tmp_path) as disk:
        storm = Storm(disk.path / "state", 3, disk)
        trio.run(storm.lives, 600, 2)
    assert storm.counts["num_in"] > 50
    caplog.clear()
