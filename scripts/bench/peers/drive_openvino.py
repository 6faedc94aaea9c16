"""Drive the continuous batching of OpenVINO GenAI, step by step. Arguments: exported model directory, threads."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

from protocol import FIRST_PROMPT, Stepped, serve  # isort: skip
import numpy as np
import openvino as ov
import openvino_genai as og


class OpenVino(Stepped):
    def __init__(self, model: str, threads: int) -> None:
        scheduler = og.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = 64
        self.pipe = og.ContinuousBatchingPipeline(
            model, scheduler_config=scheduler, device="CPU", properties={"INFERENCE_NUM_THREADS": threads}
        )
        self.ids = count()

    def started(self, prompts: list[list[int]], tokens: int) -> Any:
        config = og.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            self.pipe.add_request(next(self.ids), ov.Tensor(np.array([prompt], np.int64)), config) for prompt in prompts
        ]
        made: list[list[int]] = [[] for _ in handles]

        def step() -> list[list[int]]:
            self.pipe.step()
            for so_far, handle in zip(made, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        so_far.extend(output.generated_ids)
            return made

        return step

    def finish(self) -> None:
        while self.pipe.has_non_finished_requests():
            self.pipe.step()


def load() -> tuple[OpenVino, dict[str, Any]]:
    model, threads = sys.argv[1:]
    version = og.__version__.split("-")[0]
    engine = OpenVino(model, int(threads))
    engine.run([], [FIRST_PROMPT], 0)
    return engine, {"engine": f"OpenVINO GenAI {version}, {Path(model).name}"}


serve(load)
