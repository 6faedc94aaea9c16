#!/usr/bin/env python3
"""Measure steps under load, beside a plain loop over the same decoder that gets all prompts at once.

    .venv/bin/python scripts/bench/steps.py [--only streams,json,delay,fair] [--quick] [--rounds 5] [--precision int8]
        [--model smollm2] [--threads N] [--quiet 0.1] [--save NAME] [--json]

Programs of a daemon and the process of the plain loop run in turns, and a ratio compares turns of one round. A turn
during which other processes used more than --quiet of the cores is repeated, up to --tries times. Needs root.

streams  64 equal streams: pred() from 64 processes, generate(), generate() with stop texts that never occur
json     the same streams with a JSON schema, beside generate() without one
delay    times between tokens of 8 decodes beside back-to-back prefills of 4,000 tokens, and rates of these prefills
fair     service of equal accounts with unequal demand, and of accounts with weights 1:2
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    ROOT,
    Daemon,
    Others,
    Row,
    arguments,
    chosen,
    connected,
    cpu_s,
    in_turns,
    least_disturbed,
    processor,
    quantile,
    read_line,
    show_rows,
    wait_for_quiet,
    word_tokens,
    write_line,
)

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 16
NEVER = ["\u2603 never \u2603", "no text\x01 has this", "</never-comes>"]
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "kind": {"enum": ["animal", "plant", "mineral"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100, "maxItems": 120}
"""Schema for streams. Its 100 items are more than 500 tokens, so no text ends before its limit of tokens."""
ACCOUNTS = (13001, 13002, 13003, 13004)
Members = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """Results of one turn: tokens of each sequence with their times, and the resources used."""

    began_s: float
    came_s: list[list[float]]
    tokens: list[list[int]]
    wakeups: int
    """Number of times that a thread of the daemon or of a program slept."""
    cpu_s: float
    """Processor time of the turn's processes. Other load of the machine changes this time less than rates."""
    others: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.came_s))

    def rate(self) -> float:
        """Return tokens a second, from the beginning of the turn, so the time of prompts counts."""
        return self.num_tokens / (max(each[-1] for each in self.came_s) - self.began_s)

    def steady(self) -> float:
        """Return tokens a second while all sequences decode, or 0 if they never all decode at the same time."""
        since_s, until_s = max(each[0] for each in self.came_s), min(each[-1] for each in self.came_s)
        num = sum(since_s < at_s <= until_s for each in self.came_s for at_s in each)
        return num / (until_s - since_s) if num else 0.0


class Bench:
    """A daemon with one precision, its crew of programs, and the plain loop that they are compared with."""

    def __init__(self, args: argparse.Namespace, precision: str, daemon: Daemon) -> None:
        self.args, self.daemon, self._precision = args, daemon, precision
        self.rows: list[Row] = []
        self.others: list[float] = []
        self._rng, self._words = random.Random(1), word_tokens()
        self._crew = self._helper("steps_programs.py")
        self._loop = self._helper("plain_loop.py", args.model, precision, args.pages)
        read_line(self._loop)

    def _helper(self, name: str, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / name), *map(str, words)]
        pipe, environment = subprocess.PIPE, self.daemon.environment
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def close(self) -> None:
        for helper in (self._crew, self._loop):
            assert helper.stdin is not None
            helper.stdin.close()
            helper.wait(30)

    def prompt(self, count: int) -> list[int]:
        return self._rng.choices(self._words, k=count)

    def _ask(self, helper: subprocess.Popen[str], request: object, *pids: int) -> tuple[Any, float, float]:
        """Return the helper's answer, the processor time of `pids`, and the share of the cores that other processes
        used.
        """
        others, before_s = Others(pids), sum(map(cpu_s, pids))
        write_line(helper, json.dumps(request))
        answer = json.loads(read_line(helper))
        return answer, sum(map(cpu_s, pids)) - before_s, others.share()

    def by_crew(self, members: Members) -> tuple[Members, Turn]:
        """Run these members in the crew. Return their results, and a turn of the members that report token times."""
        slept = sleeps(self.daemon.pid)
        found, spent_s, share = self._ask(self._crew, members, self.daemon.pid, self._crew.pid)
        each: Members = found["members"]
        slept = sleeps(self.daemon.pid) - slept + sum(member["wakeups"] for member in each)
        tokens = [member.get("tokens", []) for member in each]
        return each, Turn(found["began_s"], [member["came_s"] for member in each], tokens, slept, spent_s, share)

    def by_loop(self, **request: object) -> Turn:
        found, spent_s, share = self._ask(self._loop, request, self._loop.pid)
        came_s = [found["came_s"]] * len(found["tokens"])
        return Turn(found["began_s"], came_s, found["tokens"], found["wakeups"], spent_s, share)

    def in_turns(self, turns: dict[str, Callable[[], Turn]]) -> dict[str, list[Turn]]:
        ways = {name: partial(least_disturbed, turn, self.args) for name, turn in turns.items()}
        found = in_turns(ways, self.args.rounds)
        self.others += [turn.others for each in found.values() for turn in each]
        return found

    def add(self, *values: Any, **named: Any) -> None:
        row = Row(f"{self._precision}: {values[0]}", *values[1:], **named)
        self.rows.append(row)
        print(f"  {row.line()}", file=sys.stderr, flush=True)

    def add_rates(self, what: str, turns: list[Turn], peer: str, peers: list[Turn], aim: str) -> None:
        slept = statistics.median(turn.wakeups / turn.num_tokens for turn in turns)
        us = [statistics.median(turn.cpu_s * 1e6 / turn.num_tokens for turn in each) for each in (turns, peers)]
        note = f"{slept:.2f} wake-ups a token; processor time a token {us[0]:.0f} us, {us[1]:.0f} of the {peer}"
        for part, rate in (("", Turn.rate), (", while all decode", Turn.steady)):
            figures, references = [*map(rate, turns)], [*map(rate, peers)]
            if all((*figures, *references)):
                self.add(f"{what}{part}", "tokens/s", figures, peer, references, aim, note)


