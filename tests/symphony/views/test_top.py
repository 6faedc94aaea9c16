"""`symphony top` on a real daemon: its display, its keys, and daemons that go."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key
from textual.widgets import Input, Static

import libsym as sym
from symphony.views.top.app import Top
from symphony.views.top.columns import PADDING, file_columns, fitting, machine_columns, program_columns
from symphony.views.top.fleet import FleetTop
from symphony.views.top.questions import Confirm, Keys
from symphony.views.top.sampling import Daemon as Asked
from tests.symphony.daemons import SYMPHONY
from tests.symphony.launchers import PIPES, end_process

SMALL, LARGE = (80, 24), (140, 50)
WITHIN_S = 50
WAITS = """
import sys, libsym as sym
with sym.kv_create() as kv:
    sym.kv_write(kv, [1] * int(sys.argv[1]))
    sym.subscribe("never")
    sym.recv("never")
"""


@pytest.fixture
def seen(connected, monkeypatch, tmp_path):
    """The daemon of the module, as this process and its `top` see it: with its launcher, and three files."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(connected.runtime))
    for name, num_tokens in (("large.kv", 100), ("small.kv", 10), ("between.kv", 50)):
        with sym.kv_create(name) as kv:
            sym.kv_write(kv, [1] * num_tokens)
    sym.kv_open("between.kv").close()
    yield connected
    for file in sym.kv_list():
        sym.kv_remove(file.name)


@pytest.fixture
def programs(seen, tmp_path):
    """Two that wait for a message: `many` has computed 300 tokens, `few` 30."""
    path = tmp_path / "waits.py"
    path.write_text(WAITS)
    for name, num_tokens in (("many", "300"), ("few", "30")):
        seen.symphony("run", "--detach", "--isolation", "none", "--name", name, str(path), num_tokens)
    yield
    for name in ("many", "few"):
        seen.symphony("kill", "-s", "KILL", name, check=False)
        seen.symphony("wait", name, check=False)


class Looking:
    """A `top` under a test's fingers."""

    def __init__(self, pilot):
        self.pilot = pilot
        self.app: Top = pilot.app

    async def until(self, condition):
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline_s, (self.programs, self.files, self.banner, self.notes)
            await self.pilot.pause(0.02)

    def press(self, *keys):
        """Post keys, which are handled in order. `pilot.press` would wait until this process is idle, which it never
        is.
        """
        for key in keys:
            self.app.post_message(Key(key, key if len(key) == 1 else None))

    async def sort(self, table, heading):
        """Press keys until the table is sorted by this heading."""
        while heading not in self.heads(table):
            before = self.heads(table)
            self.press("s")
            await self.until(lambda before=before: self.heads(table) != before)

    async def type_filter(self, words):
        self.press("slash")
        field = self.app.query_one("#filter", Input)
        await self.until(lambda: self.app.focused is field)
        self.press(*words)

    async def choose(self, table, is_it):
        """Press keys until the cursor is on the row."""
        while not is_it(table.selected):
            before = table.cursor_row
            self.press("down")
            await self.until(lambda before=before: table.cursor_row != before)

    @property
    def programs(self):
        return [row.program.name for row in self.app._programs.shown]

    @property
    def files(self):
        return [row.file.path for row in self.app._files.shown]

    @property
    def banner(self):
        found = self.app.query_one("#banner", Static)
        return str(found.content) if found.has_class("-shown") else ""

    @property
    def notes(self):
        return [note.message for note in self.app._notifications]

    def heads(self, table):
        return [str(column.label) for column in table.ordered_columns]


def look(scenario, size=LARGE, app=lambda: Top(Asked(None), 0.25)):
    """Run a scenario with a `top` of this process."""

    async def main():
        async with app().run_test(size=size) as pilot:
            await asyncio.wait_for(scenario(Looking(pilot)), 2 * WITHIN_S)

    asyncio.run(main())


