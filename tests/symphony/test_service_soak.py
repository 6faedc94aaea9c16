"""The soak of a daemon in service: that it would notice a leak, and a minute of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak"


@pytest.fixture
def flatness(monkeypatch):
    monkeypatch.syspath_prepend(str(SOAK))
    import flatness

    return flatness


@pytest.fixture
def leaks(flatness):
    bound = flatness.Bound
    bounds = {"fds": bound(6), "mb": bound(8, 0.05), "free_pages": bound(400, is_room=True)}
    return lambda looks: flatness.leaks(looks, bounds)


def series(number: int = 40, *, fds: float = 0, mb: float = 0, pages: float = 0) -> list[dict[str, float]]:
    """Looks at a daemon under changing load, which loses so much each time."""
    draw = random.Random(3)
    return [
        {
            "fds": round(40 + draw.uniform(-5, 5) + fds * look),
            "mb": 100 + draw.uniform(-1, 1) + mb * look,
            "free_pages": 8100 + draw.randrange(-50, 50) - pages * look,
        }
        for look in range(number)
    ]


def test_what_only_varies_is_no_leak(leaks):
    assert leaks(series()) == []


@pytest.mark.parametrize("leak", [{"fds": 0.5}, {"mb": 0.4}, {"pages": 20}])
def test_a_little_that_is_lost_each_round_is_a_leak(leaks, leak):
    (found,) = leaks(series(**leak))
    assert found.startswith({"fds": "fds", "mb": "mb", "pages": "free_pages"}[next(iter(leak))])


def test_what_is_given_back_is_no_leak(leaks):
    assert leaks(series(fds=-0.5, mb=-0.4, pages=-20)) == []


def test_warming_up_and_single_outliers_are_none_either(leaks):
    looks = series(mb=0)
    for place, each in enumerate(looks[:10]):
        each["mb"] -= 50 - 5 * place
    for each in looks[15:40:5]:
        each["fds"] += 200
    assert leaks(looks) == []


def test_growth_is_that_of_the_whole_stretch(flatness):
    assert flatness.growth([1, 2, 3, 4]) == 3


def test_a_stretch_that_is_too_short_tells_nothing(leaks):
    assert leaks(series(6, fds=50)) == []


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="NO MOUNT TESTED: /dev/fuse is missing")
def test_a_minute_of_service_loses_nothing_and_leaks_nothing(tmp_path):
    command = [sys.executable, SOAK / "service.py", "--minutes=0.6", "--out", tmp_path / "soak"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["leaks"] == []
    assert found["syncs"] > 20
    assert found["ended_by_sigterm"] >= 1
    assert found["had_full_disk"] or "NO FULL DISK" in done.stderr
    assert (tmp_path / "soak.svg").read_text().count("<path") > 8
