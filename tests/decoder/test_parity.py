"""The default model against transformers on the same weights: greedy answers in float32, and every precision.

Float32 sums in another order differ in the last bits, so two tokens whose logits are within those bits could
change places on another machine. In these answers the nearest two logits are 2.2e-3 apart; errors are 3e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pydoc_data.topics import topics
from typing import TypeVar

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model, packaged_gguf
from decoder.model_config import KV_DTYPE
from tests.decoder.bench import Bench, Call, File
from tests.decoder.peers import llama_of

pytestmark = [
    pytest.mark.slow,  # the real model beside transformers
    pytest.mark.timeout(400),  # nearly all of it is done in two fixtures, and the machine may have other work
]

NUM_NEW = 30
Given = TypeVar("Given")
Found = TypeVar("Found")


def side_by_side(work: Callable[[Given], Found], items: Iterable[Given], threads: int = 2) -> list[Found]:
    """Texts side by side rather than torch's threads within one: those spin, and stall beside a busy neighbour."""
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, items))


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(None)


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    return llama_of(packaged_gguf())


def bench_of(model: Model, num_pages: int, precision: str = "float32", threads: int = 2) -> Bench:
    arena = Arena(model.config, num_pages, KV_DTYPE[precision])
    return Bench(model.config, CpuDecoder(model.config, model.weights, arena, threads, precision=precision), arena)


def test_every_weight_is_the_gguf_packages_bit_for_bit(model, theirs):
    state = theirs.state_dict()
    for name in model.weights.names():
        array = model.weights.read(name)
        assert np.array_equal(array.view(np.uint32), state[name].numpy().view(np.uint32)), name


def test_greedy_answers_are_those_of_transformers(model, theirs):
    chat = model.tokenizer.chat_template([{"role": "user", "content": "请用中文介绍一下长城。"}])
    prompts = [model.tokenizer.encode(text) for text in (chat, "def quicksort(items):\n    ")]
    bench = bench_of(model, 8)
    files = [bench.file(len(prompt) + NUM_NEW) for prompt in prompts]
    rows, new = bench.step(*map(Call, files, prompts)), [list[int](), list[int]()]
    for _ in range(NUM_NEW):
        for tokens, row in zip(new, rows, strict=True):
            tokens.append(int(row[-1].argmax()))
        rows = bench.step(*(Call(file, tokens[-1:]) for file, tokens in zip(files, new, strict=True)))
    bench.decoder.close()
    for prompt, tokens in zip(prompts, new, strict=True):
        mask = torch.ones(1, len(prompt))
        with torch.inference_mode():
            out = theirs.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=NUM_NEW)
        assert out[0, len(prompt) :].tolist() == tokens


# ---- precisions

NUM_TEXTS = 2
LENGTH = 300
BLOCK = 50
assert LENGTH % BLOCK == 0
THEIRS = "transformers"


@dataclass(frozen=True)
class Sums:
    rows: int = 0
    nll: float = 0.0
    """Negative log-likelihood of the token that follows each row; the last row has none."""
    kl: float = 0.0
    same: int = 0
    """Rows whose most likely token is the reference's."""
    worst: float = 0.0
    """The largest error of a row's logits, relative to the row's largest logit."""

    def plus(self, other: Sums) -> Sums:
        added = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Sums)}
        return Sums(**(added | {"worst": float(np.maximum(self.worst, other.worst))}))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / (self.rows - NUM_TEXTS)))


@dataclass(frozen=True)
class Bounds:
    """How far a precision may be from transformers in float32.

    Rounding moves logits a little; a kernel that reads a wrong scale or leaves out a group moves them by orders of
    magnitude more. So each bound lies a little above what was measured.
    """

    worst: float
    perplexity: float
    """Largest distance from the reference's, as a share of that."""
    same: float
    kl: float


