"""Each model family beside transformers' own class, in float32: from its safetensors, and from a GGUF file.

The checkpoints are small and random; windows, caps and scalings are so small that they matter in 90 tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from decoder.batch import Chunk, StepBatch
from decoder.checkpoints.gguf import read_gguf
from decoder.checkpoints.gguf_llama import read_gguf_llama
from decoder.checkpoints.stored import StoredTensor
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from decoder.rope import inverse_frequencies, rotation_factor
from libsym.errors import Invalid, NotFound
from tests.decoder.reference import ReferenceDecoder
from tests.decoder.small_checkpoints import TEMPLATE, VOCAB_SIZE, gguf_metadata, interleave, small_library, write_gguf

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
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, wide heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn, everything said": (
        "Llama",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
            }
        },
    ),
    "yarn, a factor for attention": ("Qwen3", {"rope_parameters": {**YARN, "attention_factor": 0.8}, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 24}),
    "gemma2, small caps": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 33, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 20, "num_hidden_layers": 7, "rope_parameters": GEMMA_3_ROPE},
    ),
    "gemma3, own layer types": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 9,
        },
    ),
}
OLD_NAMES: dict[str, dict[str, Any]] = {  # the same, as checkpoints older than transformers 5 say it
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
TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 90).tolist()


def small_model(family: str, shape: dict[str, Any]) -> Any:
    torch.manual_seed(4)
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**{**SHAPE, **shape}, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms and biases that are not the usual ones and zeros
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint, and the logits that transformers gives for TOKENS."""

    directory: Path
    logits: np.ndarray


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Saved]:
    """Return a function that gives a family's checkpoint, written once."""
    made: dict[str, Saved] = {}

    def get(case: str) -> Saved:
        if case not in made:
            directory = tmp_path_factory.mktemp("family")
            model = small_model(*CASES[case])
            model.save_pretrained(directory)
            small_library().save(str(directory / "tokenizer.json"))
            (directory / "chat_template.jinja").write_text(TEMPLATE)
            with torch.inference_mode():
                made[case] = Saved(directory, model(torch.tensor([TOKENS])).logits[0].numpy())
        return made[case]

    return get


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and torch's stall beside a busy neighbour."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "cpu"])
def logits_of(request) -> Iterator[Callable[..., np.ndarray]]:
    """Every row's logits of a prompt that goes through a decoder in pieces."""
    decoders: list[Any] = []

    def run(model: Model, tokens: list[int], pieces: list[int]) -> np.ndarray:
        num_pages = -(-len(tokens) // 32)
        arena = Arena(model.config, num_pages)
        if request.param == "cpu":
            decoders.append(CpuDecoder(model.config, model.weights, arena, 2))
        else:
            decoders.append(ReferenceDecoder(model.config, model.weights, arena))
        out = np.empty((len(tokens), model.config.vocab_size), np.float32)
        for start, end in pairwise(accumulate(pieces, initial=0)):
            part = np.array(tokens[start:end], np.int32)
            positions = np.arange(start, start + len(part), dtype=np.int32)
            rows = tuple(memoryview(row) for row in out[start : start + len(part)])
            chunk = Chunk(part, positions, np.arange(num_pages, dtype=np.int32), start, rows)
            decoders[-1].step(StepBatch((chunk,)))
        return out

    yield run
    for decoder in decoders:
        decoder.close()


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() < 3e-5 * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_a_family_gives_the_logits_of_transformers(saved, logits_of, case):
    checkpoint = saved(case)
    model = load_model(str(checkpoint.directory))
    for pieces in ([90], [1, 16, 40, 1, 1, 31]):
        assert_close(logits_of(model, TOKENS, pieces), checkpoint.logits)


@pytest.mark.parametrize("case", CASES)
def test_a_familys_mass_of_attention_is_the_sum_of_transformers_attentions(saved, case):
    model = load_model(str(saved(case).directory))
    config = model.config
    with torch.inference_mode():
        attentions = small_model(*CASES[case])(torch.tensor([TOKENS]), output_attentions=True).attentions
    theirs = torch.cat(attentions).view(config.num_layers, config.num_kv_heads, -1, len(TOKENS), len(TOKENS)).numpy()
    decoder = CpuDecoder(config, model.weights, Arena(config, 3), 2)
    for start, end in pairwise((0, 1, 17, 57, 89, 90)):
        mass = np.zeros((config.num_layers, config.num_kv_heads, end), np.float32)
        ids, places = np.array(TOKENS[start:end], np.int32), np.arange(start, end, dtype=np.int32)
        decoder.step(StepBatch((Chunk(ids, places, np.arange(3, dtype=np.int32), start, (), mass=mass),)))
        assert np.abs(mass - theirs[:, :, :, start:end, :end].sum(axis=(2, 3))).max() < 1e-4
    decoder.close()


@pytest.mark.parametrize("case", OLD_NAMES)
def test_a_configuration_older_than_transformers_5_says_the_same(saved, tmp_path, case):
    directory = saved(case).directory
    copied = copy_of(directory, tmp_path)
    edit(copied / "config.json", rope_parameters=None, _sliding_window_pattern=None, **OLD_NAMES[case])
    old, new = load_model(str(copied)), load_model(str(directory))
    assert old.config == dataclasses.replace(new.config, name=old.config.name)
    assert old.identity == new.identity


def copy_of(source: Path, target: Path) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def edit(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("case", [case for case in CASES if "rope_parameters" in CASES[case][1]])
def test_frequencies_are_those_of_transformers(saved, case):
    config = load_model(str(saved(case).directory)).config
    theirs = small_model(*CASES[case]).model.rotary_emb
    if "gemma3" in case:
        assert np.allclose(inverse_frequencies(config), theirs.full_attention_inv_freq.numpy(), rtol=1e-6)
        assert np.allclose(
            inverse_frequencies(config, local=True), theirs.sliding_attention_inv_freq.numpy(), rtol=1e-6
        )
        assert rotation_factor(config) == 1.0
    else:
        assert np.allclose(inverse_frequencies(config), theirs.inv_freq.numpy(), rtol=1e-6)
        assert rotation_factor(config) == pytest.approx(theirs.attention_scaling, rel=1e-12)


GGUF_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # family, what transformers' configuration is given, what the file says beyond sizes
    "llama": ("Llama", {"tie_word_embeddings": True}, {}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3}, {}),
    "llama, linear": (
        "Llama",
        {"rope_parameters": LINEAR},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama, a factor alone": ("Llama", {"rope_parameters": LINEAR}, {"rope.scaling.factor": 4.0}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen2, yarn": (
        "Qwen2",
        {"rope_parameters": YARN},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.finetuned": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {}),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}, {}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20},
        {"attention.sliding_window": 20},
    ),
    "gemma2, small caps": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 33,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        {"attention.sliding_window": 33, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 20,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        {
            "attention.sliding_window": 20,
            "rope.freq_base": 100_000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3, its own local theta": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {"attention.sliding_window": 9, "rope.freq_base": 1_000_000.0, "rope.freq_base_swa": 500.0},
    ),
}


def converted(theirs: Any, extra: dict[str, Any], path: Path) -> Path:
    """A GGUF file of a model of transformers, as llama.cpp's converter writes it."""
    config = theirs.config
    architecture = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, parameter in theirs.named_parameters():
        array = parameter.detach().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        for part, count in heads.items():
            if architecture == "llama" and part in name:
                array = interleave(array, count)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    if config.rope_parameters.get("rope_type") == "llama3":
        dim = config.head_dim
        plain = 10_000.0 ** (-np.arange(0, dim, 2) / dim)
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


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_gguf_file_of_a_family_gives_the_logits_of_transformers(tmp_path, logits_of, case):
    family, shape, extra = GGUF_CASES[case]
    theirs = small_model(family, shape)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    model = load_model(str(converted(theirs, extra, tmp_path / "small.gguf")))
    for pieces in ([90], [1, 16, 40, 1, 1, 31]):
        assert_close(logits_of(model, TOKENS, pieces), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_layers"), [("Gemma2", 46), ("Gemma3", 62)])
def test_the_largest_gemma_scales_its_scores_by_hidden_size_over_heads(tmp_path, family, num_layers):
    theirs = small_model(family, {"head_dim": 32, "num_hidden_layers": num_layers})
    large = load_model(str(converted(theirs, {"attention.sliding_window": 20}, tmp_path / "large.gguf"))).config
    assert large.score_scale == 16**-0.5
    assert dataclasses.replace(large, attn_scale=0.0).score_scale == 32**-0.5


def test_a_gemma_3_without_a_window_has_no_local_layers(tmp_path):
    theirs = small_model("Gemma3", {"head_dim": 16})
    config = load_model(str(converted(theirs, {"attention.sliding_window": 0}, tmp_path / "a.gguf"))).config
    assert (config.window, config.sliding_layers, config.local_rope_theta) == (0, (), 0.0)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias = True is not supported"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
    ("qwen2", {"mlp_bias": True}, "mlp_bias = True is not supported"),
    ("gemma", {"hidden_act": "relu"}, "hidden_act = relu is not supported"),
    ("gemma2", {"hidden_activation": "silu"}, "hidden_activation = silu is not supported"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0 is not supported"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0.0 is not supported"),
    ("gemma2", {"sliding_window": 0}, "sliding_window = 0 is not supported"),
    ("gemma2", {"sliding_window": "wide"}, "sliding_window is wide, a whole number is needed"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types = .* is not supported"),
    ("gemma3", {"layer_types": ["full_attention"] * 6 + ["chunked_attention"]}, "layer_types = .* is not supported"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types = .* is not supported"),
    ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types = .* is not supported"),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0 is not supported"),
    ("llama", {"sliding_window": 64}, "sliding_window = 64 is not supported"),
    ("llama", {"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling = 8.0 is not supported"),
    ("qwen3", {"attention_sinks": True}, "attention_sinks = True is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.* is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "longrope.* is not supported"),
    ("llama", {"rope_parameters": {"rope_type": ["linear"]}}, "rope_type = .* is not supported"),
    ("llama", {"rope_parameters": {**LLAMA_3, "surprise": 1}}, "surprise.* is not supported"),
    ("llama", {"rope_parameters": {**LLAMA_3, "low_freq_factor": 4.0}}, "RoPE scaling that is impossible"),
    ("llama", {"rope_parameters": {**LLAMA_3, "low_freq_factor": None}}, "low_freq_factor is None, a number is needed"),
    ("llama", {"rope_parameters": {**LLAMA_3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not"),
    ("llama", {"rope_parameters": {**LINEAR, "factor": 0.0}}, "RoPE scaling that is impossible"),
    ("llama", {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}, "RoPE scaling that is impossible"),
    ("llama", {"rope_parameters": {**YARN, "factor": 1e-200}}, "RoPE scaling that is impossible"),
    ("llama", {"rope_parameters": {**YARN, "beta_slow": 1e-200}}, "RoPE scaling that is impossible"),
    (
        "llama",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 10**400}},
        "RoPE scaling that is impossible",
    ),
    ("llama", {"rope_parameters": {**YARN, "beta_fast": 0.5}}, "RoPE scaling that is impossible"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters = .* is not"),
    ("llama", {"rope_parameters": GEMMA_3_ROPE}, "full_attention.* is not supported"),
    ("gemma3", {"rope_parameters": LINEAR}, "rope_parameters = .* is not supported"),
    ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}, "rope_parameters = .* is not supported"),
    (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 0}}},
        "sliding layers' rope_theta = 0.0 is not supported",
    ),
    (
        "qwen2",
        {"architectures": ["LlamaForCausalLM"], "max_window_layers": None},
        r"proj\.bias' is not supported: llama models have none",
    ),
    ("llama", {"architectures": ["Qwen2ForCausalLM"]}, r"q_proj\.bias is missing: the checkpoint is incomplete"),
    ("llama", {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}, r"q_norm\.weight is missing"),
    ("qwen2", {"architectures": ["Qwen2MoeForCausalLM"]}, "architectures = .* is not supported"),
    ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures = .* is not supported"),
]


@pytest.mark.parametrize(("case", "change", "reason"), REFUSED)
def test_what_would_change_the_results_and_is_not_there_is_refused(saved, tmp_path, case, change, reason):
    directory = copy_of(saved(case).directory, tmp_path)
    edit(directory / "config.json", **change)
    with pytest.raises(Invalid, match=reason) as caught:
        load_model(str(directory))
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        ("qwen2", {"model.layers.1.self_attn.k_proj.bias": None}, r"layers\.1\.self_attn\.k_proj\.bias is missing"),
        ("qwen2", {"model.layers.1.self_attn.k_proj.bias": torch.zeros(7)}, r"k_proj\.bias has the shape \[7\]"),
        ("qwen2", {"model.layers.1.self_attn.o_proj.bias": torch.zeros(64)}, r"o_proj\.bias' is not supported"),
        ("qwen3", {"model.layers.2.self_attn.q_norm.weight": torch.ones(64)}, r"q_norm\.weight has the shape \[64\]"),
        ("llama", {"model.layers.0.mlp.up_proj.bias": torch.zeros(96)}, r"up_proj\.bias' is not supported"),
        ("llama", {"model.layers.0.self_attn.sinks": torch.zeros(4)}, r"sinks' is not supported"),
        (
            "gemma2",
            {"model.layers.0.post_feedforward_layernorm.weight": None},
            "post_feedforward.* is missing",
        ),
        ("gemma2", {"model.layers.0.post_attention_layernorm.weight": None}, "post_attention_.*norm.* is missing"),
    ],
)
def test_tensors_that_do_not_make_the_family_are_refused(saved, tmp_path, case, change, reason):
    directory = copy_of(saved(case).directory, tmp_path)
    write_tensors(directory, change)
    with pytest.raises(Invalid, match=reason):
        load_model(str(directory))


