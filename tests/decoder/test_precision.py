"""Each precision of the CPU step on the default model against transformers in float32, over 8 texts of 500 tokens.

One pass over the texts, two at a time: transformers' logits, then those of every precision, compared while they are
there (a text's take 98 MB). Rounding moves logits a little; a kernel that reads a wrong scale or leaves out a group
moves them by orders of magnitude more. So each bound lies a little above what was measured, which stands beside it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pydoc_data.topics import topics
from threading import Lock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model
from decoder.model_config import KV_DTYPE

pytestmark = [
    pytest.mark.slow,  # 4,000 tokens through the real model five times: half a minute
    pytest.mark.timeout(400),  # all of it is one fixture's, and the machine may have other work
]

NUM_TEXTS = 8
LENGTH = 500
NUM_PAGES = -(-LENGTH // 32)
BLOCK = 50
assert LENGTH % BLOCK == 0
THEIRS = "transformers"
Q8_0_SAME, Q8_0_KL = 0.9585, 0.0044
"""Bounds for Q8_0 on these texts: products of groups of 32 with a float16 scale on both sides, float32 elsewhere."""
PRECISIONS = ("float32", "bf16", "int8", "int4")


@dataclass(frozen=True)
class Sums:
    """Over the rows of the texts so far."""

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


@dataclass(frozen=True)
class Quality:
    perplexity: float
    expected_perplexity: float
    same: float
    kl: float
    worst: float


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(None)


@pytest.fixture(scope="module")
def texts(model: Model) -> list[np.ndarray]:
    """The beginnings of Python's help topics, the first by name that are long enough."""
    encoded = (model.tokenizer.encode(topics[name]) for name in sorted(topics))
    return [np.array(text[:LENGTH], np.int32) for text in encoded if len(text) >= LENGTH][:NUM_TEXTS]


@pytest.fixture(scope="module")
def theirs(model: Model) -> LlamaForCausalLM:
    config = model.config
    with torch.device("meta"):
        theirs = LlamaForCausalLM(
            their_config := LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.ffn_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=config.max_positions,
                rms_norm_eps=config.rms_eps,
                rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
                tie_word_embeddings=True,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
    state = {name: torch.from_numpy(model.weights.read(name)) for name in model.weights.names()}
    theirs.load_state_dict(state, strict=False, assign=True)
    theirs.tie_weights()
    # The frequencies of RoPE are computed, not loaded.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(their_config)
    assert not [name for name, parameter in theirs.named_parameters() if parameter.is_meta]
    return theirs.eval()


class Ours:
    """The CPU decoder in one precision, for one caller at a time."""

    def __init__(self, model: Model, precision: str) -> None:
        arena = Arena(model.config, NUM_PAGES, KV_DTYPE[precision])
        self.decoder = CpuDecoder(model.config, model.weights, arena, 1, precision=precision)
        self._lock = Lock()

    def logits(self, text: np.ndarray, out: np.ndarray) -> None:
        entries = np.arange(len(text), dtype=np.int32)
        pages = np.arange(NUM_PAGES, dtype=np.int32)
        chunk = Chunk(text, entries, pages, 0, tuple(memoryview(row) for row in out))
        with self._lock:
            self.decoder.step(StepBatch((chunk,)))


@pytest.fixture(scope="module")
def quality(model: Model, texts: list[np.ndarray], theirs: LlamaForCausalLM) -> dict[str, Quality]:
    ours = {precision: Ours(model, precision) for precision in PRECISIONS}

    @torch.inference_mode()
    def compare(share: list[np.ndarray]) -> dict[str, Sums]:
        # These are written for every text: fresh ones would be as much work for the kernel as for the model.
        expected, got = torch.empty(2, LENGTH, model.config.vocab_size)
        totals = dict.fromkeys((THEIRS, *PRECISIONS), Sums())
        for text in share:
            hidden = theirs.model(torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
            torch.mm(hidden, theirs.lm_head.weight.T, out=expected)
            totals[THEIRS] = totals[THEIRS].plus(sums_of(text, expected, expected))
            for precision, decoder in ours.items():
                decoder.logits(text, got.numpy())
                totals[precision] = totals[precision].plus(sums_of(text, expected, got))
        return totals

    # Texts side by side rather than torch's threads within one: those spin, and stall beside a busy neighbour.
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        first, second = pool.map(compare, (texts[::2], texts[1::2]))
    for each in ours.values():
        each.decoder.close()
    totals = {name: first[name].plus(second[name]) for name in first}
    reference = perplexity(totals[THEIRS])
    return {
        name: Quality(perplexity(each), reference, each.same / each.rows, each.kl / each.rows, each.worst)
        for name, each in totals.items()
    }


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
        sums = sums.plus(
            Sums(
                rows=len(theirs),
                nll=nll.double().sum().item(),
                kl=(mean - log_sum_theirs + log_sum_ours).double().sum().item(),
                same=int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum()),
                worst=error.max().item(),
            )
        )
    return sums


def perplexity(sums: Sums) -> float:
    return float(np.exp(sums.nll / (sums.rows - NUM_TEXTS)))


def test_float32_is_transformers_but_for_the_order_of_sums(quality):
    found = quality["float32"]
    assert found.worst <= 1e-4  # 1.1e-5
    assert found.perplexity == pytest.approx(found.expected_perplexity, rel=1e-5)  # 1e-7
    assert found.same >= 0.999  # 1
    assert found.kl <= 1e-6


def test_bf16_keeps_the_perplexity_to_a_thousandth(quality):
    found = quality["bf16"]
    assert found.worst <= 0.06  # 0.042
    assert found.perplexity == pytest.approx(found.expected_perplexity, rel=1e-3)  # 4e-5
    assert found.same >= 0.99  # 0.994
    assert found.kl <= 4e-4  # 2.1e-4


def test_int8_is_no_worse_than_llama_cpps_q8_0(quality):
    """The margin exceeds chance: the greedy token of 4,000 rows has a standard error of 0.0032."""
    found = quality["int8"]
    assert found.same >= Q8_0_SAME - 2 * 0.0032  # 0.9641 over 20 texts
    assert found.kl <= 1.1 * Q8_0_KL  # 0.0035
    assert found.perplexity <= 1.01 * found.expected_perplexity  # 1.0072
    assert found.worst <= 0.2  # 0.12


def test_int4_computes_with_the_stored_codes_themselves(quality):
    """Codes made anew from these weights, as llama.cpp's Q4_0 has them, raise the perplexity by a fifth."""
    found = quality["int4"]
    assert found.perplexity <= 1.006 * found.expected_perplexity  # 1.0030
    assert found.same >= 0.958  # 0.9648
    assert found.kl <= 0.004  # 0.00334
    assert found.worst <= 0.15  # 0.094
