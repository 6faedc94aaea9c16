"""Picture of a terminal: commands for a daemon with the default model, and their output."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

from svg import MONO_EM, Drawing, Theme

HOUSE = Path(__file__).resolve().parents[2]
RECORDING = Path(__file__).with_name("session.txt")
COMMANDS = (
    'symphony run lips/ask.py --kv /kv/france.kv "What is the capital of France?"',
    "cp /kv/france.kv /kv/italy.kv                         # a fork: no page is copied",
    'symphony run lips/ask.py --kv /kv/italy.kv --resume "And the capital of Italy?"',
    "grep -rl Rome /kv/.symphony/text                      # contexts can be read as text",
    "tail -n 4 /kv/.symphony/text/italy.kv",
    "head -n 40 README.md > /kv/.symphony/text/readme.kv   # and made from text",
    "ls -lh /kv",
    "symphony du                                           # what a file has of its own",
)

COLUMNS = 86
SIZE = 13
COLUMN = SIZE * MONO_EM
LINE = 18
GAP = 5
"""Extra space before a command."""
BAR = 32
"""Height of the window's title bar."""
MARGIN = 16


def record() -> None:
    """Run the commands with a daemon of our own. Needs root, and a free /kv, where the daemon mounts."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as directory:
        environment["SYMPHONY_SOCKET"] = f"{directory}/socket"
        serve = ["symphony", "serve", "--mount", "/kv", "--state", f"{directory}/state", "--kv-memory", "256M"]
        with subprocess.Popen(serve, cwd=HOUSE, env=environment, stdout=subprocess.PIPE) as daemon:
            try:
                assert daemon.stdout
                assert daemon.stdout.readline(), "the daemon did not start"
                typed = [f"$ {command}\n{output_of(command, environment)}" for command in COMMANDS]
            finally:
                daemon.terminate()
    RECORDING.write_text("".join(typed), encoding="utf-8")


def output_of(command: str, environment: dict[str, str]) -> str:
    """Return a command's output with a newline at its end, unless it is empty."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=HOUSE, env=environment, check=True, text=True, timeout=100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout if done.stdout.endswith("\n") or not done.stdout else done.stdout + "\n"


def draw(theme: Theme) -> Drawing:
    rows = RECORDING.read_text(encoding="utf-8").splitlines()
    ys = list(accumulate(LINE + GAP * row.startswith("$ ") for row in rows))
    width, height = 2 * MARGIN + round(COLUMNS * COLUMN), BAR + ys[-1] + MARGIN
    drawing = Drawing(theme, width, height, "A terminal: programs at work, and their contexts as files on /kv")
    drawing.box(0.5, 0.5, width - 1, height - 1, fill=theme.box, radius=8)
    drawing.path(f"M1 {BAR}H{width - 1}")
    for i in range(3):
        drawing.box(MARGIN + 18 * i, BAR / 2 - 5, 10, 10, fill=theme.page, radius=5)
    for row, y in zip(rows, ys, strict=True):
        if row.startswith("$ "):
            command, mark, comment = row.partition("# ")
            draw_words(drawing, 0, BAR + y, command.rstrip(), theme.accent, bold=True)
            draw_words(drawing, len(command), BAR + y, mark + comment, theme.quiet)
        else:
            indent = len(row) - len(row.lstrip())
            draw_words(drawing, indent, BAR + y, row[indent:], theme.words)
    return drawing


def draw_words(drawing: Drawing, column: int, y: float, text: str, colour: str, *, bold: bool = False) -> None:
    if text:
        room = (COLUMNS - column + 0.01) * COLUMN
        drawing.words(
            MARGIN + column * COLUMN, y, text,
            room=room, on=drawing.theme.box, colour=colour, size=SIZE, mono=True, bold=bold,
        )  # fmt: skip
