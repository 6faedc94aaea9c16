"""Drive vLLM's CPU build, compiled, step by step in this process. Arguments: checkpoint directory, dtype, threads."""

from __future__ import annotations

import os
import sys
from itertools import count, islice
from typing import Any

from protocol import FIRST_PROMPT, Stepped, serve  # isort: skip

CORES = sorted(os.sched_getaffinity(0))
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 64 sequences and a prefix of 2,048 tokens fit
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, islice(CORES, int(sys.argv[3])))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, so no queue delays the clock
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm  # noqa: E402 - reads its environment when it is imported
from vllm import LLM, SamplingParams  # noqa: E402


class Vllm(Stepped):
    def __init__(self, checkpoint: str, dtype: str) -> None:
        self.engine = LLM(
            model=checkpoint,
            dtype=dtype,
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            generation_config="vllm",
        ).llm_engine
        self.ids = count()

    def started(self, prompts: list[list[int]], tokens: int) -> Any:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        ids = [str(next(self.ids)) for _ in prompts]
        made: dict[str, list[int]] = {id_: [] for id_ in ids}

        def step() -> list[list[int]]:
            for output in self.engine.step():
                made[output.request_id] = list(output.outputs[0].token_ids)
            return list(made.values())

        for id_, prompt in zip(ids, prompts, strict=True):
            self.engine.add_request(id_, {"prompt_token_ids": prompt}, params)
        return step

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


def load() -> tuple[Vllm, dict[str, Any]]:
    checkpoint, dtype, _threads = sys.argv[1:]
    engine = Vllm(checkpoint, dtype)
    engine.run([], [FIRST_PROMPT], 0)
    return engine, {"engine": f"vLLM {vllm.__version__} CPU, {dtype}, compiled"}


if __name__ == "__main__":
    serve(load)
