"""Models of the Llama family in GGUF files: their configuration, and their tensors by Hugging Face name.

Keys have the meaning and the defaults that llama.cpp gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoder.checkpoints.gguf import GgufFile, Value
from decoder.checkpoints.huggingface import gemma_embed_scale
from decoder.checkpoints.llama import EMBED, FINAL_NORM, HEAD, Checkpoint, check_config, layer_name
from decoder.checkpoints.stored import StoredTensor
from decoder.model_config import ModelConfig, RopeScaling
from decoder.rope import yarn_attention_factor
from libsym.errors import Invalid

_LAYER_FIELDS = {  # name in a GGUF block -> field of a layer
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "attn_output.weight": "o",
    "post_attention_norm.weight": "post_attn_norm",
    "ffn_norm.weight": "ffn_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "post_ffw_norm.weight": "post_ffn_norm",
}
_TOP_LEVEL = {"token_embd.weight": EMBED, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Family:
    """Constants of one architecture of llama.cpp."""

    terms: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that the architecture fixes."""
    gemma: bool = False
    """Whether embeddings are scaled and the activation is GELU. (GGUF norms include the 1 that the formula adds.)"""
    window: int | None = None
    """Window of a file that states no window. None: the family has no sliding layers."""
    full_every: int = 0
    """Every `full_every`-th layer has full attention. The other layers are sliding layers."""
    local_theta: float = 0.0
    attn_softcap: float | None = None
    """Soft cap of a file that states no soft cap.

    None: the formula has no soft cap, and a file with a soft cap is refused.
    """
    final_softcap: float | None = None
    largest: int = 0
    """Number of layers of the family's 27B model. Only this model scales scores by hidden size / heads, in place of
    the head dimension."""


_FAMILIES = {
    "llama": _Family(),
    "qwen2": _Family({"qkv_bias": True}),
    "qwen3": _Family({"qk_norm": True}),
    "gemma": _Family(gemma=True),
    "gemma2": _Family(
        *({"post_norms": True}, True),
        window=4096,
        full_every=2,
        attn_softcap=50.0,
        final_softcap=30.0,
        largest=46,
    ),
    "gemma3": _Family(
        *({"post_norms": True, "qk_norm": True}, True),
        window=0,
        full_every=6,
        local_theta=10_000.0,
        final_softcap=0.0,
        largest=62,
    ),
}
_READ_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",  # informative
        "vocab_size",
    }
)
_NEUTRAL: dict[str, tuple[Value, ...]] = {  # values of a key that have the same effect as its absence
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
}


def read_gguf_llama(file: GgufFile) -> Checkpoint:
    """Return the checkpoint in a GGUF file. Invalid: the model has a feature that this release lacks."""
    architecture = file.text("general.architecture")
    family = _FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(_FAMILIES)
        raise Invalid(f"{file.path}: the architecture {architecture[:40]!r} is not supported: {known} are")
    _refuse_extras(file, architecture, family)
    config = check_config(_Metadata(file, architecture, family).config(), file.path)
    tensors = {_usual_name(name): stored for name, stored in file.tensors.items() if not _is_factors(name, config)}
    return Checkpoint(file.path, config, tensors, interleaved_rope=architecture == "llama")


