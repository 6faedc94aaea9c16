#!/usr/bin/env python3
"""What steps do under every kind of load, beside a plain loop over the same decoder that has all prompts in hand.

    .venv/bin/python scripts/bench/steps.py [--only streams,json,delay,many,mixed,fair] [--quick] [--rounds 5]
        [--precision int8,bf16] [--model smollm2] [--threads N] [--quiet 0.1] [--save NAME] [--json]

A daemon, programs in processes of their own, and the loop in another one take turns; each round's ratio is from its
own turns. Figures say which load of the machine they met. A turn that others disturbed (by more than --quiet of the
cores) is repeated (`--tries`). `--save NAME` writes results/NAME.json and .txt.

streams  64 equal streams: pred() from 64 processes, generate(), generate() with stop texts that never come
json     the same with a JSON schema; the loop appends the same stretches in the same number of steps
delay    p99 between tokens of 8 decodes while 4,000-token prefills run back to back, and what these pay
many     300 streams
mixed    short, long, tool-waiting and masked at once, with the daemon's own numbers
fair     what equal accounts get when they want unequal much, and accounts of weights 1:2
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parent / "attacks"))

import itertools

from attacked import ROOT, Attacked, attacked, processor
from load import Others, cpu_s, wait_for_quiet

import libsym as sym

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NUM_STREAMS, NUM_MANY, PROMPT_TOKENS = 64, 300, 16
NEVER = ["\u2603 never \u2603", "no text\x01 has this", "</never-comes>"]
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["animal", "plant", "mineral"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "known": {"type": "boolean"},
        },
        "required": ["name", "kind", "size", "known"],
        "additionalProperties": False,
    },
    "minItems": 100,
    "maxItems": 120,
}
"""100 of these are more than 1,000 tokens: no text is over before its count of tokens is."""
ACCOUNTS = (13001, 13002, 13003, 13004)


@dataclass(slots=True)
class Row:
    """One figure: of each round, and the reference's of the same round."""

    what: str
    unit: str
    figures: list[float]
    reference: str = ""
    references: list[float] = field(default_factory=list)
    aim: str = ""
    wakeups: float | None = None
    """Times that a thread of the daemon or of a program slept, for each token."""
    cpu_us: tuple[float, float] | None = None
    """Processor time for each token: of the daemon and the programs, and of the reference."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        if not self.references:
            return None
        return statistics.median(own / other for own, other in zip(self.figures, self.references, strict=True))


class Lines:
    """A helper process that answers each line with a line."""

    def __init__(self, command: list[str | Path], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a helper process of the bench has ended: see above")
        return json.loads(line)

    def ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Spent(NamedTuple):
    """What a turn took beside time."""

    wakeups: int
    cpu_s: float
    load: float
    others: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn found: every sequence's times."""

    began_s: float
    came_s: list[list[float]]
    tokens: list[list[int]]
    wakeups: int
    cpu_s: float
    """Processor time of all its processes: other work on the machine changes it less than it changes rates."""
    load: float
    others: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.came_s))

    @property
    def whole(self) -> float:
        """Tokens a second, prompts included."""
        return self.num_tokens / (max(each[-1] for each in self.came_s) - self.began_s)

    @property
    def steady(self) -> float:
        """Tokens a second while all sequences decode; 0 when they never did at once."""
        since_s, until_s = max(each[0] for each in self.came_s), min(each[-1] for each in self.came_s)
        if until_s <= since_s:
            return 0.0
        num = sum(since_s < at_s <= until_s for each in self.came_s for at_s in each)
        return num / (until_s - since_s)

    @property
    def wakeups_per_token(self) -> float:
        return self.wakeups / self.num_tokens

    @property
    def cpu_us_per_token(self) -> float:
        return self.cpu_s * 1e6 / self.num_tokens


