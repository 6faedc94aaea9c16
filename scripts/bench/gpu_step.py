"""Measurements of whole decoder steps with random weights: times, equal bits, errors of logits, the error of fp8 KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_clock import Ceilings, Clock

from decoder.batch import Chunk, StepBatch
from decoder.cuda import backend
from decoder.cuda.arena import CudaArena
from decoder.cuda.device import Device
from decoder.cuda.device_weights import DeviceWeights, LayerWeights
from decoder.model_config import ModelConfig
from decoder.rope import inverse_frequencies
from libsym.abi import PAGE_ENTRIES

LLAMA_3_8B = ModelConfig(
    name="Llama-3-8B's shape",
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    rope_theta=500000.0,
    rms_eps=1e-5,
    max_positions=32768,
    tie_embeddings=False,
)
TOY = replace(
    LLAMA_3_8B,
    name="a toy",
    vocab_size=96,
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    max_positions=1024,
)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DeviceWeights:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0.0, columns**-0.5)

    def norm() -> torch.Tensor:
        return torch.empty(config.hidden_size, dtype=dtype, device=device).uniform_(0.8, 1.2)

    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=norm(),
            qkv=matrix(q + 2 * kv, config.hidden_size),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=matrix(config.hidden_size, q),
            post_attn_norm=None,
            ffn_norm=norm(),
            gate_up=matrix(2 * config.ffn_size, config.hidden_size),
            down=matrix(config.hidden_size, config.ffn_size),
            post_ffn_norm=None,
        )
        for _ in range(config.num_layers)
    )
    embed = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device).normal_()
    return DeviceWeights(embed, layers, norm(), matrix(config.vocab_size, config.hidden_size))


class Model:
    """A model's weights and arena, with two decoders that use them: one with batch invariance, and one without."""

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        num_pages: int,
        *,
        precision: str,
        kv_dtype: str,
        weights: DeviceWeights | None = None,
    ) -> None:
        self.config, self.device, self.precision = config, device, precision
        dtype = backend.PRECISIONS[precision]
        self.weights = random_weights(config, dtype, device.torch) if weights is None else weights
        self.arena = CudaArena(config, num_pages, num_pages, device, kv_dtype)
        self.decoders = {invariant: self._decoder(invariant=invariant) for invariant in (True, False)}
        self.rng = np.random.default_rng(1)
        self.order = self.rng.permutation(num_pages).astype(np.int32)
        self.logits = np.empty((64, config.vocab_size), np.float32)

    def _decoder(self, *, invariant: bool) -> Any:
        with mock.patch.object(backend, "load_weights", return_value=self.weights):
            return backend.CudaDecoder(self.config, None, self.arena, precision=self.precision, invariant=invariant)

    def fill(self) -> None:
        """Fill every page with random entries."""
        taken = self.arena.take(np.sort(self.order), written=self.order, blank=self.order)
        finish = torch.cuda.synchronize if self.device.is_gpu else lambda: None
        finish()  # the arena zeroes frames on its own stream: wait for that
        for first in range(0, self.arena.num_frames, 256):
            self.arena.frames[first : first + 256].normal_()
        finish()
        self.arena.release(taken)

    def tables(self, count: int, context: int) -> np.ndarray:
        pages = -(-context // PAGE_ENTRIES)
        return self.order[: count * pages].reshape(count, pages)

    def chunk(self, tokens: np.ndarray, start: int, pages: np.ndarray, row: np.ndarray | None) -> Chunk:
        return Chunk(
            tokens=tokens.astype(np.int32),
            positions=np.arange(start, start + len(tokens), dtype=np.int32),
            pages=pages,
            start=start,
            rows=() if row is None else (memoryview(row),),
        )

    def tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, self.config.vocab_size, count, dtype=np.int32)

    def decode_batch(self, batch: int, context: int) -> StepBatch:
        """Return a step that decodes the token at position `context` of each of `batch` sequences, with logits for all
        sequences.
        """
        return StepBatch(
            tuple(
                self.chunk(self.tokens(1), context - 1, pages, self.logits[index])
                for index, pages in enumerate(self.tables(batch, context))
            )
        )

    def prefill(self, tokens: np.ndarray, pages: np.ndarray, cuts: Sequence[int], *, invariant: bool) -> np.ndarray:
        """Compute a text in chunks that end at `cuts`, and return the logits of its last row."""
        row = np.empty(self.config.vocab_size, np.float32)
        start = 0
        for end in cuts:
            chunk = self.chunk(tokens[start:end], start, pages, row if end == cuts[-1] else None)
            self.decoders[invariant].step(StepBatch((chunk,)))
            start = end
        return row

    def close(self) -> None:
        self.arena.close()


