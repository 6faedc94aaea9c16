"""Angles of positions: the frequencies that theta gives, and their scalings, with the formulas of transformers.

An angle is position * frequency in float64. Only its cosine and sine are rounded to float32.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from decoder.model_config import ModelConfig, RopeScaling

Doubles = npt.NDArray[np.float64]


def inverse_frequencies(config: ModelConfig, local: bool = False) -> Doubles:
    """Return the frequencies in radians per position, [head_dim / 2].

    `local` asks for the frequencies of sliding layers, which may have a theta of their own.
    """
    if local and config.local_rope_theta:
        return _plain(config.local_rope_theta, config.head_dim)
    plain, scaling = _plain(config.rope_theta, config.head_dim), config.rope_scaling
    match scaling:
        case None:
            return plain
        case RopeScaling(kind="linear"):
            return np.asarray(plain / scaling.factor)
        case RopeScaling(kind="llama3"):
            return _llama3(plain, scaling)
        case RopeScaling(kind="yarn"):
            return _yarn(plain, scaling, config.rope_theta)
        case RopeScaling(kind="factors"):
            return np.asarray(plain / np.array(scaling.factors))
    raise AssertionError(scaling.kind)


def rotation_factor(config: ModelConfig, local: bool = False) -> float:
    """Return the factor of cos and sin."""
    if config.rope_scaling is None or (local and config.local_rope_theta):
        return 1.0
    return config.rope_scaling.attention_factor


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Return YaRN's default attention factor, for checkpoints that state no factor."""

    def stretched(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return stretched(mscale) / stretched(mscale_all_dim) if mscale and mscale_all_dim else stretched(1.0)


def _plain(theta: float, head_dim: int) -> Doubles:
    return np.asarray(theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))


def _llama3(plain: Doubles, scaling: RopeScaling) -> Doubles:
    """Return Llama 3's frequencies: short wavelengths stay, long ones are stretched, and those between are blended."""
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((scaling.original_positions / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(plain * (kept + (1 - kept) / scaling.factor))


def _yarn(plain: Doubles, scaling: RopeScaling, theta: float) -> Doubles:
    """Return YaRN's frequencies: high frequencies stay, low ones are divided, and those between are blended."""
    dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    stretched = np.clip((np.arange(len(plain)) - first) / (last - first), 0, 1)
    return np.asarray(plain * (1 - stretched) + plain / scaling.factor * stretched)