BOUNDS = {
    "float32": Bounds(worst=1e-4, perplexity=1e-5, same=0.999, kl=1e-6),
    "bf16": Bounds(worst=0.05, perplexity=1e-3, same=0.99, kl=4e-4),
    # llama.cpp's Q8_0 has 0.9585 and 0.0044: products of groups of 32 with a float16 scale on both sides.
    "int8": Bounds(worst=0.12, perplexity=0.012, same=0.948, kl=0.0049),
    # The stored codes themselves. Codes made anew from these weights, as Q4_0 has, raise the perplexity by a fifth.
    "int4": Bounds(worst=0.1, perplexity=0.0105, same=0.953, kl=0.0042),
}


@pytest.fixture(scope="module")
def totals(model: Model, theirs: LlamaForCausalLM) -> dict[str, Sums]:
    """A pass over the beginnings of Python's help topics adds up transformers' logits and those of every precision."""
    encoded = (model.tokenizer.encode(topics[name]) for name in sorted(topics))
    texts = [np.array(text[:LENGTH], np.int32) for text in encoded if len(text) >= LENGTH][:NUM_TEXTS]

    @torch.inference_mode()
    def compare(share: list[np.ndarray]) -> dict[str, Sums]:
        benches = {precision: bench_of(model, -(-LENGTH // 32), precision, 1) for precision in BOUNDS}
        pages = {precision: bench.file(LENGTH).pages for precision, bench in benches.items()}
        totals = dict.fromkeys((THEIRS, *BOUNDS), Sums())
        for text in share:
            expected = theirs(torch.from_numpy(text.astype(np.int64))[None]).logits[0]
            totals[THEIRS] = totals[THEIRS].plus(sums_of(text, expected, expected))
            for precision, bench in benches.items():
                (got,) = bench.step(Call(File(pages[precision]), text.tolist()))
                totals[precision] = totals[precision].plus(sums_of(text, expected, torch.from_numpy(got)))
        for bench in benches.values():
            bench.decoder.close()
        return totals

    first, second = side_by_side(compare, (texts[::2], texts[1::2]))
    return {name: first[name].plus(second[name]) for name in first}


def sums_of(text: np.ndarray, expected: torch.Tensor, got: torch.Tensor) -> Sums:
    """A few rows at a time, which stay in the cache."""
    following = torch.from_numpy(np.append(text[1:], 0).astype(np.int64))[:, None]
    sums = Sums()
    for first in range(0, LENGTH, BLOCK):
        rows = slice(first, first + BLOCK)
        theirs, ours = expected[rows], got[rows]
        log_sum_theirs, log_sum_ours = theirs.logsumexp(dim=1), ours.logsumexp(dim=1)
        difference = theirs - ours
        error = difference.abs().amax(dim=1) / theirs.abs().amax(dim=1)
        # KL is the mean of log p - log q = (theirs - ours) - (their log sum - our log sum) under p.
        mean = difference.mul_((theirs - log_sum_theirs[:, None]).exp_()).sum(dim=1)
        nll = log_sum_ours - ours.gather(1, following[rows])[:, 0]
        if first + BLOCK == LENGTH:
            nll[-1] = 0  # nothing follows the last row
        kl = (mean - log_sum_theirs + log_sum_ours).double().sum().item()
        same = int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
        sums = sums.plus(Sums(len(theirs), nll.double().sum().item(), kl, same, error.max().item()))
    return sums


@pytest.mark.parametrize("precision", BOUNDS)
def test_a_precision_keeps_the_logits_the_perplexity_and_the_choices_of_transformers(totals, precision):
    bounds, found = BOUNDS[precision], totals[precision]
    perplexity = abs(found.perplexity / totals[THEIRS].perplexity - 1)
    assert found.rows == NUM_TEXTS * LENGTH
    assert found.worst <= bounds.worst
    assert perplexity <= bounds.perplexity
    assert found.same >= bounds.same * found.rows
    assert found.kl <= bounds.kl * found.rows