@pytest.mark.slow
def test_programs_and_files_are_shown_sorted_and_filtered_by_keys(programs):
    async def scenario(top):
        await top.until(lambda: set(top.programs) == {"many", "few"} and len(top.files) == 3)
        table = top.app._programs
        await top.sort(table, "TOKENS▼")
        assert top.programs == ["many", "few"]
        assert [row.isolation for row in table.shown] == ["none", "none"]
        assert {row.program.state for row in table.shown} == {"waiting for a message"}
        users = str(top.app.query_one("#users", Static).content)
        assert re.search(rf"uid {os.getuid()} [0-9.]+[KM]: .*\b[0-9]+ (files|connections)", users), users
        top.press("r")
        await top.until(lambda: top.programs == ["few", "many"])
        top.press("S")
        await top.until(lambda: "ISOL▲" in top.heads(table))
        table = top.app._files
        top.press("tab")
        await top.until(lambda: top.app.focused is table)
        await top.sort(table, "TOKENS▼")
        assert top.files == ["large.kv", "between.kv", "small.kv"]
        await top.sort(table, "HITS▼")
        assert top.files[0] == "between.kv"
        await top.type_filter("arge")
        await top.until(lambda: top.files == ["large.kv"])
        top.press("enter", "escape")
        await top.until(lambda: len(top.files) == 3)
        field = top.app.query_one("#filter", Input)
        assert not field.has_class("-shown")
        await top.type_filter("few")
        top.press("tab")
        await top.until(lambda: top.app.focused is top.app._programs)
        assert not field.has_class("-shown"), "it is of the other table"

    look(scenario)


@pytest.mark.slow
def test_the_cursor_stays_on_its_row_while_others_come_and_go(seen):
    async def scenario(top):
        await top.until(lambda: len(top.files) == 3)
        table = top.app._files
        top.press("tab")
        await top.until(lambda: top.app.focused is table)
        await top.sort(table, "SIZE▼")
        await top.choose(table, lambda row: row.file.path == "between.kv")
        sym.kv_remove("small.kv")
        for index in range(5):
            sym.kv_create(f"a{index}.kv").close()
        await top.until(lambda: len(top.files) == 7)
        assert table.selected.file.path == "between.kv"

    look(scenario)


@pytest.mark.slow
def test_a_program_is_killed_by_its_launcher_after_a_yes(programs, seen):
    async def scenario(top):
        await top.until(lambda: set(top.programs) == {"many", "few"})
        await top.sort(top.app._programs, "TOKENS▼")
        await top.choose(top.app._programs, lambda row: row.program.name == "few")
        for answer in "ny":
            top.press("k")
            await top.until(lambda: isinstance(top.app.screen, Confirm))
            assert top.programs == ["many", "few"]
            top.press(answer)
            await top.until(lambda: not isinstance(top.app.screen, Confirm))
        await top.until(lambda: "few" not in top.programs)
        assert "TERM was sent to few" in top.notes
        assert top.programs == ["many"]

    look(scenario)
    assert seen.symphony("wait", "few", check=False).returncode == 128 + 15


@pytest.mark.slow
def test_a_program_that_connected_by_itself_is_not_killed_and_it_is_said_whose_it_is(seen):
    process = seen.program("sym.getpid(); print('here', flush=True); sys.stdin.read()")
    assert process.stdout.readline() == "here\n"

    async def scenario(top):
        await top.until(lambda: [row.program.pid for row in top.app._programs.shown] == [process.pid])
        top.press("k")
        await top.until(lambda: isinstance(top.app.screen, Confirm))
        top.press("y")
        await top.until(lambda: any("is no program of your launcher" in note for note in top.notes))
        assert any(str(process.pid) in note for note in top.notes)

    look(scenario)
    assert process.poll() is None
    process.communicate()


def test_a_daemon_that_goes_and_comes_back_is_waited_for(start_daemon, monkeypatch):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "16M")
    monkeypatch.setenv("SYMPHONY_SOCKET", str(daemon.socket))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemon.runtime))
    daemon.run("sym.kv_create('kept.kv').close()")

    async def scenario(top):
        await top.until(lambda: top.files == ["kept.kv"])
        assert daemon.stop() == 0
        await top.until(lambda: "trying again" in top.banner)
        assert top.files == []
        again = start_daemon("--model", "tiny", "--kv-memory", "16M")
        again.run("sym.kv_open('kept.kv').close()")
        await top.until(lambda: top.files == ["kept.kv"])
        assert top.banner == ""

    look(scenario)


