"""A plain loop over a decoder, with all prompts at once and greedy choice: the peer of steps.py and calls.py.

plain_loop.py MODEL PRECISION NUM_PAGES runs as a process. The process reads a line of JSON for each request and prints
a line of JSON as the answer:
{"prompts": [[...], ...], "num_tokens": N}     N tokens for each prompt, one in each step
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np
from harness import row_view

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import load_model
from decoder.model_config import KV_DTYPE
from libsym.abi import PAGE_ENTRIES


class PlainLoop:
    def __init__(self, spec: str, precision: str, num_pages: int) -> None:
        model = load_model(spec)
        arena = Arena(model.config, num_pages, KV_DTYPE[precision])
        self._decoder = CpuDecoder(model.config, model.weights, arena, precision=precision)
        self._num_pages, self._vocab_size = num_pages, model.config.vocab_size
        self._rows = np.zeros((1, self._vocab_size), np.float32)

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Compute a token of every sequence in each step. So one list of times is valid for all sequences."""
        own, count = -(-(max(map(len, prompts)) + num_tokens) // PAGE_ENTRIES), len(prompts)
        if own * count > self._num_pages:
            raise SystemExit(f"{own * count} pages are needed, the loop has {self._num_pages}")
        tables = np.arange(own * count, dtype=np.int32).reshape(count, own)
        if len(self._rows) < count:
            self._rows = np.zeros((count, self._vocab_size), np.float32)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        starts, found, pending = [0] * count, [list[int]() for _ in prompts], prompts
        began_s, came_s = time.monotonic(), []
        for _ in range(num_tokens):
            chunks = []
            for index, tokens in enumerate(pending):
                start, starts[index] = starts[index], starts[index] + len(tokens)
                positions = np.arange(start, starts[index], dtype=np.int32)
                rows = (row_view(self._rows[index]),)
                chunks.append(Chunk(np.array(tokens, np.int32), positions, tables[index], start, rows))
            self._decoder.step(StepBatch(tuple(chunks)))
            drawn = self._rows[:count].argmax(axis=1).tolist()
            came_s.append(time.monotonic())
            for own_found, token in zip(found, drawn, strict=True):
                own_found.append(token)
            pending = [[token] for token in drawn]
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
        return {"began_s": began_s, "came_s": came_s, "tokens": found, "wakeups": switches}

    def close(self) -> None:
        self._decoder.close()


def main() -> None:
    spec, precision, num_pages = sys.argv[1:]
    loop = PlainLoop(spec, precision, int(num_pages))
    answers = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(loop.run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
