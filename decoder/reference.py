"""The reference decoder: plain torch in float32 over the same arena, as short as it can be said.

It is what the CPU step is compared with, and a way to run where no compiler is. Nothing else imports torch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from decoder.arena import Arena
from decoder.batch import Chunk, StepBatch
from decoder.config import ModelConfig
from decoder.weights import FloatArray, LayerWeights, Weights
from libsym.abi import PAGE_ENTRIES


class ReferenceDecoder:
    """Runs a batch chunk by chunk: gathers a file's pages, attends with an explicit softmax."""

    def __init__(self, config: ModelConfig, weights: Weights, arena: Arena) -> None:
        self.config = config
        self.arena = arena
        self._embed = _tensor(weights.embed)
        self._layers = [_LayerTensors(layer) for layer in weights.layers]
        self._final_norm = _tensor(weights.final_norm)
        self._head = self._embed if weights.head is None else _tensor(weights.head)
        pages = torch.from_numpy(arena.pages)  # shares the arena's memory
        layers, kv_heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
        self._keys = pages[:, :, 0].view(-1, layers, kv_heads, dim, PAGE_ENTRIES)
        self._values = pages[:, :, 1].view(-1, layers, kv_heads, PAGE_ENTRIES, dim)
        assert self._keys.shape == (arena.num_pages, layers, kv_heads, dim, PAGE_ENTRIES)

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> None:
        """One forward pass: KV goes into the batch's pages, logits into its rows."""
        for source, target in batch.copies:
            self.arena.copy(source, target)
        for chunk in batch.chunks:
            self._run(chunk)

    def close(self) -> None:
        """Nothing to stop: there are no threads of its own."""

    def _run(self, chunk: Chunk) -> None:
        eps = self.config.rms_eps
        cos, sin = self._rope(chunk.positions)
        x = embedding(torch.from_numpy(np.asarray(chunk.tokens, dtype=np.int64)), self._embed)
        for index, layer in enumerate(self._layers):
            h = rms_norm(x, x.shape[-1:], layer.attn_norm, eps)
            q = _rotate(self._split(linear(h, layer.q)), cos, sin)
            k = _rotate(self._split(linear(h, layer.k)), cos, sin)
            v = self._split(linear(h, layer.v))
            self._store(chunk, index, k, v)
            x = x + linear(self._attend(chunk, index, q), layer.o)
            h = rms_norm(x, x.shape[-1:], layer.ffn_norm, eps)
            x = x + linear(silu(linear(h, layer.gate)) * linear(h, layer.up), layer.down)
        if chunk.rows:
            last = x[len(chunk.tokens) - len(chunk.rows) :]
            logits = linear(rms_norm(last, x.shape[-1:], self._final_norm, eps), self._head)
            for row, values in zip(chunk.rows, logits, strict=True):
                row[:] = memoryview(values.numpy())

    def _split(self, x: Tensor) -> Tensor:
        """[rows, heads * dim] as [heads, rows, dim]."""
        return x.view(len(x), -1, self.config.head_dim).transpose(0, 1)

    def _rope(self, positions: np.ndarray[tuple[int], np.dtype[np.int32]]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of both halves, [rows, dim]."""
        dim = self.config.head_dim
        frequencies = self.config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.from_numpy(np.asarray(positions, dtype=np.float64))[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().float(), angles.sin().float()

    def _store(self, chunk: Chunk, layer: int, k: Tensor, v: Tensor) -> None:
        for row in range(len(chunk.tokens)):
            page, slot = divmod(chunk.start + row, PAGE_ENTRIES)
            self._keys[int(chunk.pages[page]), layer, :, :, slot] = k[:, row]
            self._values[int(chunk.pages[page]), layer, :, slot] = v[:, row]

    def _attend(self, chunk: Chunk, layer: int, q: Tensor) -> Tensor:
        """[heads, rows, dim] to [rows, heads * dim]: softmax over the entries up to each row's own."""
        rows, end = len(chunk.tokens), chunk.start + len(chunk.tokens)
        pages = torch.from_numpy(np.asarray(chunk.pages, dtype=np.int64))
        k = self._keys[pages, layer].permute(1, 0, 3, 2).flatten(1, 2)[:, :end]  # [kv_heads, entries, dim]
        v = self._values[pages, layer].transpose(0, 1).flatten(1, 2)[:, :end]
        group = self.config.num_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        scores = q @ k.transpose(1, 2) / self.config.head_dim**0.5
        unseen = torch.ones(rows, end, dtype=torch.bool).triu(chunk.start + 1)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
        attended: Tensor = (weights @ v).transpose(0, 1).flatten(1)
        return attended


class _LayerTensors:
    def __init__(self, layer: LayerWeights) -> None:
        self.attn_norm, self.ffn_norm = _tensor(layer.attn_norm), _tensor(layer.ffn_norm)
        self.q, self.k, self.v, self.o = (_tensor(w) for w in (layer.q, layer.k, layer.v, layer.o))
        self.gate, self.up, self.down = (_tensor(w) for w in (layer.gate, layer.up, layer.down))


def _tensor(array: FloatArray) -> Tensor:
    """The array's own memory; torch wants it writable, which a mapped checkpoint is not."""
    tensor: Tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half: dimension i turns with dimension i + dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
