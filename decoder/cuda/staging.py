"""A step's integers: laid out in pinned memory by the host, on the device after one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoder.batch import IntArray
from decoder.cuda.device import Device

_ALIGNMENT = 32
"""Numbers: 128 bytes. Kernels are compiled for addresses that are multiples of 16 bytes, and for others anew."""


@dataclass(frozen=True, slots=True)
class Laid:
    """Arrays by name, one after the other: to be filled on the host, to be read on the device."""

    host: dict[str, IntArray]
    device: dict[str, Tensor]
    source: Tensor
    target: Tensor
    """All of them, on the host and on the device."""


class Staging:
    """Room for the arrays of one pass at a time, at the same places here and there.

    Here twice, in turn: the next pass may be laid out while this one's arrays are still being copied.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        self._host, self._other = (self._device.pinned(capacity, dtype=torch.int32) for _ in range(2))
        self._there = torch.empty(capacity, dtype=torch.int32, device=self._device.torch)

    def lay(self, shapes: Mapping[str, tuple[int, ...]]) -> Laid:
        """Places for arrays of these shapes; what was laid since the last upload is over."""
        places, end = {}, 0
        for name, shape in shapes.items():
            places[name] = end
            end += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        if end > self._host.numel():
            self._make(2 * end)
        here: IntArray = self._host.numpy()
        host, there = {}, {}
        for name, shape in shapes.items():
            first, stop = places[name], places[name] + math.prod(shape)
            host[name] = here[first:stop].reshape(shape)
            there[name] = self._there[first:stop].view(shape)
        return Laid(host, there, self._host[:end], self._there[:end])

    def upload(self, laid: Laid) -> None:
        """Start the copy, in the order of the current stream; it has to be over before the next but one begins."""
        laid.target.copy_(laid.source, non_blocking=True)
        self._host, self._other = self._other, self._host


def fill(target: IntArray, values: IntArray, padding: int) -> None:
    """The values, then padding."""
    np.copyto(target[: len(values)], values)
    target[len(values) :] = padding
