#!/usr/bin/env python3
"""Screenshots of running programs: `symphony top`, and the gateway's pages.

    .venv/bin/python scripts/pictures/shoot.py [--model smollm2] [--seconds 20] [--only gateway] [--out DIR]

The script starts a daemon with programs of `busy.py`. Nothing is drawn by hand. The script needs /dev/fuse and
chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.lips.gateway.pages import until  # noqa: E402 - as above
from tests.lips.gateway.test_page import PLACE, say  # noqa: E402 - as above
from tests.symphony.browser import Browser  # noqa: E402 - found by the line before
from tests.symphony.launchers import end_launchers  # noqa: E402

SYMPHONY = [sys.executable, "-m", "symphony"]
PROGRAMS = [("agent", 4), ("chat", 3), ("reader", 1), ("search", 1)]
TOP_SIZE = (100, 36)
TALK_SIZE, NARROW_SIZE, TREE_SIZE = (1100, 600), (420, 720), (1100, 1000)
TREES, NUM_FORKS = ["swarm", "beam", "mcts"], 6 + 25 + 499


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the programs run before a picture")
    parser.add_argument("--out", type=Path, default=HERE / "screens")
    parser.add_argument("--only", choices=["gateway", "tree"], help="nothing else")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sy") as name:
        place = Path(name)
        os.environ |= {"SYMPHONY_SOCKET": str(place / "s"), "XDG_RUNTIME_DIR": name, "PYTHONPATH": str(ROOT)}
        daemon = start(place, args.model)
        try:
            if args.only != "tree":
                talk(args.out)
            if args.only != "gateway":
                look_at_tree(args.out)
            if args.only is None:
                run_programs(args.seconds)
                (args.out / "top.svg").write_text(asyncio.run(look_at_top(args.seconds)), encoding="utf-8")
        finally:
            end_launchers(place)
            daemon.terminate()
            daemon.wait()
    for path in sorted(args.out.iterdir()):
        print(f"{path}: {path.stat().st_size // 1024} KB")


def start(place: Path, model: str) -> subprocess.Popen[str]:
    words = ["serve", "--model", model, "--mount", place / "kv", "--state", place / "state", "--kv-memory", "512M"]
    with (place / "log").open("w") as log:
        daemon = subprocess.Popen([*SYMPHONY, *map(str, words)], stdout=subprocess.PIPE, stderr=log, text=True)
    assert daemon.stdout is not None
    if not daemon.stdout.readline():
        raise SystemExit((place / "log").read_text())
    return daemon


def symphony(*words: object) -> str:
    done = subprocess.run([*SYMPHONY, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def run_programs(seconds: float) -> None:
    for kind, count in PROGRAMS:
        for seed in range(count):
            symphony("run", "--detach", "--name", f"{kind}-{seed + 1}", HERE / "busy.py", kind, seed)
    time.sleep(seconds)


async def look_at_top(seconds: float) -> str:
    """Return the picture of `symphony top` after some seconds, from a virtual terminal."""
    from symphony.views.top.app import Top
    from symphony.views.top.sampling import Daemon

    top = Top(Daemon(None), 1.0)
    async with top.run_test(size=TOP_SIZE) as pilot:
        await pilot.pause(seconds)
        return top.export_screenshot(title="symphony top", simplify=True)


def talk(out: Path) -> None:
    """Ask two questions on the gateway's page. Take a wide picture in light colours and a narrow one in dark colours,
    with a token's distribution.
    """
    command = [sys.executable, "-m", "lips.gateway", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway,
    ):
        assert gateway.stderr is not None
        browser = Browser(Path(profile), *TALK_SIZE)
        try:
            browser.go(gateway.stderr.readline().split()[1])
            until(browser, """document.getElementById("model").textContent !== "" """)
            browser.run("""document.getElementById("temperature").value = 0""")
            for question in ("What is the capital of France?", "And what is the sea?"):
                say(browser, question)
            time.sleep(2)  # `top` shows figures of the last second
            for theme, size in (("light", TALK_SIZE), ("dark", NARROW_SIZE)):
                browser.resize(*size)
                browser.prefer(theme)
                browser.run("""document.querySelector("section").scrollIntoView()""")
                x, y = browser.run(PLACE % 3)
                browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
                until(browser, """!document.getElementById("tip").hidden""")
                (out / f"gateway-{theme}.png").write_bytes(browser.picture())
        finally:
            browser.close()
            gateway.terminate()


def look_at_tree(out: Path) -> None:
    """Take pictures of the page /tree with a swarm, a beam search and a tree search, whose largest part is closed."""
    command = [sys.executable, "-m", "lips.gateway", "--port", "0"]
    for kind in TREES:
        symphony("run", "--detach", "--name", kind, HERE / "busy.py", kind, 1)
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway,
    ):
        assert gateway.stderr is not None
        browser = Browser(Path(profile), *TREE_SIZE)
        try:
            browser.go(gateway.stderr.readline().split()[1] + "/tree")
            while not browser.run(f"""Number(document.getElementById("num-forks").textContent) >= {NUM_FORKS}"""):
                time.sleep(1)
            time.sleep(2)
            for theme in ("light", "dark"):
                browser.prefer(theme)
                time.sleep(0.5)
                (out / f"tree-{theme}.png").write_bytes(browser.picture())
        finally:
            browser.close()
            gateway.terminate()
    for kind in TREES:
        symphony("kill", kind)


if __name__ == "__main__":
    main()
