"""The reference is compared with transformers' own Llama, so that the CPU step may be compared with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.model_config import ModelConfig
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid
from tests.decoder.bench import Call
from tests.decoder.reference import ReferenceDecoder


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
    state = {name: torch.from_numpy(weights.read(name)) for name in weights.names()}
    missing = model.load_state_dict(state, strict=False)
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


@pytest.mark.parametrize("shape", [{}, {"qkv_bias": True, "qk_norm": True, "post_norms": True, "attn_softcap": 5.0}])
def test_a_masked_entry_is_as_if_it_were_not_there(reference_bench, shape):
    bench = reference_bench(**shape)
    prompt, first, second, third = list(range(40)), 50, 60, 70
    _, plain = bench.prefill([*prompt, second, third])
    file, _ = bench.prefill(prompt, reserve=3)
    mask = np.ones((3, 43), dtype=np.bool_)
    mask[1:, 40] = False
    # Two branches in one file: the second one's entries have the positions that they would have alone.
    (branches,) = bench.step(Call(file, [first, second, third], positions=[40, 40, 41], mask=mask))
    assert np.abs(branches[1:] - plain[40:]).max() < 1e-4
    (unmasked,) = bench.step(Call(bench.prefill(prompt, reserve=3)[0], [first, second, third]))
    assert np.abs(unmasked[0] - branches[0]).max() == 0
    assert np.abs(unmasked[1:] - branches[1:]).max() > 1e-2


def test_what_a_mask_says_of_later_entries_changes_nothing(reference_bench):
    bench = reference_bench(window=7, sliding_layers=(True, False))
    tokens = list(range(30))
    (expected,) = bench.step(Call(bench.file(30), tokens))
    (got,) = bench.step(Call(bench.file(30), tokens, mask=np.ones((30, 30), dtype=np.bool_)))
    assert np.array_equal(got, expected)


def test_an_arena_of_another_type_is_refused():
    config = tiny_config()
    with pytest.raises(Invalid, match="give it an arena of F32, not BF16"):
        ReferenceDecoder(config, random_weights(config), Arena(config, 1, "BF16"))
