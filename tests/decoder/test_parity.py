"""The default model against transformers, in float32, on the same weights.

Our decoder writes 200 tokens after each of 20 prompts, all in one batch. Transformers then reads prompt and
answer in one pass and must choose, at every position, the token that follows there: by induction its own
greedy decoding writes the same text. (One prompt goes through its `generate` as well.) That takes twenty
passes instead of four thousand steps.

Float32 sums in another order differ in the last bits, so two tokens whose logits are within those bits could
change places on another machine. In these answers the nearest two logits are 2.2e-3 apart; errors are 3e-4.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.batch import Chunk, StepBatch
from decoder.cpu.arena import Arena
from decoder.cpu.backend import CpuDecoder
from decoder.model import Model, load_model, packaged_gguf

pytestmark = [
    pytest.mark.slow,  # the real model beside transformers: most of a minute
    pytest.mark.timeout(400),  # nearly all of it is one test's, and the machine may have other work
]

NUM_NEW = 200
NUM_GENERATED = 60
NUM_ALONE = 24
CHATS = [
    "What is the capital of France? Answer in one sentence.",
    "List three uses of a hammer.",
    "How do plants make food from sunlight?",
    "Write a haiku about the sea.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "Traduis en anglais : « Où est la bibliothèque ? »",
    "请用中文介绍一下长城。",
    "What is 17 * 23? Show your work.",
    "Give me a JSON object with the keys name, age and city.",
    "Why is the sky blue? 🌌",
]
TEXTS = [
    "Once upon a time, in a small village,",
    "def quicksort(items):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "The three laws of thermodynamics are",
    "SELECT name, count(*) FROM users WHERE",
    "| Country | Capital | Population |\n|---|---|---|\n",
    "The café’s naïve résumé — “quoted” — cost 12,50 €…",  # noqa: RUF001 - typographic on purpose
    "In 1492, Columbus sailed",
    "Roses are red,\nViolets are blue,\n",
]


@dataclass(frozen=True)
class Answer:
    """A prompt, the 200 tokens that our decoder put after it, and the logits of all but the last."""

    prompt: list[int]
    new: list[int]
    logits: np.ndarray
    """[prompt + 199, vocab]"""


class Session:
    """Files of one decoder; `pred` appends to several at once, as one batch."""

    def __init__(self, model: Model, num_files: int, entries_each: int) -> None:
        self.vocab_size = model.config.vocab_size
        self._pages_each = -(-entries_each // 32)
        self.arena = Arena(model.config, num_files * self._pages_each)
        self.decoder = CpuDecoder(model.config, model.weights, self.arena, 2)
        self.lengths = [0] * num_files

    def pred(self, calls: dict[int, Sequence[int]], rows: str = "all") -> dict[int, np.ndarray]:
        chunks, outs = [], {}
        for file, tokens in calls.items():
            start, n = self.lengths[file], len(tokens)
            out = outs[file] = np.empty((n if rows == "all" else 1, self.vocab_size), np.float32)
            pages = np.arange(file * self._pages_each, (file + 1) * self._pages_each, dtype=np.int32)
            positions = np.arange(start, start + n, dtype=np.int32)
            views = tuple(memoryview(row) for row in out)
            chunks.append(Chunk(np.array(tokens, np.int32), positions, pages, start, views))
            self.lengths[file] += n
        self.decoder.step(StepBatch(tuple(chunks)))
        return outs


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(None)


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    chats = [model.tokenizer.chat_template([{"role": "user", "content": question}]) for question in CHATS]
    return [model.tokenizer.encode(text) for text in (*chats, *TEXTS)]


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    """The model as transformers runs it, from the file as the gguf package reads it."""
    reader = gguf.GGUFReader(packaged_gguf())
    field = {key: value.contents() for key, value in reader.fields.items() if key.startswith("llama.")}
    config = LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": field["llama.rope.freq_base"], "rope_type": "default"},
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    state = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        state[their_name(tensor.name)] = torch.from_numpy(np.array(unpermuted(tensor.name, array, config)))
    theirs.load_state_dict(state, strict=False, assign=True)
    theirs.tie_weights()
    # The frequencies of RoPE are computed, not loaded.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    assert not [name for name, parameter in theirs.named_parameters() if parameter.is_meta]
    return theirs.eval()


def their_name(name: str) -> str:
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    match name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{parts[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def unpermuted(name: str, array: np.ndarray, config: LlamaConfig) -> np.ndarray:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name:
            return array.reshape(num_heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return array


@pytest.fixture(scope="module")
def answers(model: Model, prompts: list[list[int]]) -> list[Answer]:
    session = Session(model, len(prompts), max(map(len, prompts)) + NUM_NEW)
    logits = [[rows] for rows in session.pred(dict(enumerate(prompts))).values()]
    new = [[int(rows[0][-1].argmax())] for rows in logits]
    for _ in range(NUM_NEW - 1):
        for file, row in session.pred({file: [tokens[-1]] for file, tokens in enumerate(new)}).items():
            logits[file].append(row)
            new[file].append(int(row[0].argmax()))
    session.decoder.close()
    return [
        Answer(prompt, tokens, np.concatenate(rows)) for prompt, tokens, rows in zip(prompts, new, logits, strict=True)
    ]


def test_every_weight_is_the_gguf_packages_bit_for_bit(model, theirs):
    state = theirs.state_dict()
    for name in model.weights.names():
        array = model.weights.read(name)
        assert np.array_equal(array.view(np.uint32), state[name].numpy().view(np.uint32)), name


def test_200_tokens_after_20_prompts_are_those_of_transformers(theirs, answers):
    assert len(answers) == 20

    def check(answer: Answer) -> None:
        with torch.inference_mode():
            expected = theirs(torch.tensor([answer.prompt + answer.new[:-1]])).logits[0].numpy()
        assert len(answer.new) == NUM_NEW
        assert expected[len(answer.prompt) - 1 :].argmax(axis=1).tolist() == answer.new
        assert_close(answer.logits, expected)

    with one_thread_each(2) as pool:
        list(pool.map(check, answers))


def one_thread_each(count: int) -> ThreadPoolExecutor:
    """Prompts side by side rather than torch's threads within one: those spin, and stall beside a busy neighbour."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-3 of the largest logit, over the whole text and in each row."""
    assert got.shape == expected.shape
    error, scale = np.abs(got - expected).max(axis=1), np.abs(expected).max(axis=1)
    assert error.max() <= 1e-3 * scale.max()
    assert (error <= 1e-3 * scale).all()


