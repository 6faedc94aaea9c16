#!/usr/bin/env python3
"""Check that `conversations.py` finds faults: the soak must notice when a safeguard of conversations is removed.

A mutant is a copy of the repository in which one text is replaced. For each mutant the soak runs until it finds a
fault, but only up to a number of operations. The table shows after how many operations the soak found the mutant. If
the soak misses a mutant, the exit status is 1.

.venv/bin/python scripts/soak/conversation_mutants.py --operations 10000
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CHAT, GENERATE = "libsym/tools/chat.py", "libsym/calls/generate.py"
ENGINE, TENANTS = "lips/gateway/engine.py", "lips/gateway/tenants.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    what: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "undo without a turn empties the file",
        CHAT,
        '            raise Invalid(f"{self.kv.name}: there is no turn to undo")\n        if at is None or',
        "            at = None\n        if at is None or",
    ),
    Mutant("no note of where turns begin", CHAT, "        if turns:\n", "        if turns and not turns:\n"),
    Mutant("a Chat takes no lock", CHAT, "if self.kv.path is not None and not self.kv.is_locked:", "if not self.kv:"),
    Mutant("the gateway takes no lock", TENANTS, "await sym.aio.kv_lock(kv, blocking=False)", "pass"),
    Mutant(
        "a session is saved whoever talks",
        ENGINE,
        "            async with tenant.saving, tenant.talking(path, may_begin=True) as (old, length):\n",
        "            async with tenant.saving:\n                length = 0\n",
    ),
    Mutant("a turn that failed stays asked", CHAT, "return answer.is_lost or (", "return False and ("),
    Mutant(
        "what was not sent stays",
        ENGINE,
        "self.generation.num_read, self.generation.num_read_bytes = self.num_sent if is_streamed else (0, 0)",
        "self.generation.num_read = len(self.generation.tokens)",
    ),
    Mutant(
        "a stop text stays",
        GENERATE,
        'if self.finish != "stop_text" or self._keeps_stop or self._left is not None:',
        'if self.finish != "nothing":',
    ),
    Mutant(
        "a full file is not closed in order",
        CHAT,
        "            if self._pending and self.kv.path is not None:",
        "            if self._answer is not None and self.kv.path is not None:",
    ),
    Mutant("a program's cut leaves stale tokens", CHAT, "if self._num_cuts != self.kv.num_cuts:", "if not self.kv:"),
    Mutant(
        "a fork ends its parent's answer",
        CHAT,
        "        return self.kv.channel.run(self._fork(path))",
        "        self._cancel()\n        return self.kv.channel.run(self._fork(path))",
    ),
    Mutant(
        "several choices save no session",
        ENGINE,
        "if asked.session is not None and (is_whole",
        "if asked.session is not None and len(generations) == 1 and (is_whole",
    ),
    Mutant(
        "the repetition penalty knows the new tokens alone",
        ENGINE,
        '{**_options(asked), "before": tokens}',
        "{**_options(asked)}",
    ),
    Mutant(
        "a prompt's key is a conversation's name",
        TENANTS,
        'self.cached = f"{root}cached"',
        'self.cached = f"{root}sessions"',
    ),
    Mutant(
        "names are taken for each other",
        "lips/gateway/file_names.py",
        "    found = _ENCODED.sub(",
        '    name = re.sub("[^a-z0-9]", "-", name)\n    found = _ENCODED.sub(',
    ),
    Mutant(
        "a conversation is removed by its name",
        ENGINE,
        "await sym.aio.kv_remove(chat.kv)",
        "await sym.aio.kv_remove(chat.kv.path)",
    ),
    Mutant(
        "an export's length is that of another look",
        "lips/gateway/sessions.py",
        "            return file, os.fstat(file.fileno()).st_size\n",
        "            name_in = f'{tenant.place.mount}/{tenant.place.path}/sessions/{tenant.file_of(name)}.kv'\n"
        "            return file, os.stat(name_in).st_size\n",
    ),
    Mutant(
        "a copy has a turn that another answers",
        TENANTS,
        "async with await sym.aio.kv_fork(file, ended=True) as kv:",
        "async with await sym.aio.kv_fork(file) as kv:",
    ),
    Mutant(
        "a name that moved is not noticed",
        TENANTS,
        "is_its_own = await self.is_at(kv, path)",
        "is_its_own = True",
    ),
    Mutant(
        "a later system message is dropped",
        ENGINE,
        "    return list(turn)\n\n\nasync def _end(",
        '    return [message for message in turn if message["role"] != "system"]\n\n\nasync def _end(',
    ),
    Mutant(
        "a second try for room goes on behind the first",
        ENGINE,
        "        if is_again:  # the first try may have computed some tokens",
        "        if False:",
    ),
    Mutant(
        "a completion with a conversation is answered",
        "lips/gateway/completions.py",
        'if fields.has("conversation"):',
        "if False:",
    ),
)


def copy_to(place: Path) -> None:
    """Copy the files that git tracks, and the built libraries, to `place`."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    built = [
        str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("[a-z]*/**/*.so") if "build" not in path.parts
    ]
    for name in (*listed.splitlines(), *built):
        if (REPOSITORY / name).is_file() and not name.startswith(("tests/", "scripts/bench/results", "scripts/traces")):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, place / name)


def judged(mutant: Mutant, options: argparse.Namespace) -> str:
    """Return after how many operations the soak found a mutant, and the fault, or a note that the mutant lives."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        place = Path(directory)
        copy_to(place)
        text = (place / mutant.file).read_text()
        if text.count(mutant.old) != 1:
            return f"NO MUTANT: its text is {text.count(mutant.old)} times in {mutant.file}"
        (place / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "scripts/soak/conversations.py", "--operations", str(options.operations)]
        command += ["--seconds", str(options.seconds), "--seed", str(options.seed)]
        done = subprocess.run(command, cwd=place, check=False, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
    found = re.search(r"WRONG after (\d+) operations, (\d+) s, seed \d+: (.*)", done.stdout)
    if found:
        return f"found after {found[1]:>5} operations, {found[2]:>3} s: {found[3][:100]}"
    return f"LIVES: {lines[-1][:120]}" if done.returncode == 0 else f"NOT JUDGED: {lines[-1][:120]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=600, help="for each mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose description has this text")
    parser.add_argument("--quick", action="store_true", help="one mutant")
    options = parser.parse_args()
    if options.quick:
        options.only = "the gateway takes no lock"
    wanted = [mutant for mutant in MUTANTS if options.only in mutant.what]
    num_living = 0
    for mutant in wanted:
        what = judged(mutant, options)
        num_living += not what.startswith("found")
        print(f"{mutant.what:50} {what}", flush=True)
    return 1 if num_living else 0


if __name__ == "__main__":
    sys.exit(main())