def step_times(
    clock: Clock, ceilings: Ceilings, model: Model, batch: int, context: int, runs: int
) -> dict[str, dict[str, float]]:
    """Measure decode steps with and without batch invariance, in turns.

    A step ends when its logits are in the caller's memory. The floor is the time to read weights and KV once, at the
    bandwidth that a copy reached.
    """
    work = model.decode_batch(batch, context)
    sides = {name: model.decoders[invariant] for name, invariant in (("invariant", True), ("free", False))}
    for decoder in sides.values():
        for _ in range(3 if clock.is_gpu else 1):
            decoder.step(work)  # first compiles kernels, then captures a graph
    wall = clock.in_turns([lambda decoder=decoder: decoder.step(work) for decoder in sides.values()], runs=runs)
    num_bytes = model.decoders[True].weight_bytes + batch * context * model.config.entry_bytes(model.arena.dtype)
    floor = num_bytes / ceilings.copy_bytes_per_s
    found = {}
    for (name, decoder), times in zip(sides.items(), wall, strict=True):
        found[name] = times.figures() | {
            "tokens_per_s": batch / times.median,
            "floor_us": 1e6 * floor,
            "of_floor": floor / times.median,
        }
        graphs = list(decoder._graphs._graphs.values())  # noqa: SLF001
        if clock.is_gpu and graphs:
            alone = clock.events(graphs[-1].replay, runs=runs)  # the graph that the step used
            found[name] |= {"device_us": 1e6 * alone.median, "device_of_floor": floor / alone.median}
    ratio = wall[0].median / wall[1].median
    found["cost"] = {"invariant_to_free": ratio, "throughput_lost": 1.0 - 1.0 / ratio}
    return found


def prefill_times(
    clock: Clock, ceilings: Ceilings, model: Model, length: int, runs: int
) -> dict[str, dict[str, float]]:
    """Measure the prefill of `length` tokens into an empty file, with and without batch invariance, in turns."""
    tokens, pages = model.tokens(length), model.tables(1, length)[0]
    sides = [lambda on=on: model.prefill(tokens, pages, [length], invariant=on) for on in (True, False)]
    for run in sides:
        run()
    config = model.config
    matrices = sum(outputs * inputs for outputs, inputs in _layer_shapes(config)) * config.num_layers
    flop = 2 * length * matrices + 2 * config.num_layers * config.num_heads * config.head_dim * length * (length + 1)
    found = {}
    for name, times in zip(("invariant", "free"), clock.in_turns(sides, runs=runs), strict=True):
        found[name] = times.figures() | {
            "tokens_per_s": length / times.median,
            "of_products": flop / times.median / ceilings.products_flop_per_s,
        }
    ratio = found["invariant"]["median_us"] / found["free"]["median_us"]
    found["cost"] = {"invariant_to_free": ratio, "throughput_lost": 1.0 - 1.0 / ratio}
    return found


def _layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.ffn_size
    return [(q + 2 * kv, hidden), (hidden, q), (2 * ffn, hidden), (hidden, ffn)]