@pytest.mark.slow
def test_on_a_small_terminal_one_table_is_there_and_on_a_large_one_both(seen):
    async def scenario(top):
        await top.until(lambda: len(top.files) == 3)
        tables = top.app._programs, top.app._files
        for size, shown in ((SMALL, 1), (LARGE, 2), ((40, 10), 1), (SMALL, 1)):
            await top.pilot.resize_terminal(*size)
            await top.until(lambda shown=shown: sum(each.display and each.size.height > 0 for each in tables) == shown)
        assert "PID" not in top.heads(tables[0])
        top.press("tab")
        await top.until(lambda: [each.display for each in tables] == [False, True])
        top.press("question_mark")
        await top.until(lambda: isinstance(top.app.screen, Keys))
        top.press("escape")
        await top.until(lambda: not isinstance(top.app.screen, Keys))
        top.press("space")
        await top.until(lambda: top.banner == "paused: Space goes on")

    look(scenario, SMALL)


def test_the_columns_take_no_more_than_the_width():
    columns: Any
    for columns in (program_columns(), file_columns(4096), machine_columns()):
        for width in range(78, 200):
            assert sum(each.width + 2 * PADDING for each in fitting(columns, width)) <= width


@pytest.mark.slow
def test_a_file_is_pinned_and_unpinned_and_control_characters_and_markup_of_its_name_are_shown_as_text(seen):
    name = "[red]\x1b[31mevil\n.kv"
    sym.kv_create(name).close()

    async def scenario(top):
        await top.until(lambda: len(top.files) == 4)
        top.press("tab")
        await top.type_filter("evil")
        await top.until(lambda: top.files == [name])
        assert str(top.app._files.get_row_at(0)[0]) == "[red]\\x1b[31mevil\\n.kv"
        top.press("enter")
        await top.until(lambda: top.app.focused is top.app._files)
        top.press("p")
        await top.until(lambda: any("is pinned" in note for note in top.notes))
        await top.until(lambda: top.app._files.selected.file.pinned)
        assert sym.kv_stat(name).pinned
        top.press("p")
        await top.until(lambda: any("is not pinned any more" in note for note in top.notes))
        assert not sym.kv_stat(name).pinned

    look(scenario)