def test_a_value_that_is_not_finite_is_an_error_when_it_is_read(saved, tmp_path):
    directory = copy_of(saved("qwen2").directory, tmp_path)
    write_tensors(directory, {"model.layers.1.self_attn.k_proj.bias": torch.full((32,), float("nan"))})
    model = load_model(str(directory))
    with pytest.raises(Invalid, match=r"k_proj\.bias holds values that are not finite: the file is damaged"):
        model.weights.read("model.layers.1.self_attn.k_proj.bias")
    with pytest.raises(Invalid, match=r"model\.safetensors: tensor .* not finite"):
        ReferenceDecoder(model.config, model.weights, Arena(model.config, 1))


def write_tensors(directory: Path, change: dict[str, Any]) -> None:
    """Replaces, adds or (None) removes tensors of a checkpoint."""
    tensors = {**load_file(directory / "model.safetensors"), **change}
    save_file({name: array for name, array in tensors.items() if array is not None}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("Qwen2", {"qwen2.rope.scaling.type": "longrope"}, r"qwen2\.rope\.scaling\.type = longrope is not supported"),
        ("Qwen2", {"qwen2.attention.sliding_window": 64}, r"qwen2\.attention\.sliding_window = 64 is not supported"),
        ("Qwen2", {"qwen2.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1 is not supported"),
        ("Gemma3", {"gemma3.attn_logit_softcapping": 50.0}, r"gemma3\.attn_logit_softcapping = 50\.0 is not supported"),
        ("Gemma3", {"gemma3.rope.scaling.factor": float("inf")}, "RoPE scaling that is impossible"),
        ("Gemma2", {"gemma2.attention.sliding_window": -1}, r"gemma2\.attention\.sliding_window"),
        ("Llama", {"llama.rope.scaling.factor": float("nan")}, "RoPE scaling that is impossible"),
        (
            "Llama",
            {"general.architecture": "qwen2moe"},
            "the architecture 'qwen2moe' is not supported: llama, qwen2, qwen3",
        ),
    ],
)
def test_gguf_metadata_that_would_change_the_results_is_refused(tmp_path, family, change, reason):
    theirs = small_model(family, {"num_hidden_layers": 1})
    path = converted(theirs, {}, tmp_path / "a.gguf")
    file = read_gguf(path)
    file.metadata.update(change)
    with pytest.raises(Invalid, match=reason) as caught:
        read_gguf_llama(file)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("factors", [np.ones(7), np.array([1.0] * 7 + [0.0]), np.array([1.0] * 7 + [np.nan])])
