"""Output of the commands that show the daemon's answers."""

from typing import Any

from symphony.views.reports import du_lines, memory_line, stat_lines, tiers_line

ROW = ("path", "exclusive_pages", "shared_pages", "tokens", "plain_bytes")


def test_du_shows_bytes_of_both_kinds_of_files_and_a_dash_for_what_is_not_told() -> None:
    found = (
        ("./a.kv", 2, 1, 70, 0),
        ("./b.txt", 0, 0, 0, 1500),
        ("./theirs.kv", None, None, 40, 0),
        (".", 2, 1, 110, 1500),
    )
    *rows, total = (dict(zip(ROW, each, strict=True)) for each in found)
    assert du_lines({"rows": rows, "total": total}, 4096) == [
        "EXCLUSIVE  SHARED   TOKENS  PATH",
        "     8.0K    4.0K       70  ./a.kv",
        "     1.5K       0        0  ./b.txt",
        "        -       -       40  ./theirs.kv",
        "     9.5K    4.0K      110  total",
    ]


COUNTS = "num_on_disk_alone num_kept num_in num_dropped num_resumes num_hidden num_waiting num_waits num_preempted"
TIERS: dict[str, Any] = dict.fromkeys(COUNTS.split(), 0)
TIERS |= {"num_frames": 1024, "num_free_frames": 512, "policy": "cost", "policy_error": "", "wait_s": 0.0, "error": ""}
DISK: dict[str, Any] = {"disk_bytes": 3 << 20, "disk_limit_bytes": None, "num_unsynced_files": 0, "unsynced_bytes": 0}
DISK |= {"error": "", "damage": ""}


def test_stat_says_whether_the_weights_are_there_and_how_long_the_daemon_was_held() -> None:
    numbers = (
        "num_pages num_free_pages num_names used_bytes used_files lips waiting_calls num_steps step_s num_tokens "
        "num_prefill_tokens num_calls num_failed_calls max_calls_in_step max_lips_in_step pid uptime_s"
    )
    info: dict[str, Any] = dict.fromkeys(numbers.split(), 0)
    info |= {"page_bytes": 4096, "quota_bytes": None, "quota_files": None}
    info |= {
        "model": "tiny",
        "mount": "/kv",
        "socket": "/s",
        "weights": "loading",
        "weights_s": 12.3,
        "weights_share": 0.456,
    }
    info["held"] = {"num": 120311, "num_long": 3, "long_s": 0.001, "longest_s": 0.00181}
    info["held"]["worst"] = [{"held_s": 0.00181, "processor_s": 0.0003, "task": "serve gate:12"}]
    info["cost_model"] = {}
    info["tiers"] = TIERS
    assert "costs    no step was expected yet" in stat_lines(info | {"disk": DISK})
    info["cost_model"] = {"1 decode": {"median_error": 0.034, "steps": 9}, "mixed": {"median_error": 0.081, "steps": 2}}
    info["disk"] = DISK
    assert "disk     3.0M" in stat_lines(info)
    full = {"disk_limit_bytes": 4 << 20, "num_unsynced_files": 2, "unsynced_bytes": 8192, "error": "full"}
    info["disk"] = DISK | full
    assert "disk     3.0M of 4.0M; 2 changes not on it yet, 8.0K of pages; IT FAILS: full" in stat_lines(info)
    assert "costs    steps take what was expected within 3 % (1 decode), 8 % (mixed)" in stat_lines(info)
    assert "weights  loading (46 %, 12 s)" in stat_lines(info)
    assert stat_lines(info)[-1] == (
        "held     longest 1.8 ms; 3 of 120,311 times over 1 ms; the longest was 0.3 ms of processor, by serve gate:12"
    )
    holds = {"files": 3000, "handles": 12}
    user = {"uid": 4242, "used_bytes": 8192, "memory_bytes": 18 << 20, "quota_memory": 1 << 30, "holds": holds}
    others: dict[str, Any] = {"uid": 0, "used_bytes": 0, "memory_bytes": 0, "quota_memory": None, "holds": {}}
    assert stat_lines(info | {"users": [user, others]})[-2:] == [
        "user     4242: 8.0K of files, 18M of 1.0G of memory (3,000 files, 12 handles)",
        "user     0: 0 of files, 0 of memory (nothing)",
    ]
    assert "weights  loaded in 3.1 s" in stat_lines(info | {"weights": "loaded", "weights_s": 3.06})


def test_stat_says_how_full_memory_is_and_what_has_moved() -> None:
    assert memory_line(TIERS, 4096) == "2.0M of 4.0M in use; 0 on disk alone"
    assert tiers_line(TIERS) == "cost; 0 pages came in, 0 went"
    busy = TIERS | {"num_kept": 256, "num_on_disk_alone": 2560, "num_in": 12_345, "num_dropped": 6789}
    busy |= {"num_resumes": 14, "num_hidden": 12, "num_waiting": 3, "num_waits": 40, "wait_s": 0.5, "num_preempted": 2}
    assert memory_line(busy, 4096) == "2.0M of 4.0M in use; 10M on disk alone, 1.0M pinned"
    assert tiers_line(busy) == (
        "cost; 12,345 pages came in, 6,789 went; 12 of 14 resumes hidden; "
        "3 calls wait, 40 did for 12.5 ms each; 2 preempted"
    )
    assert tiers_line(TIERS | {"error": "the disk is full"}).endswith("; IT FAILS: the disk is full")
    own = TIERS | {"policy": "mine.py", "policy_error": "policy mine.py:3: ZeroDivisionError: division by zero"}
    assert tiers_line(own).endswith("; IT FAILS: policy mine.py:3: ZeroDivisionError: division by zero")