@pytest.mark.slow
def test_on_a_real_terminal_it_comes_and_leaves_the_screen_as_it_was(seen):
    ours, theirs = pty.openpty()
    environment = {**seen.environment, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen([*SYMPHONY, "top"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    while b"between.kv" not in text:
        text += os.read(ours, 65536)
        if b"programs" in text and b"\t" not in text:
            os.write(ours, b"\t")
            text += b"\t"
    os.write(ours, b"q")
    while True:
        try:
            text += os.read(ours, 65536)
        except OSError:  # nobody has the other end any more
            break
    os.close(ours)
    assert process.wait(WITHIN_S) == 0
    assert b"\x1b[?1049h" in text
    assert b"\x1b[?1049l" in text


SAMPLE: dict[str, Any] = {
    "fleet": "default",
    "machine": "east",
    "troubles": [],
    "machines": {
        "east": {"state": "serves", "trouble": "", "rates": {"tokens_per_s": 7.0, "busy": 0.5}, "num_programs": 1},
        "west": {"state": "", "trouble": "no answer for 9 s", "rates": None, "num_programs": 0},
    },
    "programs": [
        {"id": "1a", "name": "app", "pid": 7, "machine": machine, "tokens_per_s": rate, "waiting": 0.0, "isolation": ""}
        for machine, rate in (("east", 3.0), ("north", 4.0))
    ],
}
for machine in SAMPLE["machines"].values():
    machine |= {"model": "tiny", "free_bytes": 1 << 30, "load": None}
PRINTS = """
import sys, time
from pathlib import Path
asked, told = Path("{directory}", "asked"), Path("{directory}", "told")
with asked.open("a") as file:
    print(*sys.argv[1:], file=file)
if sys.argv[1] == "kill":
    sys.exit("symphony: north does not answer" if "15" in sys.argv else 0)
sys.stdout.write(told.read_text())
sys.stdout.flush()
if "troubles" in told.read_text():
    time.sleep(600)
sys.exit("symphony: Ray at 10.0.0.1:6379 does not answer")
"""
"""Stand-in for `symphony top --fleet --json`, and for `symphony kill`."""


@pytest.mark.slow
def test_a_fleet_is_shown_by_machines_and_programs_and_its_screen_outlives_what_it_asks(tmp_path, monkeypatch):
    (tmp_path / "told").write_text(json.dumps(SAMPLE) + "\n")
    (tmp_path / "prints.py").write_text(PRINTS.format(directory=tmp_path))
    monkeypatch.setattr("symphony.views.top.fleet._SYMPHONY", (sys.executable, "-SE", tmp_path / "prints.py"))

    async def scenario(top):
        machines = top.app._second
        await top.until(lambda: top.programs == ["north:app", "east:app"])
        shown = [(row.id, row.state) for row in machines.shown]
        assert shown == [("east", "serves"), ("west", "no answer for 9 s")]
        assert "2 programs on 2 machines, 7 tokens/s" in str(top.app.query_one("#fleet", Static).content)
        for key, note in (("k", "north does not answer"), ("K", "KILL was sent to north:app")):
            top.press(key)
            await top.until(lambda: isinstance(top.app.screen, Confirm))
            top.press("y")
            await top.until(lambda note=note: note in top.notes)
        top.press("down")
        await top.until(lambda: top.app._programs.selected.id == "east:1a")
        top.press("K")
        await top.until(lambda: isinstance(top.app.screen, Confirm))
        top.press("y")
        await top.until(lambda: "KILL was sent to east:app" in top.notes)
        (tmp_path / "told").write_text(json.dumps(SAMPLE | {"troubles": ["Ray does not answer"]}) + "\n")
        top.press("plus")
        await top.until(lambda: top.banner == "Ray does not answer")
        (tmp_path / "told").write_text("")
        top.press("minus")
        await top.until(lambda: top.banner == "Ray at 10.0.0.1:6379 does not answer: trying again")
        assert (top.programs, machines.shown) == ([], [])

    look(scenario, app=lambda: FleetTop(Path("/the.socket"), 0.5))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:4] == [
        "top --fleet --json --interval 0.5 --socket /the.socket",
        "kill --signal 15 --socket /the.socket -- north:1a",
        "kill --signal 9 --socket /the.socket -- north:1a",
        "kill --signal 9 --socket /the.socket -- 1a",
    ]
    assert asked[4].startswith("top --fleet --json --interval 0.2")


@pytest.mark.slow
def test_samples_are_printed_as_json_for_scripts(programs, seen):
    command = [*SYMPHONY, "top", "--json", "--interval", "0.1"]
    process: Any = subprocess.Popen(command, env=seen.environment, **PIPES)
    try:
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert first["rates"] is None
        assert second["rates"]["tokens_per_s"] == 0
        found = {each["name"]: (each["usage"]["tokens"], each["isolation"]) for each in second["programs"]}
        assert (found["many"], found["few"]) == ((300, "none"), (30, "none"))
    finally:
        process.terminate()
        process.communicate()
    done = seen.symphony("top", "--fleet", "--json", check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "symphony: this daemon is in no fleet: see `etcd` in symphony.toml(5)\n",
    )


@pytest.mark.slow
def test_without_a_terminal_or_without_textual_one_line_says_what_to_do(seen):
    needs = "symphony: symphony top needs a terminal; without one there are symphony top --json and stat --watch\n"
    lacks = "this needs textual, which the base installation lacks: pip install 'symphony-os[server]'"
    for term, is_terminal, told in (("xterm", False, needs), ("dumb", True, needs), ("xterm", True, lacks)):
        source = (
            f"import sys; sys.modules['textual'] = None; sys.stdin.isatty = sys.stdout.isatty = lambda: {is_terminal}\n"
            "from symphony.cli import main; sys.exit(main(['top']))"
        )
        environment = {**seen.environment, "TERM": term, "PYTHONPATH": str(Path(__file__).parents[3])}
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert (done.returncode, done.stdout, told in done.stderr) == (1, "", True), done.stderr


def test_stat_that_is_piped_goes_on_line_by_line_and_waits_for_a_daemon_that_went(start_daemon):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "16M")
    command = [*SYMPHONY, "stat", "--watch", "0.1"]
    started: Any = [subprocess.Popen([*command, *word], env=daemon.environment, **PIPES) for word in ([], ["--json"])]
    plain, as_json = started
    try:
        assert plain.stdout.readline().split()[:4] == ["UP", "TOKENS/S", "PREFILL/S", "STEPS/S"]
        assert len(plain.stdout.readline().split()) >= 11
        assert '"rates": null' in as_json.stdout.readline()
        assert '"rates": {"seconds": ' in as_json.stdout.readline()
        assert daemon.stop() == 0
        assert plain.stderr.readline().endswith(": trying again\n")
        again = start_daemon("--model", "tiny", "--kv-memory", "16M")
        while f'"pid": {again.process.pid},' not in as_json.stdout.readline():
            pass
    finally:
        for process in (plain, as_json):
            end_process(process.pid)
            process.communicate()
