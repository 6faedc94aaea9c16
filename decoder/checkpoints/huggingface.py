"""Models of the Llama family in Hugging Face checkpoints: their configuration, from `config.json`.

A family is a set of constants: the defaults of its configuration class in transformers, and the terms of its formula.
The reader refuses a file that deviates from the formula.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from decoder.checkpoints.json_file import read_json_object
from decoder.checkpoints.llama import HEAD, Checkpoint, check_config, tensor_shapes
from decoder.checkpoints.quantization import read_quantization
from decoder.checkpoints.safetensors import QUANTIZED_TYPES, read_checkpoint_tensors
from decoder.checkpoints.weights import Tensor
from decoder.model_config import ModelConfig, RopeScaling
from decoder.rope import yarn_attention_factor
from libsym.errors import Invalid

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Family:
    """Constants of one architecture of transformers."""

    name: str
    defaults: Json
    """Defaults of the keys of `config.json`, from the configuration class in transformers."""
    terms: Json = field(default_factory=dict)
    """Fields of `ModelConfig` that the architecture fixes."""
    gemma: bool = False
    """Whether the file stores each norm minus 1, embeddings are scaled, and the activation is GELU."""


_GEMMA: Json = {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA_2: Json = {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", {}),
    "MistralForCausalLM": _Family("mistral", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": _Family("qwen2", {"num_key_value_heads": 32, "sliding_window": 4096}, {"qkv_bias": True}),
    "Qwen3ForCausalLM": _Family(
        "qwen3", {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096}, {"qk_norm": True}
    ),
    "GemmaForCausalLM": _Family(
        "gemma", {**_GEMMA, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"}, gemma=True
    ),
    "Gemma2ForCausalLM": _Family(
        "gemma2",
        {**_GEMMA, **_GEMMA_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {"post_norms": True},
        gemma=True,
    ),
    "Gemma3ForCausalLM": _Family("gemma3", {**_GEMMA, **_GEMMA_2}, {"post_norms": True, "qk_norm": True}, gemma=True),
}

_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh",)

_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values of a key that have the same effect as its absence
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False, None),
}
_READ_OR_IDLE = frozenset(
    {
        *("num_attention_heads", "rms_norm_eps", "layer_types", "attention_dropout", "quantization_config"),
        *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    }
)
_READ_BY_FAMILY = {
    "mistral": {"sliding_window"},
    "qwen2": {"sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"},
    "qwen3": {"sliding_window", "use_sliding_window", "max_window_layers"},
    "gemma2": {
        *("sliding_window", "sliding_window_size", "query_pre_attn_scalar"),  # no code reads sliding_window_size
        *("attn_logit_softcapping", "final_logit_softcapping"),
    },
    "gemma3": {
        *("sliding_window", "query_pre_attn_scalar", "final_logit_softcapping"),
        *("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"),
    },
}
_TELLING = re.compile(
    "bias|norm|rope|rotary|window|softcap|expert|moe|sink|scal|multiplier|quant|lora|adapter|layer_types|attn|attention"
)
"""Pattern of keys that may change the results of a model. Most other keys are about training."""

_STRETCHED = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings")
_SCALING_KEYS = {  # rope_type -> keys that it may have
    "default": ("rope_type", "type", "rope_theta"),
    "linear": ("rope_type", "type", "rope_theta", "factor"),
    "llama3": (*_STRETCHED, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_STRETCHED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_QWEN = ("qwen2", "qwen3")

_ROPE_BUFFER = "rotary_emb.inv_freq"  # old checkpoints store this buffer; theta determines it


class _Config:
    """The values of `config.json`, by key. A value of the wrong type is an error that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json_object(path)
        match self.values.get("architectures"):
            case [str(architecture)] if architecture in _FAMILIES:
                self.family = _FAMILIES[architecture]
            case other:
                raise self.refuse("architectures", other)

    def get(self, key: str) -> Any:
        """Return the file's value of a key, or else the family's default."""
        return self.values.get(key, self.family.defaults.get(key))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or abs(value) >= 1 << 63:
            raise Invalid(f"{self.path}: {key} is {str(value)[:40]}, a whole number is needed")
        return value

    def number(self, key: str, default: float | None, within: Mapping[str, Any] | None = None) -> float:
        value: Any = self.get(key) if within is None else within.get(key)
        value = default if value is None else value
        if type(value) not in {int, float} or abs(value) > 1e300:  # float() fails on a larger int
            raise Invalid(f"{self.path}: {key} is {str(value)[:40]}, a number is needed")
        return float(value)

    def refuse(self, key: str, value: Any) -> Invalid:
        return Invalid(
            f"{self.path}: {key} = {str(value)[:80]} is not supported: this release runs plain Llama, Mistral, Qwen2, "
            "Qwen3, Gemma, Gemma 2 and Gemma 3 (text) models"
        )


