"""How decoder.py talks to one engine: a process of its own, one line of JSON a request, one line an answer.

    driver  {"ready": true}                                      when its libraries are imported
    bench   {"do": "load"}
    driver  {"engine": "vLLM 0.32.0", "seconds": 21.5, ...}      the model has answered FIRST_PROMPT
    bench   {"do": "run", "prefix": [...], "prompts": [[...], ...], "decodes": 24}
    driver  {"seconds": 0.31, "first": [318, ...], ...}

A run is as many sequences as prompts, each the prefix and then its prompt. `decodes` 0 times the prompts themselves,
to the first token (the prefix is empty then, and nothing may come from an earlier run's cache). Otherwise the time is
that of `decodes` more tokens for every sequence, counted from when all have their first; what was common may be
shared. Tokens are chosen greedily, and ends of text ignored. `first` is each sequence's first token, where the engine
tells it. Anything that fails answers {"error": "..."}. The end of input ends the driver.

Drivers run in their peer's own environment, so this file needs the standard library alone. Import it first: it
keeps the standard output to itself, because engines print there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1
# Whatever happens to the bench, even while this process is stopped, it does not stay behind.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


FIRST_PROMPT = list(range(1_000, 1_032))
"""Loading ends with the first token after this: some engines read their weights only then."""


class Engine(Protocol):
    def run(self, prefix: list[int], prompts: list[list[int]], decodes: int) -> dict[str, Any]: ...


def serve(load: Callable[[], tuple[Engine, dict[str, Any]]]) -> None:
    """Answers requests until there are no more. `load` gives the engine, after its first run, and its answer."""
    engine: Engine | None = None
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.pop("do") == "load":
                began = time.perf_counter()
                engine, about = load()
                _answer({"seconds": time.perf_counter() - began} | about)
            else:
                assert engine is not None
                _answer(engine.run(**request))
        except Exception as error:  # noqa: BLE001 - the bench decides what it means
            traceback.print_exc()
            _answer({"error": f"{type(error).__name__}: {error}"})


def timed_decode(step: Callable[[], list[list[int]]], decodes: int) -> dict[str, Any]:
    """Times an engine that is driven step by step. `step` returns the tokens of every sequence so far.

    Sequences that were ahead when the last one got its first token have less to do: the time is scaled to
    `decodes` tokens for each.
    """
    began = time.perf_counter()
    tokens = step()
    while not all(tokens):
        tokens = step()
    first = time.perf_counter()
    if not decodes:
        return {"seconds": first - began, "first": [each[0] for each in tokens]}
    done = sum(map(len, tokens))
    while min(map(len, tokens)) <= decodes:
        tokens = step()
    seconds = time.perf_counter() - first
    made = sum(map(len, tokens)) - done
    return {"seconds": seconds * decodes * len(tokens) / made, "first": [each[0] for each in tokens]}


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=_answers, flush=True)
