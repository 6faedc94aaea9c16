"""The model families, as transformers configures small models of them."""

from typing import Any

import numpy as np

from tests.decoder.small_checkpoints import VOCAB_SIZE, small_model

DEFAULT = {"rope_type": "default", "rope_theta": 50_000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA_3 = {**YARN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ALL_OF_YARN = {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
}
SMALL_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
FULL, SLIDING = "full_attention", "sliding_attention"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": DEFAULT}),
    "llama, tied, wide heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn, everything said": ("Llama", {"rope_parameters": ALL_OF_YARN}),
    "yarn, a factor for attention": ("Qwen3", {"rope_parameters": {**YARN, "attention_factor": 0.8}, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 24}),
    "gemma2, small caps": ("Gemma2", {"head_dim": 16, "sliding_window": 33, **SMALL_CAPS}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 20, "num_hidden_layers": 7, "rope_parameters": GEMMA_3_ROPE},
    ),
    "gemma3, own layer types": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": [FULL, SLIDING, SLIDING],
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 9,
        },
    ),
}
TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 90).tolist()
PIECES = [(90,), (1, 16, 40, 1, 1, 31)]


def model_of(case: str, **changes: Any) -> Any:
    family, shape = CASES[case]
    return small_model(family, **{**shape, **changes})


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() < 3e-5 * np.abs(expected).max()
