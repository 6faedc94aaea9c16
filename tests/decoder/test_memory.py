"""Memory by the machine and by the limits of control groups, on made-up trees."""

from pathlib import Path

import pytest

from decoder.memory import available_memory_bytes, total_memory_bytes


def proc_and_cgroups(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root / "proc", root / "cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n"}, (5000 << 10, 9000 << 10)),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/b/memory.max": "max\n",
                "cgroup/a/memory.max": "3000000\n",
                "cgroup/a/memory.current": "1000000\n",
                "cgroup/a/memory.stat": "anon 5\ninactive_file 250000\n",
            },
            (2_250_000, 3_000_000),
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:cpuset,memory:/docker/1\n0::/\n",
                "cgroup/memory/memory.limit_in_bytes": "700000\n",  # the container's own view of its root
                "cgroup/memory/memory.usage_in_bytes": "600000\n",
                "cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
            },
            (150_000, 700_000),
        ),
    ],
    ids=["no limit", "version 2", "version 1"],
)
def test_memory_is_the_least_that_any_limit_allows_and_leaves(tmp_path, files, expected):
    meminfo = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    5000 kB\n"}
    places = proc_and_cgroups(tmp_path, meminfo | files)
    assert (available_memory_bytes(*places), total_memory_bytes(*places)) == expected


def test_this_machine_has_memory_available():
    assert 1 << 26 < available_memory_bytes() < total_memory_bytes() < 1 << 50