def test_factors_of_frequencies_that_do_not_fit_are_refused(tmp_path, factors):
    path = converted(small_model("Llama", {"num_hidden_layers": 1}), {}, tmp_path / "a.gguf")
    file = read_gguf(path)
    file.tensors["rope_freqs.weight"] = StoredTensor.of_array("rope_freqs.weight", factors.astype(np.float32))
    with pytest.raises(Invalid, match=r"RoPE scaling that is impossible|not finite"):
        read_gguf_llama(file)


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
    "Mistral 7B v0.3": """
        {"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps":
        1e-05, "rope_theta": 1000000.0, "sliding_window": null}
    """,
    "Qwen 2.5": """
        {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps":
        1e-06, "max_window_layers": 21, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window":
        false, "tie_word_embeddings": true, "use_mrope": false, "rope_scaling": null}
    """,
    "Qwen 2.5, long": """
        {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "max_window_layers": 28, "rope_theta":
        1000000.0, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}
    """,
    "Qwen 3": """
        {"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
        "max_window_layers": 28, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
        "tie_word_embeddings": true, "use_sliding_window": false, "rms_norm_eps": 1e-06}
    """,
    "Gemma": """
        {"architectures": ["GemmaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "head_dim":
        256, "hidden_act": "gelu", "hidden_activation": null, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 10000.0, "model_type": "gemma"}
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
    "Gemma 3 270M": """
        {"_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": null,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 512,
        "rope_scaling": null, "rope_theta": 1000000.0, "use_bidirectional_attention": false}
    """,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configurations_of_published_models_are_taken(tmp_path, name):
    sizes = {key: value for key, value in SHAPE.items() if key != "pad_token_id"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **json.loads(PUBLISHED[name])}))
    with pytest.raises(NotFound, match=r"model\.safetensors"):  # what is asked for next
        load_model(str(tmp_path))
