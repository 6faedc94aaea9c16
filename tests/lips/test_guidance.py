"""Two contexts beside each other: the question, text or memory of one changes the draws by the given weight."""

import numpy as np
import pytest

import libsym as sym
from lips import cad, cfg, contrastive

pytestmark = pytest.mark.slow
FACTS = [
    ("In 2030 the capital of France moved to Lyon.", "The capital of France is", "Lyon"),
    ("An apple a day keeps the teacher away.", "An apple a day keeps the", "teacher"),
]
ASKED, SYSTEM = "Describe a cat.", "You speak like a pirate."
PROMPT = "The history of the city begins"


def greedy(tokens, max_tokens):
    """Return the tokens of the daemon's own loop."""
    with sym.kv_create() as kv:
        return list(sym.generate(kv, tokens, max_tokens=max_tokens))


def of_conversation(system, question=ASKED):
    return sym.chat_tokens([{"role": "system", "content": system}, {"role": "user", "content": question}])


def random_rows(num_rows, size=50):
    rng = np.random.default_rng(11)
    return [sym.Dist.of(rng.normal(0, 3, size)) for _ in range(num_rows)]


@pytest.mark.parametrize(("context", "question", "told"), FACTS)
def test_the_model_believes_what_it_reads_where_by_itself_it_says_what_it_knows(lips, context, question, told):
    plain = greedy(sym.tokenize(f"{context}\n{question}"), 3)
    assert list(cad.answer(context, question, 0, 3)) == plain, "a strength of 0 is plain decoding"
    assert told not in sym.detokenize(plain)
    assert told in cad.answer(context, question, 1, 3).full_text()


def test_guidance_of_1_is_plain_decoding_and_of_0_knows_no_instructions(lips):
    assert list(cfg.answer(ASKED, SYSTEM, None, 1, 8)) == greedy(of_conversation(SYSTEM), 8)
    plain = sym.chat_tokens([{"role": "user", "content": ASKED}])
    assert list(cfg.answer(ASKED, SYSTEM, None, 0, 8)) == greedy(plain, 8)
    assert list(cfg.answer(ASKED, SYSTEM, SYSTEM, 5, 8)) == greedy(of_conversation(SYSTEM), 8), (
        "nothing to keep away from"
    )
    opposite = "You speak like a king."
    assert list(cfg.answer(ASKED, SYSTEM, opposite, 0, 8)) == greedy(of_conversation(opposite), 8)


def test_each_step_moves_toward_the_instructions_as_the_scale_grows():
    for follows, ignores in zip(random_rows(20), random_rows(40)[20:], strict=True):
        gain = np.asarray(follows) - np.asarray(ignores)
        chosen = [cfg.guided(follows, ignores, scale) for scale in (0, 0.5, 1, 2, 5, 1000)]
        assert chosen[0] == ignores.argmax()
        assert chosen[2] == follows.argmax()
        assert chosen[-1] == gain.argmax()
        assert np.all(np.diff(gain[chosen]) >= 0)


def test_the_contrast_chooses_among_what_the_expert_finds_plausible():
    changed = 0
    for expert, amateur in zip(random_rows(20), random_rows(40)[20:], strict=True):
        knows = np.log(np.asarray(expert.probs(), np.float64))
        guesses = np.log(np.asarray(amateur.probs(), np.float64))
        for alpha, beta in ((0.1, 1), (0.01, 5), (0, 1)):
            token = contrastive.contrast(expert, amateur, alpha, beta)
            plausible = [each for each in range(50) if np.exp(knows[each]) >= alpha * np.exp(knows.max())]
            assert token == max(plausible, key=lambda each: (1 + beta) * knows[each] - beta * guesses[each])
            changed += token != expert.argmax()
        assert contrastive.contrast(expert, amateur, 0.1, 0) == expert.argmax(), "beta 0 is plain decoding"
        assert contrastive.contrast(expert, amateur, 1, 9) == expert.argmax(), "nothing else is plausible"
    assert changed > 20


def test_the_amateur_remembers_the_last_tokens_alone(lips, computed):
    """Against a loop that gives both the whole of what they are to remember, from nothing, at each step."""
    prompt, window, max_tokens = sym.tokenize(PROMPT), 3, 8
    expected = list[int]()
    for step in range(max_tokens):
        read = prompt + expected
        remembered = read[-window - step % window :]
        with sym.kv_create() as expert, sym.kv_create() as amateur:
            knows, guesses = sym.pred_batch([sym.Pred(expert, read), sym.Pred(amateur, remembered)])
            assert isinstance(knows, sym.Dist)
            assert isinstance(guesses, sym.Dist)
            expected.append(contrastive.contrast(knows, guesses, alpha=0.1, beta=1))
    found, num_computed = computed(contrastive.decode, prompt, window, 0.1, 1, max_tokens)
    assert found == expected != greedy(prompt, max_tokens)
    num_parts = -(-max_tokens // window)
    assert num_computed == (len(prompt) + max_tokens - 1) + (num_parts * (window - 1) + max_tokens)
    assert contrastive.decode(prompt, window, 0.1, 0, max_tokens) == greedy(prompt, max_tokens)
    assert contrastive.decode(prompt, len(prompt), 0.1, 1, 1) == greedy(prompt, 1), "the amateur knows as much"


def test_each_is_run_by_its_name(lips):
    context, question, told = FACTS[0]
    assert told in lips.run("cad", "--context", context, question, "--strength", "1", "--max-tokens", "4")
    ours = cfg.answer(ASKED, SYSTEM, None, 3, 6).full_text()
    assert lips.run("cfg", ASKED, "--system", SYSTEM, "--scale", "3", "--max-tokens", "6") == ours + "\n"
    tokens = sym.tokenize(PROMPT)
    ours = PROMPT + sym.detokenize(contrastive.decode(tokens, 4, 0.1, 1, 6))
    assert lips.run("contrastive", PROMPT, "--window", "4", "--max-tokens", "6") == ours + "\n"
