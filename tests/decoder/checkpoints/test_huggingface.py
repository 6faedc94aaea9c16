"""Model families beside transformers' own classes, in float32, from the checkpoints that they save; and refusals."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder.checkpoints.llama import HEAD
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import load_model
from libsym.errors import Invalid, NotFound
from tests.decoder.checkpoints.families import (
    CASES,
    FULL,
    GEMMA_3_ROPE,
    LINEAR,
    LLAMA_3,
    PIECES,
    SLIDING,
    TOKENS,
    YARN,
    assert_close,
    model_of,
)
from tests.decoder.reference import ReferenceDecoder
from tests.decoder.small_checkpoints import (
    SHAPE,
    VOCAB_SIZE,
    copied,
    expected_logits,
    logits_of,
    of_transformers,
    save,
    small_model,
)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint, and the logits that transformers gives for TOKENS."""

    directory: Path
    logits: np.ndarray


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def get(case: str) -> Saved:
        if case not in made:
            model = model_of(case)
            made[case] = Saved(save(tmp_path_factory.mktemp("family"), model), expected_logits(model, TOKENS))
        return made[case]

    return get


@pytest.mark.parametrize("backend", [ReferenceDecoder, CpuDecoder])
@pytest.mark.parametrize("case", CASES)
def test_a_family_gives_the_logits_of_transformers(saved, case, backend):
    model = load_model(str(saved(case).directory))
    for pieces in PIECES:
        assert_close(logits_of(model, TOKENS, *pieces, backend=backend), saved(case).logits)


OLD_NAMES: dict[str, dict[str, Any]] = {  # the same, as checkpoints older than transformers 5 say it
    "llama": {"rope_theta": 50_000, "rope_scaling": None},
    "llama 3": {"rope_theta": 10_000.0, "rope_scaling": {k: v for k, v in LLAMA_3.items() if k != "rope_theta"}},
    "llama, linear": {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma3": {
        "rope_theta": 100_000.0,
        "rope_local_base_freq": 1_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": None,
        "sliding_window_pattern": 6,
    },
    "gemma2": {"layer_types": None, "rope_theta": 10_000.0, "hidden_act": "gelu_pytorch_tanh"},
    "gemma": {"hidden_act": "gelu", "hidden_activation": None, "tie_word_embeddings": None, "rope_theta": 10_000.0},
    "qwen2, window": {"layer_types": None, "rope_theta": 10_000.0},
}


@pytest.mark.parametrize("case", OLD_NAMES)
def test_a_configuration_older_than_transformers_5_says_the_same(saved, tmp_path, case):
    directory = saved(case).directory
    changes = {"rope_parameters": None, "_sliding_window_pattern": None, **OLD_NAMES[case]}
    old, new = load_model(str(copied(directory, tmp_path, **changes))), load_model(str(directory))
    assert old.config == dataclasses.replace(new.config, name=old.config.name)
    assert old.identity == new.identity


def test_a_mistral_that_names_no_window_has_transformers_default(saved, tmp_path):
    directory = copied(saved("llama").directory, tmp_path, architectures=["MistralForCausalLM"])
    assert load_model(str(directory)).config.window == 4096


