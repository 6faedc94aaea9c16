"""The reference is compared with transformers' own Llama, so that the CPU step may be compared with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.config import ModelConfig
from decoder.tiny import random_weights, tiny_config
from decoder.weights import Weights


def peer_model(config: ModelConfig, weights: Weights) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    arrays = {"model.embed_tokens": weights.embed, "model.norm": weights.final_norm}
    if weights.head is not None:
        arrays["lm_head"] = weights.head
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        arrays[prefix + "input_layernorm"] = layer.attn_norm
        arrays[prefix + "post_attention_layernorm"] = layer.ffn_norm
        arrays |= {f"{prefix}self_attn.{name}_proj": getattr(layer, name) for name in "qkvo"}
        arrays |= {f"{prefix}mlp.{name}_proj": getattr(layer, name) for name in ("gate", "up", "down")}
    missing = model.load_state_dict({f"{k}.weight": torch.from_numpy(v) for k, v in arrays.items()}, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 96, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32, "tie_embeddings": False},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 80, "rope_theta": 100_000.0},
    ],
)
def test_the_reference_gives_the_logits_of_transformers(reference_bench, shape):
    config = tiny_config(**shape)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 150).tolist()
    _, logits = reference_bench(**shape).prefill(tokens, 64)
    with torch.inference_mode():
        expected = peer_model(config, random_weights(config, seed=7))(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