def sleeps(pid: int) -> int:
    """Return how often the threads of a process gave up their core to wait."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = status.read_text()
        except OSError:  # a thread that has just ended
            continue
        total += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def size_of(bench: Bench) -> tuple[int, int]:
    """Return the number of streams, and of tokens of each."""
    return (16, 32) if bench.args.quick else (64, 128)


def streams(bench: Bench) -> None:
    num_streams, count = size_of(bench)
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(num_streams)]
    ways: dict[str, dict[str, Any]] = {"pred()": {"way": "pred"}, "generate()": {"way": "generate"}}
    ways["stop texts"] = {"way": "generate", "stop": NEVER}
    turns = {name: partial(crew_turn, bench, prompts, num_tokens=count, **member) for name, member in ways.items()}
    found = bench.in_turns({"loop": partial(bench.by_loop, prompts=prompts, num_tokens=count), **turns})
    for name, aim in (("pred()", "0.97"), ("generate()", "0.99"), ("stop texts", "0.97")):
        texts = found["loop"][0].tokens
        assert all(turn.tokens == texts for turn in found[name]), f"{name} decoded different tokens than the loop"
        bench.add_rates(f"{num_streams} streams, {name}", found[name], "plain loop", found["loop"], aim)


def crew_turn(bench: Bench, prompts: list[list[int]], **member: Any) -> Turn:
    return bench.by_crew([member | {"prompt": prompt} for prompt in prompts])[1]


def with_schema(bench: Bench) -> None:
    num_streams, count = size_of(bench)
    prompts = [bench.prompt(PROMPT_TOKENS) for _ in range(num_streams)]
    turn = partial(crew_turn, bench, prompts, way="generate", num_tokens=count)
    found = bench.in_turns({"generate()": turn, "json": partial(turn, schema=json.dumps(SCHEMA))})
    assert {len(text) for turn in found["json"] for text in turn.tokens} == {count}, "a text of the schema ended early"
    bench.add_rates(f"{num_streams} streams, JSON schema", found["json"], "generate()", found["generate()"], "")


def delay(bench: Bench) -> None:
    """Measure decodes beside prefills. The `idle` decodes end with about as many entries as the decodes beside the
    prefills.
    """
    num_prefills, length = (1 if bench.args.quick else 2), 1000 if bench.args.quick else 4000
    decode = {"way": "decode_until_over", "limit_s": 0.4 if bench.args.quick else 10.0}
    decodes = [decode | {"prompt": bench.prompt(PROMPT_TOKENS)} for _ in range(8)]
    prefill = {"way": "prefill", "tokens": bench.prompt(length), "count": num_prefills}
    beside = [*[each | {"limit_s": 600.0} for each in decodes], prefill | {"after_s": 0.2 if bench.args.quick else 1.0}]

    def turn(members: Members) -> Turn:
        return bench.by_crew(members)[1]

    wanted = {"idle": decodes, "alone": [prefill | {"after_s": 0.0}], "beside": beside}
    found = bench.in_turns({name: partial(turn, members) for name, members in wanted.items()})
    for percent in (50, 99):
        quiet = [quantile(gaps_ms(turn.came_s), percent / 100) for turn in found["idle"]]
        busy = [quantile(gaps_ms(turn.came_s[:-1], *spans(turn)), percent / 100) for turn in found["beside"]]
        aim = "under 2" if percent == 99 else ""
        bench.add(f"8 decodes beside prefills, p{percent} between tokens", "ms", busy, "idle", quiet, aim)
    rates = [
        [num_prefills * length / (spans(turn)[1] - spans(turn)[0]) for turn in found[name]]
        for name in ("beside", "alone")
    ]
    bench.add(f"prefills of {length:,} beside 8 decodes", "tokens/s", rates[0], "alone", rates[1])


def spans(turn: Turn) -> tuple[float, float]:
    """Return the times of the first and the last token of the last member, which prefills."""
    return turn.came_s[-1][0], turn.came_s[-1][-1]


def gaps_ms(came_s: list[list[float]], since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
    """Return the milliseconds between consecutive tokens of each sequence, for tokens from `since_s` to `until_s`."""
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, came_s))
    return [(after - before) * 1e3 for before, after in pairs if since_s <= before and after <= until_s]


def fair(bench: Bench) -> None:
    """Measure the service of accounts with unequal demand. Each account demands more than an equal share."""
    prompts = {"decode_for": bench.prompt(PROMPT_TOKENS), "prefill_for": bench.prompt(256)}
    decodes = (18, 24, 36, 52) if bench.args.quick else (90, 120, 180, 260)
    for way, nums in (("decode_for", decodes), ("prefill_for", (2, 4, 8, 16))):
        fairness(bench, f"equal accounts, {way}, max/min", way, prompts[way], nums, (1, 1, 1, 1))


def weights(bench: Bench) -> None:
    prompt = bench.prompt(PROMPT_TOKENS)
    nums = (60, 60) if bench.args.quick else (300, 300)
    fairness(bench, "weights 1:2, max/min of service for weight", "decode_for", prompt, nums, (1, 2))


def fairness(
    bench: Bench, what: str, way: str, tokens: list[int], nums: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    seconds, ratios = 0.6 if bench.args.quick else 20.0, []
    member = {"way": way, "tokens": tokens, "seconds": seconds}
    members = [member | {"num_streams": num, "uid": uid} for uid, num in zip(ACCOUNTS, nums, strict=False)]
    for _ in range(max(1, bench.args.rounds // 2)):
        wait_for_quiet(bench.args)
        found, turn = bench.by_crew(members)
        bench.others.append(turn.others)
        until_s = turn.began_s + seconds
        num_served = [sum(until_s - seconds / 1.5 < at_s <= until_s for at_s in each["came_s"]) for each in found]
        shares = [each / weight for each, weight in zip(num_served, weights, strict=True)]
        ratios.append(max(shares) / max(min(shares), 1e-9))
    total = sum(num_served)
    note = f"streams {nums}; of the last round: {' : '.join(f'{each / total:.0%}' for each in num_served)} of {total}"
    bench.add(what, "", ratios, aim="under 1.2", note=note)


PARTS = {"streams": streams, "json": with_schema, "delay": delay, "fair": fair}


@contextmanager
def benched(args: argparse.Namespace, precision: str, *options: str) -> Iterator[Bench]:
    threads = ["--threads", str(args.threads)] if args.threads else []
    with connected(args.model, "--precision", precision, *threads, *options, tree=args.tree) as daemon:
        bench = Bench(args, precision, daemon)
        try:
            yield bench
        finally:
            bench.close()


def main() -> None:
    kinds = {"only": ",".join(PARTS), "model": "smollm2", "precision": "int8,bf16", "tree": ROOT, "save": str}
    sizes = {"rounds": 5, "quiet": 0.1, "tries": 3, "patience": 10.0, "pages": (1024, "of the loop's arena")}
    args = arguments(__doc__, **kinds, **sizes, threads=(int, "of the daemon"), quick=False, json=False).parse_args()
    if args.quick:
        args.rounds, args.tries, args.patience, args.precision = 1, 1, 0.0, args.precision.split(",")[0]
    heading = f"{processor()}; {args.model}; {time.strftime('%Y-%m-%d %H:%M')}"
    names, rows, others = chosen(args.only, PARTS), list[Row](), list[float]()
    for precision in args.precision.split(","):
        with benched(args, precision) as bench:
            for name in names:
                PARTS[name](bench)
            rows, others = [*rows, *bench.rows], [*others, *bench.others]
        if "fair" in names:
            with benched(args, precision, *(f"--weight={uid}={1 + n}" for n, uid in enumerate(ACCOUNTS[:2]))) as bench:
                weights(bench)
                rows += bench.rows
    show_rows(rows, heading, args, f"others took {min(others):.0%} to {max(others):.0%} of the cores")


if __name__ == "__main__":
    main()
