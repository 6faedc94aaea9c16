"""Cores by affinity and by the quotas of control groups, on made-up trees."""

from __future__ import annotations

import os

import pytest

from decoder.cores import available_cores


def tree(tmp_path, membership: str, **files: str):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(membership)
    cgroups.mkdir()
    for path, text in files.items():
        file = cgroups / path.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return proc, cgroups


@pytest.fixture
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {}, 16),
        ("0::/a/b\n", {"cpu_dot_max": "max 100000"}, 16),
        ("0::/a/b\n", {"a__b__cpu_dot_max": "350000 100000"}, 3),
        ("0::/a/b\n", {"a__b__cpu_dot_max": "max 100000", "a__cpu_dot_max": "200000 100000"}, 2),
        ("0::/host/path\n", {"cpu_dot_max": "400000 100000"}, 4),
        ("0::/a\n", {"a__cpu_dot_max": "5000 100000"}, 1),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu__a__cpu_dot_cfs_quota_us": "-1\n", "cpu__a__cpu_dot_cfs_period_us": "100000\n"},
            16,
        ),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu__a__cpu_dot_cfs_quota_us": "250000\n", "cpu__a__cpu_dot_cfs_period_us": "100000\n"},
            2,
        ),
        ("5:memory:/a\n", {"a__cpu_dot_max": "100000 100000"}, 16),
    ],
)
def test_the_tightest_quota_up_to_the_root_counts(tmp_path, membership, files, cores):
    assert available_cores(*tree(tmp_path, membership, **files)) == cores