class Bench:
    """One precision: its daemon, its crew, its loop."""

    def __init__(self, args: argparse.Namespace, daemon: Attacked, crew: Lines, loop: Lines) -> None:
        self.args = args
        self.rounds: int = args.rounds
        self.is_quick: bool = args.quick
        self.daemon, self.crew, self.loop = daemon, crew, loop
        self.rows: list[Row] = []
        self.details: dict[str, Any] = {}
        self.loads: list[float] = []
        self.others: list[float] = []
        self._rng = random.Random(1)
        self.words = [token for token, text in enumerate(sym.vocabulary()) if re.fullmatch(rb" [a-z]{2,}", text)]

    def prompt(self, count: int) -> list[int]:
        return self._rng.choices(self.words, k=count)

    # Turns

    def least_disturbed(self, turn: Callable[[], Turn]) -> Turn:
        found: list[Turn] = []
        while not found or (found[-1].others > self.args.quiet and len(found) < self.args.tries):
            wait_for_quiet(self.args.quiet, self.args.patience)
            found.append(turn())
        best = min(found, key=lambda each: each.others)
        self.loads.append(best.load)
        self.others.append(best.others)
        return best

    def by_crew(self, members: list[dict[str, Any]]) -> tuple[dict[str, Any], Spent]:
        """What it found, and what that took."""
        load, pids = os.getloadavg()[0], (self.daemon.pid, self.crew.pid)
        others, sleeps_before, cpu_before_s = Others(pids), sleeps(self.daemon.pid), sum(map(cpu_s, pids))
        found = self.crew.ask([dict(member) for member in members])
        wakeups = sleeps(self.daemon.pid) - sleeps_before + sum(member["wakeups"] for member in found["members"])
        return found, Spent(wakeups, sum(map(cpu_s, pids)) - cpu_before_s, load, others.share())

    def crew_turn(self, members: list[dict[str, Any]]) -> Callable[[], Turn]:
        def turn() -> Turn:
            found, spent = self.by_crew(members)
            each = found["members"]
            tokens = [member.get("tokens", []) for member in each]
            return Turn(found["began_s"], [member["came_s"] for member in each], tokens, *spent)

        return turn

    def loop_turn(self, request: dict[str, Any]) -> Callable[[], Turn]:
        def turn() -> Turn:
            load, others, cpu_before_s = os.getloadavg()[0], Others((self.loop.pid,)), cpu_s(self.loop.pid)
            found = self.loop.ask(request)
            spent = Spent(found["wakeups"], cpu_s(self.loop.pid) - cpu_before_s, load, others.share())
            return Turn(found["began_s"], [found["came_s"]] * len(found["tokens"]), found["tokens"], *spent)

        return turn

    def in_turns(self, turns: dict[str, Callable[[], Turn]]) -> dict[str, list[Turn]]:
        found: dict[str, list[Turn]] = {name: [] for name in turns}
        names = list(turns)
        for number in range(self.rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                turn = self.least_disturbed(turns[name]) if number else turns[name]()
                if number:  # the first round warms up
                    found[name].append(turn)
        return found

    # Results

    def add_rates(self, what: str, turns: list[Turn], loop: list[Turn], aim: str) -> None:
        for part, rate in (("", "whole"), (", while all decode", "steady")):
            figures, references = ([getattr(turn, rate) for turn in each] for each in (turns, loop))
            if not all(figures):
                continue  # more streams than a step has seats may never all decode
            row = Row(f"{what}{part}", "tokens/s", figures, "plain loop", references, aim)
            row.wakeups = statistics.median(turn.wakeups_per_token for turn in turns)
            row.cpu_us = cpu_us(turns, loop)
            self.add(row)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {line_of(row)}", file=sys.stderr, flush=True)


def cpu_us(turns: list[Turn], loop: list[Turn]) -> tuple[float, float]:
    own, references = (statistics.median(turn.cpu_us_per_token for turn in each) for each in (turns, loop))
    return own, references


def sleeps(pid: int) -> int:
    """How often the threads of a process gave their core up to wait."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = status.read_text()
        except OSError:  # a thread that has just ended
            continue
        total += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


# What is measured


def streams(bench: Bench) -> None:
    num_tokens = 32 if bench.is_quick else 128
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(NUM_STREAMS)]

    def crew(way: str, **more: Any) -> Callable[[], Turn]:
        member = {"way": way, "num_tokens": num_tokens} | more
        return bench.crew_turn([member | {"prompt": prompt} for prompt in prompts])

    found = bench.in_turns(
        {
            "loop": bench.loop_turn({"prompts": prompts, "num_tokens": num_tokens}),
            "pred": crew("pred"),
            "generate": crew("generate"),
            "stops": crew("generate", stop=NEVER),
        }
    )
    texts = found["loop"][0].tokens
    for name, turns in found.items():
        assert all(turn.tokens == texts for turn in turns), f"{name} decoded different tokens than the loop"
    bench.add_rates("64 streams, pred()", found["pred"], found["loop"], "0.97")
    bench.add_rates("64 streams, generate()", found["generate"], found["loop"], "0.99")
    bench.add_rates("64 streams, stop texts", found["stops"], found["loop"], "0.97")
    bench.details["wakeups of the plain loop"] = found["loop"][0].wakeups_per_token


def with_schema(bench: Bench) -> None:
    """The generations are a grammar's, so the loop is told what they were: it appends the same, without masks."""
    num_tokens = 32 if bench.is_quick else 128
    schema = json.dumps(SCHEMA)
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(NUM_STREAMS)]
    member = {"way": "grammar", "num_tokens": num_tokens, "schema": schema}
    crew = bench.crew_turn([member | {"prompt": prompt} for prompt in prompts])
    texts = crew().tokens
    assert {len(text) for text in texts} == {num_tokens}, "a text of the schema ended early"
    stretches = bench.loop.ask({"schema": schema, "texts": texts})
    found = bench.in_turns({"loop": bench.loop_turn({"prompts": prompts, "stretches": stretches}), "json": crew})
    assert all(turn.tokens == texts for turn in found["json"]), "the same generations gave different tokens"
    num_all = num_tokens * NUM_STREAMS
    whole = [num_all / (turn.came_s[0][-1] - turn.began_s) for turn in found["loop"]]
    row = Row(
        "64 streams, JSON schema", "tokens/s", [turn.whole for turn in found["json"]], "plain loop", whole, "0.90"
    )
    row.wakeups = statistics.median(turn.wakeups_per_token for turn in found["json"])
    num_steps = 1 + max(map(len, stretches))
    own_us, loop_us = cpu_us(found["json"], found["loop"])
    row.cpu_us = (own_us, loop_us * found["loop"][0].num_tokens / num_all)  # the loop has a time a step, not a token
    row.note = f"{num_all} tokens in {num_steps} steps of the loop"
    bench.add(row)


