"""The page of a trace: one file with everything in it, and what its script draws of it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from symphony.trace_html import page, page_data
from tests.symphony.browser import DRAWN_FRAMES, Browser
from tests.symphony.traces import TraceMaker

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="SCRIPT OF THE PAGE NOT TESTED: there is no node")
WIDTH, HEIGHT = 1000, 400
VOID = {"meta", "br", "link"}


class Parsed(HTMLParser):
    """Elements, whether they are closed in order, and what may lead out of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.led_out: list[tuple[str, str | None]] = []
        self.data: dict[str, str] = {}
        self._script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.led_out += [(name, value) for name, value in attrs if name in {"src", "href", "action", "data"}]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id", "script")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.data[self._script] = self.data.get(self._script, "") + data


@pytest.fixture
def made():
    """Two programs: a prefill and then a loop, and a call that fails."""
    made = TraceMaker()
    made.arrive(1, 0, pid=71, file=3, tokens=100)
    made.step(20, 40, [(1, 100, 0)], prefill=100)
    made.answer(1, 40)
    made.arrive(2, 50, pid=71, file=3)
    made.step(60, 70, [(2, 1, 50)])
    made.answer(2, 70)
    made.arrive(3, 10, pid=72, file=4)
    made.answer(3, 100, 110)
    return made


def column(packed):
    """As the script unpacks it."""
    kind, count, is_delta, text = packed
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    values = planes.reshape(-1 if count else 0, count).T.copy().view(f"<{kind}").reshape(count)
    return np.cumsum(values, dtype=values.dtype) if is_delta else values


def test_the_page_is_one_file_that_parses_and_leads_nowhere(made, tmp_path):
    text = page(made.trace(tmp_path), "a <b> & c")
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.led_out == []
    assert {"canvas", "style", "script"} <= set(parsed.seen)
    assert parsed.seen.count("b") == 0
    assert text.count("a &lt;b> &amp; c</") == 2, "in the title and in the heading"
    assert "<!--" not in text
    assert not re.search(r"https?:|import\s|fetch\(|XMLHttpRequest|url\(", text)
    assert set(parsed.data) == {"trace", "script"}, "the model's name, with an end of a script in it, ended none"
    assert json.loads(parsed.data["trace"])["header"]["model"] == "made </script> up"


def test_the_numbers_of_the_page_are_those_of_the_trace(made, tmp_path):
    data = page_data(made.trace(tmp_path), "x")
    assert data["lanes"] == [[71, 0, 0, 1], [72, 0, 1, 1]]
    assert data["end_us"] == 100_000
    assert column(data["steps"]["began"]).tolist() == [20_000, 60_000]
    assert column(data["steps"]["took"]).tolist() == [20_000, 10_000]
    assert column(data["steps"]["prefill"]).tolist() == [100, 0]
    calls = data["calls"]
    assert column(calls["number"]).tolist() == [1, 2, 3]
    assert column(calls["began"]).tolist() == [0, 50_000, 10_000], "a delta may be negative"
    assert column(calls["errno"]).tolist() == [0, 0, 110]
    assert column(calls["part"]).tolist() == [0, 1, 2, 2]
    assert column(data["rows"]["first"]).tolist() == [0, 2, 3]


def test_steps_that_follow_each_other_closely_are_one_part(tmp_path):
    made = TraceMaker()
    made.arrive(1, 0)
    for began in (0, 11, 22, 40, 51):  # of 10 ms; 8 ms lie before the fourth
        made.step(began, began + 10, [(1, 1, 0)])
    calls = page_data(made.trace(tmp_path), "x")["calls"]
    assert column(calls["first_step"]).tolist() == [0, 3]
    assert column(calls["last_step"]).tolist() == [2, 1]


def run_script(path: Path, *actions: str) -> dict:
    stub = Path(__file__).with_name("page_stub.js")
    command = ["node", str(stub), str(path), str(WIDTH), str(HEIGHT), *actions]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def boxes(drawn, colour):
    return [each[1:] for each in drawn if each[0] == colour]


@needs_node
def test_the_script_draws_steps_and_calls_where_they_are(made, tmp_path):
    path = tmp_path / "x.html"
    path.write_text(page(made.trace(tmp_path), "x"))
    # Ten pixels are a millisecond. The first lane's row begins at 22 + 110 + 18, the next lane's 37 below.
    found = run_script(path, "300,100", "100,155", "300,155", "450,155", "650,155", "200,192")
    assert "2 steps" in found["facts"]
    assert "2 programs" in found["facts"]
    assert boxes(found["first"], "prefill")[0][0::2] == [200, 200]
    assert [box[0::2] for box in boxes(found["first"], "decode")] == [[200, 200], [600, 100]]
    assert [box[0::2] for box in boxes(found["first"], "waiting")] == [[0, 400], [500, 200]]
    assert [box[0::2] for box in boxes(found["first"], "computing")] == [[200, 200], [600, 100]]
    assert [box[0::2] for box in boxes(found["first"], "failed")] == [[100, 900]]
    step, waiting, computing, thinking, second, failed = found["told"]
    assert step.splitlines() == [
        "step 0, at 20.00 ms",
        "20.00 ms, predicted 22.00 ms",
        "100 rows, 100 of prefills",
        "1 calls; decodes read 0 entries",
    ]
    assert waiting == computing
    assert "call 1 of pid 71, uid 0" in waiting
    assert "40.00 ms: waiting 20.00 ms, computing 20.00 ms" in waiting
    assert thinking == "pid 71, uid 0\nthinking: 5.00 ms since call 1"
    assert "call 2 of pid 71" in second
    assert failed.endswith("failed: errno 110")


