"""The plain loop that steps.py compares with: a decoder, all prompts in hand, a greedy choice, and nothing else.

    steps_loop.py MODEL PRECISION NUM_PAGES, in a process of its own; a line of JSON for a request, one for its answer

{"prompts": [[...], ...], "num_tokens": N}     as many tokens for each, one a step
{"prompts": ..., "stretches": [[[...], ...]]}  for each prompt the stretches that its steps append after it
{"schema": "...", "texts": [[...], ...]}       how generations of these tokens were cut into stretches by a grammar
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from decoder.model_config import KV_DTYPE
from libsym.abi import PAGE_ENTRIES
from scheduler.batch.grammar import Grammars, Owner


class PlainLoop:
    def __init__(self, model: Model, precision: str, num_pages: int) -> None:
        self._decoder = CpuDecoder(
            model.config, model.weights, Arena(model.config, num_pages, KV_DTYPE[precision]), precision=precision
        )
        self._num_pages = num_pages
        self._vocab_size = model.config.vocab_size
        self._rows = np.zeros((1, self._vocab_size), np.float32)

    def run(
        self, prompts: list[list[int]], num_tokens: int = 0, stretches: list[list[list[int]]] | None = None
    ) -> dict[str, Any]:
        """Every sequence's tokens come with the same steps, so one list of times is everybody's."""
        total = max(map(len, prompts)) + num_tokens + max((sum(map(len, each)) for each in stretches or ()), default=0)
        own = -(-total // PAGE_ENTRIES)
        if own * len(prompts) > self._num_pages:
            raise SystemExit(f"{own * len(prompts)} pages are needed, the loop has {self._num_pages}")
        tables = np.arange(own * len(prompts), dtype=np.int32).reshape(len(prompts), own)
        if len(self._rows) < len(prompts):
            self._rows = np.zeros((len(prompts), self._vocab_size), np.float32)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        starts = [0] * len(prompts)
        found: list[list[int]] = [[] for _ in prompts]
        steps_before_s = sum(self._decoder.phase_seconds().values())
        began_s, came_s = time.monotonic(), []
        pending: Sequence[list[int]] = prompts
        for number in range(num_tokens or max(map(len, stretches or ())) + 1):
            if number and stretches is not None:
                pending = [each[number - 1] if number <= len(each) else [] for each in stretches]
            drawn = self._step(pending, starts, tables)
            came_s.append(time.monotonic())
            for own_found, token in zip(found, drawn, strict=True):
                own_found.append(token)
            pending = [[token] for token in drawn]
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
        outside_s = came_s[-1] - began_s - sum(self._decoder.phase_seconds().values()) + steps_before_s
        return {
            "began_s": began_s,
            "came_s": came_s,
            "tokens": found,
            "wakeups": switches,
            "outside": outside_s / (came_s[-1] - began_s),
        }

    def _step(self, pending: Sequence[list[int]], starts: list[int], tables: np.ndarray) -> list[int]:
        chunks = []
        for index, tokens in enumerate(pending):
            if not tokens:
                continue
            start, end = starts[index], starts[index] + len(tokens)
            positions = np.arange(start, end, dtype=np.int32)
            row = memoryview(self._rows[index])
            chunks.append(Chunk(np.array(tokens, np.int32), positions, tables[index], start, (row,)))
            starts[index] = end
        self._decoder.step(StepBatch(tuple(chunks)))
        drawn: list[int] = self._rows[: len(pending)].argmax(axis=1).tolist()
        return drawn


class GrammarText:
    """What compiling a grammar needs of a model, as the daemon gives it."""

    def __init__(self, model: Model) -> None:
        self.vocab_size = model.config.vocab_size
        self.eos_ids = model.tokenizer.eos_ids
        self.special_ids = model.tokenizer.special_ids
        self.own_encoder = model.tokenizer.own_encoder
        self.token_texts = [model.tokenizer.token_bytes(token) for token in range(self.vocab_size)]


def stretches_of(grammars: Grammars, schema: str, texts: list[list[int]]) -> list[list[list[int]]]:
    """A draw and what the grammar forces after it are one stretch; the last of a text is in no step."""
    found = []
    for text in texts:
        grammar = grammars.compile(Owner(0, 0), "compact_json", schema)
        stretches, index = [], 0
        while index < len(text):
            grammar.advance(text[index])
            num = 1 + len(grammar.forced())
            stretches.append(text[index : index + num])
            index += num
        found.append(stretches[:-1])
    return found


def main() -> None:
    spec, precision, num_pages = sys.argv[1:]
    model = load_model(spec)
    loop, grammars = PlainLoop(model, precision, int(num_pages)), Grammars(GrammarText(model))
    answers = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "schema" in request:
            answer: Any = stretches_of(grammars, request["schema"], request["texts"])
        else:
            answer = loop.run(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