class _Metadata:
    """Metadata of one architecture; keys are given without the architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str, family: _Family) -> None:
        self._file = file
        self._architecture = architecture
        self._family = family

    def config(self) -> ModelConfig:
        family, file = self._family, self._file
        # The size of the vocabulary is the number of embeddings, because the metadata often lacks that size.
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise Invalid(f"{file.path}: has no two-dimensional token_embd.weight: the checkpoint is incomplete")
        num_heads, hidden_size = self._integer("attention.head_count"), self._integer("embedding_length")
        num_layers = self._integer("block_count")
        head_dim = self._integer("attention.key_length", hidden_size // num_heads if num_heads else 0)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, head_dim) != head_dim:
                raise self._refuse(key, f"differs from the head dimension {head_dim}: this is not supported")
        window = 0 if family.window is None else self._integer("attention.sliding_window", family.window)
        if not 0 <= window < 1 << 31:
            raise self._refuse("attention.sliding_window", f"= {window} is impossible")
        sliding = [(layer + 1) % family.full_every != 0 for layer in range(min(num_layers, 1 << 12)) if window]
        per_head = hidden_size / num_heads if num_heads and num_layers == family.largest else head_dim
        max_positions = self._integer("context_length")
        return ModelConfig(
            name=file.text("general.name", file.path.stem),
            architecture=self._architecture,
            vocab_size=self._integer("vocab_size", embedding.shape[0]),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=self._integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            ffn_size=self._integer("feed_forward_length"),
            rope_theta=self._number("rope.freq_base", 10_000.0),
            rms_eps=_as_written(self._number("attention.layer_norm_rms_epsilon")),
            max_positions=max_positions,
            tie_embeddings="output.weight" not in file.tensors,
            activation="gelu_tanh" if family.gemma else "silu",
            embed_scale=gemma_embed_scale(hidden_size) if family.gemma else 1.0,
            attn_scale=0.0 if per_head == head_dim else per_head**-0.5,
            attn_softcap=self._softcap("attn_logit_softcapping", family.attn_softcap),
            final_softcap=self._softcap("final_logit_softcapping", family.final_softcap),
            window=window,
            sliding_layers=tuple(sliding),
            rope_scaling=self._scaling(max_positions),
            local_rope_theta=self._number("rope.freq_base_swa", family.local_theta) if window else 0.0,
            **family.terms,
        )

    def _integer(self, key: str, default: int | None = None) -> int:
        return self._file.integer(f"{self._architecture}.{key}", default)

    def _number(self, key: str, default: float | None = None) -> float:
        return self._file.number(f"{self._architecture}.{key}", default)

    def _refuse(self, key: str, reason: str) -> Invalid:
        return Invalid(f"{self._file.path}: {self._architecture}.{key} {reason}")

    def _softcap(self, key: str, usual: float | None) -> float:
        cap = 0.0 if usual is None else self._number(key, usual)
        if not 0 <= cap < float("inf"):
            raise self._refuse(key, f"= {cap} is impossible")
        return cap

    def _scaling(self, max_positions: int) -> RopeScaling | None:
        factor = self._number("rope.scaling.factor", 0.0) or 1.0
        # llama.cpp assumes linear scaling if the file has only a factor.
        kind = self._file.text(f"{self._architecture}.rope.scaling.type", "linear")
        if self._architecture == "llama" and (stored := self._file.tensors.get(_ROPE_FACTORS)) is not None:
            if factor != 1:
                raise self._refuse("rope.scaling.factor", f"= {factor} beside {_ROPE_FACTORS} is not supported")
            return _factors(stored)
        if kind != "yarn" and self._number("rope.scaling.attn_factor", 1.0) != 1:
            raise self._refuse("rope.scaling.attn_factor", "is supported with yarn alone")
        if kind == "none" or (kind == "linear" and factor == 1):
            return None
        if kind == "linear":
            return RopeScaling("linear", _as_written(factor))
        if kind != "yarn":
            raise self._refuse("rope.scaling.type", f"= {kind[:40]} is not supported: none, linear and yarn are")
        return RopeScaling(
            "yarn",
            _as_written(factor),
            self._integer("rope.scaling.original_context_length", max_positions),
            beta_fast=self._number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=self._number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor),
        )


def _factors(stored: StoredTensor) -> RopeScaling:
    """Return Llama 3's RoPE scaling from the factors that the converter to GGUF computed."""
    factors = np.empty(stored.shape, dtype=np.float32)
    stored.read_into(factors)
    return RopeScaling("factors", factors=tuple(factors.reshape(-1).tolist()))


def _is_factors(name: str, config: ModelConfig) -> bool:
    return name == _ROPE_FACTORS and config.rope_scaling is not None and config.rope_scaling.kind == "factors"


def _refuse_extras(file: GgufFile, architecture: str, family: _Family) -> None:
    read = set(_READ_KEYS)
    if family.window is not None:
        read.add("attention.sliding_window")
    if family.local_theta:
        read.add("rope.freq_base_swa")
    if family.attn_softcap is not None:
        read.add("attn_logit_softcapping")
    if family.final_softcap is not None:
        read.add("final_logit_softcapping")
    for key, value in file.metadata.items():
        section, _, name = key.partition(".")
        if section != architecture or name in read or value in _NEUTRAL.get(name, ()):
            continue
        raise Invalid(f"{file.path}: {key} = {str(value)[:40]} is not supported by this release")


def _usual_name(name: str) -> str:
    """Return a tensor's name in `decoder.checkpoints.llama`; an unknown tensor keeps its GGUF name."""
    match name.split(".", 2):
        case ["blk", number, part] if number.isascii() and number.isdigit() and part in _LAYER_FIELDS:
            return layer_name(int(number), _LAYER_FIELDS[part]) if str(int(number)) == number else name
    return _TOP_LEVEL.get(name, name)


def _as_written(value: float) -> float:
    """Return a float32 of the file as the decimal that its author wrote: 1e-05, not 9.99999974738e-06."""
    return float(f"{value:.7g}")
