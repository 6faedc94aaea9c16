"""The README's pictures: drawn from the tree and the recording as they are, and readable on light and dark pages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "scripts" / "pictures"


@pytest.fixture
def svg(monkeypatch):
    monkeypatch.syspath_prepend(str(PICTURES))
    import svg

    return svg


def test_the_pictures_are_those_that_the_tree_and_the_recording_make(tmp_path):
    subprocess.run([sys.executable, PICTURES / "draw.py", "--out", tmp_path], check=True, timeout=60)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in PICTURES.glob("*.svg")}
    assert drawn == kept, "draw them anew: .venv/bin/python scripts/pictures/draw.py"


def test_the_readme_shows_each_picture_in_light_and_dark_with_words_for_those_who_do_not_see_it():
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r'(?:srcset|src)="scripts/pictures/([^"]+)"', readme)
    drawn = [name for name in shown if not name.startswith("screens/")]
    assert sorted(drawn) == sorted(path.name for path in PICTURES.glob("*.svg"))
    assert all((PICTURES / name).exists() for name in shown)
    assert len(re.findall(r'<img alt="[^"]{40,}"', readme)) == readme.count("<img ") == (len(shown) + 1) / 2


def test_contrast_is_that_of_wcag(svg):
    assert svg.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert svg.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the usual example of just too little


def test_words_that_are_too_faint_or_too_long_are_not_drawn(svg):
    drawing = svg.Drawing(svg.THEMES[0], 100, 100, "a test")
    drawing.words(0, 20, "words", room=100, on="#ffffff", colour="#767676")
    with pytest.raises(AssertionError, match="can't be read"):
        drawing.words(0, 20, "words", room=100, on="#ffffff", colour="#777777")
    with pytest.raises(AssertionError, match="of 20 pixels"):
        drawing.words(0, 20, "words", room=20, on="#ffffff")
