#!/usr/bin/env python3
"""Runs every program that ships with odd input by `symphony run`. Prints a table of statuses and messages.

    .venv/bin/python scripts/conformance/odd_programs.py              # all: a quarter of an hour
    .venv/bin/python scripts/conformance/odd_programs.py beam chat    # these alone
    .venv/bin/python scripts/conformance/odd_programs.py --quick      # two programs, as the suite does

The model is small and random, and answers nonsense. The last line says BROKEN, and the exit status is 1, if a program
prints a traceback, hangs, succeeds without output, accepts bad input, refuses input without a message or in several
lines, or leaves a process, an anonymous file, or a name without entries. `CASES` says which words of a program are
replaced in each case.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "attacks")]

from attacked import Daemon, daemon, of_root  # noqa: E402 - where they lie is known now

import libsym as sym  # noqa: E402
from symphony.launcher.common.finding import PURPOSES  # noqa: E402

SMALL, SLOW = "tiny:positions=2048", "tiny:positions=2048,hidden=768,layers=12,ffn=3072"
LIMIT_S = 60
"""Time after which a run counts as hung."""
TEXT = "one, two, three, one, two, three,"

USUAL = "{text} --max-tokens {number}"
PLAIN = {name: USUAL for names in PURPOSES.values() for name in names} | {
    "chat": "{kv} --max-tokens {number}",
    "compact": "{kv} new/short.kv --keep 0 --max-tokens {number}",
    "batch": "{prompts} {answers} --max-tokens {number}",
    "score": "{file} --context {number}",
    "prefix_tree": "--document {file} {text} --max-tokens {number}",
    "mapreduce": "{file} --max-tokens {number}",
    "modular": "{text} {file} {file} --max-tokens {number}",
    "rag": "{directory} {text} --max-tokens {number}",
    "editor": "{directory} --max-tokens {number}",
    "h2o": "{text} --context {file} --max-tokens {number}",
    "snapkv": "{text} --context {file} --max-tokens {number}",
    "tova": "{text} --context {file} --max-tokens {number}",
    "constrained": "{text} --regex [a-z]+ --max-tokens {number}",
    "cfg": "{text} --system {text} --max-tokens {number}",
    "cad": "{text} --context {text} --max-tokens {number}",
    "tree_of_thought": "{text} --depth {number}",
    "graph_of_thought": "5 3 9 1 7 2 8 4 --ways {number}",
    "recursion_of_thought": "{count} 4 2",
    "mcts": "24 --tokens {number}",
    "reflexion": "{text} --test {text} --attempts {number}",
    "rlm": "{text} {kv} --max-turns {number}",
    "react": "{text} --files {directory} --max-calls {count}",
    "codeact": "{text} --read {file} --max-turns {number}",
    "async_tools": "{text} --files {directory} --max-tokens {number}",
    "mcp_client": "{text} --max-calls {count} -- {server}",
    "gateway": "--port {port}",
}
"""Command-line words of each program. `{count}` is a number that may be 0. `plain` returns the other values."""
STAYS = {"editor", "gateway"}
"""Programs that run until Ctrl-C ends them."""
ENDS_WELL = {"chat", "gateway"}
"""Programs whose status after Ctrl-C is 0. A chat ends its answer and finds no more input. A gateway ends as after
SIGTERM.
"""
MAKES = {"chat"}
"""Programs that create their KV file if it does not exist."""
QUIET = {"batch"}
"""Programs that write their answers to a file."""
LOCK = "prefix_tree.kv"
"""KV file without entries that may stay after the run."""


@dataclass(frozen=True)
class Case:
    """Odd words that replace words of a plain run, and the exit statuses that are allowed with them."""

    put: dict[str, str]
    statuses: tuple[int, ...]
    needs: str = ""
    """Pattern of placeholders. A program whose words have none of these placeholders skips the case."""


def plain(place: Path) -> dict[str, str]:
    """Make the files of a plain run. Return the run's words."""
    texts = {
        "a.txt": "# Bees\nBees eat pollen.\n\n# Ants\nAnts eat one, two, three.\n" * 4,
        "long.txt": "Ants and bees eat one, two, three. " * 80,
        "prompts.jsonl": "".join(json.dumps({"prompt": f"{TEXT} {number}"}) + "\n" for number in range(3)),
        "long.jsonl": json.dumps({"prompt": TEXT * 200}) + "\n" + json.dumps({"prompt": TEXT}) + "\n",
        "docs/a.md": "# Bees\nBees eat pollen.\n\n# Numbers\none, two, three\n",
        "long/a.md": "Bees eat one, two, three.\n" * 300,
    }
    for name, text in texts.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    server = f"{sys.executable} {ROOT / 'tests' / 'lips' / 'weather_server.py'}"
    files = {"file": "a.txt", "prompts": "prompts.jsonl", "directory": "docs"}
    return {"text": TEXT, "number": "8", "count": "2", "port": "0", "kv": "kept.kv", "server": server} | files


