"""The shape of a model of the Llama family, for the decoder, the arena and images."""

from __future__ import annotations

from dataclasses import dataclass

from libsym.abi import PAGE_ENTRIES

KV_DTYPE = {"float32": "F32", "bf16": "BF16", "int8": "BF16", "int4": "BF16"}
"""Element type of KV in an arena, by the precision of the arithmetic."""
GPU_PRECISIONS = ("float32", "bf16", "float16")
"""Precisions of the arithmetic on a GPU. KV has the same type, or another type in `GPU_KV_DTYPE`."""
GPU_KV_DTYPE = {"float32": "F32", "bf16": "BF16", "float16": "F16", "fp8": "F8_E4M3"}
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of a model's RoPE frequencies for longer contexts. `decoder/rope.py` has the formulas."""

    kind: str
    """`linear`, `llama3`, `yarn`, or `factors`: a divisor for each frequency, as GGUF files have them."""
    factor: float = 1.0
    """Factor of the longer context. `linear` divides all frequencies by the factor, `llama3` and `yarn` low ones."""
    original_positions: int = 0
    """`llama3`, `yarn`: the context length before the scaling."""
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    """`llama3`: a frequency is divided if its wavelength is above original_positions / low_freq_factor. A frequency is
    kept if its wavelength is below original_positions / high_freq_factor."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """`yarn`: a frequency is kept if it makes more than `beta_fast` rotations in the original context. A frequency is
    divided if it makes fewer than `beta_slow` rotations."""
    truncate: bool = True
    """`yarn`: whether the ramp between kept and divided frequencies begins and ends at whole dimensions."""
    attention_factor: float = 1.0
    """`yarn`: factor of cos and sin. So the scores are multiplied by the factor's square."""
    factors: tuple[float, ...] = ()
    """`factors`: the divisors, [head_dim / 2]."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and constants of one model, as its checkpoint states them."""

    name: str
    architecture: str
    """Hugging Face's name of the family, in lower case: `llama`, `qwen2`, …"""
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
    """Whether the output head is the embedding matrix."""
    activation: str = "silu"
    """Activation of the MLP's gate: `silu` or `gelu_tanh`."""
    embed_scale: float = 1.0
    """Factor of the embedding's rows, a float32 (Gemma)."""
    attn_scale: float = 0.0
    """Factor of the scores; 0: head_dim ** -0.5."""
    attn_softcap: float = 0.0
    """Soft cap of the scores (Gemma 2): a score s becomes cap * tanh(s / cap). 0: no soft cap."""
    final_softcap: float = 0.0
    """Soft cap of the logits, with the formula of `attn_softcap`. 0: no soft cap."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether each head of Q and K passes an RMS norm before RoPE."""
    post_norms: bool = False
    """Whether the outputs of attention and of the MLP pass an RMS norm before they are added (Gemma 2, 3)."""
    window: int = 0
    """Number of entries that a row of a sliding layer sees, including the row's own entry; 0: no layer slides."""
    sliding_layers: tuple[bool, ...] = ()
    """Whether each layer slides; empty when window is 0."""
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float = 0.0
    """Theta of sliding layers, without RoPE scaling (Gemma 3); 0: sliding layers have the other layers' RoPE."""

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """Return `(layers, 2, kv_heads, 32 * head_dim)`: K and V of 32 entries."""
        return (self.num_layers, 2, self.num_kv_heads, PAGE_ENTRIES * self.head_dim)

    @property
    def score_scale(self) -> float:
        """Return the factor of attention scores."""
        return self.attn_scale or self.head_dim**-0.5

    def slides(self, layer: int) -> bool:
        """Return whether the rows of a layer see only a window of entries."""
        return self.window > 0 and self.sliding_layers[layer]

    def entry_bytes(self, dtype: str = "F32") -> int:
        """Return the KV bytes of one entry, over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[dtype]
