"""The soak of a daemon in service: it would notice a leak. `tests/scripts/test_quick_forms.py` runs it."""

import importlib
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(SOAK))
    return importlib.import_module


@pytest.fixture
def leaks(soak):
    flatness = soak("flatness")
    bounds = {"fds": flatness.Bound(6), "mb": flatness.Bound(8, 0.05), "free_pages": flatness.Bound(400, is_room=True)}
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


@pytest.mark.parametrize(("lost", "found"), [({"fds": 0.5}, "fds"), ({"mb": 0.4}, "mb"), ({"pages": 20}, "free_pages")])
def test_a_little_that_is_lost_each_round_is_a_leak(leaks, lost, found):
    (leak,) = leaks(series(**lost))
    assert leak.startswith(found)


def test_growth_is_that_of_the_whole_stretch_and_what_varies_warms_up_stands_out_or_is_too_short_is_none(soak, leaks):
    assert soak("flatness").growth([1, 2, 3, 4]) == 3
    looks = series()
    for place, each in enumerate(looks[:10]):
        each["mb"] -= 50 - 5 * place
    for each in looks[15:40:5]:
        each["fds"] += 200
    for seen in (series(), series(fds=-0.5, mb=-0.4, pages=-20), looks, series(6, fds=50)):
        assert leaks(seen) == []


@pytest.mark.parametrize("lock", [None, "", "{gone}\n", "{other}\n"])
def test_a_launcher_that_has_gone_is_none_whatever_its_lock_says(soak, tmp_path, lock):
    """The soak ended itself over it; and its number may be another process's by now."""
    service = soak("service")
    places = service.Places(tmp_path, "/no/daemon")
    with subprocess.Popen(["sleep", "60"]) as other, subprocess.Popen(["true"]) as gone:
        gone.wait()
        if lock is not None:
            places.lock.write_text(lock.format(gone=gone.pid, other=other.pid))
        assert service.launcher_of(places) is None
        assert not service.end_launcher(places, signal.SIGKILL)
        assert other.poll() is None
        other.kill()


def test_a_launcher_that_is_there_is_ended(soak, tmp_path):
    service = soak("service")
    places = service.Places(tmp_path, "/no/daemon")
    with subprocess.Popen([sys.executable, "-c", "input()", tmp_path], stdin=subprocess.PIPE) as launcher:
        places.lock.write_text(f"{launcher.pid}\n")
        while service.launcher_of(places) is None:  # until it has its words
            assert launcher.poll() is None
        assert service.end_launcher(places, signal.SIGTERM)
        assert launcher.wait(20) == -signal.SIGTERM
