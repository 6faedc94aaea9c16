#!/usr/bin/env python3
"""Simulate a fleet: where requests run by the placement of `symphony run --fleet`, beside random and least loaded.

    .venv/bin/python scripts/bench/placement.py [--trace FILE] [--machine h100|cpu|COSTS] [--machines 1000] [--load 0.6]
        [--minutes 15] [--shared] [--fetch] [--shrink 1] [--blocks 2000] [--placers 16] [--quick] [--save NAME] [--json]

`--trace`: a trace in Mooncake's form (FAST'25): lines of JSON with timestamp, input_length, output_length and hash_ids,
one for each 512 tokens. Without it, conversations of about the same lengths, turns and pauses are drawn; with
`--shared`, programs that fork one of 200 prefixes. Copies of the trace run beside each other until the machines have
the wanted load. All copies have the first block in common.

The choice is `symphony.fleet.placement.choose` itself, by each of `--placers` daemons. Tables are up to 3 seconds old,
as those of daemons are, and a daemon adds only what it has placed itself. Times of steps are those of the cost model.
A machine computes the prompts one after the other, in chunks beside its decodes. It keeps the blocks that were used
last. With `--fetch`, blocks that another machine has are fetched, else they are computed again.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from harness import arguments, processor, quantile, show_rows

from symphony.fleet.membership import RENEW_S
from symphony.fleet.placement import LINK_BYTES_S, TABLE, ProgramNeeds, Table, choose
from symphony.policy.machine import Machine as Costs
from symphony.policy.machine import machine_of

BLOCK = 512
"""Tokens of a block in the trace."""
DEEP_BLOCKS = 4
"""Blocks from which a prefix counts as common: the first block is the same in all requests of the trace."""
TYPICAL_CONTEXT = 2048
"""Entries that a row of a prompt sees, for the time of a row that a machine publishes."""


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    num_tokens: int
    num_answered: int
    blocks: tuple[int, ...]


# The load


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace."""
    found = list[Request]()
    for line in path.read_text().splitlines():
        each = json.loads(line)
        blocks = tuple(each["hash_ids"])
        found.append(Request(each["timestamp"] / 1e3, each["input_length"], max(each["output_length"], 1), blocks))
    return found