def test_transformers_own_generate_writes_the_same(theirs, answers):
    answer = answers[0]

    def generate() -> list[int]:
        prompt = torch.tensor([answer.prompt])
        mask = torch.ones_like(prompt)
        with torch.inference_mode():
            out = theirs.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=NUM_GENERATED, do_sample=False)
        return out[0, len(answer.prompt) :].tolist()

    with one_thread_each(1) as pool:
        assert pool.submit(generate).result() == answer.new[:NUM_GENERATED]


def test_a_prompt_alone_in_pieces_gives_the_bits_that_it_got_in_the_batch(model, answers):
    answer = answers[12]
    text = answer.prompt + answer.new[:NUM_ALONE]
    session = Session(model, 1, len(text))
    cuts = [0, 1, 6, len(answer.prompt), *range(len(answer.prompt) + 1, len(text) + 1)]
    for first, last in pairwise(cut for cut in cuts if cut <= len(text)):
        rows = session.pred({0: text[first:last]})[0]
        assert np.array_equal(rows, answer.logits[first:last])
    session.decoder.close()


def test_the_mass_of_attention_is_the_sum_of_transformers_attentions(model, theirs, prompts):
    text = [token for prompt in prompts[:8] for token in prompt]
    config, before = model.config, theirs.config._attn_implementation
    theirs.set_attn_implementation("eager")  # no other gives attentions
    with torch.inference_mode():
        attentions = theirs(torch.tensor([text]), output_attentions=True).attentions
    theirs.set_attn_implementation(before)
    weights = torch.cat(attentions).view(config.num_layers, config.num_kv_heads, -1, len(text), len(text)).numpy()
    session = Session(model, 1, len(text))
    pages = np.arange(-(-len(text) // 32), dtype=np.int32)
    for first, end in pairwise((0, 100, 101, len(text))):
        mass = np.zeros((config.num_layers, config.num_kv_heads, end), np.float32)
        places = np.arange(first, end, dtype=np.int32)
        chunk = Chunk(np.array(text[first:end], np.int32), places, pages, first, (), mass=mass)
        session.decoder.step(StepBatch((chunk,)))
        expected = weights[:, :, :, first:end, :end].sum(axis=(2, 3))
        assert np.abs(mass - expected).max() < 1e-3 * expected.max()
    session.decoder.close()
