"""What a GGUF file says about a Llama-family model: its configuration, and its tensors by their usual names."""

from __future__ import annotations

from decoder.config import ModelConfig
from decoder.gguf import GgufFile, Value
from decoder.llama import EMBED, FINAL_NORM, HEAD, Checkpoint, check_config, layer_name
from libsym.errors import Invalid

_LAYER_FIELDS = {  # name in a GGUF block -> field of LayerWeights
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_TOP_LEVEL = {"token_embd.weight": EMBED, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}

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
        "vocab_size",
    }
)
_NEUTRAL: dict[str, tuple[Value, ...]] = {  # values with which a key changes nothing
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
}


def read_gguf_llama(file: GgufFile) -> Checkpoint:
    """The checkpoint in a GGUF file; anything that this release would leave out is an error."""
    architecture = file.text("general.architecture")
    if architecture != "llama":
        raise Invalid(
            f"{file.path}: the architecture {architecture[:40]!r} is not supported: this release runs 'llama'"
        )
    _refuse_extras(file)
    # The fast lookup of a vocabulary's size is the embedding's: `llama.vocab_size` is often missing.
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise Invalid(f"{file.path}: has no two-dimensional token_embd.weight: the checkpoint is incomplete")
    num_heads, hidden_size = file.integer("llama.attention.head_count"), file.integer("llama.embedding_length")
    head_dim = file.integer("llama.attention.key_length", hidden_size // num_heads if num_heads else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.integer(f"llama.{key}", head_dim) != head_dim:
            raise Invalid(f"{file.path}: llama.{key} differs from the head dimension {head_dim}: this is not supported")
    config = ModelConfig(
        name=file.text("general.name", file.path.stem),
        architecture="llama",
        vocab_size=file.integer("llama.vocab_size", embedding.shape[0]),
        hidden_size=hidden_size,
        num_layers=file.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=file.integer("llama.feed_forward_length"),
        rope_theta=file.number("llama.rope.freq_base", 10_000.0),
        rms_eps=_as_written(file.number("llama.attention.layer_norm_rms_epsilon")),
        max_positions=file.integer("llama.context_length"),
        tie_embeddings="output.weight" not in file.tensors,
    )
    tensors = {_usual_name(name): stored for name, stored in file.tensors.items()}
    return Checkpoint(file.path, check_config(config, file.path), tensors, interleaved_rope=True)


def _refuse_extras(file: GgufFile) -> None:
    for key, value in file.metadata.items():
        section, _, name = key.partition(".")
        if section != "llama" or name in _READ_KEYS or value in _NEUTRAL.get(name, ()):
            continue
        raise Invalid(f"{file.path}: {key} = {str(value)[:40]} is not supported: this release runs plain Llama models")


def _usual_name(name: str) -> str:
    """The Hugging Face name of a tensor, or its own where it has none."""
    match name.split("."):
        case ["blk", number, part, "weight"] if number.isascii() and number.isdigit() and part in _LAYER_FIELDS:
            return layer_name(int(number), _LAYER_FIELDS[part]) if str(int(number)) == number else name
    return _TOP_LEVEL.get(name, name)


def _as_written(value: float) -> float:
    """A float32 of the file as the decimal that its author wrote: 1e-05, not 9.99999974738e-06."""
    return float(f"{value:.7g}")
