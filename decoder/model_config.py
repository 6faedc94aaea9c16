"""The shape of a Llama-family model: what the decoder, the arena and the image need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from libsym.abi import PAGE_ENTRIES

KV_DTYPE = {"float32": "F32", "bf16": "BF16", "int8": "BF16", "int4": "BF16"}
"""What an arena holds, by the precision of the arithmetic."""
GPU_PRECISIONS = ("float32", "bf16", "float16")
"""Of the arithmetic on a GPU, where KV is in the same type, or in another of these."""
GPU_KV_DTYPE = {"float32": "F32", "bf16": "BF16", "float16": "F16", "fp8": "F8_E4M3"}
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model's frequencies differ from theta's plain ones; `decoder/rope.py` has the formulas."""

    kind: str
    """`linear`, `llama3`, `yarn`, or `factors`: a divisor for each frequency, as GGUF files have them."""
    factor: float = 1.0
    """Longer by: `linear` divides every frequency by it, `llama3` and `yarn` the low ones."""
    original_positions: int = 0
    """`llama3`, `yarn`: the context length before it was stretched."""
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    """`llama3`: wavelengths above original / low are divided, those below original / high are not."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """`yarn`: the same as numbers of turns in the original context."""
    truncate: bool = True
    """`yarn`: the ramp begins and ends at whole dimensions."""
    attention_factor: float = 1.0
    """`yarn`: multiplies cos and sin, and so the scores by its square."""
    factors: tuple[float, ...] = ()
    """`factors`: [head_dim / 2]"""


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
    activation: str = "silu"
    """Of the MLP's gate: `silu` or `gelu_tanh`."""
    embed_scale: float = 1.0
    """Multiplies the embedding's rows (Gemma), a float32."""
    attn_scale: float = 0.0
    """Multiplies the scores; 0: head_dim ** -0.5."""
    attn_softcap: float = 0.0
    """A score s becomes cap * tanh(s / cap) (Gemma 2); 0: none."""
    final_softcap: float = 0.0
    """The same for logits."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each head of Q and K, before RoPE."""
    post_norms: bool = False
    """RMS norm of attention's and of the MLP's output, before each is added (Gemma 2, 3)."""
    window: int = 0
    """A sliding layer's row sees that many entries, its own the last; 0: no layer slides."""
    sliding_layers: tuple[bool, ...] = ()
    """Which layers slide; empty when window is 0."""
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float = 0.0
    """Above 0: sliding layers rotate with this theta, unscaled (Gemma 3)."""

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """`(layers, 2, kv_heads, 32 * head_dim)`: K and V of 32 entries."""
        return (self.num_layers, 2, self.num_kv_heads, PAGE_ENTRIES * self.head_dim)

    @property
    def score_scale(self) -> float:
        """What the scores of Q and K are multiplied with."""
        return self.attn_scale or self.head_dim**-0.5

    def slides(self, layer: int) -> bool:
        """Whether a layer's rows see a window of entries only."""
        return self.window > 0 and self.sliding_layers[layer]

    def entry_bytes(self, dtype: str = "F32") -> int:
        """KV bytes of one entry, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[dtype]
