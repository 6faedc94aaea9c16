#!/usr/bin/env python3
"""Measures the CPU step beside transformers' generate on the same weights, in turns, in one run.

    .venv/bin/python scripts/bench/decoder.py [--peer-dtype bfloat16] [--threads 2] [--rounds 3] [--json]

The weights are random, of SmolLM2-135M's shape: arithmetic does not care. Each round measures every case first
here, then there; the figures are medians, the ratio is the median of the rounds' ratios. The floor of a decode
at batch 1 is the time to read the weights once at the memory bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoder.arena import Arena
from decoder.batch import Chunk, StepBatch
from decoder.config import ModelConfig
from decoder.cpu.backend import CpuDecoder, available_cores
from decoder.tiny import random_weights, tiny_config
from decoder.weights import Weights

SMOLLM2 = tiny_config(
    name="SmolLM2-135M (random weights)",
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn_size=1_536,
    rope_theta=100_000.0,
    max_positions=8_192,
)
PROMPT = 64
"""Tokens before the first decode of a sequence."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batch: int
    prompt: int
    decodes: int
    """Steps after the prompt; 0: the prompt itself is what is timed."""

    @property
    def tokens(self) -> int:
        return self.batch * (self.decodes or self.prompt)


CASES = (
    Case("prefill 512", 1, 512, 0),
    Case("prefill 2048", 1, 2048, 0),
    Case("decode b1", 1, PROMPT, 32),
    Case("decode b8", 8, PROMPT, 24),
    Case("decode b32", 32, PROMPT, 16),
)


class Side(Protocol):
    def seconds(self, case: Case, prompts: np.ndarray) -> float: ...
    def logits(self, prompt: np.ndarray) -> np.ndarray: ...


class Ours:
    def __init__(self, config: ModelConfig, weights: Weights, threads: int, isa: str | None) -> None:
        self.pages = -(-max(case.prompt + case.decodes for case in CASES) // 32)
        arena = Arena(config, self.pages * max(case.batch for case in CASES))
        self.decoder = CpuDecoder(config, weights, arena, threads, isa)
        self.rows = np.zeros((max(case.batch for case in CASES), config.vocab_size), np.float32)

    def step(self, tokens: np.ndarray, start: int) -> None:
        """tokens [batch, n] go on at entry `start` of as many files; each one's last row is wanted."""
        batch, n = tokens.shape
        pages = np.arange(batch * self.pages, dtype=np.int32).reshape(batch, self.pages)
        positions = np.arange(start, start + n, dtype=np.int32)
        self.decoder.step(
            StepBatch(
                tuple(Chunk(tokens[i], positions, pages[i], start, (memoryview(self.rows[i]),)) for i in range(batch))
            )
        )

    def seconds(self, case: Case, prompts: np.ndarray) -> float:
        began = time.perf_counter()
        self.step(prompts, 0)
        if case.decodes:
            began = time.perf_counter()
        for i in range(case.decodes):
            tokens = self.rows[: case.batch].argmax(axis=1).astype(np.int32)
            self.step(tokens[:, None], case.prompt + i)
        return time.perf_counter() - began

    def logits(self, prompt: np.ndarray) -> np.ndarray:
        self.step(prompt, 0)
        return self.rows[0].copy()


class Transformers:
    def __init__(self, config: ModelConfig, weights: Weights, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self.model = peer_model(config, weights).to(getattr(torch, dtype))

    @torch.inference_mode()
    def seconds(self, case: Case, prompts: np.ndarray) -> float:
        ids = torch.from_numpy(prompts.astype(np.int64))
        clock = Clock()
        count = 1 + case.decodes
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        assert out.shape[1] == ids.shape[1] + count
        return clock.seconds(decode=bool(case.decodes))

    @torch.inference_mode()
    def logits(self, prompt: np.ndarray) -> np.ndarray:
        return self.model(torch.from_numpy(prompt.astype(np.int64))).logits[0, -1].float().numpy()


class Clock(StoppingCriteria):
    """Reads the time whenever generate has one more token for every sequence."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def seconds(self, *, decode: bool) -> float:
        """From the first token to the last, or from the start to the first."""
        return self.times[-1] - self.times[1] if decode else self.times[1] - self.times[0]


def peer_model(config: ModelConfig, weights: Weights) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    arrays = {"model.embed_tokens": weights.embed, "model.norm": weights.final_norm}
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        arrays[prefix + "input_layernorm"] = layer.attn_norm
        arrays[prefix + "post_attention_layernorm"] = layer.ffn_norm
        arrays |= {f"{prefix}self_attn.{name}_proj": getattr(layer, name) for name in "qkvo"}
        arrays |= {f"{prefix}mlp.{name}_proj": getattr(layer, name) for name in ("gate", "up", "down")}
    result = model.load_state_dict({f"{k}.weight": torch.from_numpy(v) for k, v in arrays.items()}, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def memory_bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read together: the best of five passes over 512 MiB."""
    parts = np.array_split(np.ones(1 << 26, np.int64), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            best = min(best, time.perf_counter() - began)
    return sum(part.nbytes for part in parts) / best


def measure(sides: dict[str, Side], rounds: int, vocab_size: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    results: dict[str, dict[str, float]] = {}
    for case in CASES:
        prompts = rng.integers(0, vocab_size, (case.batch, case.prompt)).astype(np.int32)
        for side in sides.values():
            side.seconds(case, prompts)  # scratch memory, caches of compiled kernels
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                times[name].append(side.seconds(case, prompts))
        results[case.name] = {name: case.tokens / statistics.median(all_) for name, all_ in times.items()}
        if "peer" in times:
            pairs = zip(times["ours"], times["peer"], strict=True)
            results[case.name]["ratio"] = statistics.median(peer / ours for ours, peer in pairs)
        print(json.dumps({case.name: results[case.name]}), file=sys.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", help="avx512, avx2 or plain; default: the best here")
    parser.add_argument("--peer-dtype", default="float32", choices=["float32", "bfloat16", "none"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    config = SMOLLM2
    weights = random_weights(config)
    ours = Ours(config, weights, options.threads, options.isa)
    sides: dict[str, Side] = {"ours": ours}
    if options.peer_dtype != "none":
        sides["peer"] = Transformers(config, weights, options.threads, options.peer_dtype)
    report: dict[str, object] = {
        "model": config.name,
        "threads": options.threads,
        "isa": ours.decoder.isa,
        "peer": f"transformers generate, {options.peer_dtype}",
    }
    if "peer" in sides:
        prompt = np.arange(200, dtype=np.int32)[None] * 7
        a, b = ours.logits(prompt), sides["peer"].logits(prompt)
        report["logits_relative_difference"] = float(np.abs(a - b).max() / np.abs(b).max())
    results = measure(sides, options.rounds, config.vocab_size)
    bandwidth = memory_bandwidth(options.threads)
    floor = bandwidth / ours.decoder.weight_bytes
    report |= {"tokens_per_second": results, "read_gb_per_second": bandwidth / 1e9, "b1_floor_tokens_per_second": floor}
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for key in ("model", "threads", "isa", "peer", "logits_relative_difference"):
        print(f"{key:28} {report.get(key, '-')}")
    print(f"{'tokens/s':28} {'ours':>8} {'peer':>8} {'ratio':>6}")
    for name, row in results.items():
        print(
            f"{name:28} {row['ours']:8.1f} {row.get('peer', float('nan')):8.1f} {row.get('ratio', float('nan')):6.2f}"
        )
    print(f"memory reads {bandwidth / 1e9:.1f} GB/s: at most {floor:.1f} tokens/s at batch 1")


if __name__ == "__main__":
    main()
