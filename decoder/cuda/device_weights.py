"""Weights of a model on the device. They are loaded in pieces: the host holds only pieces in flight.

A matrix that is stored in the type of the arithmetic is uploaded unchanged. Other matrices are decoded on the host's
cores, some thousand rows at a time, and rounded on the device. Q, K and V are rows of one matrix, and so are gate and
up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from decoder.checkpoints.llama import EMBED, FINAL_NORM, HEAD, layer_name
from decoder.checkpoints.weights import Weights
from decoder.cores import available_cores
from decoder.cuda.device import Device
from decoder.model_config import ModelConfig
from libsym.errors import Invalid

_PIECE_VALUES = 1 << 22
"""Number of values in a piece, which one core reads: 16 MiB as float32."""
_STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; matrices are `[out, in]`. None: the model has no such tensor."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_attn_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    post_ffn_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Weights of a whole model on the device."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    """The output head; `embed` itself if the two are tied."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a step reads. Steps per second are at most memory bandwidth / this number."""
        tensors = [self.final_norm, self.head]
        for layer in self.layers:
            fields = (getattr(layer, name) for name in LayerWeights.__slots__)
            tensors += [tensor for tensor in fields if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def matrix_shapes(self) -> set[tuple[int, int]]:
        """Return `(outputs, inputs)` of every product of a step."""
        matrices = [self.head] + [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return {(matrix.shape[0], matrix.shape[1]) for matrix in matrices}


def load_weights(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    device: Device,
    checkpoint: Callable[[float], None] = lambda _share: None,
) -> DeviceWeights:
    """Upload a model's weights. Invalid: a value is not finite in `dtype`.

    `checkpoint` is called before each piece, with the share that is loaded. An exception from it ends the load.
    """
    with _Loader(weights, dtype, device, checkpoint) as loader:
        layers = tuple(_load_layer(loader, index) for index in range(config.num_layers))
        embed = loader.matrix(EMBED)
        final_norm = loader.matrix(FINAL_NORM)
        head = loader.matrix(HEAD) if HEAD in weights else embed
    return DeviceWeights(embed, layers, final_norm, head)


def _load_layer(loader: _Loader, index: int) -> LayerWeights:
    def matrix(*fields: str) -> Tensor:
        return loader.matrix(*(layer_name(index, field) for field in fields))

    def optional(*fields: str) -> Tensor | None:
        return matrix(*fields) if layer_name(index, fields[0]) in loader.weights else None

    return LayerWeights(
        attn_norm=matrix("attn_norm"),
        qkv=matrix("q", "k", "v"),
        qkv_bias=optional("q_bias", "k_bias", "v_bias"),
        q_norm=optional("q_norm"),
        k_norm=optional("k_norm"),
        o=matrix("o"),
        post_attn_norm=optional("post_attn_norm"),
        ffn_norm=matrix("ffn_norm"),
        gate_up=matrix("gate", "up"),
        down=matrix("down"),
        post_ffn_norm=optional("post_ffn_norm"),
    )


class _Loader:
    """Loader that reads a bounded number of pieces ahead of the uploads, and checks the uploaded weights at the end."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: Device, checkpoint: Callable[[float], None]
    ) -> None:
        self.weights = weights
        self._dtype, self._device, self._checkpoint = dtype, device, checkpoint
        self._num_values, self._num_loaded = sum(math.prod(weights.shape(name)) for name in weights.names()), 0
        num_threads = available_cores()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load")
        self._pieces: deque[tuple[Tensor, Future[Tensor]]] = deque()
        self._max_pieces = 2 * num_threads
        self._is_finite = torch.ones((), dtype=torch.bool, device=device.torch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._upload_pieces(0)
                if not bool(self._is_finite):
                    raise Invalid(
                        f"the weights hold values that are not finite in {self._dtype}: the file is damaged, or needs "
                        "another --precision"
                    )
        finally:
            self._pool.shutdown(cancel_futures=True)

    def matrix(self, *names: str) -> Tensor:
        """Return one tensor with the rows of the named tensors, one tensor after the other."""
        shapes = [self.weights.shape(name) for name in names]
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device.torch)
        for name, part in zip(names, out.split(rows), strict=True):
            if part.dim() == 1:
                self._upload(part, torch.from_numpy(self.weights.read(name)))
            else:
                self._read_ahead(name, part)
        return out

    def _read_ahead(self, name: str, part: Tensor) -> None:
        rows = max(1, _PIECE_VALUES // part.shape[1])
        for first in range(0, part.shape[0], rows):
            piece = part[first : first + rows]
            read = self._pool.submit(_read, self.weights, name, first, first + len(piece), self._dtype)
            self._pieces.append((piece, read))
            self._upload_pieces(self._max_pieces)

    def _upload_pieces(self, num_left: int) -> None:
        while len(self._pieces) > num_left:
            self._checkpoint(self._num_loaded / self._num_values)
            part, values = self._pieces.popleft()
            self._upload(part, values.result())

    def _upload(self, part: Tensor, values: Tensor) -> None:
        part.copy_(values.to(self._device.torch))
        self._num_loaded += part.numel()
        self._is_finite &= part.isfinite().all()


def _read(weights: Weights, name: str, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Read rows on one of the host's cores. If their stored type is not `dtype`, decode them to float32."""
    stored = weights.rows(name, first, end)
    if stored.encoding.name == _STORED_AS[dtype]:
        # torch makes no tensor over read-only memory, and the file is mapped read-only. So a copy is needed.
        return torch.from_numpy(np.frombuffer(stored.data, np.uint8).copy()).view(dtype).view(stored.shape)
    out = np.empty(stored.shape, np.float32)
    stored.read_into(out)
    return torch.from_numpy(out)
