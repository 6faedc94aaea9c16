"""The reference decoder: plain torch in float32 over the same arena, as short as it can be said.

Tests compare both backends with it.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear, rms_norm, silu

from decoder.batch import Chunk, IntArray, StepBatch
from decoder.checkpoints.llama import EMBED, FINAL_NORM, HEAD, LAYER_TENSORS, layer_name
from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.model_config import ModelConfig
from decoder.rope import inverse_frequencies, rotation_factor
from libsym.abi import PAGE_ENTRIES


class ReferenceDecoder:
    """Runs a batch chunk by chunk: gathers a file's pages, attends with an explicit softmax."""

    def __init__(self, config: ModelConfig, weights: Weights, arena: Arena) -> None:
        assert arena.dtype == "F32"
        self.config = config
        self.arena = arena
        self._embed, self._final_norm = _tensor(weights, EMBED), _tensor(weights, FINAL_NORM)
        self._head = _tensor(weights, HEAD) if HEAD in weights else self._embed
        self._layers = [_layer_tensors(weights, index) for index in range(config.num_layers)]
        pages = torch.from_numpy(arena.pages)  # shares the arena's memory
        layers, kv_heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
        self._keys = pages[:, :, 0].view(-1, layers, kv_heads, dim, PAGE_ENTRIES)
        self._values = pages[:, :, 1].view(-1, layers, kv_heads, PAGE_ENTRIES, dim)
        assert self._keys.shape == (arena.num_pages, layers, kv_heads, dim, PAGE_ENTRIES)

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> None:
        for source, target, _ in batch.copies:
            self.arena.writable(target)[:] = self.arena.view(source)
        for chunk in batch.chunks:
            self._run(chunk)

    def close(self) -> None:
        """Stop nothing: there are no threads of its own."""

    def _run(self, chunk: Chunk) -> None:
        config = self.config
        x = embedding(torch.from_numpy(np.asarray(chunk.tokens, dtype=np.int64)), self._embed) * config.embed_scale
        for index, layer in enumerate(self._layers):
            h = self._attention(chunk, index, self._normed(x, layer["attn_norm"]))
            x = x + self._normed(h, layer.get("post_attn_norm"))
            h = self._normed(x, layer["ffn_norm"])
            gate = linear(h, layer["gate"])
            gate = silu(gate) if config.activation == "silu" else gelu(gate, approximate="tanh")
            x = x + self._normed(linear(gate * linear(h, layer["up"]), layer["down"]), layer.get("post_ffn_norm"))
        if chunk.rows:
            last = x[len(chunk.tokens) - len(chunk.rows) :]
            logits = _capped(linear(self._normed(last, self._final_norm), self._head), config.final_softcap)
            for row, values in zip(chunk.rows, logits, strict=True):
                row[:] = memoryview(values.numpy())

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The RMS norm of the last dimension, where the model has that norm."""
        return x if weight is None else rms_norm(x, x.shape[-1:], weight, self.config.rms_eps)

    def _attention(self, chunk: Chunk, index: int, h: Tensor) -> Tensor:
        """[rows, hidden] to the same; K and V of the rows are stored on the way."""
        layer = self._layers[index]
        q, k, v = (self._split(linear(h, layer[name], layer.get(f"{name}_bias"))) for name in "qkv")
        cos, sin = self._rope(chunk.positions, self.config.slides(index))
        q = _rotate(self._normed(q, layer.get("q_norm")), cos, sin)
        k = _rotate(self._normed(k, layer.get("k_norm")), cos, sin)
        self._store(chunk, index, k, v)
        return linear(self._attend(chunk, index, q), layer["o"])

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.config.head_dim).transpose(0, 1)

    def _rope(self, positions: IntArray, local: bool) -> tuple[Tensor, Tensor]:
        angles = np.asarray(positions, dtype=np.float64)[:, None] * inverse_frequencies(self.config, local)
        both, factor = torch.from_numpy(np.tile(angles, 2)), rotation_factor(self.config, local)
        return (both.cos() * factor).float(), (both.sin() * factor).float()

    def _store(self, chunk: Chunk, layer: int, k: Tensor, v: Tensor) -> None:
        for row in range(len(chunk.tokens)):
            page, slot = divmod(chunk.start + row, PAGE_ENTRIES)
            self._keys[int(chunk.pages[page]), layer, :, :, slot] = k[:, row]
            self._values[int(chunk.pages[page]), layer, :, slot] = v[:, row]

    def _attend(self, chunk: Chunk, layer: int, q: Tensor) -> Tensor:
        """[heads, rows, dim] to [rows, heads * dim]: softmax over the entries that each row sees."""
        config, end = self.config, chunk.start + len(chunk.tokens)
        pages = torch.from_numpy(np.asarray(chunk.pages, dtype=np.int64))
        k = self._keys[pages, layer].permute(1, 0, 3, 2).flatten(1, 2)[:, :end]  # [kv_heads, entries, dim]
        v = self._values[pages, layer].transpose(0, 1).flatten(1, 2)[:, :end]
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        scores = _capped(q @ k.transpose(1, 2) * config.score_scale, config.attn_softcap)
        weights = scores.masked_fill(~self._seen(chunk, layer), -torch.inf).softmax(dim=-1)
        if chunk.mass is not None:
            chunk.mass[layer, :, :end] += weights.sum(dim=1).view(-1, group, end).sum(dim=1).numpy()
        attended: Tensor = (weights @ v).transpose(0, 1).flatten(1)
        return attended

    def _seen(self, chunk: Chunk, layer: int) -> Tensor:
        """[rows, entries]: none behind the row's own, in a sliding layer the last few, of these what the mask has."""
        rows, end = len(chunk.tokens), chunk.start + len(chunk.tokens)
        seen = torch.ones(rows, end, dtype=torch.bool).tril(chunk.start)
        if self.config.slides(layer):
            seen = seen.triu(chunk.start - self.config.window + 1)
        return seen if chunk.mask is None else seen & torch.tensor(np.asarray(chunk.mask, dtype=np.bool_))


def _layer_tensors(weights: Weights, index: int) -> dict[str, Tensor]:
    names = {field: layer_name(index, field) for field in LAYER_TENSORS}
    return {field: _tensor(weights, name) for field, name in names.items() if name in weights}


def _tensor(weights: Weights, name: str) -> Tensor:
    return torch.from_numpy(weights.read(name))


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half: dimension i turns with dimension i + dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
