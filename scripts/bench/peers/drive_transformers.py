"""Drives transformers' generate on the same weights. Arguments: model, dtype, threads."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from protocol import FIRST_PROMPT, serve  # isort: skip
import torch
import transformers
from make_models import llama_model
from transformers import DynamicCache, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from decoder.model import load_model


class Clock(StoppingCriteria):
    """Reads the time whenever generate has one more token for every sequence."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model

    @torch.inference_mode()
    def run(self, prefix: list[int], prompts: list[list[int]], decodes: int) -> dict[str, Any]:
        """A shared prefix is computed once, then copied for every sequence: generate cannot share it."""
        ids = torch.tensor([prefix + prompt for prompt in prompts])
        cache = DynamicCache()
        if prefix:
            cache = self.model(torch.tensor([prefix]), past_key_values=cache, logits_to_keep=1).past_key_values
            cache.batch_repeat_interleave(len(prompts))
        clock = Clock()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            min_new_tokens=1 + decodes,
            max_new_tokens=1 + decodes,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        new = out[:, ids.shape[1] :]
        assert new.shape[1] == 1 + decodes
        times = clock.times
        seconds = times[-1] - times[1] if decodes else times[1] - times[0]
        return {"seconds": seconds, "first": new[:, 0].tolist()}


def load() -> tuple[Transformers, dict[str, Any]]:
    spec, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    ours = load_model(spec)
    weights = {name: torch.from_numpy(ours.weights.read(name)) for name in ours.weights.names()}
    peer = llama_model(ours.config, weights).to(getattr(torch, dtype))
    engine = Transformers(peer)
    engine.run([], [FIRST_PROMPT], 0)
    return engine, {"engine": f"transformers {transformers.__version__} generate, {dtype}"}


serve(load)
