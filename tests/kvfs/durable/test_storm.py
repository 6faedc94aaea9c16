"""A short storm: `scripts/soak/tiers.py` is the long one."""

import pytest
import trio

from tests.disk.recorder import Disk, available
from tests.kvfs.durable.storm import Storm


@pytest.mark.slow
def test_nothing_is_lost_between_memory_and_disk_whatever_is_done(tmp_path):
    storm = Storm(tmp_path / "state", 1)
    trio.run(storm.lives, 2400, 3)
    assert min(storm.counts["num_in"], storm.counts["num_out"], storm.counts["num_waits"]) > 100


@pytest.mark.slow
def test_nobody_is_refused_whose_pages_fit_into_memory_while_nothing_is_pinned_and_the_disk_has_room(tmp_path):
    storm = Storm(tmp_path / "state", 2, without=("pin", "limit", "assemble"))
    trio.run(storm.lives, 1500, 2)
    assert storm.counts["num_waits"] > 100
    assert not [name for name in storm.counts if name.startswith("errno")]


@pytest.mark.slow
@pytest.mark.skipif(bool(available()), reason=available())
def test_nothing_is_lost_on_a_disk_that_fails_hangs_and_is_full(tmp_path, caplog):
    with Disk(tmp_path) as disk:
        storm = Storm(disk.path / "state", 3, disk)
        trio.run(storm.lives, 1200, 2)
    assert storm.counts["num_in"] > 30
    assert sum(count for name, count in storm.counts.items() if name.startswith("trouble")) > 1