def drawn_trace(seed: int, *, hour_s: float = 3600.0, per_s: float = 2.1) -> list[Request]:
    """Return conversations with about the quantiles of Mooncake's conversation trace: inputs of 1,000 to 27,000 tokens
    between the first and the last tenth, 39 % further turns, pauses of 42 to 483 s, 36 % of all blocks seen before.
    """
    chance, found, next_block = random.Random(seed), list[Request](), 1
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(per_s)) < hour_s:
        now_s, num_tokens, blocks = at_s, int(min(chance.lognormvariate(8.8, 1.25), 120_000)) + 1, [0]
        while now_s < hour_s:
            num_blocks = -(-num_tokens // BLOCK)
            new = range(next_block, next_block + num_blocks - len(blocks))
            next_block += len(new)
            blocks += new
            num_answered = int(min(chance.lognormvariate(5.5, 0.9), 2000)) + 1
            found.append(Request(now_s, num_tokens, num_answered, tuple(blocks)))
            if chance.random() > 0.4:
                break
            now_s += chance.lognormvariate(math.log(123), 0.95)
            if num_tokens % BLOCK:
                blocks.pop()  # its hash changes when it is full
            num_tokens += num_answered + int(chance.expovariate(1 / 300))
    return sorted(found, key=lambda each: each.at_s)


def shared_trace(seed: int, *, num_prefixes: int = 200, hour_s: float = 3600.0, per_s: float = 5.0) -> list[Request]:
    """Return programs that fork one of some prefixes of 2,000 to 16,000 tokens, and add some hundred tokens. The most
    wanted prefix has a sixth of the programs (Zipf).
    """
    chance, found, next_block = random.Random(seed), list[Request](), 1
    prefixes = list[list[int]]()
    for _ in range(num_prefixes):
        num_blocks = chance.randint(4, 32)
        prefixes.append([0, *range(next_block, next_block + num_blocks - 1)])
        next_block += num_blocks
    shares = [1 / number for number in range(1, num_prefixes + 1)]
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(per_s)) < hour_s:
        (prefix,) = chance.choices(prefixes, shares)
        num_tokens = len(prefix) * BLOCK + int(min(chance.lognormvariate(5.7, 0.8), 4000)) + 1
        new = range(next_block, next_block + -(-num_tokens // BLOCK) - len(prefix))
        next_block += len(new)
        num_answered = int(min(chance.lognormvariate(5.0, 0.9), 2000)) + 1
        found.append(Request(at_s, num_tokens, num_answered, (*prefix, *new)))
    return found


def copied(trace: Sequence[Request], copies: float, minutes: float, shrink: int) -> list[Request]:
    """Return the requests of the first minutes of several copies of a trace, in the order of time.

    The last copy is a part of the trace: the conversations whose second block is below some number.
    """
    found, chance = list[Request](), random.Random(1)
    stride = 1 + max(max(each.blocks) for each in trace)
    for copy in range(math.ceil(copies)):
        shift_s, share = chance.uniform(-30, 30), min(1.0, copies - copy)
        for each in trace:
            at_s = each.at_s + shift_s
            is_in = len(each.blocks) < 2 or hash((each.blocks[1], copy)) % 1000 < 1000 * share
            if 0 <= at_s < 60 * minutes and is_in:
                blocks = tuple(block and block + copy * stride for block in each.blocks)
                tokens = max(each.num_tokens // shrink, 1)
                found.append(Request(at_s, tokens, max(each.num_answered // shrink, 1), blocks))
    return sorted(found, key=lambda each: each.at_s)


# The machines


@dataclass(slots=True)
class Job:
    request: Request
    left_s: float
    """Time of the prompt's computation that is left, on a machine that does nothing else."""


@dataclass(slots=True)
class Machine:
    """A machine: prompts one after the other, decodes together."""

    costs: Costs
    max_blocks: int
    now_s: float = 0.0
    busy_s: float = 0.0
    prompts: deque[Job] = field(default_factory=deque)
    decodes: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap of decodes: `num_steps` at its end, a number, and entries."""
    num_entries: int = 0
    num_steps: float = 0.0
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    version: int = 0
    """Number of changes, so that events of an earlier state can be told."""

    def pace(self) -> tuple[float, float]:
        """Return the share of the time that prompts get, and the time of a step."""
        n, costs = len(self.decodes), self.costs
        if not n:
            return 1.0, math.inf
        alone_s = costs.step_s(n, n, self.num_entries, self.num_entries)
        if not self.prompts:
            return 0.0, alone_s
        rows_s = costs.step_s(costs.limits.min_chunk + n, n, self.num_entries, self.num_entries)
        step_s = max(costs.limits.step_s, rows_s)
        return 1 - alone_s / step_s, step_s

    def advance(self, now_s: float) -> None:
        took_s = now_s - self.now_s
        if self.prompts or self.decodes:
            share, step_s = self.pace()
            self.busy_s += took_s
            self.num_steps += took_s / step_s
            if self.prompts:
                self.prompts[0].left_s -= took_s * share
        self.now_s = now_s

    def next_s(self) -> float:
        """Return the time of the next end of a prompt or a decode."""
        share, step_s = self.pace()
        ends_s = math.inf
        if self.prompts and share > 0:
            ends_s = max(self.prompts[0].left_s, 0.0) / share
        if self.decodes:
            ends_s = min(ends_s, max(self.decodes[0][0] - self.num_steps, 0.0) * step_s)
        return self.now_s + ends_s

    def load(self) -> tuple[float, float]:
        """Return what the machine publishes: the time of a step, and of the prompts that wait."""
        n = len(self.decodes) + 1
        step_s = self.costs.step_s(n, n, self.num_entries, self.num_entries)
        return step_s, sum(max(each.left_s, 0.0) for each in self.prompts)


@dataclass(slots=True)
class Result:
    """Figures of one policy."""

    first_s: list[float] = field(default_factory=list)
    """Time to the first token of each request."""
    num_wanted: int = 0
    num_found: int = 0
    num_fetched: int = 0
    num_common: int = 0
    """Requests with a common prefix that some machine had."""
    num_at_home: int = 0
    """Requests of `num_common` that ran where all of the prefix was."""
    busy_s: list[float] = field(default_factory=list)
    choose_us: float = 0.0


Policy = Callable[[Table, ProgramNeeds], int]


class Fleet:
    """Machines, and what the daemons that place requests know of them."""

    def __init__(self, costs: Costs, num_machines: int, max_blocks: int, num_placers: int, block: int) -> None:
        self.costs, self.block = costs, block
        self.machines = [Machine(costs, max_blocks) for _ in range(num_machines)]
        self.holders: defaultdict[int, set[int]] = defaultdict(set)
        self.events: list[tuple[float, int, int]] = []
        self.result = Result()
        self._number = 0
        self._chance = random.Random(2)
        chunk = costs.limits.max_tokens
        row_s = costs.step_s(chunk, num_pairs=chunk * TYPICAL_CONTEXT) / chunk
        self.table = np.zeros(num_machines, TABLE)
        self.table["can"], self.table["row_s"], self.table["free_bytes"] = True, row_s, 1 << 40
        self.table["step_s"] = costs.step_s(1, 1)
        self._placed = np.zeros((num_placers, num_machines), np.int64)
        self._due = deque(sorted((self._chance.uniform(0, RENEW_S), number) for number in range(num_machines)))

    def run(self, requests: Sequence[Request], policy: Policy, *, fetch: bool) -> Result:
        for request in requests:
            self._until(request.at_s)
            self._place(request, policy, fetch=fetch)
        self._until(math.inf)
        self.result.busy_s = [each.busy_s for each in self.machines]
        return self.result

    def _until(self, now_s: float) -> None:
        """Let the machines work, and publish their loads, until a time."""
        while self.events and self.events[0][0] <= now_s:
            at_s, number, version = heapq.heappop(self.events)
            if self.machines[number].version == version:
                self._publish_until(at_s)
                self._end(number, at_s)
        self._publish_until(min(now_s, self._due[0][0] + RENEW_S))

    def _publish_until(self, now_s: float) -> None:
        while self._due[0][0] <= now_s:
            due_s, number = self._due.popleft()
            machine = self.machines[number]
            machine.advance(max(due_s, machine.now_s))
            self.table["step_s"][number], self.table["backlog_s"][number] = machine.load()
            self._placed[:, number] = 0
            self._due.append((due_s + RENEW_S, number))

    def _place(self, request: Request, policy: Policy, *, fetch: bool) -> None:
        depth = self._held(request)
        most = int(self.table["held"].max())
        placer = self._chance.randrange(len(self._placed))
        self.table["placed"] = self._placed[placer]
        wanted = ProgramNeeds(most, self.costs.entry_bytes if fetch else 0, self._chance.getrandbits(32))
        began_s = time.perf_counter()
        number = policy(self.table, wanted)
        self.result.choose_us += (time.perf_counter() - began_s) * 1e6
        self._placed[placer, number] += 1
        self._begin(request, number, depth.get(number, 0), most, fetch=fetch)
        for each in depth:
            self.table["held"][each] = 0

    def _held(self, request: Request) -> dict[int, int]:
        """Write the entries of the prefix that each machine has into the table. Return the numbers of blocks."""
        depth, there = dict[int, int](), None
        for count, block in enumerate(request.blocks, 1):
            holders = self.holders.get(block, set())
            there = holders if there is None else there & holders
            if not there:
                break
            for number in there:
                depth[number] = count
        for number, count in depth.items():
            self.table["held"][number] = min(count * self.block, request.num_tokens - 1)
        return depth

    def _begin(self, request: Request, number: int, num_blocks: int, most: int, *, fetch: bool) -> None:
        machine, result = self.machines[number], self.result
        held = min(num_blocks * self.block, request.num_tokens - 1)
        result.num_wanted += request.num_tokens
        result.num_found += held
        if most >= DEEP_BLOCKS * self.block:
            result.num_common += 1
            result.num_at_home += held == most
        left_s, known = 0.0, held
        if fetch and most > held:
            left_s, known = (most - held) * self.costs.entry_bytes / LINK_BYTES_S, most
            result.num_fetched += most - held
        new = np.array([request.num_tokens - known], float)
        left_s += float(self.costs.compute_s(new, np.array([known], float))[0])
        machine.advance(max(request.at_s, machine.now_s))
        machine.prompts.append(Job(request, left_s))
        for block in reversed(request.blocks[:num_blocks]):
            machine.kept.move_to_end(block)
        self._changed(number)

    def _end(self, number: int, at_s: float) -> None:
        """End the prompts and decodes that are complete."""
        machine = self.machines[number]
        machine.advance(max(at_s, machine.now_s))
        while machine.decodes and machine.decodes[0][0] <= machine.num_steps + 1e-6:
            machine.num_entries -= heapq.heappop(machine.decodes)[2]
        while machine.prompts and machine.prompts[0].left_s <= 1e-9:
            request = machine.prompts.popleft().request
            self.result.first_s.append(machine.now_s - request.at_s)
            self._number += 1
            ends = machine.num_steps + request.num_answered
            heapq.heappush(machine.decodes, (ends, self._number, request.num_tokens))
            machine.num_entries += request.num_tokens
            self._keep(number, request.blocks)
        self._changed(number)

    def _keep(self, number: int, blocks: tuple[int, ...]) -> None:
        kept = self.machines[number].kept
        for block in reversed(blocks):  # the end of a prefix goes first
            kept[block] = None
            kept.move_to_end(block)
            self.holders[block].add(number)
        while len(kept) > self.machines[number].max_blocks:
            gone, _ = kept.popitem(last=False)
            self.holders[gone].discard(number)

    def _changed(self, number: int) -> None:
        machine = self.machines[number]
        machine.version += 1
        if machine.prompts or machine.decodes:
            heapq.heappush(self.events, (machine.next_s(), number, machine.version))


def by_placement(table: Table, wanted: ProgramNeeds) -> int:
    return choose(table, wanted).row


def by_load(table: Table, wanted: ProgramNeeds) -> int:
    return choose(table, ProgramNeeds(seed=wanted.seed)).row


def by_chance(table: Table, wanted: ProgramNeeds) -> int:
    return random.Random(wanted.seed).randrange(len(table))


POLICIES: dict[str, Policy] = {
    "placement": by_placement,
    "least loaded": by_load,
    "random": by_chance,
}


def work_s(trace: Sequence[Request], costs: Costs, shrink: int) -> float:
    """Return the mean time of a request on a machine that keeps nothing, if 8 decodes share a step."""
    tokens = np.array([each.num_tokens // shrink for each in trace], float)
    prompts_s = float(np.mean(costs.compute_s(tokens, np.zeros_like(tokens))))
    context = int(tokens.mean())
    step_s = costs.step_s(8, 8, 8 * context, 8 * context) / 8
    return prompts_s + step_s * float(np.mean([each.num_answered / shrink for each in trace]))


def line_of(name: str, result: Result) -> str:
    """Return a policy's line of the table."""
    busy, firsts = np.array(result.busy_s), result.first_s
    figures = [
        f"{100 * result.num_found / result.num_wanted:.1f} %",
        f"{100 * result.num_fetched / result.num_wanted:.1f} %",
        f"{100 * result.num_at_home / max(result.num_common, 1):.1f} %",
        f"{float(np.quantile(busy, 0.99) / busy.mean()):.2f}",
        f"{sum(firsts) / len(firsts):.2f}",
        *(f"{quantile(firsts, share):.2f}" for share in (0.5, 0.9, 0.99)),
        f"{result.choose_us / len(firsts):.0f}",
    ]
    return "".join([f"{name:15}", *(f"{figure:>11}" for figure in figures)])


HEAD = "".join(
    [
        f"{'policy':15}",
        *(
            f"{each:>11}"
            for each in ("found", "fetched", "at home", "p99/mean", "mean s", "median s", "p90 s", "p99 s", "choice us")
        ),
    ]
)


def _trace(path: str, *, shared: bool) -> tuple[list[Request], str]:
    if path:
        return read_trace(Path(path)), Path(path).name
    return (shared_trace(1), "drawn forks of 200 prefixes") if shared else (drawn_trace(1), "drawn conversations")


def main() -> None:
    parser = arguments(
        __doc__,
        trace=("", "a trace in Mooncake's form (default: conversations are drawn)"),
        machine=("h100", "h100, cpu, or a file of fitted costs (default: %(default)s)"),
        machines=(1000, "number of machines (default: %(default)s)"),
        load=(0.6, "load of the machines if nothing is found (default: %(default)s)"),
        minutes=(15.0, "length of the run (default: %(default)s)"),
        shared=(False, "programs that fork one of 200 prefixes, instead of conversations"),
        fetch=(False, "fetch what another machine has, instead of computing it"),
        shrink=(1, "divisor of all lengths, for small machines (default: %(default)s)"),
        blocks=(2000, "blocks that a machine keeps (default: %(default)s)"),
        placers=(16, "daemons that place requests (default: %(default)s)"),
        quick=False,
        save="",
        json=False,
    )
    args = parser.parse_args()
    if args.quick:
        args.machines, args.minutes = 20, 6.0
    costs = machine_of(args.machine, {})
    trace, source = _trace(args.trace, shared=args.shared)
    span_s = max(each.at_s for each in trace)
    copies = args.load * args.machines / (work_s(trace, costs, args.shrink) * len(trace) / span_s)
    requests = copied(trace, copies, args.minutes, args.shrink)
    lines = [HEAD]
    for name, policy in POLICIES.items():
        fleet = Fleet(costs, args.machines, args.blocks, args.placers, BLOCK // args.shrink)
        lines.append(line_of(name, fleet.run(requests, policy, fetch=args.fetch)))
    heading = (
        f"{args.machines:,} machines ({costs.about}), {len(requests):,} requests in {args.minutes:g} minutes, "
        f"{source}, load {args.load:g}, lengths / {args.shrink}; simulated on {processor()}"
    )
    show_rows([], heading, args, *lines)


if __name__ == "__main__":
    main()