@needs_node
def test_a_zoom_keeps_what_is_under_the_pointer_where_it_is(made, tmp_path):
    path = tmp_path / "x.html"
    path.write_text(page(made.trace(tmp_path), "x"))
    found = run_script(path, "wheel:600")
    (left, width) = boxes(found["last"], "decode")[-1][0::2]
    assert left == pytest.approx(600, abs=0.01)
    assert width == pytest.approx(271.83, abs=0.01)


@needs_node
def test_of_a_long_trace_each_pixel_shows_its_share(tmp_path):
    """Of 20,000 calls on 1,000 pixels; half of each is computing."""
    made = TraceMaker()
    for number in range(20_000):
        made.step(number + 0.4, number + 0.8, [(1, 1, number)])
    made.arrive(1, 0)
    path = tmp_path / "x.html"
    path.write_text(page(made.trace(tmp_path), "x"))
    found = run_script(path, "500,150", "wheel:500", "wheel:500", "wheel:500", "wheel:500", "wheel:500", "wheel:500")
    assert len(found["first"]) < 8 * WIDTH
    computing = sum(width * height for _, _, width, height in boxes(found["first"], "computing"))
    waiting = sum(width * height for _, _, width, height in boxes(found["first"], "waiting"))
    assert computing / (computing + waiting) == pytest.approx(0.5, abs=0.01)
    assert (computing + waiting) / (WIDTH * 12) == pytest.approx(0.8, abs=0.01)
    assert 40 < len(boxes(found["last"], "computing")) < 60, "single calls again: 50 of them are in sight"


DRAWN = """(async () => {
    const facts = document.getElementById("facts"), view = document.getElementById("view");
    const copy = new OffscreenCanvas(view.width, view.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(view, 0, 0);
    const { data } = copy.getImageData(0, 0, view.width, view.height);
    const count = {};
    for (let at = 0; at < data.length; at += 4) {
        const colour = `${data[at]} ${data[at + 1]} ${data[at + 2]}`;
        count[colour] = (count[colour] || 0) + 1;
    }
    return { count, width: view.width, wide: document.documentElement.scrollWidth, facts: facts.textContent };
})()"""
"""How often each colour is in the picture."""
POINT = """(() => {
    const view = document.getElementById("view"), { left, top } = view.getBoundingClientRect();
    view.dispatchEvent(new PointerEvent("pointermove", { clientX: left + 300, clientY: top + 155 }));
    return document.getElementById("tip").innerText;
})()"""
ZOOM = """document.getElementById("view").dispatchEvent(
    new WheelEvent("wheel", { deltaY: -400, clientX: 0.3 * innerWidth, clientY: 300, cancelable: true }))"""
COMPUTING = {"light": "26 127 122", "dark": "57 197 187"}
"""As page.css has it."""


@pytest.fixture
def browser(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("PAGE NOT OPENED IN A BROWSER: there is no chromium")
    browser = Browser(tmp_path / "profile", WIDTH, HEIGHT)
    yield browser
    browser.close()


def test_a_real_browser_draws_it_light_and_dark_wide_and_narrow_without_complaint(browser, made, tmp_path):
    path = tmp_path / "x.html"
    path.write_text(page(made.trace(tmp_path), "x"))
    for scheme, width in (("light", 1000), ("dark", 420)):
        browser.resize(width, 500)
        browser.prefer(scheme)
        browser.open(path)
        browser.run(DRAWN_FRAMES)
        drawn = browser.run(DRAWN)
        assert "2 steps" in drawn["facts"]
        assert (drawn["width"], drawn["wide"]) == (width, width), "nothing sticks out"
        assert len(drawn["count"]) > 8, "paper, lines, ink, bars of each kind"
        before = drawn["count"][COMPUTING[scheme]]
        assert before > 0
        browser.run(ZOOM)
        browser.run(DRAWN_FRAMES)
        assert browser.run(DRAWN)["count"][COMPUTING[scheme]] > 1.5 * before, "larger by e"
    browser.resize(1000, 500)
    browser.open(path)
    browser.run(DRAWN_FRAMES)
    assert "call 1 of pid 71" in browser.run(POINT)
    assert browser.complaints == []


def test_what_was_before_the_recording_is_told_apart(tmp_path):
    made = TraceMaker()
    made.arrive(1, -500)
    made.step(20, 40, [(1, 1, -500)])
    made.answer(1, 40)
    trace = made.trace(tmp_path)
    assert page_data(trace, "x")["recorded_us"] == 500_000
    assert page_data(trace, "x")["end_us"] == 540_000
