"""Guidance: what a prompt, a context or an expert changes in the model's opinion counts more, or less."""

import numpy as np
import pytest

import libsym as sym
from lips import cad, cfg, contrastive

pytestmark = pytest.mark.slow
SYSTEM, QUESTION = "You speak like a pirate.", "Describe a cat."
CONTEXT = "In 2030 the capital of France moved to Lyon."


def greedy(tokens, max_tokens):
    with sym.kv_create() as kv:
        return sym.generate(kv, tokens, max_tokens=max_tokens).full_text()


def test_guidance_of_1_is_the_prompt_and_of_0_is_none(lips):
    asked = {"role": "user", "content": QUESTION}
    with_, without = (sym.chat_tokens(each) for each in ([{"role": "system", "content": SYSTEM}, asked], [asked]))
    assert cfg.answer(QUESTION, SYSTEM, None, 1.0, 12).full_text() == greedy(with_, 12)
    assert cfg.answer(QUESTION, SYSTEM, None, 0.0, 12).full_text() == greedy(without, 12)
    assert cfg.answer(QUESTION, SYSTEM, SYSTEM, 5.0, 12).full_text() == greedy(with_, 12), (
        "what it keeps away from is itself"
    )


def test_the_more_guidance_the_likelier_is_what_the_prompt_makes_likely():
    with_, without = sym.Dist.of([1.0, 0.0, 0.5]), sym.Dist.of([1.0, 0.9, 0.0])
    draws = [cfg.guided(scale)(with_, without) for scale in (0, 1, 2, 4)]
    assert draws == [0, 0, 2, 2], "the third token is the one that the prompt speaks for"
    margins = []
    for scale in (0.0, 1.0, 2.0):
        follows, ignores = np.log(with_.probs()), np.log(without.probs())
        row = ignores + scale * (follows - ignores)
        margins.append(row[2] - row[1])
    assert margins == sorted(margins)


def test_a_context_that_contradicts_what_the_model_knows_is_believed(lips):
    question = "The capital of France is"
    assert "Lyon" in cad.answer(CONTEXT, question, 1.0, 6).full_text()
    assert "Paris" in greedy(sym.tokenize(question), 6), "what it remembers"
    reading, remembering = sym.kv_create(), sym.kv_create()
    read = sym.pred(reading, sym.tokenize(f"{CONTEXT}\n{question}"))
    remembered = sym.pred(remembering, sym.tokenize(question))
    lyon, paris = (sym.tokenize(word)[0] for word in (" Lyon", " Paris"))
    margins = []
    for strength in (0.0, 0.5, 1.0):
        row = np.log(read.probs()) + strength * (np.log(read.probs()) - np.log(remembered.probs()))
        margins.append(row[lyon] - row[paris])
        assert cad.aware(strength)(read, remembered) == int(np.argmax(row))
    assert margins == sorted(margins)


def test_without_strength_it_is_plain_decoding(lips):
    question = "The capital of France is"
    assert cad.answer(CONTEXT, question, 0.0, 10).full_text() == greedy(sym.tokenize(f"{CONTEXT}\n{question}"), 10)


def test_the_contrast_is_among_plausible_tokens_alone():
    expert, amateur = sym.Dist.of([3.0, 2.5, -2.0]), sym.Dist.of([3.0, 0.0, -9.0])
    assert contrastive.contrast(0.1)(expert, amateur) == 1, "what the amateur does not know"
    assert contrastive.contrast(1e-9)(expert, amateur) == 2, "without the mask the implausible wins"
    assert contrastive.contrast(1.0)(expert, amateur) == 0, "only the first is left"


def test_contrast_with_alpha_1_is_greedy_and_the_amateur_reads_the_window_alone(lips, computed):
    prompt = sym.tokenize("The history of the city begins with a small village on the river, and")
    found, num_tokens = computed(contrastive.decode, prompt, 4, 1.0, 12)
    assert sym.detokenize(found) == greedy(prompt, 12)
    assert num_tokens <= len(prompt) + 12 + 3 * (4 + 4), "each amateur reads four tokens, and four more"
    assert contrastive.decode(prompt, 4, 0.1, 12) != found


COMMANDS = {
    "cfg": [QUESTION, "--system", SYSTEM, "--scale", "2", "--max-tokens", "6"],
    "cad": ["The capital of France is", "--context", CONTEXT, "--max-tokens", "6"],
    "contrastive": ["The history of the city begins", "--window", "16", "--max-tokens", "6"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_writes_its_text(lips, name):
    out = lips.run(name, *COMMANDS[name])
    assert len(out.strip()) > 5
    assert name != "cad" or "Lyon" in out
