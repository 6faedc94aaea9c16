#!/usr/bin/env python3
"""Caches: does an answer come sooner for a text that another user, or another key of a gateway, has used?

Each case is a cache that two accounts or two keys reach. The victim uses some secrets. Then the attacker asks for each
secret and for as many wrong texts, in pairs of random order. Wilcoxon's test compares the pairs. Neither the time to
the first token nor the time to the end may differ at p < 0.01. By chance, a hundredth of the tests differ. So a case
that differs is measured again with new secrets, and fails only if both measurements differ in the same direction.

`--table PAGE` runs no attack: it compares the table of caches in the manual with the cases.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import re
import string
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from attacked import _BECOME, ATTACKER, ROOT, VICTIM, Daemon, daemon, verdict

from lips.gateway.keys import new_key

P = 0.01
NUM_PAIRS, NUM_QUICK_PAIRS = 200, 10
"""Pairs of measurements. With fewer than ten pairs the test cannot reach P."""
Took = tuple[float, float]
"""Two times of an answer in seconds: until its first token (or first part), and until its end."""

USER = """
import json

MOUNT, KEPT = sys.argv[1], []
MINE = f"uid{os.getuid()}"
sym.kv_mkdir(MINE)

def took(began_s, generation=()):
    first_s = None
    for _ in generation:
        first_s = first_s or time.perf_counter() - began_s
    end_s = time.perf_counter() - began_s
    return first_s or end_s, end_s

def path_of(secret):
    return f"{MINE}/{secret[:40]}.kv"

def generate(secret, **options):
    began_s = time.perf_counter()
    with sym.kv_create() as kv:
        return took(began_s, sym.generate(kv, list(secret.encode()), max_tokens=4, stop_at_end=False, **options))

def sample(secret):
    return generate(secret, sampler=sym.Sampler(temperature=0.8, top_p=0.9, seed=1))

def guide(secret):
    words = {secret[at : at + 9]: {"type": "string", "pattern": "[a-z]{2,80}x"} for at in range(190)}
    grammar = sym.Grammar.json({"type": "object", "properties": words, "required": list(words)})
    began_s = time.perf_counter()
    with sym.kv_create() as kv:
        return took(began_s, sym.generate(kv, [65], grammar=grammar, max_tokens=2))

def tokenize(secret):
    text = " ".join(secret[at:] + secret[:at] for at in range(0, 200, 20))
    began_s = time.perf_counter()
    sym.tokenize(text)
    return took(began_s)

def render(secret):
    began_s = time.perf_counter()
    sym.chat_tokens([{"role": "user", "content": secret}])
    return took(began_s)

def keep(secret):
    with sym.kv_create(path_of(secret)) as kv:
        sym.kv_write(kv, list(secret.encode()))
    with open(f"{MOUNT}/{path_of(secret)}", "rb") as file:
        return file.read()

def bring(secret):
    image = keep(secret)
    sym.kv_remove(path_of(secret))
    with open(f"{MOUNT}/{path_of(secret)}", "wb", buffering=0) as file:
        began_s = time.perf_counter()
        file.write(image)
        first_s = time.perf_counter() - began_s
    took_s = time.perf_counter() - began_s
    sym.kv_remove(path_of(secret))
    return first_s, took_s

def look(secret):
    began_s = time.perf_counter()
    try:
        sym.kv_open_or_compute(f"uid4243/{secret[:40]}.kv", [1, 2, 3])
    except sym.NoAccess:
        return took(began_s)

def begin(secret):
    end("")
    KEPT[:] = [sym.kv_create()]
    KEPT.append(sym.generate(KEPT[0], list(secret.encode()), stop_at_end=False))

def end(secret):
    for each in reversed(KEPT):
        each.cancel() if each is not KEPT[0] else each.close()
    KEPT.clear()

print("ready", flush=True)
for line in sys.stdin:
    name, secret = json.loads(line)
    took_s = globals()[name](secret)
    print(json.dumps(took_s if isinstance(took_s, tuple) else None), flush=True)