def many(bench: Bench) -> None:
    num_tokens = 16 if bench.is_quick else 48
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(NUM_MANY)]
    members = [{"way": "generate", "num_tokens": num_tokens, "prompt": prompt} for prompt in prompts]
    request = {"prompts": prompts, "num_tokens": num_tokens}
    found = bench.in_turns({"loop": bench.loop_turn(request), "generate": bench.crew_turn(members)})
    texts = found["loop"][0].tokens
    assert all(turn.tokens == texts for turn in found["generate"]), "300 streams decoded different tokens than the loop"
    bench.add_rates(f"{NUM_MANY} streams, generate()", found["generate"], found["loop"], "")


def delay(bench: Bench) -> None:
    num_prefills, length, num_decodes = (1 if bench.is_quick else 3), 4000, 8
    idle_s = 2.0 if bench.is_quick else 5.0
    tokens = bench.prompt(length)
    decodes = [
        {"way": "decode_until_over", "prompt": bench.prompt(PROMPT_TOKENS), "limit_s": idle_s}
        for _ in range(num_decodes)
    ]
    prefill = {"way": "prefill", "tokens": tokens, "count": num_prefills}

    def idle() -> Turn:
        return bench.crew_turn(decodes)()

    def alone() -> Turn:
        found, spent = bench.by_crew([prefill | {"after_s": 0.0}])
        spans = found["members"][-1]["spans_s"]
        return Turn(found["began_s"], [[at_s for span in spans for at_s in span]], [], *spent)

    def beside() -> Turn:
        members = [*[each | {"limit_s": 600.0} for each in decodes], prefill | {"after_s": 1.0}]
        found, spent = bench.by_crew(members)
        spans = found["members"][-1]["spans_s"]
        came_s = [each["came_s"] for each in found["members"][:-1]]
        return Turn(found["began_s"], [*came_s, [at_s for span in spans for at_s in span]], [], *spent)

    found = bench.in_turns({"idle": idle, "alone": alone, "beside": beside})
    for percent in (50, 99):
        quiet = [percentile(gaps(turn.came_s), percent) for turn in found["idle"]]
        busy = [
            percentile(gaps(turn.came_s[:-1], turn.came_s[-1][0], turn.came_s[-1][-1]), percent)
            for turn in found["beside"]
        ]
        aim = "under 2" if percent == 99 else ""
        bench.add(Row(f"8 decodes beside prefills, p{percent} between tokens", "ms", busy, "idle", quiet, aim))
    worst = [max(gaps(turn.came_s[:-1], turn.came_s[-1][0], turn.came_s[-1][-1])) for turn in found["beside"]]
    bench.add(Row("8 decodes beside prefills, longest between tokens", "ms", worst))
    rates = {
        name: [num_prefills * length / (turn.came_s[-1][-1] - turn.came_s[-1][0]) for turn in found[name]]
        for name in ("beside", "alone")
    }
    bench.add(Row("prefills of 4,000 beside 8 decodes", "tokens/s", rates["beside"], "alone", rates["alone"]))
    decoded = [
        sum(turn.came_s[-1][0] < at_s <= turn.came_s[-1][-1] for each in turn.came_s[:-1] for at_s in each)
        / (turn.came_s[-1][-1] - turn.came_s[-1][0])
        for turn in found["beside"]
    ]
    idle_rates = [turn.steady for turn in found["idle"]]
    bench.add(Row("8 decodes beside prefills", "tokens/s", decoded, "idle", idle_rates))


