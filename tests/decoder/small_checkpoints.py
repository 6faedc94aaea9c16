"""Small checkpoints of both kinds, written by the libraries that others write theirs with."""

import gc
import json
from functools import cache
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from decoder.batch import Chunk, StepBatch
from decoder.checkpoints.stored import StoredTensor
from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model
from decoder.text.codecs import BYTE_ALPHABET
from decoder.tiny import random_weights, tiny_config

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "Ġ 1", "Ġ Ġ"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_vocabulary() -> list[str]:
    """Return special tokens, the 256 bytes, and the products of a few merges."""
    return [*SPECIALS, *BYTE_ALPHABET.values(), *(merge.replace(" ", "") for merge in MERGES)]


VOCAB_SIZE = len(small_vocabulary())
CONFIG = tiny_config(vocab_size=VOCAB_SIZE, tie_embeddings=False)


def small_library() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(small_vocabulary())}
    library = Tokenizer(
        models.BPE(vocabulary, [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return library


def interleave(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    halves = matrix.reshape(num_heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def as_gguf(arrays: dict[str, np.ndarray], architecture: str, num_layers: int, *heads: int) -> dict[str, np.ndarray]:
    """Tensors of a Hugging Face checkpoint as llama.cpp's converter writes them; `heads` are those of Q and of K."""
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, tensors = gguf.get_tensor_name_map(kind, num_layers), dict[str, np.ndarray]()
    for name, array in arrays.items():
        key = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        tensors[key] = array + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else array
        for part, count in zip(("q_proj", "k_proj"), heads, strict=True):
            if architecture == "llama" and part in name:
                tensors[key] = interleave(array, count)
    return tensors


def gguf_tensors(config: Any = CONFIG, weights: Weights | None = None) -> dict[str, np.ndarray]:
    weights = random_weights(config) if weights is None else weights
    arrays = {name: weights.read(name) for name in weights.names()}
    return as_gguf(arrays, "llama", config.num_layers, config.num_heads, config.num_kv_heads)


def gguf_metadata(config: Any = CONFIG) -> dict[str, Any]:
    tokens = small_vocabulary()
    return {
        "general.name": "small",
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.ffn_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    encoding: str = "F32",
    architecture: str = "llama",
) -> Path:
    """A GGUF file; matrices are quantised to `encoding`, vectors stay float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (gguf_metadata() if metadata is None else metadata).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    kind = gguf.GGMLQuantizationType[encoding]
    for name, array in (gguf_tensors() if tensors is None else tensors).items():
        if array.ndim == 1 or encoding == "F32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- Hugging Face

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
    # Large weights, so that attention and logits are far from uniform.
    "initializer_range": 0.2,
}


@cache
def of_transformers(name: str) -> Any:
    """Return a class of transformers. The import takes seconds, and few runs have the tests that need it."""
    found = getattr(import_module("transformers"), name)
    gc.freeze()  # otherwise each full collection of garbage looks at the library's objects, which takes 0.1 s
    return found


def small_model(family: str, **shape: Any) -> Any:
    """A model of transformers; windows, caps and scalings are to be so small that they matter in a few tokens."""
    config_class = of_transformers(f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**{**SHAPE, **shape}, attn_implementation="eager")
    model_class = of_transformers(f"{family}ForCausalLM")
    torch.manual_seed(4)
    model = model_class(config).eval()
    with torch.no_grad():  # norms and biases that are not the usual ones and zeros
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def save(directory: Path, model: Any, shard_bytes: str = "1GB") -> Path:
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    small_library().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def copied(source: Path, target: Path, **changes: Any) -> Path:
    """A checkpoint with other keys in its configuration; None removes one."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    values = {**json.loads((target / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return target


def converted(theirs: Any, path: Path, **extra: Any) -> Path:
    """A GGUF file of a model of transformers, as llama.cpp's converter writes it, with what it says beyond sizes."""
    config = theirs.config
    architecture = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    arrays = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}
    heads = config.num_attention_heads, config.num_key_value_heads
    tensors = as_gguf(arrays, architecture, config.num_hidden_layers, *heads)
    if config.rope_parameters.get("rope_type") == "llama3":
        plain = 10_000.0 ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        tensors["rope_freqs.weight"] = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10_000.0,
    }
    if getattr(config, "head_dim", None):
        sizes |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    metadata = {key: value for key, value in gguf_metadata().items() if not key.startswith("llama.")}
    metadata |= {f"{architecture}.{key}": value for key, value in {**sizes, **extra}.items()}
    return write_gguf(path, metadata, tensors, architecture=architecture)


def values_of(stored: StoredTensor) -> np.ndarray:
    out = np.empty(stored.shape, np.float32)
    stored.read_into(out)
    return out


# ---- logits


def logits_of(model: Model, tokens: list[int], *pieces: int, backend: Any = CpuDecoder) -> np.ndarray:
    """Every row's logits of a prompt that goes through a decoder in pieces; by default at once."""
    num_pages = -(-len(tokens) // 32)
    decoder = backend(model.config, model.weights, Arena(model.config, num_pages))
    out: Any = np.empty((len(tokens), model.config.vocab_size), np.float32)
    for start, end in pairwise(accumulate(pieces or [len(tokens)], initial=0)):
        places = np.arange(start, end, dtype=np.int32)
        rows: Any = tuple(memoryview(row) for row in out[start:end])
        chunk = Chunk(np.array(tokens[start:end], np.int32), places, np.arange(num_pages, dtype=np.int32), start, rows)
        decoder.step(StepBatch((chunk,)))
    decoder.close()
    return out


def expected_logits(theirs: Any, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return theirs(torch.tensor([tokens])).logits[0].numpy()