CASES = {
    "nonsense": Case({}, (0, 1)),
    "empty": Case(dict.fromkeys(["text", "file", "prompts", "directory", "kv", "number", "count", "port"], ""), (2,)),
    "zero": Case({"number": "0"}, (2,), "number"),
    "legal zero": Case({"count": "0"}, (0, 1), "count"),
    "negative": Case({"number": "-1", "count": "-1", "port": "-1"}, (2,), "number|count|port"),
    "NaN": Case({"number": "nan", "count": "nan", "port": "nan"}, (2,), "number|count|port"),
    "missing file": Case(
        {"file": "none", "prompts": "none", "directory": "none", "kv": "none.kv"}, (1, 2), "file|prompts|directory|kv"
    ),
    "nearly full": Case({"text": TEXT * 61, "number": "64", "kv": "full.kv"}, (0, 1), "text|kv"),
    "too long": Case(
        {"text": TEXT * 100, "file": "long.txt", "prompts": "long.jsonl", "directory": "long", "kv": "full.kv"},
        (0, 1),
        "text|file|prompts|directory|kv",
    ),
    "Ctrl-C": Case({"number": "60", "count": "1000000000"}, (130,)),
}


class Runs:
    """Runs of programs beside a daemon, with checks of what they leave."""

    def __init__(self, served: Daemon, place: Path) -> None:
        self.served, self.place, self.plain, self.broken = served, place, plain(place), list[str]()
        sym.connect(str(served.socket))
        self.talks = {"kept.kv": self.talk(3, TEXT), "full.kv": self.talk(2, TEXT * 28)}
        self.anonymous, self.programs = self.num_anonymous(), sym.daemon_stat()["programs"]  # with this script

    def talk(self, turns: int, text: str) -> sym.KV:
        """Return a file with a conversation. Programs get forks of the file."""
        with sym.Chat(kv := sym.kv_create()) as chat:
            for _ in range(turns):
                chat.ask(text, max_tokens=8).full_text()
            return kv.fork()

    def num_anonymous(self) -> int:
        """Return the number of open files without a name."""
        state = sym.daemon_stat()
        return int(state["num_files"]) - int(state["num_names"])

    def try_(self, name: str, kind: str) -> str:
        """Run a program once. Return the line of the table for this run."""
        case, form = CASES[kind], PLAIN[name]
        put = self.plain | {"answers": str(self.served.mount / "answers.jsonl")} | case.put
        words = [each for word in form.split() for each in self.words(word, put)]
        sym.kv_mkdir("new", parents=True)
        for path, kv in self.talks.items():
            kv.fork(path).close()
        how = of_root(self.served, ROOT, "run", name, *words) | {"cwd": self.place}
        ctrl_c = kind == "Ctrl-C" or (name in STAYS and 2 not in case.statuses)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            before = sym.daemon_stat()["num_tokens"]
            with subprocess.Popen(**how, stdin=subprocess.PIPE, stdout=out, stderr=err) as run:
                assert run.stdin is not None
                run.stdin.write(f"{put['text']}\n")
                run.stdin.close()
                if ctrl_c:
                    self.until(lambda: run.poll() is not None or self.works(before, out.fileno(), err.fileno(), name))
                    run.send_signal(signal.SIGINT)
                try:
                    status = run.wait(LIMIT_S)
                except subprocess.TimeoutExpired:
                    run.kill()
                    status = -1
            for file in (out, err):
                file.seek(0)
            said, errors = out.read(), err.read()
        wanted = ((0,) if name in ENDS_WELL else (130,)) if ctrl_c else case.statuses
        if kind == "missing file" and name in MAKES:
            wanted = (0,)
        wrong = self.wrong(name, status, wanted, said, errors)
        self.broken += [f"{name}, {kind}: {each}" for each in wrong]
        told = "  <- ".join([last_line(errors or said)[:150], *([", ".join(wrong)] if wrong else [])])
        return f"{name:20} {kind:12} {status:4}  {told}"

    def words(self, word: str, put: dict[str, str]) -> list[str]:
        """Return the words that one word of the form stands for."""
        if word == "{server}":
            return put["server"].split()
        return [re.sub(r"\{(\w+)\}", lambda found: put[found[1]], word)]

    def works(self, before: int, out: int, err: int, name: str) -> bool:
        """Return whether a program is in the middle of its work."""
        if name in STAYS:
            return any(Path(f"/proc/self/fd/{number}").stat().st_size for number in (out, err))
        return bool(sym.daemon_stat()["num_tokens"] > before)

    def wrong(self, name: str, status: int, wanted: tuple[int, ...], said: str, errors: str) -> list[str]:
        """Return the faults of a run and of its leftovers, and remove the leftovers."""
        wrong = {
            "hangs": status == -1,
            f"status {status}, wanted {wanted}": status not in wanted,
            "a traceback": "Traceback" in said + errors,
            "silence": not said + errors and status != 130 and name not in QUIET,
            "many lines": status == 2 and len(errors.splitlines()) != 1,
            "nothing said": status in {1, 2} and not re.match(rf"(symphony run )?{name}: .", last_line(errors)),
            "a program goes on": not self.until(lambda: sym.daemon_stat()["programs"] == self.programs),
            "anonymous files": not self.until(lambda: self.num_anonymous() <= self.anonymous),
            "a name without entries": bool(self.empty()),
        }
        sym.daemon_check()
        for path in sorted(self.served.mount.rglob("*"), reverse=True):
            if ".symphony" not in path.parts:
                path.rmdir() if path.is_dir() else path.unlink()
        return [each for each, is_so in wrong.items() if is_so]

    def empty(self) -> list[str]:
        """Return the names of KV files without entries that have no TTL."""
        names = [str(path.relative_to(self.served.mount)) for path in self.served.mount.rglob("[!.]*.kv")]
        found = ((name, sym.kv_stat(name)) for name in names)
        return [name for name, stat in found if not (stat.tokens or stat.ttl_s or name == LOCK)]

    def until(self, holds: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + LIMIT_S
        while not (found := holds()) and time.monotonic() < end_s:
            time.sleep(0.02)
        return found


def last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="*", choices=[*PLAIN, []], metavar="PROGRAM", help="(default: all)")
    parser.add_argument("--quick", action="store_true", help="two programs")
    args = parser.parse_args()
    names = args.program or (["completion", "compact"] if args.quick else [*PLAIN])
    broken = list[str]()
    for model, kinds in ((SMALL, [kind for kind in CASES if kind != "Ctrl-C"]), (SLOW, ["Ctrl-C"])):
        with daemon("--kv-memory", "512M", "--model", model) as served, tempfile.TemporaryDirectory() as place:
            runs = Runs(served, Path(place))
            for name in names:
                for kind in kinds:
                    if re.search(f"{{({CASES[kind].needs or '.*'})}}", PLAIN[name]):
                        print(runs.try_(name, kind), flush=True)
            sym.close()
        broken += runs.broken
    print(f"BROKEN: {'; '.join(broken)}" if broken else f"held: {len(names)} programs")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