@pytest.mark.parametrize(
    ("dtype", "shard_bytes", "tied"),
    [(torch.float32, "1GB", True), (torch.float16, "60KB", False), (torch.bfloat16, "60KB", True)],
)
def test_a_checkpoint_of_any_type_whole_or_in_shards_gives_transformers_logits(tmp_path, dtype, shard_bytes, tied):
    save(tmp_path, small_model("Llama", tie_word_embeddings=tied).to(dtype), shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == "60KB")
    model = load_model(str(tmp_path))
    # Read back by them: `.to(bfloat16)` has rounded the frequencies of RoPE too, in the model but not in the file.
    theirs = of_transformers("LlamaForCausalLM").from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_close(logits_of(model, TOKENS), expected_logits(theirs, TOKENS))
    assert (HEAD not in model.weights) == tied
    assert model.tokenizer.chat_template([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
    assert 2 in model.tokenizer.eos_ids


def test_the_fingerprint_is_the_same_for_another_name_and_other_shards(tmp_path):
    one, many = save(tmp_path / "one", small_model("Llama")), save(tmp_path / "many", small_model("Llama"), "60KB")
    assert load_model(str(one)).identity == load_model(str(many)).identity
    (tmp_path / "other").mkdir()
    other = copied(one, tmp_path / "other", rms_norm_eps=1e-3)
    assert load_model(str(other)).identity["model"] != load_model(str(many)).identity["model"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_missing_or_cut_is_named(saved, tmp_path, file):
    directory = copied(saved("llama").directory, tmp_path)
    whole = (directory / file).read_bytes()
    (directory / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Invalid, match=file):
        load_model(str(directory))
    (directory / file).unlink()
    with pytest.raises(NotFound, match=file):
        load_model(str(directory))


UNSUPPORTED: list[tuple[str, str, Any]] = [
    ("llama", "attention_bias", True),
    ("qwen3", "attention_bias", True),
    ("qwen2", "mlp_bias", True),
    ("mistral", "hidden_act", "gelu"),
    ("gemma", "hidden_act", "relu"),
    ("gemma2", "hidden_activation", "silu"),
    ("gemma3", "use_bidirectional_attention", True),
    ("gemma3", "attn_logit_softcapping", 50.0),
    ("gemma2", "attn_logit_softcapping", -1.0),
    ("gemma2", "query_pre_attn_scalar", 0.0),
    ("gemma2", "sliding_window", 0),
    ("gemma2", "layer_types", [FULL]),
    ("gemma3", "layer_types", [FULL] * 6 + ["chunked_attention"]),
    ("qwen2", "layer_types", [SLIDING] * 3),
    ("llama", "layer_types", [SLIDING] * 3),
    ("llama", "sliding_window", 64),
    ("llama", "num_local_experts", 8),
    ("llama", "logits_scaling", 8.0),
    ("qwen3", "attention_sinks", True),
    ("mistral", "partial_rotary_factor", 0.5),
    ("llama", "architectures", ["PhiForCausalLM"]),
    ("qwen2", "architectures", ["Qwen2MoeForCausalLM"]),
    ("gemma3", "architectures", ["Gemma3ForConditionalGeneration"]),
    ("llama", "architectures", None),
    ("llama", "rope_parameters", 7),
    ("gemma3", "rope_parameters", LINEAR),
]
IMPOSSIBLE = [
    {**LLAMA_3, "low_freq_factor": 4.0},
    {**LINEAR, "factor": 0.0},
    {**YARN, "original_max_position_embeddings": 0},
    {**YARN, "original_max_position_embeddings": 10**400},
    {**YARN, "factor": 1e-200},
    {**YARN, "beta_slow": 1e-200},
    {**YARN, "beta_fast": 0.5},
]
ROPE: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_type = dynamic is not supported"),
    ({"rope_type": "longrope", "long_factor": [1.0]}, "rope_type = longrope is not supported"),
    ({"rope_type": ["linear"]}, "rope_type = .* is not supported"),
    ({**LLAMA_3, "surprise": 1}, "llama3 RoPE with surprise = 1 is not supported"),
    ({**LLAMA_3, "low_freq_factor": None}, "low_freq_factor is None, a number is needed"),
    ({**LLAMA_3, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not"),
    ({"rope_theta": 0}, "RoPE theta = 0.0, which is impossible"),
    ({"rope_theta": float("nan")}, "RoPE theta = nan, which is impossible"),
    (GEMMA_3_ROPE, "default RoPE with full_attention .* is not supported"),
]
LLAMA, QWEN_2, QWEN_3 = (["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"])
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((case, {key: value}, re.escape(f"{key} = {value!s:.80} is not supported")) for case, key, value in UNSUPPORTED),
    *(("llama", {"rope_parameters": rope}, "RoPE scaling that is impossible") for rope in IMPOSSIBLE),
    *(("llama", {"rope_parameters": rope}, reason) for rope, reason in ROPE),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters = .* is not"),
    ("gemma3", {"rope_parameters": {SLIDING: LINEAR}}, "rope_parameters = .* is not supported"),
    ("gemma3", {"rope_parameters": {SLIDING: {"rope_theta": 0}}}, "sliding layers' rope_theta = 0.0 is not supported"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0 is not supported"),
    ("gemma2", {"sliding_window": "wide"}, "sliding_window is wide, a whole number is needed"),
    ("llama", {"hidden_size": "many"}, "hidden_size is many, a whole number is needed"),
    ("mistral", {"hidden_size": None}, "hidden_size is None, a whole number is needed"),
    ("llama", {"num_attention_heads": 0}, "heads = 0, which is impossible"),
    ("llama", {"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads evenly"),
    ("llama", {"num_hidden_layers": 1 << 40}, "layers, which is impossible"),
    ("llama", {"max_position_embeddings": -1}, "-1 positions, which is impossible"),
    ("llama", {"head_dim": 15}, "even head dimension"),
    ("llama", {"rms_norm_eps": 0.0}, "norm epsilon of 0.0, which is impossible"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is small, a number is needed"),
    ("llama", {"vocab_size": VOCAB_SIZE + 1}, "has the shape .*, the configuration says"),
    ("llama", {"intermediate_size": 128}, "has the shape .*, the configuration says"),
    ("llama", {"num_hidden_layers": 4}, r"model\.layers\.3\..* is missing: the checkpoint is incomplete"),
    ("llama", {"num_hidden_layers": 2}, r"'model\.layers\.2\..* is not supported"),
    ("qwen2", {"architectures": LLAMA, "max_window_layers": None}, r"proj\.bias' is not supported: llama models have"),
    ("llama", {"architectures": QWEN_2}, r"q_proj\.bias is missing: the checkpoint is incomplete"),
    ("llama", {"architectures": QWEN_3, "head_dim": 16}, r"q_norm\.weight is missing"),
]


@pytest.mark.parametrize(("case", "change", "reason"), REFUSED)
def test_what_would_change_the_results_and_is_not_there_is_refused(saved, tmp_path, case, change, reason):
    directory = copied(saved(case).directory, tmp_path, **change)
    with pytest.raises(Invalid, match=reason) as caught:
        load_model(str(directory))
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "name", "tensor", "reason"),
    [
        ("qwen2", "layers.1.self_attn.k_proj.bias", None, r"layers\.1\.self_attn\.k_proj\.bias is missing"),
        ("qwen2", "layers.1.self_attn.k_proj.bias", torch.zeros(7), r"k_proj\.bias has the shape \[7\]"),
        ("qwen2", "layers.1.self_attn.o_proj.bias", torch.zeros(64), r"o_proj\.bias' is not supported"),
        ("qwen3", "layers.2.self_attn.q_norm.weight", torch.ones(64), r"q_norm\.weight has the shape \[64\]"),
        ("llama", "layers.0.mlp.up_proj.bias", torch.zeros(96), r"up_proj\.bias' is not supported"),
        ("llama", "layers.0.self_attn.sinks", torch.zeros(4), r"sinks' is not supported"),
        ("gemma2", "layers.0.post_feedforward_layernorm.weight", None, "post_feedforward.* is missing"),
        ("gemma2", "layers.0.post_attention_layernorm.weight", None, "post_attention_.*norm.* is missing"),
    ],
)
def test_tensors_that_do_not_make_the_family_are_refused(saved, tmp_path, case, name, tensor, reason):
    with pytest.raises(Invalid, match=reason):
        load_model(str(with_tensor(saved(case).directory, tmp_path, name, tensor)))


def with_tensor(source: Path, target: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """Replaces, adds or (None) removes a tensor of a checkpoint."""
    tensors = {**load_file(source / "model.safetensors"), f"model.{name}": tensor}
    path = copied(source, target) / "model.safetensors"
    save_file({name: array for name, array in tensors.items() if array is not None}, path)
    return target


def test_the_rope_buffer_of_old_checkpoints_is_left_out(saved, tmp_path):
    buffer = "layers.0.self_attn.rotary_emb.inv_freq"
    model = load_model(str(with_tensor(saved("llama").directory, tmp_path, buffer, torch.ones(8))))
    assert_close(logits_of(model, TOKENS), saved("llama").logits)


def test_a_value_that_is_not_finite_is_an_error_when_it_is_read(saved, tmp_path):
    name = "layers.1.self_attn.k_proj.bias"
    model = load_model(str(with_tensor(saved("qwen2").directory, tmp_path, name, torch.full((32,), float("nan")))))
    with pytest.raises(Invalid, match=r"k_proj\.bias holds values that are not finite: the file is damaged"):
        model.weights.read(f"model.{name}")
    with pytest.raises(Invalid, match=r"model\.safetensors: tensor .* not finite"):
        ReferenceDecoder(model.config, model.weights, Arena(model.config, 1))


PUBLISHED = {  # what stands in the config.json of published models, sizes left out
    "SmolLM2": """
        {"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "mlp_bias":
        false, "hidden_act": "silu", "initializer_range": 0.04, "is_llama_config": true, "model_type": "llama",
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling":
        null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": true}
    """,
    "Llama 3.2": """
        {"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "mlp_bias":
        false, "head_dim": 16, "hidden_act": "silu", "eos_token_id": [1, 2], "rms_norm_eps": 1e-05,
        "pretraining_tp": 1, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "rope_type": "llama3", "original_max_position_embeddings": 8192}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "transformers_version": "4.45.0.dev0"}
    """,
    "Mistral 7B v0.1": """
        {"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "model_type": "mistral", "rms_norm_eps":
        1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false}
    """,
    "Qwen 2.5": """
        {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps":
        1e-06, "max_window_layers": 21, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window":
        false, "tie_word_embeddings": true, "use_mrope": false, "rope_scaling": null}
    """,
    "Gemma 2": """
        {"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act":
        "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "rope_theta": 10000.0}
    """,
    "Gemma 3": """
        {"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
        "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim": 256, "hidden_activation":
        "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": null,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6}
    """,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configurations_of_published_models_are_taken(tmp_path, name):
    sizes = {key: value for key, value in SHAPE.items() if key != "pad_token_id"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **json.loads(PUBLISHED[name])}))
    with pytest.raises(NotFound, match=r"model\.safetensors"):  # what is asked for next
        load_model(str(tmp_path))