def read_huggingface(directory: Path) -> Checkpoint:
    """Return the checkpoint in a directory. Invalid: the model has a feature that this release lacks."""
    raw = _Config(directory / "config.json")
    config = _read_config(raw, directory.resolve().name)
    quantization = read_quantization(raw.values, raw.path)
    named: Mapping[str, Tensor]
    if quantization is None:
        named = read_checkpoint_tensors(directory)
    else:
        known = frozenset(name for name, _ in tensor_shapes(config))
        named = quantization.matrices(read_checkpoint_tensors(directory, QUANTIZED_TYPES), known)
    tensors = {
        _usual_name(name, config): stored
        for name, stored in named.items()
        if not name.endswith(_ROPE_BUFFER) and not (config.tie_embeddings and name == HEAD)
    }
    return Checkpoint(directory, config, tensors, interleaved_rope=False, norms_without_one=raw.family.gemma)


def _read_config(raw: _Config, name: str) -> ModelConfig:
    _refuse_extras(raw)
    hidden_size, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    head_dim = raw.integer("head_dim", hidden_size // num_heads if num_heads else 0)
    num_layers, max_positions = raw.integer("num_hidden_layers"), raw.integer("max_position_embeddings")
    theta, local_theta, scaling = _rope(raw, max_positions)
    window, sliding_layers = _window(raw, num_layers)
    score_scalar = raw.number("query_pre_attn_scalar", float(head_dim))
    if not 0 < score_scalar < float("inf"):
        raise raw.refuse("query_pre_attn_scalar", score_scalar)
    config = ModelConfig(
        name=name,
        architecture=raw.family.name,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        ffn_size=raw.integer("intermediate_size"),
        rope_theta=theta,
        rms_eps=raw.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tie_embeddings=raw.get("tie_word_embeddings") is True,
        activation="gelu_tanh" if raw.family.gemma else "silu",
        embed_scale=gemma_embed_scale(hidden_size) if raw.family.gemma else 1.0,
        attn_scale=0.0 if score_scalar == head_dim else score_scalar**-0.5,
        attn_softcap=_softcap(raw, "attn_logit_softcapping"),
        final_softcap=_softcap(raw, "final_logit_softcapping"),
        window=window,
        sliding_layers=sliding_layers,
        rope_scaling=scaling,
        local_rope_theta=local_theta,
        **raw.family.terms,
    )
    return check_config(config, raw.path)


def gemma_embed_scale(hidden_size: int) -> float:
    """Return Gemma's scale of embeddings: the square root of the hidden size, in float32 as transformers rounds it."""
    return float(np.float32(max(hidden_size, 0) ** 0.5))


def _refuse_extras(raw: _Config) -> None:
    read = _READ_BY_FAMILY.get(raw.family.name, set()) | _READ_OR_IDLE
    for key, neutral in (_NEUTRAL | _activations(raw.family)).items():
        if key in raw.values and key not in read and raw.values[key] not in neutral:
            raise raw.refuse(key, raw.values[key])
    for key, value in raw.values.items():
        if value and key not in read and key not in _NEUTRAL and _TELLING.search(key):
            raise raw.refuse(key, value)


def _activations(family: _Family) -> dict[str, tuple[Any, ...]]:
    """Return the values that each activation key may have.

    In Gemma's first configurations, `gelu` means the tanh approximation of GELU.
    """
    if not family.gemma:
        return {"hidden_act": _SILU}
    return {"hidden_act": (*_GELU_TANH, "gelu", None), "hidden_activation": (*_GELU_TANH, None)}


def _softcap(raw: _Config, key: str) -> float:
    cap = raw.number(key, 0.0)
    if not 0 <= cap < float("inf"):
        raise raw.refuse(key, cap)
    return cap


def _window(raw: _Config, num_layers: int) -> tuple[int, tuple[bool, ...]]:
    """Return the window, and for each layer whether the layer slides."""
    sliding = _sliding_layers(raw, min(max(num_layers, 0), 1 << 12))
    if not any(sliding):
        return 0, ()
    window = raw.integer("sliding_window")
    if not 1 <= window < 1 << 31:
        raise raw.refuse("sliding_window", window)
    return window, sliding


def _sliding_layers(raw: _Config, num_layers: int) -> tuple[bool, ...]:
    usual = _usual_sliding_layers(raw, num_layers)
    types = raw.values.get("layer_types")
    if types is None:
        return usual
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in kinds for kind in types):
        raise raw.refuse("layer_types", types)
    sliding = tuple(kind == "sliding_attention" for kind in types)
    # In Gemma 2 and 3, `layer_types` may choose any layers. In Qwen, `layer_types` may choose any layers only if the
    # other keys make some layers slide. In the other families, `layer_types` must agree with the other keys.
    if sliding != usual and not (raw.family.name in {"gemma2", "gemma3"} or (raw.family.name in _QWEN and any(usual))):
        raise raw.refuse("layer_types", types)
    return sliding


