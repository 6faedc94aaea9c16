"""Completion of commands in bash, zsh and fish: shtab writes the scripts from the grammar of the command line.

For names that depend on the machine (programs, names on the mount), the scripts run `symphony completion --names KIND`
at each completion. The scripts never expand a name that they get: a file may be called `$(reboot)`.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import libsym
from libsym.channel.socket_path import find_socket
from symphony.commands.programs import add_run_options
from symphony.launcher.asking import listing
from symphony.launcher.asking.commands import places_of
from symphony.launcher.common.finding import find_program, shipped
from symphony.launcher.common.places import Refused
from symphony.manuals import manual
from symphony.settings.config import SETTINGS

MAX_KV_NAMES = 1000
"""Upper bound of the names on the mount that a completion offers. A mount may have a million names."""
MODELS = ("smollm2", "tiny")
WORDS = {
    **{key: setting.kind.words for key, setting in SETTINGS.items() if setting.kind.words},
    "restart": ["no", "on-failure"],
    "signal": ["TERM", "INT", "HUP", "KILL", "STOP", "CONT", "USR1", "USR2"],
}
"""Words to offer for options whose values the grammar does not restrict."""
_FILES = ("FILE", "PAGE", "PATH", "PATH[:ro]", "ARGS")
_ASK = "symphony completion --names"
_BASH = f"""\
_symphony_names() {{
  local name
  while IFS= read -r name; do
    [[ "$name" == "$2"* ]] && printf '%s\\n' "$name"
  done < <({_ASK} "$1" 2>/dev/null)
}}
_symphony_programs() {{ _symphony_names programs "$1"; }}
_symphony_all_programs() {{ _symphony_names all-programs "$1"; }}
_symphony_topics() {{ _symphony_names topics "$1"; }}
_symphony_kv_files() {{ _symphony_names kv "$1"; compgen -f -- "$1"; }}
_symphony_program_files() {{ _symphony_names shipped "$1"; compgen -f -- "$1"; }}
_symphony_model_files() {{ compgen -W "{" ".join(MODELS)}" -- "$1"; compgen -f -- "$1"; }}
"""
_BASH_END = f"""\
_symphony() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" options option
  if [[ "${{COMP_WORDS[1]}}" == run && "$current" == -* ]] &&
    options=$({_ASK} options --line "${{COMP_WORDS[@]:2:COMP_CWORD-2}}" 2>/dev/null); then
    COMPREPLY=()
    while IFS= read -r option; do
      [[ "$option" == "$current"* ]] && COMPREPLY+=("$option")
    done <<<"$options"
  else
    _shtab_symphony
  fi
}}
complete -o bashdefault -F _symphony symphony
"""
"""Last part of the script for bash. After `symphony run PROG`, the script completes the program's own options."""
_ZSH = f"""\
_symphony_names() {{
  local -a found=("${{(@f)$({_ASK} $1 2>/dev/null)}}")
  compadd -a found
}}
_symphony_programs() {{ _symphony_names programs }}
_symphony_all_programs() {{ _symphony_names all-programs }}
_symphony_topics() {{ _symphony_names topics }}
_symphony_kv_files() {{ _symphony_names kv; _files }}
_symphony_program_files() {{ _symphony_names shipped; _files }}
_symphony_model_files() {{ compadd {" ".join(MODELS)}; _files }}
"""
_FISH = f"""\
function _symphony_names; {_ASK} $argv[1] 2>/dev/null; end
function _symphony_files; __fish_complete_path (commandline -ct); end
function _symphony_programs; _symphony_names programs; end
function _symphony_all_programs; _symphony_names all-programs; end
function _symphony_topics; _symphony_names topics; end
function _symphony_kv_files; _symphony_names kv; _symphony_files; end
function _symphony_program_files; _symphony_names shipped; _symphony_files; end
function _symphony_model_files; printf '%s\\n' {" ".join(MODELS)}; _symphony_files; end
"""
_FUNCTIONS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str, whole: argparse.ArgumentParser) -> str:
    """Return the completion script for a shell. ImportError: shtab is missing."""
    import shtab  # noqa: PLC0415 - `--names` works without it

    for parser in _parsers(whole):
        for action in parser._actions:  # noqa: SLF001 - as shtab does
            function = _function(parser, action)
            if function is not None:
                action.complete = {"bash": function, "zsh": function, "fish": f"({function})"}  # type: ignore[attr-defined] # shtab's
            elif action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.dest in WORDS:
                action.choices = WORDS[action.dest]
    written: str = shtab.complete(whole, shell, preamble=_FUNCTIONS[shell])
    return f"{written}\n{_BASH_END}" if shell == "bash" else written


def _function(parser: argparse.ArgumentParser, action: argparse.Action) -> str | None:
    """Return the name of the shell function that completes an argument. None: there is no such function."""
    if action.metavar == "PROGRAM":
        has_ended = parser.prog.endswith((" logs", " wait"))
        return "_symphony_all_programs" if has_ended else "_symphony_programs"
    if not action.option_strings and action.dest == "path":
        return "_symphony_kv_files"
    if action.dest == "model":
        return "_symphony_model_files"
    return {"PROG": "_symphony_program_files", "TOPIC": "_symphony_topics"}.get(str(action.metavar))


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser, and the parsers of its commands."""
    yield parser
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for part in action.choices.values():
                yield from _parsers(part)


def names(kind: str, socket: Path | None) -> list[str]:
    """Return all names of a kind that exist now, for a completion script.
    SymError, Refused: the daemon or the launcher can't answer.
    """
    if kind == "shipped":
        return list(shipped())
    if kind == "topics":
        pages = manual.find_pages(manual.directories())
        return sorted({page.name.removeprefix("symphony-") for page in pages} | set(libsym.__all__) | set(shipped()))
    if kind == "kv":
        return list(islice(_kv_names(socket), MAX_KV_NAMES))
    daemon = socket or find_socket()
    programs, _ = listing.rows(places_of(daemon), str(daemon), ended=kind == "all-programs")
    return sorted({each["name"] for each in programs if each["program"]})


def options_of(line: Sequence[str]) -> list[str]:
    """Return the options of a program, which are found in its source. `line`: the words after `symphony run`.
    Refused: the words name no Python program.
    """
    run = argparse.ArgumentParser()
    add_run_options(run)
    word = run.parse_args(line).program
    path, is_python = find_program(word or "", ".")
    if not is_python:
        raise Refused(f"{path} is no Python")
    calls = [node for node in ast.walk(ast.parse(Path(path).read_bytes())) if isinstance(node, ast.Call)]
    words = [each.value for call in calls for each in call.args if isinstance(each, ast.Constant)]
    options = [each for each in words if isinstance(each, str) and re.fullmatch(r"--?[a-z][\w-]*", each)]
    return sorted({*options, "--help"})


def _kv_names(socket: Path | None) -> Iterator[str]:
    """Yield the printable names on the mount, from its root down."""
    libsym.connect(str(socket) if socket else None)
    mount = libsym.daemon_stat()["mount"]
    for directory, below, files in os.walk(mount):
        for name in [*(f"{each}/" for each in below), *files]:
            path = os.path.relpath(os.path.join(directory, name), mount) + "/" * name.endswith("/")  # noqa: PTH118 - text
            if path.isprintable():
                yield path
