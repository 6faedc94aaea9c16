"""The default model against transformers on the same weights: greedy answers in float32, and every precision.

Float32 sums in another order differ in the last bits, so two tokens whose logits are within those bits could
change places on another machine. In these answers the nearest two logits are 2.2e-3 apart; errors are 3e-4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model, packaged_gguf
from decoder.model_config import KV_DTYPE
from tests.decoder.bench import Bench, Call
from tests.decoder.peers import llama_of

pytestmark = [
    pytest.mark.slow,  # the real model beside transformers
    pytest.mark.timeout(400),  # nearly all of it is done in two fixtures, and the machine may have other work
]

NUM_NEW = 16
NUM_TEXTS, LENGTH = 2, 300


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(None)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return llama_of(packaged_gguf())


def bench_of(model: Model, num_pages: int, precision: str = "float32", threads: int = 2) -> Bench:
    arena = Arena(model.config, num_pages, KV_DTYPE[precision])
    return Bench(model.config, CpuDecoder(model.config, model.weights, arena, threads, precision=precision), arena)


@pytest.fixture(scope="module")
def float32(model: Model) -> Iterator[Bench]:
    """A decoder that packs the weights once."""
    bench = bench_of(model, 8 + NUM_PAGES)
    yield bench
    bench.decoder.close()


def test_every_weight_is_the_gguf_packages_bit_for_bit(model, theirs):
    state = theirs.state_dict()
    for name in model.weights.names():
        array = model.weights.read(name)
        assert np.array_equal(array.view(np.uint32), state[name].numpy().view(np.uint32)), name


def test_greedy_answers_are_those_of_transformers(model, theirs, float32):
    chat = model.tokenizer.chat_template([{"role": "user", "content": "请用中文介绍一下长城。"}])
    prompts = [model.tokenizer.encode(text) for text in (chat, "def quicksort(items):\n    ")]
    files = [float32.file(len(prompt) + NUM_NEW) for prompt in prompts]
    rows, new = float32.step(*map(Call, files, prompts)), [list[int](), list[int]()]
    for _ in range(NUM_NEW):
        for tokens, row in zip(new, rows, strict=True):
            tokens.append(int(row[-1].argmax()))
        rows = float32.step(*(Call(file, tokens[-1:]) for file, tokens in zip(files, new, strict=True)))
    for prompt, tokens in zip(prompts, new, strict=True):
        mask = torch.ones(1, len(prompt))
        with torch.inference_mode():
            out = theirs.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=NUM_NEW)
        assert out[0, len(prompt) :].tolist() == tokens


# ---- precisions

NUM_PAGES = NUM_TEXTS * -(-LENGTH // 32)
THEIRS = "transformers"


@dataclass(frozen=True)
class Figures:
    worst: float
    """The largest error of a row's logits, relative to the row's largest logit."""
    perplexity: float
    same: float
    """Share of rows whose most likely token is the reference's."""
    kl: float


# Bounds, the perplexity's as a share of the reference's. Rounding moves logits a little; a kernel that reads a wrong
# scale or leaves out a group moves them by orders of magnitude more. So each lies a little above what was measured.
BOUNDS = {
    "float32": Figures(worst=1e-4, perplexity=1e-5, same=0.999, kl=1e-6),
    "bf16": Figures(worst=0.05, perplexity=1e-3, same=0.99, kl=4e-4),
    # llama.cpp's Q8_0 has 0.9585 and 0.0044: products of groups of 32 with a float16 scale on both sides.
    "int8": Figures(worst=0.12, perplexity=0.012, same=0.948, kl=0.0049),
    # The stored codes themselves. Codes made anew from these weights, as Q4_0 has, raise the perplexity by a fifth.
    "int4": Figures(worst=0.1, perplexity=0.0105, same=0.953, kl=0.0042),
}


@pytest.fixture(scope="module")
def found(model: Model, theirs: Any, float32: Bench) -> dict[str, Figures]:
    """Figures of transformers' logits and of those of every precision, over beginnings of Python's help topics."""
    encoded = (model.tokenizer.encode(topics[name]) for name in sorted(topics))
    texts = [text[:LENGTH] for text in encoded if len(text) >= LENGTH][:NUM_TEXTS]
    with torch.inference_mode():
        expected = [theirs(torch.tensor([text])).logits[0] for text in texts]
    log_p = [logits.double().log_softmax(dim=1) for logits in expected]
    found = {THEIRS: figures(texts, expected, log_p, expected)}
    for precision in BOUNDS:
        bench = float32 if precision == "float32" else bench_of(model, NUM_PAGES, precision)
        got = [torch.from_numpy(bench.prefill(text)[1]) for text in texts]
        if bench is not float32:
            bench.decoder.close()
        found[precision] = figures(texts, expected, log_p, got)
    return found


def figures(
    texts: list[list[int]], expected: list[torch.Tensor], expected_log_p: list[torch.Tensor], got: list[torch.Tensor]
) -> Figures:
    rows = []
    for text, theirs, log_p, ours in zip(texts, expected, expected_log_p, got, strict=True):
        log_q = log_p if ours is theirs else ours.double().log_softmax(dim=1)
        worst = ((theirs - ours).abs().amax(dim=1) / theirs.abs().amax(dim=1)).max()
        nll = -log_q[:-1].gather(1, torch.tensor(text[1:])[:, None]).mean()  # of the token that follows each row
        same = (theirs.argmax(dim=1) == ours.argmax(dim=1)).double().mean()
        kl = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True) / len(text)
        rows.append([float(each) for each in (worst, nll, same, kl)])
    worst, nll, same, kl = np.array(rows).T
    return Figures(worst.max(), np.exp(nll.mean()), same.mean(), kl.mean())


@pytest.mark.parametrize("precision", BOUNDS)
def test_a_precision_keeps_the_logits_the_perplexity_and_the_choices_of_transformers(found, precision):
    bounds, ours = BOUNDS[precision], found[precision]
    assert ours.worst <= bounds.worst
    assert abs(ours.perplexity / found[THEIRS].perplexity - 1) <= bounds.perplexity
    assert ours.same >= bounds.same
    assert ours.kl <= bounds.kl
