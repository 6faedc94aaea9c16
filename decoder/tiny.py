"""Random models of any shape: tiny models for tests, and models of real sizes for measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from decoder.checkpoints.llama import EMBED, FINAL_NORM, HEAD, layer_name
from decoder.checkpoints.weights import Float32Array, Weights
from decoder.model_config import ModelConfig

_TINY = ModelConfig(
    name="tiny",
    architecture="llama",
    vocab_size=259,  # 256 bytes, then bos, eos, pad
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    max_positions=4096,
    tie_embeddings=True,
)


def tiny_config(**overrides: Any) -> ModelConfig:
    """Return the configuration of a model whose step takes microseconds, with some fields overridden."""
    return dataclasses.replace(_TINY, **overrides)


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Return Gaussian weights, scaled so that activations keep their size through the layers.

    A seed always gives the same weights.
    """
    rng = np.random.default_rng(seed)
    hidden, ffn = config.hidden_size, config.ffn_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Float32Array:
        out = rng.standard_normal((rows, columns), dtype=np.float32)
        out *= np.float32(gain / np.sqrt(columns))
        return out

    def vector(size: int, around: float) -> Float32Array:
        return (around + 0.1 * rng.standard_normal(size, dtype=np.float32)).astype(np.float32)

    def layer() -> dict[str, Float32Array]:
        fields = {
            "attn_norm": vector(hidden, 1),
            # With a gain on Q and K, attention picks a few entries instead of averaging over all.
            "q": matrix(heads, hidden, 1.5),
            "k": matrix(kv, hidden, 1.5),
            "v": matrix(kv, hidden),
            "o": matrix(hidden, heads),
            "ffn_norm": vector(hidden, 1),
            "gate": matrix(ffn, hidden),
            "up": matrix(ffn, hidden),
            "down": matrix(hidden, ffn),
        }
        if config.qkv_bias:
            fields |= {"q_bias": vector(heads, 0), "k_bias": vector(kv, 0), "v_bias": vector(kv, 0)}
        if config.qk_norm:
            fields |= {"q_norm": vector(config.head_dim, 1), "k_norm": vector(config.head_dim, 1)}
        if config.post_norms:
            fields |= {"post_attn_norm": vector(hidden, 1), "post_ffn_norm": vector(hidden, 1)}
        return fields

    # The elements of the embeddings are about 1, so that residual branches neither vanish nor dominate.
    arrays = {EMBED: matrix(config.vocab_size, hidden, float(np.sqrt(hidden)) / config.embed_scale)}
    for index in range(config.num_layers):
        arrays |= {layer_name(index, field): array for field, array in layer().items()}
    arrays[FINAL_NORM] = vector(hidden, 1)
    if not config.tie_embeddings:
        arrays[HEAD] = matrix(config.vocab_size, hidden)
    return Weights.of_arrays(arrays)