"""


class Party(Protocol):
    """The victim or the attacker."""

    def do(self, name: str, secret: str) -> Took:
        """Use a secret by the operation `name`, and return the times of the answer."""
        ...


class User:
    """A party that is the program of a user."""

    def __init__(self, served: Daemon, uid: int, stack: ExitStack) -> None:
        command = [sys.executable, "-c", _BECOME + textwrap.dedent(USER), str(uid), str(served.mount)]
        self._process = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=served.environment
            )
        )
        stack.callback(self._process.kill)
        self._answer()

    def do(self, name: str, secret: str) -> Took:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, secret]) + "\n")
        self._process.stdin.flush()
        first_s, end_s = json.loads(self._answer()) or (0.0, 0.0)
        return first_s, end_s

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a user's program has failed: see above"
        return line


class Key:
    """A party that is a client of a gateway, with one key."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key
        self._running: list[http.client.HTTPConnection] = []

    def do(self, name: str, secret: str) -> Took:
        return getattr(self, name)(secret) or (0.0, 0.0)

    def chat(self, secret: str, **more: Any) -> Took:
        return self._ask("/v1/chat/completions", {**_chat(secret), "max_tokens": 2, **more})

    def guide(self, secret: str) -> Took:
        words = {secret[at : at + 9]: {"type": "string", "pattern": "[a-z]{2,80}x"} for at in range(190)}
        schema = {"type": "object", "properties": words, "required": list(words)}
        form = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        return self.chat("Hi.", response_format=form)

    def sample(self, secret: str) -> Took:
        return self.chat(secret, temperature=0.8, top_p=0.9, seed=1)

    def tokenize(self, secret: str) -> Took:
        words = [secret[at:] + secret[:at] for at in range(0, 200, 20)]
        return self._ask("/tokenize", {"model": "any", "prompt": " ".join(words)})

    def name(self, secret: str) -> Took:
        return self.chat("Hi.", prompt_cache_key=secret[:40])

    def begin(self, secret: str) -> None:
        self.end("")
        self._running = [self._connect()]
        self._post(self._running[0], "/v1/chat/completions", {**_chat(secret), "max_tokens": 3000, "ignore_eos": True})

    def end(self, _secret: str) -> None:
        for each in self._running:
            each.close()
        self._running = []

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def _post(self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)

    def _ask(self, path: str, body: dict[str, Any]) -> Took:
        connection = self._connect()
        connection.connect()
        began_s = time.perf_counter()
        self._post(connection, path, body)
        answer = connection.getresponse()
        first = answer.readline()
        first_s = time.perf_counter() - began_s
        rest = answer.read()
        connection.close()
        assert answer.status == 200, first + rest
        return first_s, time.perf_counter() - began_s


def _chat(secret: str) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": secret}], "stream": True, "temperature": 0}


@dataclass(frozen=True)
class Case:
    """A cache: how the victim uses a secret, and how the attacker guesses one."""

    prime: str
    guess: str
    of_keys: bool = False
    batch: int = 16
    """Number of secrets that the victim uses in a row. With many secrets, the CPU's caches do not favour a single one.
    """
    model: str = "tiny"


