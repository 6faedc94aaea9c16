"""Staging: the host lays out a step's integers in pinned memory, and one copy brings them to the device."""

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
"""Alignment: 32 numbers are 128 bytes. At an address that is no multiple of 16, a kernel would be compiled again."""


@dataclass(frozen=True, slots=True)
class Laid:
    """Arrays by name, one after the other. The caller fills them on the host, and the device reads its copies."""

    host: dict[str, IntArray]
    device: dict[str, Tensor]
    source: Tensor
    target: Tensor
    """All arrays in one: `source` on the host, `target` on the device."""


class Staging:
    """Buffers for the arrays of one pass, with the same offsets on the host and on the device.

    The host uses two buffers alternately: the next pass may be laid out while the copy of this pass is in flight.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        self._host, self._other = (self._device.pinned(capacity, dtype=torch.int32) for _ in range(2))
        self._there = torch.empty(capacity, dtype=torch.int32, device=self._device.torch)

    def lay(self, shapes: Mapping[str, tuple[int, ...]]) -> Laid:
        """Return arrays of these shapes. Arrays from earlier calls since the last upload become invalid."""
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
        """Start the copy, in the order of the current stream.

        This copy must end before its buffer is used again, two copies later.
        """
        laid.target.copy_(laid.source, non_blocking=True)
        self._host, self._other = self._other, self._host


def fill(target: IntArray, values: IntArray, padding: int) -> None:
    """Fill `target` with the values, then with padding."""
    np.copyto(target[: len(values)], values)
    target[len(values) :] = padding
