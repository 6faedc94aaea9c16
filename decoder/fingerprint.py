"""What makes the KV of one model unusable with another: short strings that an image carries and import compares."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import TypeAlias

from decoder.config import ModelConfig

_EDGE_BYTES = 64 << 10
"""Hashing all of a 16 GB checkpoint takes longer than loading it. Training moves every tensor, and all of it,
so the ends of each tensor tell two fine-tunes apart."""

TensorBytes: TypeAlias = tuple[str, str, tuple[int, ...], memoryview]
"""Name, stored type, shape, data."""


def model_fingerprint(config: ModelConfig, tensors: Iterable[TensorBytes]) -> str:
    """A hash of the configuration and of each tensor's name, type, shape and first and last 64 KiB.

    The model's name for people is left out, and so is the order of the tensors: a renamed or re-sharded
    checkpoint is the same model.
    """
    shape = dataclasses.asdict(config)
    del shape["name"]
    digest = hashlib.blake2b(json.dumps(shape, sort_keys=True).encode(), digest_size=32)
    for name, kind, sizes, data in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(f"\n{name} {kind} {sizes} ".encode())
        digest.update(data[:_EDGE_BYTES])
        digest.update(data[-_EDGE_BYTES:])
    return digest.hexdigest()


def rope_identity(config: ModelConfig) -> str:
    """How positions rotate, in words: an error about a foreign image can show both."""
    return f"theta={config.rope_theta:g} scaling=none positions={config.max_positions}"