def contract(model: Model, length: int, neighbours: int, *, invariant: bool) -> dict[str, float]:
    """Return whether batch invariance holds: logits and KV have the same bits however a call is computed. 1.0: yes."""
    assert length % PAGE_ENTRIES, length  # a fork must have a last page of its own
    tokens, order = model.tokens(length), model.order
    count = -(-(length + 1) // PAGE_ENTRIES)
    mine, other = order[:count], order[count : 2 * count]
    whole = model.prefill(tokens, mine, [length], invariant=invariant)
    cuts = sorted({1, length // 3, min(length // 3 + 33, length - 1), length - 1, length})
    chunked = model.prefill(tokens, other, cuts, invariant=invariant)
    there = model.arena
    held = [_entries(there.frames[there.frames_of(pages).tolist()], length) for pages in (mine, other)]

    decoder, next_token = model.decoders[invariant], model.tokens(1)
    rows = np.empty((2 + neighbours, model.config.vocab_size), np.float32)
    alone = model.chunk(next_token, length, mine, rows[0])
    decoder.step(StepBatch((alone,)))
    # Compute the call again in a batch with neighbours of other lengths. Half of the neighbours are forks of the call's
    # file.
    forks = []
    for index in range(neighbours):
        table = order[(2 + index) * count : (3 + index) * count].copy()
        at = 1 + (37 * index) % length
        if index % 2:
            table[:-1], at = mine[:-1], length
        forks.append(model.chunk(model.tokens(1), at, table, rows[2 + index]))
    decoder.step(
        StepBatch((*forks[: neighbours // 2], replace(alone, rows=(memoryview(rows[1]),)), *forks[neighbours // 2 :]))
    )
    return {
        "chunked_prefill_logits": float(np.array_equal(whole, chunked)),
        "chunked_prefill_kv": float(torch.equal(held[0].view(torch.uint8), held[1].view(torch.uint8))),
        "among_neighbours": float(np.array_equal(rows[0], rows[1])),
        "finite": float(np.isfinite(rows).all()),
    }


def _entries(frames: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` entries of `[frames, layers, 2, kv_heads, 32, head_dim]`."""
    by_entry = frames.permute(0, 4, 1, 2, 3, 5).reshape(-1, *frames.shape[1:4], frames.shape[5])
    return by_entry[:length].contiguous()


def reference_logits(model: Model, tokens: np.ndarray) -> torch.Tensor:
    """Return the logits of the last row, computed from the same weights by plain torch in float64."""
    config, weights = model.config, model.weights
    device, length = model.device.torch, len(tokens)
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * torch.from_numpy(
        inverse_frequencies(config, False).astype(np.float64)
    ).to(device)
    cos, sin = (torch.cat((part, part), dim=1)[:, None] for part in (angles.cos(), angles.sin()))

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_eps) * weight.double()

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    hidden = weights.embed[torch.from_numpy(tokens).long().to(device)].double()
    for layer in weights.layers:
        qkv = norm(hidden, layer.attn_norm) @ layer.qkv.double().t()
        q, k, v = qkv.view(length, -1, config.head_dim).split(
            [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        group = config.num_heads // config.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (turned(k), v))
        scores = torch.einsum("qhd,khd->hqk", turned(q), k) * config.score_scale
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool, device=device).triu(1), float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, -1)
        hidden = hidden + attended @ layer.o.double().t()
        gate, up = (norm(hidden, layer.ffn_norm) @ layer.gate_up.double().t()).chunk(2, dim=-1)
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ layer.down.double().t()
    return norm(hidden[-1:], weights.final_norm)[0] @ weights.head.double().t()


def errors(model: Model, narrow: Model, length: int) -> dict[str, dict[str, float]]:
    """Return the errors of logits against float64: with and without batch invariance, and for `narrow`, the same model
    with fp8 KV.
    """
    tokens = model.tokens(length)
    exact = reference_logits(model, tokens).cpu().numpy()
    found = {}
    cuts = [length // 2, length - 1, length]  # a prefill, a prefill after a prefix, a decode
    for name, one, invariant in (
        ("invariant", model, True),
        ("free", model, False),
        ("fp8 KV", narrow, True),
    ):
        logits = one.prefill(tokens, one.tables(1, length)[0], cuts, invariant=invariant).astype(np.float64)
        found[name] = {
            "relative_error": float(np.linalg.norm(logits - exact) / np.linalg.norm(exact)),
            "same_greedy_token": float(logits.argmax() == exact.argmax()),
        }
    return found
