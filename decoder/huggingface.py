"""What a Hugging Face checkpoint's `config.json` says about a Llama-family model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decoder.config import ModelConfig
from decoder.jsonfile import read_json_object
from decoder.llama import HEAD, Checkpoint, check_config
from decoder.safetensors import read_checkpoint_tensors
from libsym.errors import Invalid

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_MISTRAL_WINDOW = 4096  # transformers' default where a Mistral config.json does not say

_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values with which a key changes nothing; absent is neutral too
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
_ROPE_BUFFER = "rotary_emb.inv_freq"  # old checkpoints saved it; it follows from theta


class _Config:
    """`config.json`, asked by key; wrong types are errors that name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json_object(path)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int:
            raise Invalid(f"{self.path}: {key} is {str(value)[:40]}, a whole number is needed")
        return value

    def number(self, key: str, default: float, within: dict[str, Any] | None = None) -> float:
        value = (self.values if within is None else within).get(key, default)
        if type(value) not in {int, float} or abs(value) > 1e300:  # a larger int is no float
            raise Invalid(f"{self.path}: {key} is {str(value)[:40]}, a number is needed")
        return float(value)

    def refuse(self, key: str, value: Any) -> Invalid:
        return Invalid(
            f"{self.path}: {key} = {str(value)[:80]} is not supported: this release runs plain Llama and Mistral models"
        )


def read_huggingface(directory: Path) -> Checkpoint:
    """The checkpoint in a directory; anything that this release would leave out is an error."""
    config = _read_config(directory)
    tensors = {
        name: stored
        for name, stored in read_checkpoint_tensors(directory).items()
        if not name.endswith(_ROPE_BUFFER) and not (config.tie_embeddings and name == HEAD)
    }
    return Checkpoint(directory, config, tensors, interleaved_rope=False)


def _read_config(directory: Path) -> ModelConfig:
    raw = _Config(directory / "config.json")
    match raw.values.get("architectures"):
        case [str(architecture)] if architecture in _ARCHITECTURES:
            pass
        case other:
            raise raw.refuse("architectures", other)
    for key, neutral in _NEUTRAL.items():
        if key in raw.values and raw.values[key] not in neutral:
            raise raw.refuse(key, raw.values[key])
    hidden_size, num_heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    config = ModelConfig(
        name=directory.resolve().name,
        architecture=architecture.removesuffix("ForCausalLM").lower(),
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.integer("num_key_value_heads", num_heads),
        head_dim=raw.integer("head_dim", hidden_size // num_heads if num_heads else 0),
        ffn_size=raw.integer("intermediate_size"),
        rope_theta=_rope_theta(raw),
        rms_eps=raw.number("rms_norm_eps", 1e-6),
        max_positions=raw.integer("max_position_embeddings"),
        tie_embeddings=raw.values.get("tie_word_embeddings", False) is True,
    )
    _refuse_window(raw, config)
    return check_config(config, raw.path)


def _rope_theta(raw: _Config) -> float:
    """From `rope_theta` and `rope_scaling` at the top, or from transformers 5's `rope_parameters`."""
    theta = raw.number("rope_theta", 10_000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise raw.refuse(key, rope)
        theta = raw.number("rope_theta", theta, rope)
    return theta


def _refuse_window(raw: _Config, config: ModelConfig) -> None:
    if config.architecture != "mistral":
        return
    window = raw.values.get("sliding_window", _MISTRAL_WINDOW)
    if window is not None and not (type(window) is int and window >= config.max_positions):
        raise raw.refuse("sliding_window", window)