CASES = {
    "grammars": Case("guide", "guide"),
    "grammars of keys": Case("guide", "guide", of_keys=True),
    "tokenizations": Case("tokenize", "tokenize", model="smollm2"),
    "tokenizations of keys": Case("tokenize", "tokenize", of_keys=True, model="smollm2"),
    "templates": Case("render", "render"),
    "twins": Case("keep", "bring"),
    "prompts": Case("keep", "generate"),
    "prompts of keys": Case("chat", "chat", of_keys=True),
    "names": Case("keep", "look"),
    "names of keys": Case("name", "name", of_keys=True),
    "weights": Case("sample", "sample"),
    "weights of keys": Case("sample", "sample", of_keys=True),
    "flights": Case("begin", "generate", batch=1),
    "flights of keys": Case("begin", "chat", of_keys=True, batch=1),
}
LONG = {"tokenizations of keys"}
"""Cases that the short form leaves out. This case needs its own gateway. The daemon tokenizes in the same way for keys
as for users, and a case for users remains."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some seconds: the form that the suite runs")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout whose daemon is attacked")
    parser.add_argument("--case", choices=CASES, action="append", help="this case alone")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="compare the table of caches with the cases")
    asked = parser.parse_args()
    if asked.table is not None:
        return compare(asked.table.read_text(encoding="utf-8"))
    num_pairs = NUM_QUICK_PAIRS if asked.quick else NUM_PAIRS
    chosen = asked.case or [name for name in CASES if not asked.quick or name not in LONG]
    cases = {name: CASES[name] for name in chosen}
    broken = []
    for model in sorted({case.model for case in cases.values()}):
        of_model = {name: case for name, case in cases.items() if case.model == model}
        with_keys = any(case.of_keys for case in of_model.values())
        with parties(model, asked.tree, with_keys=with_keys) as (users, keys):
            for name, case in of_model.items():
                if told := differs(case, keys if case.of_keys else users, num_pairs):
                    broken.append(f"{name}: {told}")
    return verdict(f"in {len(cases)} caches a right guess takes as long as a wrong one", broken)


@contextmanager
def parties(model: str, tree: Path, *, with_keys: bool) -> Iterator[tuple[tuple[Party, Party], tuple[Party, Party]]]:
    """Yield the pairs (victim, attacker) of two users and of two keys. Without keys, both pairs are the two users."""
    with daemon("--model", model, "--kv-memory", "512M", tree=tree) as served, ExitStack() as stack:
        users = User(served, VICTIM, stack), User(served, ATTACKER, stack)
        if not with_keys:
            yield users, users
            return
        keys, lines = zip(*map(new_key, ("victim", "attacker")), strict=True)
        file = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        print(*(f"{line} quota=128M" for line in lines), sep="\n", file=file, flush=True)
        gateway = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "lips.gateway", "--port", "0", "--keys", file.name],
                cwd=tree,
                env=served.environment | {"PYTHONPATH": str(tree)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(gateway.terminate)
        assert gateway.stderr is not None
        line = gateway.stderr.readline()
        threading.Thread(target=gateway.stderr.read, daemon=True).start()  # drops the log's line for each request
        port = int(line.split("#")[0].split()[1].rstrip("/").rpartition(":")[2])
        yield users, (Key(port, keys[0]), Key(port, keys[1]))


def differs(case: Case, parties: tuple[Party, Party], num_pairs: int) -> str:
    """Return the differences between right and wrong guesses that two measurements confirm. Empty: none."""
    first = compared(case, parties, num_pairs)
    told = {what: found for what, found in first.items() if found[0] < P}
    if not told:
        return ""
    again = compared(case, parties, num_pairs)
    said = []
    for what, (p, sooner_s) in told.items():
        p_again, sooner_again_s = again[what]
        if p_again < P and (sooner_s > 0) == (sooner_again_s > 0):
            said.append(f"{what} {sooner_again_s * 1e3:+.2f} ms sooner (p = {p:.1g}, {p_again:.1g})")
    return ", ".join(said)


def compared(case: Case, parties: tuple[Party, Party], num_pairs: int) -> dict[str, tuple[float, float]]:
    """Return the p-value and the median (in s) of the differences, for the first token and for the whole answer."""
    victim, attacker = parties
    sooner: dict[str, list[float]] = {"the first token": [], "the whole answer": []}
    attacker.do(case.guess, secret())  # fills caches that all secrets share
    while len(sooner["the first token"]) < num_pairs:
        used = [secret() for _ in range(min(case.batch, num_pairs))]
        for each in used:
            victim.do(case.prime, each)
        for right in used:
            guesses = [right, secret()]
            took = {guess: attacker.do(case.guess, guess) for guess in random.sample(guesses, 2)}
            for place, differences in enumerate(sooner.values()):
                differences.append(took[guesses[1]][place] - took[right][place])
        if case.prime == "begin":
            victim.do("end", "")
    return {what: (p_value(found), sorted(found)[len(found) // 2]) for what, found in sooner.items()}


def secret() -> str:
    """Return 200 random letters: one word, or a prompt of some pages."""
    return "".join(random.choices(string.ascii_lowercase, k=200))


def p_value(differences: list[float]) -> float:
    """Return the p-value of these differences by Wilcoxon's signed-rank test, with the normal approximation."""
    ranked = sorted((each for each in differences if each), key=abs)
    n = len(ranked)
    if n == 0:
        return 1.0
    positive = sum(rank for rank, each in enumerate(ranked, 1) if each > 0)
    deviation = positive - n * (n + 1) / 4
    return math.erfc(abs(deviation) / math.sqrt(n * (n + 1) * (2 * n + 1) / 24) / math.sqrt(2))


def compare(page: str) -> int:
    """Return the exit status: 1 if a cache of the table has no case, or a case has no cache."""
    table = page.partition("\n.SH CACHES\n")[2].partition("\n.SH ")[0]
    wrong, tried = [], set[str]()
    for row in table.split("\n.TP\n")[1:]:
        cache = row.partition("\n")[0].removeprefix(".B ")
        cases = re.findall(r"\\fI(.+?)\\fP", row.partition("\nCases:")[2])
        tried |= set(cases)
        wrong += [] if cases else [f"{cache}: no case asks this cache"]
        wrong += [f"{case}: there is no such case" for case in cases if case not in CASES]
    wrong += [f"{case}: no cache of the table has this case" for case in CASES if case not in tried]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
