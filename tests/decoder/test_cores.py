"""Cores by affinity and by the quotas of control groups, on made-up trees."""

import os

import pytest

from decoder.cores import available_cores
from tests.decoder.test_memory import proc_and_cgroups

QUOTA, PERIOD = "cpu/a/cpu.cfs_quota_us", "cpu/a/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/", {}, 16),
        ("0::/a/b", {"cpu.max": "max 100000"}, 16),
        ("0::/a/b", {"a/b/cpu.max": "350000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/host/path", {"cpu.max": "400000 100000"}, 4),
        ("0::/a", {"a/cpu.max": "5000 100000"}, 1),
        ("3:cpu,cpuacct:/a", {QUOTA: "-1\n", PERIOD: "100000\n"}, 16),
        ("3:cpu,cpuacct:/a", {QUOTA: "250000\n", PERIOD: "100000\n"}, 2),
        ("5:memory:/a", {"a/cpu.max": "100000 100000"}, 16),
    ],
)
def test_the_tightest_quota_up_to_the_root_counts(tmp_path, monkeypatch, membership, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    texts = {f"cgroup/{path}": text for path, text in files.items()}
    places = proc_and_cgroups(tmp_path, {"proc/self/cgroup": f"{membership}\n", **texts})
    assert available_cores(*places) == cores
