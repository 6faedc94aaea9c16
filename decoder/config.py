"""The shape of a Llama-family model: what the decoder, the arena and the image need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from libsym.abi import PAGE_ENTRIES

_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's dimensions and constants, as its checkpoint states them."""

    name: str
    architecture: str
    """The Hugging Face word for the family, in lower case: `llama`, `qwen2`, …"""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float
    rms_eps: float
    max_positions: int
    tie_embeddings: bool
    """The output head is the embedding matrix."""

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """`(layers, 2, kv_heads, 32 * head_dim)`: K and V of 32 entries."""
        return (self.num_layers, 2, self.num_kv_heads, PAGE_ENTRIES * self.head_dim)

    def entry_bytes(self, dtype: str = "F32") -> int:
        """KV bytes of one entry, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[dtype]
