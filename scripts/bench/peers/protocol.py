"""Protocol between decoder.py and the process of an engine: a line of JSON for each request and for each answer.

    driver  {"ready": true}                                      when its libraries are imported
    bench   {"do": "load"}
    driver  {"engine": "vLLM 0.32.0", "seconds": 21.5, ...}      the model has answered FIRST_PROMPT
    bench   {"do": "run", "prefix": [...], "prompts": [[...], ...], "decodes": 24}
    driver  {"seconds": 0.31, "first": [318, ...], ...}

A run has one sequence for each prompt: the prefix, and then the prompt. With 0 `decodes` the time is that of the
prompts, until the first tokens. The prefix is empty then, and no cache of an earlier run may be used. Otherwise the
time begins when all sequences have their first token, and ends after `decodes` more tokens of each. The sequences may
share the KV of the prefix. Engines choose tokens greedily and ignore ends of text. `first` has the first token of each
sequence, if the engine reports it. The answer to a request that fails is {"error": "..."}. The end of input ends the
driver.

A driver runs in the environment of its engine, so this file needs only the standard library. Import it first: it
reserves the standard output for answers, because engines print to it.
"""

from __future__ import annotations

import abc
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
# The kernel kills this process when the benchmark ends for any reason, even while this process is stopped.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


FIRST_PROMPT = list(range(1_000, 1_032))
"""Prompt whose first token ends the loading, because some engines read their weights only for their first prompt."""


class Engine(Protocol):
    def run(self, prefix: list[int], prompts: list[list[int]], decodes: int) -> dict[str, Any]: ...


def serve(load: Callable[[], tuple[Engine, dict[str, Any]]]) -> None:
    """Answer requests until the end of input. `load` returns the engine after its first run, and the answer to the
    request.
    """
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


class Stepped(abc.ABC):
    """An engine that has a prefix cache and runs step by step."""

    @abc.abstractmethod
    def started(self, prompts: list[list[int]], tokens: int) -> Callable[[], list[list[int]]]:
        """Begin one sequence for each prompt. Return a function that runs a step and returns all tokens so far."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Run steps until all sequences have ended."""

    def run(self, prefix: list[int], prompts: list[list[int]], decodes: int) -> dict[str, Any]:
        if prefix:
            timed_decode(self.started([prefix + prompts[0]], 1), 0)  # puts the prefix into the cache
            self.finish()
        answer = timed_decode(self.started([prefix + prompt for prompt in prompts], decodes + 1), decodes)
        self.finish()
        return answer


def timed_decode(step: Callable[[], list[list[int]]], decodes: int) -> dict[str, Any]:
    """Measure an engine that runs step by step. `step` returns the tokens of every sequence so far.

    Some sequences have more than one token when the last sequence gets its first token. Such sequences compute fewer
    tokens in the measured time. The time is scaled to `decodes` tokens for each sequence.
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