def _usual_sliding_layers(raw: _Config, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer slides, as all keys except `layer_types` imply."""
    match raw.family.name:
        case "mistral":
            return (raw.get("sliding_window") is not None,) * num_layers
        case "qwen2" | "qwen3" if raw.values.get("use_sliding_window") is True and raw.get("sliding_window"):
            first = raw.integer("max_window_layers", 28)
            return tuple(layer >= first for layer in range(num_layers))
        case "gemma2":
            return tuple(layer % 2 == 0 for layer in range(num_layers))
        case "gemma3":
            every = raw.integer("sliding_window_pattern", 6)
            if every < 1:
                raise raw.refuse("sliding_window_pattern", every)
            return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    return (False,) * num_layers


def _rope(raw: _Config, max_positions: int) -> tuple[float, float, RopeScaling | None]:
    """Return theta, the theta of sliding layers (0: the same theta) and the scaling.

    Files have the keys `rope_theta` and `rope_scaling` at the top level. Files of transformers 5 have
    `rope_parameters`.
    """
    scaling, parameters = (_dictionary(raw, key) for key in ("rope_scaling", "rope_parameters"))
    if scaling and parameters:
        raise raw.refuse("rope_scaling and rope_parameters", scaling)
    if raw.family.name != "gemma3":
        theta = raw.number("rope_theta", 10_000.0)
        rope = scaling or parameters
        return raw.number("rope_theta", theta, rope), 0.0, _scaling(raw, rope, max_positions)
    if parameters.keys() - {"full_attention", "sliding_attention"}:
        raise raw.refuse("rope_parameters", parameters)
    theta, local_theta = raw.number("rope_theta", 1_000_000.0), raw.number("rope_local_base_freq", 10_000.0)
    whole = scaling or _dictionary(raw, "full_attention", parameters)
    local = _dictionary(raw, "sliding_attention", parameters)
    if _scaling(raw, local, max_positions) is not None:
        raise raw.refuse("rope_parameters", parameters)
    local_theta = raw.number("rope_theta", local_theta, local)
    if not local_theta > 0:
        raise raw.refuse("the sliding layers' rope_theta", local_theta)
    return raw.number("rope_theta", theta, whole), local_theta, _scaling(raw, whole, max_positions)


def _dictionary(raw: _Config, key: str, within: Json | None = None) -> Json:
    value = (raw.values if within is None else within).get(key)
    if value is not None and not isinstance(value, dict):
        raise raw.refuse(key, value)
    return value or {}


def _scaling(raw: _Config, rope: Json, max_positions: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALING_KEYS:
        raise raw.refuse("rope_type", kind)
    for key, value in rope.items():
        if key not in _SCALING_KEYS[kind] and (key, value) != ("partial_rotary_factor", 1) and value is not None:
            raise raw.refuse(f"{kind} RoPE with {key}", value)
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings", max_positions)
    original = raw.values.get("original_max_position_embeddings", original)
    if type(original) is not int:
        raise raw.refuse("original_max_position_embeddings", original)
    stretched = max_positions / original if kind == "yarn" and original else None
    factor = raw.number("factor", stretched, rope)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = (raw.number(f"{which}_freq_factor", None, rope) for which in ("low", "high"))
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    mscales = [raw.number(key, 0.0, rope) for key in ("mscale", "mscale_all_dim")]
    if min(mscales) < 0:
        raise raw.refuse("yarn RoPE with mscale", min(mscales))
    usual = yarn_attention_factor(factor, *mscales)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=raw.number("beta_fast", 32.0, rope) or 32.0,
        beta_slow=raw.number("beta_slow", 1.0, rope) or 1.0,
        truncate=rope.get("truncate", True) is not False,
        attention_factor=raw.number("attention_factor", usual, rope),
    )


def _usual_name(name: str, config: ModelConfig) -> str:
    """Return a tensor's name in `decoder.checkpoints.llama.LAYER_TENSORS`, where each name has one meaning."""
    if not config.post_norms:
        return name
    if name.endswith(".post_attention_layernorm.weight"):
        return name.replace("post_attention_layernorm", "post_attention_norm")
    return name.replace(".pre_feedforward_layernorm.weight", ".post_attention_layernorm.weight")
