#!/usr/bin/env python3
"""Run the same work with Symphony's programs and with clients of other servers, in turns.

    .venv/bin/python scripts/bench/workloads/compare.py [--only plain,react,...] [--scale 1] [--rounds 3] [--quick]
        [--precision bf16,int8] [--server NAME=URL ...] [--group NAME=PGID ...] [--options NAME=JSON ...] [--save NAME]
    .venv/bin/python scripts/bench/workloads/compare.py --only rag,sessions,crowd [--index 3,1,0.5]
        [--policies lru,ttl,idle,cost] [--kv-tokens 11648] ...

README.md describes the workloads and how to start servers. In every round each side runs each workload. The order of
the sides changes in each round. All prompts are new. A run during which other processes used more than --quiet of the
cores is repeated (`--tries`). `rag`, `sessions` and `crowd` need several times more KV than memory holds: here one
daemon runs its policies in turns. `--save NAME` writes results/NAME.txt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).resolve().parents[1]))

import jobs
from harness import ROOT, chosen, connected, served, word_tokens
from sides import Bench, Side, Symphony, options, servers
from work import Job, Words

import libsym as sym

WORKLOADS = {each.__name__: each for each in (jobs.plain, jobs.shared, jobs.branches, jobs.react, jobs.structured)}
WORKLOADS["mix"] = jobs.mix
PRESSURE = "rag", "sessions", "crowd"
QUICK_SCALE, QUICK_HASTE = 1 / 16, 20.0
CROWD_SHARE = 10
"""Size of the KV of `crowd`, as a multiple of the memory for KV."""


@contextmanager
def policed(bench: Bench, kv_tokens: int, entry_bytes: int, kinds: dict[str, str]) -> Iterator[list[Side]]:
    """Yield sides of one daemon that has memory for `kv_tokens`, one for each policy in `kinds`.

    The side without a policy keeps nothing in files.
    """
    with TemporaryDirectory() as directory:
        config = Path(directory) / "symphony.toml"
        config.write_text("")
        memory = ("--kv-memory", str(kv_tokens * entry_bytes), "--config", config)
        with served(bench.args.model, "--precision", bench.args.precision, *memory) as daemon:
            yield [
                Symphony(f"symphony-{name}", daemon, config=config, policy=policy, keeps=bool(policy))
                for name, policy in kinds.items()
            ]


def pressure(bench: Bench, others: list[Side], entry_bytes: int) -> None:
    """Run the workloads that need more KV than memory holds."""
    args = bench.args
    policies = {policy: policy for policy in args.policies.split(",")}
    last = list(policies)[-1]
    scale = max(args.scale, 0.25)
    if "rag" in args.only:
        documents, kv_tokens = jobs.corpus(scale, bench.words("corpus")), round(args.kv_tokens * max(scale, 0.5))
        with policed(bench, kv_tokens, entry_bytes, {"none": "", **policies}) as sides:
            for index in map(float, args.index.split(",")):

                def questions(words: Words, index: float = index) -> list[Job]:
                    return jobs.rag(args.scale, words, documents, f"corpus-{args.seed}", index)

                bench.turns(f"rag {index:g}", [*sides, *others], questions, is_same=True)
    if "sessions" in args.only:
        scale, haste = max(args.scale, 0.125), QUICK_HASTE if args.quick else 1.0
        with policed(bench, round(args.kv_tokens * scale), entry_bytes, policies) as sides:
            make = partial(jobs.sessions, scale, (jobs.AGENTS, jobs.PEOPLE), haste)
            bench.turns("sessions", [*sides, *others], make, is_same=True)
    if "crowd" in args.only:
        make = partial(jobs.sessions, max(args.scale, 0.25), (jobs.CROWD,), 1.0)
        kv_tokens = jobs.kv_tokens(make(bench.words("size")))
        for name, size in (("ample", 2 * kv_tokens), ("tenth", kv_tokens // CROWD_SHARE)):
            with policed(bench, size, entry_bytes, {f"{last}-{name}": last}) as sides:
                bench.turns("crowd", sides, make, is_same=True)
        if others:
            bench.turns("crowd", others, make, is_same=True)


def main() -> None:
    args = options(
        __doc__,
        only=",".join(WORKLOADS),
        scale=1.0,
        index="3,1,0.5",
        policies="lru,ttl,idle,cost",
        kv_tokens=(11_648, "that memory has room for: 256 MiB of smollm2"),
    )
    args.only = chosen(args.only, [*WORKLOADS, *PRESSURE])
    if args.quick:
        args.scale, args.index = min(args.scale, QUICK_SCALE), args.index.rpartition(",")[2]
    with ExitStack() as stack:
        with connected(args.model, "--precision", args.precision.split(",")[0]):
            tokens, entry_bytes = word_tokens(), sym.model_info().entry_bytes
        bench = Bench(args, tokens)
        others = servers(args, stack)
        if plain := [name for name in args.only if name in WORKLOADS]:
            with ExitStack() as daemons:
                sides = [
                    Symphony(
                        f"symphony-{each}", daemons.enter_context(served(args.model, "--precision", each, tree=ROOT))
                    )
                    for each in args.precision.split(",")
                ]
                for side in (*sides, *others):  # warms up libraries, and kernels that the first request compiles
                    side.run(WORKLOADS["plain"](QUICK_SCALE, bench.words("warm")))
                for name in plain:
                    bench.turns(name, [*sides, *others], partial(WORKLOADS[name], args.scale))
        pressure(bench, others, entry_bytes)
    bench.show(bench.table())


if __name__ == "__main__":
    main()
