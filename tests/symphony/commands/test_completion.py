"""`symphony completion`, in real shells: the completions of beginnings of words."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from decoder.model_config import GPU_PRECISIONS, KV_DTYPE
from symphony.cli import main
from symphony.commands.completing import MODELS, WORDS
from symphony.settings.loading import load
from tests.symphony.launchers import ROOT
from tests.symphony.test_run_terminal import Terminal

FUNCTION = """\
symphony() {
  case "$*" in
    "completion --names "*) command symphony "$@" ;;
    *) echo "typed: $*." ;;
  esac
}
"""
"""Function in place of the command, so that the completed line is told; the scripts' questions reach the command."""
PROMPT = "ready> "
HEADS = {
    "bash": "bind 'set enable-bracketed-paste off'\nsource symphony.bash\n",
    "zsh": "fpath=($PWD $fpath)\nautoload -Uz compinit\ncompinit -u -D\nunsetopt zle_bracketed_paste\n",
}
COMMANDS = {
    "bash": ["bash", "--noprofile", "--rcfile", "head", "-i"],
    "zsh": ["zsh", "-d", "-i"],  # ZDOTDIR is the test's
}
LINES = {
    "completion bash": "compl\tba\t",
    "run --isolation none": "run --isol\tno\t",
    "serve --device cuda": "serve --devi\tcu\t",
    "serve --model smollm2": "serve --model smo\t",
    "trace summary": "trace summ\t",
    "help kvfs": "help kvf\t",
    "run prefix": "run pref\t",
    "run hello.py": "run hel\t",
    "du handbook.kv": "du handb\t",
    "kill ticker": "kill tick\t",
    "attach ticker": "attach ti\t",
}
OF_PROGRAMS = {"run --detach ask --resume --max-tokens": "run --det\task --res\t--max-t\t"}


@pytest.fixture(scope="module")
def place(shared_daemon, tmp_path_factory):
    """Make a directory with names to complete, and the environment of shells in it."""
    daemon, directory = shared_daemon, tmp_path_factory.mktemp("completion")
    commands = directory / "bin"
    commands.mkdir()
    (commands / "symphony").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m symphony "$@"\n')
    (commands / "symphony").chmod(0o755)
    (directory / "hello.py").write_text("print('hello')\n")
    (directory / "ticker.py").write_text("import time\nprint('ready')\ntime.sleep(600)\n")
    daemon.run("sym.kv_create('handbook.kv').close(); sym.kv_create('$(touch evil).kv').close()")
    assert daemon.symphony("run", "--detach", str(directory / "ticker.py")).stdout == "ticker\n"
    for shell in ("bash", "zsh", "fish"):
        script = daemon.symphony("completion", shell).stdout
        (directory / {"zsh": "_symphony"}.get(shell, f"symphony.{shell}")).write_text(script)
    places = {"HOME": str(directory), "ZDOTDIR": str(directory), "PATH": f"{commands}:{os.environ['PATH']}"}
    environment = {**daemon.environment, **places, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    yield SimpleNamespace(directory=directory, environment=environment)
    daemon.symphony("kill", "-s", "KILL", "ticker")
    daemon.shell("rm kv/*.kv")


def need(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"NO COMPLETION TESTED IN {shell}: it is not installed (apt-get install {shell})")


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_the_tab_key_completes_commands_options_choices_and_names(name, place):
    """Behind the name of a program bash completes the program's own options."""
    need(name)
    head = f"PS1='{PROMPT}'\n{HEADS[name]}{FUNCTION}"
    (place.directory / {"bash": "head", "zsh": ".zshrc"}[name]).write_text(head)
    shell = Terminal(place, command=COMMANDS[name])
    shell.shows(PROMPT)
    try:
        for words, typed in (LINES | (OF_PROGRAMS if name == "bash" else {})).items():
            shell.types(f"symphony {typed}\r".encode())
            shell.shows("\ntyped: ")
            assert shell.shows(".\r").removesuffix(".\r").rstrip() == words
            shell.shows(PROMPT)
    finally:
        os.close(shell.master)  # it gets SIGHUP
        os.waitpid(shell.pid, 0)
    assert not (place.directory / "evil").exists(), "a file's name was expanded"


@pytest.mark.slow
def test_fish_completes_commands_options_choices_and_names(place):
    need("fish")
    starts = [words[:-1] for words in LINES]
    asked = "\n".join(f"complete -C 'symphony {start}'; echo ==" for start in starts)
    command = ["fish", "--no-config", "-c", f"source symphony.fish\n{asked}"]
    how = {"cwd": place.directory, "env": place.environment, "timeout": 100}
    done = subprocess.run(command, capture_output=True, text=True, check=True, **how)
    answers = [answer.splitlines() for answer in done.stdout.split("==\n")][:-1]
    found = [[line.partition("\t")[0] for line in answer] for answer in answers]
    assert found == [[words.split()[-1]] for words in LINES]
    assert not (place.directory / "evil").exists(), "a file's name was expanded"


def test_the_words_of_options_are_those_that_a_daemon_takes():
    assert set(WORDS["precision"]) == {*KV_DTYPE, *GPU_PRECISIONS, "auto"}
    for key in ("device", "log"):
        for word in WORDS[key]:
            assert getattr(load(None, {key: word}), key) == word
    for word in set(WORDS["kv_dtype"]) - {"fp8"}:
        assert load(None, {"device": "cuda", "precision": word, "kv_dtype": word}).kv_dtype == word
    assert all(load(None, {"model": word}).model == word for word in MODELS)


def test_a_name_that_is_asked_for_needs_no_library_that_writes_scripts(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "--names", "shipped"]) == 0
    assert "ask" in capsys.readouterr().out.splitlines()
    assert main(["completion", "bash"]) == 1
    assert "shtab" in capsys.readouterr().err
    assert main(["completion", "--names", "kv", "--socket", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().out == "", "without a daemon"
