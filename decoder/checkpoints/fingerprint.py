"""Fingerprints of a model: short strings that an image carries and an import compares.

If one model can't use the KV of another model, the two have different fingerprints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from decoder.checkpoints.coded_matrix import CodedMatrix
from decoder.checkpoints.weights import Weights
from decoder.model_config import ModelConfig, RopeScaling

_EDGE_BYTES = 64 << 10
"""Bytes that are hashed at each end of a tensor. Hashing all of a 16 GB checkpoint takes longer than loading it.
Training changes every part of every tensor, so the ends tell two fine-tunes apart."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelConfig)}


def model_fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Return a hash of the configuration and of each tensor's name, type, shape and first and last 64 KiB.

    A matrix of several tensors counts with the first and last 64 KiB of each, and with the size of its blocks.

    The hash leaves out the model's display name and the order of the tensors: a renamed or re-sharded checkpoint is
    the same model. The hash also leaves out constants at their defaults. So a model keeps its fingerprint when a
    later release adds constants that this model does not use.
    """
    shape = {key: value for key, value in dataclasses.asdict(config).items() if value != _DEFAULTS.get(key)}
    del shape["name"]
    digest = hashlib.blake2b(json.dumps(shape, sort_keys=True).encode(), digest_size=32)
    for name in sorted(weights.names()):
        stored = weights.stored(name)
        digest.update(f"\n{name} {stored.encoding.name} {stored.shape} ".encode())
        if isinstance(stored, CodedMatrix):
            digest.update(f"{stored.block} ".encode())
        for part in stored.parts:
            digest.update(part.data[:_EDGE_BYTES])
            digest.update(part.data[-_EDGE_BYTES:])
    return digest.hexdigest()


def rope_identity(config: ModelConfig) -> str:
    """Return a description of the model's RoPE. Errors about images of other models show this text."""
    theta = f"{config.rope_theta:g}" + (f"+{config.local_rope_theta:g}" if config.local_rope_theta else "")
    return f"theta={theta} scaling={_scaling(config.rope_scaling)} positions={config.max_positions}"


def _scaling(scaling: RopeScaling | None) -> str:
    """Return `none`, or the scaling's kind with the numbers that differ from their defaults: `linear(factor=8.0)`."""
    if scaling is None:
        return "none"
    fields = [field for field in dataclasses.fields(scaling) if getattr(scaling, field.name) != field.default]
    return f"{scaling.kind}({','.join(f'{f.name}={getattr(scaling, f.name)}' for f in fields if f.name != 'kind')})"
