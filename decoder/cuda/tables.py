"""Tables of the cosines and sines of every position, computed once on the host in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decoder.cuda.device import Device
from decoder.model_config import ModelConfig
from decoder.rope import inverse_frequencies, rotation_factor

_BLOCK = 1 << 14
"""Positions that are computed at a time, so that the float64 arrays stay small."""


def rope_table(config: ModelConfig, device: Device, *, local: bool) -> Tensor:
    """Return [max_positions, head_dim] float32: the cosines of head_dim / 2 angles, then the sines.

    Cosines and sines are multiplied by the model's rotation factor.
    """
    frequencies, factor = inverse_frequencies(config, local), rotation_factor(config, local)
    half = len(frequencies)
    table = np.empty((config.max_positions, 2 * half), np.float32)
    for first in range(0, config.max_positions, _BLOCK):
        rows = table[first : first + _BLOCK]
        angles = np.arange(first, first + len(rows), dtype=np.float64)[:, None] * frequencies
        rows[:, :half] = np.cos(angles) * factor
        rows[:, half:] = np.sin(angles) * factor
    return torch.from_numpy(table).to(device.torch)
