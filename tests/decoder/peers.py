"""Models of transformers around weights of our checkpoints, which are read once for both."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.decoder.small_checkpoints import of_transformers


def around(model_class: Any, config: Any, state: dict[str, torch.Tensor]) -> Any:
    """A model of these parameters, which it does not copy."""
    with torch.device("meta"):
        theirs = model_class(config)
    theirs.load_state_dict(state, strict=False, assign=True)
    theirs.tie_weights()
    # The frequencies of RoPE are computed, not loaded.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    assert not [name for name, parameter in theirs.named_parameters() if parameter.is_meta]
    return theirs.eval()


def gguf_state(reader: gguf.GGUFReader, kind: Any, num_layers: int, names: list[str]) -> dict[str, np.ndarray]:
    """Parameters by their names in transformers, as the gguf package reads them."""
    tensors = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    table = gguf.get_tensor_name_map(kind, num_layers)
    return {name: np.array(tensors[str(table.get_name(name, try_suffixes=(".weight",)))]) for name in names}


def llama_of(path: Path) -> Any:
    """A Llama with tied embeddings as transformers runs it, from the file as the gguf package reads it."""
    reader = gguf.GGUFReader(path)  # which takes seconds, for the vocabulary
    fields = {key: value.contents() for key, value in reader.fields.items() if key.startswith("llama.")}
    config = of_transformers("LlamaConfig")(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    model_class = of_transformers("LlamaForCausalLM")
    with torch.device("meta"):
        names = [name for name, _ in model_class(config).named_parameters()]
    state = gguf_state(reader, gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers, names)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, array in state.items():
        for part, num_heads in heads.items():
            if part in name:  # llama.cpp's order of rows
                state[name] = array.reshape(num_heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return around(model_class, config, {name: torch.from_numpy(array) for name, array in state.items()})
