"""The real command tells a person at a terminal about hidden files, similar names, and the next step."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from symphony.cli import main
from symphony.launcher.asking import listing
from symphony.launcher.asking.hidden import hidden_line
from symphony.launcher.common.finding import shipped
from tests.symphony.daemons import SYMPHONY
from tests.symphony.launchers import PIPES, end_process
from tests.symphony.sandboxes import needs_sandbox
from tests.symphony.services import OTHER_UID, as_user


@needs_sandbox
def test_run_names_hidden_directories_and_files_with_the_options_that_show_them(own_launchers):
    launchers = own_launchers
    home = launchers.directory = launchers.runtime / "home"
    home.mkdir()
    launchers.environment["HOME"] = str(home)
    (home / "neighbour.py").write_text("NAME = 'neighbour'")
    (home / "data.txt").write_text("data")
    source = "import neighbour\nprint(neighbour.NAME, open(sys.argv[1]).read())\nopen(sys.argv[2], 'w').write('new')"
    program = launchers.script(source)
    done = launchers.symphony("run", program, "data.txt", "--out=new.txt", "a question?", check=False)
    said, *rest = done.stderr.splitlines()
    assert rest[-1] == "ModuleNotFoundError: No module named 'neighbour'"
    assert said == (
        f"symphony: the sandbox hides {home}, data.txt, --out=new.txt from the program; "
        f"to show it: symphony run --bind {home} ..."
    )
    [option] = re.findall(r"--bind \S+", said)
    shown = launchers.symphony("run", *option.split(), program, "data.txt", "new.txt")
    assert (shown.stdout, shown.stderr, (home / "new.txt").read_text()) == ("neighbour data\n", "", "new")
    to_read = hidden_line(str(program), str(home), [], [])
    assert to_read == f"the sandbox hides {home} from the program; to show it: symphony run --bind {home}:ro ..."


def test_of_a_program_that_ships_hidden_arguments_alone_are_named_and_no_directory_that_a_sandbox_has(tmp_path):
    ask, data = str(shipped()["ask"]), tmp_path / "data.txt"
    data.touch()
    for arguments in (["--help"], ["--kv", "new.kv"], ["/new.txt", "/run/new.txt", "/"]):
        assert hidden_line(ask, str(tmp_path), arguments, []) is None, arguments
    assert hidden_line("/program.py", "/", ["/new.txt", "/run/new.txt", "/"], []) is None
    assert hidden_line(ask, "/", [str(data)], []) == (
        f"the sandbox hides {data} from the program; to show it: symphony run --bind {data}:ro ..."
    )


@pytest.mark.slow
def test_symphony_alone_says_what_it_is_whether_a_daemon_runs_and_how_to_begin(shared):
    environment = {**os.environ, "SYMPHONY_SOCKET": "/nowhere.sock"}
    without = subprocess.run(SYMPHONY, capture_output=True, text=True, check=False, env=environment).stdout
    with_daemon = shared.symphony().stdout
    for said in (with_daemon, without):
        assert said.startswith("Symphony: an operating system for LLM inference programs.\n")
        assert len(re.findall(r"^  symphony ", said, re.MULTILINE)) == 3
    assert f"a daemon serves tiny; its KV files are in {shared.mount}" in with_daemon
    assert "no daemon listens at /nowhere.sock" in without
    assert "  symphony serve " in without


@pytest.fixture
def typed(monkeypatch, capsys):
    """A command that finds no daemon, in this process: its status and its errors."""
    monkeypatch.setenv("SYMPHONY_SOCKET", "/nowhere.sock")

    def typed(*words):
        try:
            status: object = main(words)
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().err

    return typed


def test_a_wrong_name_or_option_is_answered_by_one_that_is_near(typed):
    assert typed("rnu") == (2, "symphony: there is no command 'rnu': did you mean run?\n")
    assert typed("chat") == (2, "symphony: there is no command 'chat': did you mean run chat?\n")
    assert typed("config", "chek") == (2, "symphony config: there is no command 'chek': did you mean check?\n")
    assert typed("run", "asck") == (127, "symphony: no program asck: did you mean ask?\n")
    status, said = typed("ps", "--jsn")
    assert (status, said.startswith("usage: symphony ps [-h]")) == (2, True)
    assert said.endswith("symphony ps: error: unrecognized arguments: --jsn: did you mean --json?\n")
    assert typed("serve", "--port", "3")[1].endswith("unrecognized arguments: --port 3\n"), "as far from --quota"


def test_commands_without_a_daemon_look_nowhere_else(typed, tmp_path):
    assert typed("ps")[0] == 1
    status, said = typed("fsck")
    assert (status, said.startswith("symphony: no daemon listens at /nowhere.sock")) == (2, True)
    (file := tmp_path / "mine.toml").write_text('quota = "4X"\n')
    status, said = typed("config", "check", "--config", str(file))
    assert (status, f"{file}:1: quota" in said) == (1, True)
    status, said = typed("config", "check", "--config", "/no/such.toml")
    assert (status, "no configuration file /no/such.toml" in said) == (1, True)


def test_the_columns_of_ps_are_as_wide_as_what_is_in_them():
    about = {"id": "0a02b622", "uid": 0, "created": time.time(), "usage": {}, "isolation": "none", "reason": None}
    waits = {"name": "worker", "pid": 42, "state": "waiting for a message", "call": "recv", "program": "worker.py"}
    assert listing.lines([{**about, **waits, "args": []}]) == [
        "ID       NAME   PID USER AGE TOKENS ISOLATION STATUS                       PROGRAM",
        "0a02b622 worker  42 root  0s      0 none      waiting for a message (recv) worker.py",
    ]


def test_ps_leaves_out_commands_of_symphony(start_daemon):
    daemon = start_daemon("--model", "tiny")
    assert "0 names" in daemon.symphony("stat").stdout
    daemon.run("with sym.kv_create('one.kv'): pass")
    assert "1 name\n" in daemon.symphony("stat").stdout
    ended = json.loads(daemon.symphony("ps", "--all", "--json").stdout)
    assert {each["name"] for each in ended} == {"python"}


def test_a_daemon_that_dies_under_a_chat_is_told_in_one_line(start_daemon):
    daemon = start_daemon("--model", "tiny")
    how: dict[str, Any] = {"env": daemon.environment, "cwd": daemon.mount.parent, **PIPES}
    chat: Any = subprocess.Popen([*SYMPHONY, "run", "chat", "--max-tokens", "4"], **how)
    chat.stdin.write("Hi\n")
    chat.stdin.flush()
    shown = ""
    while shown.count("> ") < 2:
        shown += chat.stdout.read(1)
    daemon.stop(9)
    _, error = chat.communicate("Again\n", timeout=60)
    remedy = "start it with `symphony serve`, then run the program again, or sym.connect() in it"
    assert error == f"chat: the daemon is gone: {remedy}\n"
    assert chat.returncode == 1


def test_du_means_a_directory_of_the_working_directory_and_knows_sizes_of_another_model(start_daemon):
    daemon = start_daemon("--model", "tiny")
    daemon.run("sym.kv_mkdir('sub'); kv = sym.kv_create('sub/a.kv'); sym.kv_write(kv, [1] * 64); kv.close()")
    daemon.run("sym.kv_create('b.kv').close()")
    where = {"cwd": daemon.mount / "sub", "env": {**daemon.environment, "PYTHONPATH": str(Path.cwd())}}
    for path, names in ((".", ["sub/a.kv"]), ("..", ["b.kv", "sub/a.kv"])):
        here = subprocess.run([*SYMPHONY, "du", path], capture_output=True, text=True, check=True, **where).stdout
        assert re.findall(r"\S+\.kv", here) == [f"{daemon.mount}/{name}" for name in names]
    told = daemon.symphony("du", "sub").stdout
    assert daemon.stop() == 0
    other = start_daemon("--model", "tiny", "--precision", "float32")
    assert other.symphony("du", "sub").stdout == told, "the pages are as large as before, whatever the daemon serves"
    (other.mount / "sub/a.kv").read_bytes()
    hot = other.run("other, = [each for each in sym.kv_hot() if each.path == 'sub/a.kv']; print(other.page_bytes)")
    assert int(hot) * 2 == other.stat()["page_bytes"]


def test_who_cannot_create_a_file_is_told_what_root_would_do(start_daemon, open_to_all):
    create = as_user(OTHER_UID, "try: print(sym.kv_create('mine.kv'))\nexcept sym.NoAccess as error: print(error)")
    daemon = start_daemon("--model", "tiny")
    said = daemon.run(create)
    assert "root would let all users make files there by chmod 1777, or by symphony serve --open" in said
    assert daemon.stop() == 0
    shutil.rmtree(daemon.mount.parent / "state")
    assert start_daemon("--model", "tiny", "--open").run(create).startswith("<KV mine.kv")


def test_a_launcher_that_cannot_be_started_is_told_in_one_line(own_launchers):
    launchers = own_launchers
    launchers.symphony("run", launchers.script(""))
    lock = launchers.state / "lock"
    end_process(launchers.pid)
    lock.unlink()
    lock.mkdir()
    done = launchers.symphony("run", "prog.py", check=False)
    assert (done.returncode, done.stderr) == (125, f"symphony: the launcher can't be started: {lock}: Is a directory\n")
    (launchers.state / "control").unlink(missing_ok=True)  # of the launcher that was killed
    lock.rmdir()


def test_a_full_disk_is_foretold_and_logged_once_with_what_is_used_and_the_limit(start_daemon, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12M", "full", state], check=True)
    try:
        daemon = start_daemon("--model", "tiny", "--disk", "1G", "--kv-memory", "64M")
        (warned,) = (line for line in daemon.log.read_text().splitlines() if " WARNING " in line)
        assert re.search(rf"{state} has room for [\d.]+M of KV, and memory for 64M: what does not", warned)
        daemon.run("for i in range(60): sym.kv_write(sym.kv_create(f'{i}.kv'), [i] * 4000)")
        assert daemon.symphony("sync", check=False).returncode == 1
        daemon.stop()
        lines = [line for line in daemon.log.read_text().splitlines() if "not everything is on disk" in line]
        assert len(lines) == 1, lines
        assert re.search(r"; \d+ bytes are used, of a limit of 1073741824$", lines[0])
    finally:
        subprocess.run(["umount", "-l", state], check=True)