def gaps(came_s: list[list[float]], since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
    """Milliseconds between tokens of one sequence that came between two times."""
    return [
        (after - before) * 1e3
        for each in came_s
        for before, after in itertools.pairwise(each)
        if since_s <= before and after <= until_s
    ]


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def mixed(bench: Bench) -> None:
    share = 0.5 if bench.is_quick else 1.0
    prompt = bench.prompt

    def count(num: int) -> range:
        return range(int(num * share))

    members: list[dict[str, Any]] = []
    members += [{"way": "generate", "prompt": prompt(32), "num_tokens": 24} for _ in count(24)]
    members += [{"way": "pred", "prompt": prompt(64), "num_tokens": 48} for _ in count(8)]
    members += [{"way": "generate", "prompt": prompt(1000), "num_tokens": 96} for _ in count(8)]
    members += [
        {"way": "agent", "prompt": prompt(64), "num_calls": 4, "tool_s": 0.1, "num_tokens": 16} for _ in count(16)
    ]
    members += [{"way": "masked", "prompt": prompt(32), "num_tokens": 32} for _ in count(4)]
    members += [
        {"way": "grammar", "prompt": prompt(32), "num_tokens": 48, "schema": json.dumps(SCHEMA)} for _ in count(4)
    ]
    turn, rates, wakeups = bench.crew_turn(members), [], []
    turn()
    before = sym.daemon_stat()
    for _ in range(bench.rounds):
        found = bench.least_disturbed(turn)
        rates.append(found.whole)
        wakeups.append(found.wakeups_per_token)
    after = sym.daemon_stat()
    row = Row("mixed: short, long, tools, masks, grammars", "tokens/s", rates, wakeups=statistics.median(wakeups))
    num_steps = after["num_steps"] - before["num_steps"]
    if "num_steps_in_c" in after:
        row.note = f"{(after['num_steps_in_c'] - before['num_steps_in_c']) / num_steps:.0%} of the steps ran in C"
    else:
        row.note = "this daemon does not tell which steps ran in C (num_steps_in_c)"
    bench.add(row)
    changed = {
        name: after[name] - before[name]
        for name in after
        if isinstance(after[name], (int, float)) and not isinstance(after[name], bool) and name.startswith("num_")
        if name in before and after[name] != before[name]
    }
    sizes = [late - early for early, late in zip(before["num_steps_by_size"], after["num_steps_by_size"], strict=True)]
    step_s = after["step_s"] - before["step_s"]
    numbers = {"step_s": step_s, "queue_s": after["queue_s"] - before["queue_s"], "num_steps_by_size": sizes}
    bench.details["mixed, the daemon's numbers"] = changed | numbers


def fair(bench: Bench) -> None:
    """Accounts want unequal much, all of them more than an equal share: what each gets of the middle of the time."""
    seconds = 8.0 if bench.is_quick else 20.0
    wanted = (90, 120, 180, 260)  # streams of each account: 650, of which a step holds 256
    for what, way, prompt, nums in (
        ("decodes", "decode_for", bench.prompt(PROMPT_TOKENS), wanted),
        ("prefills", "prefill_for", bench.prompt(64), (1, 2, 4, 8)),
    ):
        members = [
            {"way": way, "num_streams": num, "seconds": seconds, "uid": uid}
            | {"prompt" if way == "decode_for" else "tokens": prompt}
            for uid, num in zip(ACCOUNTS, nums, strict=True)
        ]
        add_fairness(bench, f"equal accounts, {what}, max/min", members, "came_s" if way == "decode_for" else "ended_s")


def add_fairness(bench: Bench, what: str, members: list[dict[str, Any]], key: str) -> None:
    ratios, notes = [], []
    for _ in range(max(1, bench.rounds // 2)):
        wait_for_quiet(bench.args.quiet, bench.args.patience)
        served, note = service(bench, members, key)
        weights = [member.get("weight", 1) for member in members]
        shares = [each / weight for each, weight in zip(served, weights, strict=True)]
        ratios.append(max(shares) / max(min(shares), 1e-9))
        notes.append(note)
    asked = ", ".join(str(member["num_streams"]) for member in members)
    note = f"streams {asked}; of the last round: {notes[-1]}"
    bench.add(Row(what, "", ratios, aim="under 1.2" if "equal" in what else "within 10 %", note=note))


def service(bench: Bench, members: list[dict[str, Any]], key: str) -> tuple[list[float], str]:
    """Answers of each account, once all have come."""
    plain = [{name: value for name, value in member.items() if name != "weight"} for member in members]
    found, spent = bench.by_crew(plain)
    bench.loads.append(spent.load)
    bench.others.append(spent.others)
    seconds = members[0]["seconds"]
    since_s = found["began_s"] + seconds / 3
    until_s = found["began_s"] + seconds
    served = [float(sum(since_s < at_s <= until_s for at_s in member[key])) for member in found["members"]]
    total = sum(served)
    return served, " : ".join(f"{each / total:.0%}" for each in served)


def weights(bench: Bench, way: str) -> None:
    seconds = 8.0 if bench.is_quick else 20.0
    prompt = bench.prompt(PROMPT_TOKENS)
    members = [
        {"way": way, "num_streams": 300, "seconds": seconds, "uid": uid, "prompt": prompt, "weight": weight}
        for uid, weight in zip(ACCOUNTS[:2], (1, 2), strict=True)
    ]
    add_fairness(bench, "weights 1:2, decodes, max/min of service for weight", members, "came_s")


PARTS: dict[str, Callable[[Bench], None]] = {
    "streams": streams,
    "json": with_schema,
    "delay": delay,
    "many": many,
    "mixed": mixed,
    "fair": fair,
}


# A run


@contextmanager
def benched(args: argparse.Namespace, precision: str, *options: str) -> Iterator[Bench]:
    threads = ["--threads", str(args.threads)] if args.threads else []
    with attacked(args, "--precision", precision, *threads, *options) as daemon:
        sym.connect(daemon.socket)
        crew = Lines([sys.executable, HERE / "steps_programs.py"], daemon.environment)
        loop = Lines(
            [sys.executable, HERE / "steps_loop.py", args.model, precision, str(args.pages)], daemon.environment
        )
        try:
            loop.read()
            while sym.daemon_stat()["weights"] != "loaded":
                time.sleep(0.05)
            yield Bench(args, daemon, crew, loop)
        finally:
            sym.close()
            crew.close()
            loop.close()


def has_weights() -> bool:
    command = [sys.executable, "-m", "symphony.cli", "serve", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    return "--weight" in done.stdout


def line_of(row: Row) -> str:
    text = f"{row.what:56}{statistics.median(row.figures):>10.2f} {row.unit:9}"
    text += f"{f'{min(row.figures):.1f} to {max(row.figures):.1f}':>20}"
    if row.ratio is not None:
        text += f"  {row.reference} {statistics.median(row.references):.2f}, ratio {row.ratio:.3f}"
    if row.aim:
        text += f" (aim {row.aim})"
    if row.wakeups is not None:
        text += f"; {row.wakeups:.2f} wake-ups a token"
    if row.cpu_us is not None:
        text += "; processor time a token {:.0f} us, the loop's {:.0f}".format(*row.cpu_us)
    return text + (f"; {row.note}" if row.note else "")


def run(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    names = args.only.split(",") if args.only else list(PARTS)
    print(f"{precision}:", file=sys.stderr)
    with benched(args, precision) as bench:
        for name in names:
            PARTS[name](bench)
        cost_model = sym.daemon_stat().get("cost_model", "this daemon has none")
        rows, details, loads, others = bench.rows, bench.details, bench.loads, bench.others
    if "fair" in names:
        if has_weights():
            with benched(args, precision, "--weight", f"{ACCOUNTS[0]}=1", "--weight", f"{ACCOUNTS[1]}=2") as bench:
                weights(bench, "decode_for")
                rows = rows + bench.rows
        else:
            print("  SKIPPED: weights 1:2. This daemon has no --weight UID=N.", file=sys.stderr)
            details["weights"] = "skipped: this daemon has no --weight UID=N"
    load = {"median": statistics.median(loads), "most": max(loads), "others": statistics.median(others)}
    load["most_others"] = max(others)
    return {"rows": rows, "details": details, "cost_model": cost_model, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="two rounds of less")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="int8,bf16")
    parser.add_argument("--threads", type=int, help="of daemon and loop (default: the cores given)")
    parser.add_argument("--pages", type=int, default=1024, help="of the loop's arena")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of the cores that others may take")
    parser.add_argument("--tries", type=int, default=3, help="turns of which the least disturbed counts")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that a turn waits for a quiet machine")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the built checkout whose daemon is measured")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json and .txt")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds = min(args.rounds, 2)
    found = {precision: run(args, precision) for precision in args.precision.split(",")}
    heading = f"{processor()}; {args.model}; {args.rounds} rounds; {time.strftime('%Y-%m-%d')}"
    lines = [heading]
    for precision, result in found.items():
        load = result["load"]
        lines += ["", f"{precision}; load {load['median']:.1f} (most {load['most']:.1f}), others took "]
        lines[-1] += f"{load['others']:.0%} of the cores (most {load['most_others']:.0%})"
        lines += [line_of(row) for row in result["rows"]]
        lines += [f"{name}: {json.dumps(value)}" for name, value in result["details"].items()]
        lines += [f"cost model: {json.dumps(result['cost_model'])}"]
    text = "\n".join(lines) + "\n"
    plain = {
        precision: result | {"rows": [asdict(row) | {"ratio": row.ratio} for row in result["rows"]]}
        for precision, result in found.items()
    }
    whole = {"processor": processor(), "model": args.model, "rounds": args.rounds, "precisions": plain}
    print(json.dumps(whole, indent=1) if args.json else text, end="")
    if args.save:
        (RESULTS / f"{args.save}.json").write_text(json.dumps(whole, indent=1) + "\n")
        (RESULTS / f"{args.save}.txt").write_text(text)


if __name__ == "__main__":
    main()
