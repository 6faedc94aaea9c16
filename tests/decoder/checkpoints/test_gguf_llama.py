"""GGUF files of every family beside transformers, what is read from them, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from decoder.checkpoints.gguf import read_gguf
from decoder.checkpoints.gguf_llama import read_gguf_llama
from decoder.model import load_model
from decoder.tiny import random_weights
from libsym.errors import Invalid
from tests.decoder.checkpoints.families import FULL, SLIDING, TOKENS, assert_close, model_of
from tests.decoder.small_checkpoints import (
    CONFIG,
    converted,
    expected_logits,
    gguf_metadata,
    gguf_tensors,
    logits_of,
    write_gguf,
)
from tests.decoder.test_model import assert_same_weights


def rope_of_gemma_3(local_theta: float, **whole: Any) -> dict[str, Any]:
    return {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": local_theta}}


LINEAR, WINDOW = {"rope.scaling.factor": 4.0}, "attention.sliding_window"
YARN = {**LINEAR, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 64}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA_3 = {"rope.freq_base": 100_000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
STRETCHED = rope_of_gemma_3(10_000.0, rope_type="linear", rope_theta=100_000.0, factor=8.0)
OWN_LOCAL = rope_of_gemma_3(500.0, rope_type="default", rope_theta=1e6)
FILES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # family, what else transformers' configuration is given, what the file says beyond sizes
    ("llama", {}, {"rope.freq_base": 50_000.0}),
    ("llama, tied, wide heads", {}, {}),
    ("llama 3", {}, {}),
    ("llama, linear", {}, {**LINEAR, "rope.scaling.type": "linear"}),
    ("llama, linear", {}, LINEAR),
    ("llama, yarn", {}, {**YARN, "rope.scaling.finetuned": True}),
    ("qwen2", {}, {}),
    ("qwen3", {}, {}),
    ("gemma", {}, {}),
    ("gemma2", {"query_pre_attn_scalar": 32}, {WINDOW: 20}),
    ("gemma2, small caps", {"query_pre_attn_scalar": 16}, {WINDOW: 33, **CAPS}),
    ("gemma3", {"query_pre_attn_scalar": 32, "rope_parameters": STRETCHED}, {WINDOW: 20, **GEMMA_3}),
    (
        "gemma3",
        {"query_pre_attn_scalar": 32, "rope_parameters": OWN_LOCAL},
        {WINDOW: 20, "rope.freq_base": 1e6, "rope.freq_base_swa": 500.0},
    ),
]


@pytest.mark.parametrize(("case", "shape", "extra"), FILES)
def test_a_file_of_a_family_gives_the_logits_of_transformers(tmp_path, case, shape, extra):
    theirs = model_of(case, **shape)
    model = load_model(str(converted(theirs, tmp_path / "small.gguf", **extra)))
    assert_close(logits_of(model, TOKENS), expected_logits(theirs, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_its_scores_by_hidden_size_over_heads(tmp_path, family, num_layers):
    theirs = model_of(family, num_hidden_layers=num_layers)
    large = load_model(str(converted(theirs, tmp_path / "large.gguf", **{WINDOW: 20}))).config
    assert large.score_scale == 16**-0.5
    assert dataclasses.replace(large, attn_scale=0.0).score_scale == 32**-0.5


def test_a_gemma_3_without_a_window_has_no_local_layers(tmp_path):
    config = load_model(str(converted(model_of("gemma3"), tmp_path / "a.gguf", **{WINDOW: 0}))).config
    assert (config.window, config.sliding_layers, config.local_rope_theta) == (0, (), 0.0)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_that_were_written(tmp_path, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, name="small")
    weights = random_weights(config)
    model = load_model(str(write_gguf(tmp_path / "a.gguf", gguf_metadata(config), gguf_tensors(config, weights))))
    assert model.config == config
    assert_same_weights(model.weights, weights)
    for name in weights.names():
        stored, order = model.weights.stored(name), model.weights.row_order(name)
        raw = np.empty(stored.shape, np.float32)
        stored.read_into(raw)
        assert (order is not None) == name.endswith(("q_proj.weight", "k_proj.weight"))
        assert np.array_equal(weights.read(name), raw if order is None else raw[order])
        assert model.weights.shape(name) == stored.shape


def test_a_file_without_optional_keys_gets_llama_cpps_defaults(tmp_path):
    metadata = gguf_metadata()
    for key in ("general.name", "llama.rope.freq_base", "llama.vocab_size", "llama.attention.head_count_kv"):
        del metadata[key]
    config = dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads)
    model = load_model(str(write_gguf(tmp_path / "plain.gguf", metadata, gguf_tensors(config))))
    assert model.config == dataclasses.replace(config, name="plain", rope_theta=10_000.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("files")
    paths = {case: converted(model_of(case), directory / f"{case}.gguf") for case in ("qwen2", "gemma2", "gemma3")}
    return {case: read_gguf(path) for case, path in {**paths, "llama": write_gguf(directory / "a.gguf")}.items()}


@pytest.mark.parametrize(
    ("case", "key", "value", "reason"),
    [
        ("llama", "rope.scaling.type", "longrope", r"llama\.rope\.scaling\.type = longrope is not"),
        ("llama", "rope.scaling.factor", float("nan"), "RoPE scaling that is impossible"),
        ("llama", "expert_count", 8, r"llama\.expert_count = 8 is not supported"),
        ("llama", WINDOW, 4096, r"sliding_window = 4096 is not supported"),
        ("llama", "attention.scale", 0.5, r"llama\.attention\.scale = 0\.5 is not supported"),
        ("llama", "rope.dimension_count", 8, "rope.dimension_count differs from the head dimension 16"),
        ("llama", "attention.value_length", 8, "value_length differs from the head dimension 16"),
        ("llama", "attention.head_count_kv", [2, 1], r"head_count_kv is '\[2, 1\]', not one whole number"),
        ("llama", "block_count", "two", "block_count is 'two', not one whole number"),
        ("llama", "attention.layer_norm_rms_epsilon", "x", "not one number"),
        ("llama", "block_count", None, r"the metadata has no llama\.block_count"),
        ("llama", "attention.head_count", 0, "heads = 0, which is impossible"),
        ("llama", "context_length", 1 << 31, "positions, which is impossible"),
        ("llama", "rope.freq_base", float("nan"), "RoPE theta = nan"),
        ("qwen2", "rope.scaling.type", "longrope", r"qwen2\.rope\.scaling\.type = longrope is not supported"),
        ("qwen2", WINDOW, 64, r"qwen2\.attention\.sliding_window = 64 is not supported"),
        ("qwen2", "rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier = 0.1 is not supported"),
        ("gemma3", "attn_logit_softcapping", 50.0, r"gemma3\.attn_logit_softcapping = 50\.0 is not supported"),
        ("gemma3", "rope.scaling.factor", float("inf"), "RoPE scaling that is impossible"),
        ("gemma2", WINDOW, -1, r"gemma2\.attention\.sliding_window"),
    ],
)
def test_metadata_that_would_change_the_results_is_refused(files, case, key, value, reason):
    metadata = {**files[case].metadata, f"{case}.{key}": value}
    file = dataclasses.replace(
        files[case], metadata={key: value for key, value in metadata.items() if value is not None}
    )
    with pytest.raises(Invalid, match=reason) as caught:
        read_gguf_llama(file)
    assert str(file.path) in str(caught.value)


def test_another_architecture_a_missing_layer_and_a_damaged_list_of_tokens_are_refused(tmp_path):
    with pytest.raises(Invalid, match="the architecture 'phi3' is not supported: llama, qwen2, qwen3, gemma"):
        load_model(str(write_gguf(tmp_path / "a.gguf", architecture="phi3")))
    for change, reason in (
        ({"llama.block_count": 3}, r"model\.layers\.2\..* is missing"),
        ({"tokenizer.ggml.tokens": "all"}, "not a list of strings"),
    ):
        with pytest.raises(Invalid, match=reason):
            load_model(str(write_gguf(tmp_path / "a.gguf", gguf_metadata() | change)))


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("blk.0.attn_q.bias", np.zeros(64), r"'blk\.0\.attn_q\.bias' is not supported"),
        ("blk.0.attn_sinks.weight", np.ones(4), r"'blk\.0\.attn_sinks\.weight' is not supported"),
        ("blk.01.attn_q.weight", np.ones((64, 64)), r"'blk\.01\.attn_q\.weight' is not supported"),
        ("blk.1.ffn_up.weight", None, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ("token_embd.weight", None, r"no two-dimensional token_embd\.weight"),
        ("blk.1.ffn_up.weight", np.ones((128, 32)), r"blk\.1\.ffn_up\.weight has the shape \[128, 32\]"),
        ("rope_freqs.weight", np.ones(7), "RoPE scaling that is impossible"),
        ("rope_freqs.weight", np.array([1.0] * 7 + [0.0]), "RoPE scaling that is impossible"),
        ("rope_freqs.weight", np.array([1.0] * 7 + [np.nan]), "not finite"),
    ],
)
def test_tensors_that_do_not_make_a_llama_are_refused(tmp_path, name, array, reason):
    tensors = {other: tensor for other, tensor in gguf_tensors().items() if other != name}
    tensors |= {} if array is None else {name: array.astype(np.float32)}
    with pytest.raises(Invalid, match=reason):
        load_model(str(write_gguf(tmp_path / "a.gguf", tensors=tensors)))


@pytest.mark.parametrize(
    ("name", "array"),
    [("blk.1.ffn_norm.weight", np.full(64, np.nan)), ("blk.1.attn_q.weight", np.full((64, 64), np.inf))],
)
def test_values_that_are_not_finite_are_an_error_when_they_are_read(tmp_path, name, array):
    tensors = {**gguf_tensors(), name: array.astype(np.float32)}
    model = load_model(str(write_gguf(tmp_path / "a.gguf", tensors=tensors)))
    with pytest.raises(Invalid, match=rf"a\.gguf: tensor {name} holds values that are not finite"):
        logits_of(model, [1])


def test_one_value_changed_anywhere_near_the_ends_changes_the_fingerprint(tmp_path):
    identities = [load_model(str(write_gguf(tmp_path / "a.gguf"))).identity]
    for name, at in (("blk.1.ffn_down.weight", -1), ("token_embd.weight", 0), ("blk.0.attn_norm.weight", 5)):
        changed = gguf_tensors()[name].copy()
        changed.reshape(-1)[at] += 1
        path = write_gguf(tmp_path / "a.gguf", tensors={**gguf_tensors(), name: changed})
        identities.append(load_model(str(path)).identity)
    assert len({identity["model"] for identity in identities}) == 4
    assert len({identity["tokenizer"] for identity in identities}) == 1
