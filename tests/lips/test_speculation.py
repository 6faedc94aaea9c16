"""N-gram speculation and Jacobi decoding give the tokens of greedy decoding in fewer steps; no wrong guess stays."""

import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import libsym as sym
from lips import jacobi, ngram, tree_speculation

pytestmark = pytest.mark.slow
NUMBERS = "1, 2, 3, 4, 5, 6,"
WORDS = "Count: one, two, three, one, two, three,"
METHODS: dict[str, Callable[[sym.KV, list[int]], Iterator[list[int]]]] = {
    "ngram": ngram.speculate,
    "jacobi": jacobi.iterate,
    "tree": partial(tree_speculation.speculate, match=1),
}


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    return list(sym.generate(sym.kv_create(), prompt, max_tokens=num_tokens, stop_at_end=False))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text", [NUMBERS, WORDS])
def test_the_tokens_are_those_of_greedy_decoding_in_fewer_steps(lips, method, text):
    prompt, kv = sym.tokenize(text), sym.kv_create()
    expected, before = greedy(prompt, 32), sym.getrusage()
    found: list[int] = []
    for step in METHODS[method](kv, prompt):
        assert step
        found += step
        assert kv.read()[0] == [*prompt, *found[:-1]], "what was guessed wrongly is not in the file"
        if len(found) >= 24:
            break
    used = sym.getrusage()
    assert found == expected[: len(found)]
    assert used.steps - before.steps == used.calls - before.calls <= 0.9 * len(found)
    assert used.tokens - before.tokens > kv.len(), "some guesses were wrong"


@pytest.mark.parametrize("method", METHODS)
def test_it_goes_on_behind_what_a_file_holds(lips, method):
    prompt = sym.tokenize(WORDS)
    kv = sym.kv_create()
    kv.write(prompt[:5])
    steps = METHODS[method](kv, prompt[5:])
    found = [token for _ in range(6) for token in next(steps)]
    assert found == greedy(prompt, len(found))
    assert kv.read() == ([*prompt, *found[:-1]], [*range(len(prompt) + len(found) - 1)])


def test_a_draft_is_what_followed_the_latest_time_and_a_tree_has_what_drafts_begin_with_in_common_once():
    assert ngram.draft([1, 2, 3, 1, 2, 4, 5, 1, 2], match=2, length=2) == [4, 5]
    assert ngram.draft([7, 7, 7], match=2, length=8) == [7]
    assert ngram.draft([1, 2, 3], match=1, length=8) == []
    assert ngram.draft([1], match=2, length=8) == []
    assert tree_speculation.drafts([1, 2, 3, 1, 2, 4, 1, 2], match=2, width=4, length=2) == [[4, 1], [3, 1]]
    assert tree_speculation.tree([[4, 1], [4, 5], [3]]) == ([4, 1, 5, 3], [[0], [0, 1], [0, 2], [3]])


def test_a_branch_that_is_not_the_first_is_kept_alone(lips):
    """The latest draft is wrong, an earlier one is right: its entries move up behind the text."""
    kv, prompt = (
        sym.kv_create(),
        sym.tokenize("one two three four. one two five. one two three four. nine two ten. one two"),
    )
    steps, found = tree_speculation.speculate(kv, prompt, match=1, width=4, length=6), list[int]()
    while len(found) < 20:
        found += next(steps)
    assert found == greedy(prompt, len(found))
    assert kv.read() == ([*prompt, *found[:-1]], [*range(len(prompt) + len(found) - 1)])


def test_the_daemon_does_the_same_in_one_call(lips):
    by_hand, built_in = (lips.finish("ngram", WORDS, "--max-tokens", "30", *more) for more in ([], ["--builtin"]))
    assert (by_hand.returncode, built_in.returncode) == (0, 0)
    assert by_hand.stdout == built_in.stdout == f"{WORDS}{sym.detokenize(greedy(sym.tokenize(WORDS), 30))}\n"
    [hand], [daemon] = (
        re.findall(r"30 tokens in (\d+) steps, (\d+) calls", each.stderr) for each in (by_hand, built_in)
    )
    assert int(hand[0]) == int(hand[1]) < 30
    assert int(daemon[0]) < 30
    assert daemon[1] == "1"


def test_the_command_iterates_until_the_text_is_as_long_as_was_asked_for(lips):
    done = lips.finish("jacobi", NUMBERS, "--max-tokens", "20")
    assert done.stdout == f"{NUMBERS}{sym.detokenize(greedy(sym.tokenize(NUMBERS), 20))}\n"
    [steps] = re.findall(r"20 tokens in (\d+) steps", done.stderr)
    assert int(steps) < 20
