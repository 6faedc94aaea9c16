"""Reasoning: shared thoughts are computed once, branches grow in the same steps, and searches find their goal."""

import itertools
import random
import re
from contextlib import nullcontext
from typing import Any

import pytest

import libsym as sym
from lips import (
    graph_of_thought,
    mcts,
    recursion_of_thought,
    reflexion,
    self_consistency,
    skeleton_of_thought,
    tree_of_thought,
)
from tests.lips.scripted import NoAnswerLeft, scripted

pytestmark = pytest.mark.slow


@pytest.fixture
def steps(lips):
    """Return a function that calls another and counts the daemon's steps meanwhile; only this process calls it."""

    def count(call, *arguments, **how):
        before = sym.daemon_stat()["num_steps"]
        result = call(*arguments, **how)
        return result, sym.daemon_stat()["num_steps"] - before

    return count


def root_of(task, path=None):
    root = tree_of_thought.Thought(sym.kv_create(), path)
    tokens = sym.tokenize(task)
    root.kv.write(tokens[:-1])
    root.pending = tokens[-1:]
    return root


def test_a_tree_of_thoughts_goes_on_with_those_that_the_model_finds_best(lips):
    free = sym.daemon_stat()["num_free_pages"]
    root = root_of("Task: Plan a day in a city.\nA plan in 2 steps.", "plan")
    best = tree_of_thought.think(root, breadth=3, keep=2, depth=2, max_tokens=12)
    assert [leaf.score for leaf in best] == sorted((leaf.score for leaf in best), reverse=True)
    assert {leaf.depth for leaf in best} == {2}
    assert len(root.leaves()) <= 2 + 2, "those that lost are gone, but for a parent without children"
    assert sorted(path.name for path in (lips.mount / "plan").iterdir()) == sorted(
        f"{node.name}.kv" for node in root if node.parent
    )
    text = sym.detokenize([*best[0].kv.read()[0], *best[0].pending])
    assert all(thought.text in text for thought in best[0].line()[1:]), "a leaf's file holds all thoughts up to it"
    root.remove()
    root.kv.close()
    assert sym.daemon_stat()["num_free_pages"] == free


def test_thoughts_of_all_levels_are_drawn_apart(lips, monkeypatch):
    drawn, generate = [], sym.generate

    def noted(*arguments, **options):
        drawn.append(generate(*arguments, **options))
        return drawn[-1]

    monkeypatch.setattr(sym, "generate", noted)
    root = root_of("Task: Plan a day.")
    tree_of_thought.think(root, breadth=2, keep=1, depth=3, max_tokens=4)
    assert len({generation.seed for generation in drawn}) == len(drawn) == 6
    root.remove()
    root.kv.close()


def test_a_thoughts_score_is_what_the_model_says_without_the_tree(lips):
    root = root_of("Task: Boil an egg.")
    [thought] = tree_of_thought.think(root, breadth=2, keep=1, depth=1, max_tokens=10)
    tokens = [*thought.kv.read()[0], *thought.pending, *sym.tokenize(tree_of_thought.JUDGE)]
    dist = sym.pred(sym.kv_create(), tokens)
    yes, no = (sym.tokenize(word)[0] for word in (" Yes", " No"))
    alone = dist.probs(allowed=[yes, no])[yes]
    assert thought.score == pytest.approx(alone, abs=2e-2)


def test_thoughts_cost_their_own_tokens_and_share_steps(lips, computed, steps):
    root = root_of("Task: " + "Plan a long day in a large city with many museums. " * 8)
    (_, num_tokens), num_steps = steps(computed, tree_of_thought.think, root, breadth=4, keep=1, depth=1, max_tokens=8)
    judged = 4 * len(sym.tokenize(tree_of_thought.JUDGE))
    drawn = 4 * (len(root.pending) + len(sym.tokenize("\nStep 1:")) + 8)
    assert num_tokens <= drawn + judged + 4, "the task is not among them"
    assert num_steps <= 4 * 8 / 2, "four thoughts grow in the same steps"


def test_faults_are_what_is_out_of_order_missing_or_too_many():
    assert graph_of_thought.faults([3, 1, 2], [1, 2, 3]) == 0
    assert graph_of_thought.faults([1, 2, 3], [2, 1, 3]) == 1
    assert graph_of_thought.faults([1, 2, 3], [1, 2]) == 1
    assert graph_of_thought.faults([1, 2, 3], [1, 2, 4]) == 2


def test_more_ways_never_sort_worse_and_the_parts_sort_what_the_whole_does_not(lips):
    digits = [5, 3, 9, 1, 7, 2, 8, 4]
    with sym.kv_create() as examples:
        examples.write(sym.tokenize(graph_of_thought.SORT.partition("{")[0]))
        length = examples.len()
        parts = [digits[:4], digits[4:]]
        one, many = (graph_of_thought.attempts(examples, parts, ways) for ways in (1, 6))
        for part, first, best in zip(parts, one, many, strict=True):
            assert len(best) == 4
            assert graph_of_thought.faults(part, best) <= graph_of_thought.faults(part, first)
        found = graph_of_thought.sort(examples, digits, 3)
        assert examples.len() == length
    assert len(found) == 8
    assert graph_of_thought.faults(digits, found) <= 4


def test_the_points_of_a_skeleton_are_written_in_the_same_steps(lips, computed, steps):
    with sym.kv_create() as kv:
        (points, num_tokens), num_steps = steps(
            computed, lambda: list(skeleton_of_thought.answer(kv, "How do I plant a tree?", 3, 30))
        )
        outline = kv.len()
    assert [point[:2] for point, _ in points] == ["1.", "2.", "3."]
    lengths = [len(sym.tokenize(text)) for _, text in points]
    assert num_steps < outline + sum(lengths), "one after the other they would take a step for each token"
    questions = sum(len(sym.tokenize(f"Explain in one sentence: {point[3:]}")) + 20 for point, _ in points)
    assert num_tokens < outline + questions + sum(lengths) + 30, "the outline is computed once, for three forks"


def test_a_sum_of_any_length_is_solved_in_contexts_that_stay_short(lips, computed):
    with sym.kv_create() as examples:
        examples.write(sym.tokenize(recursion_of_thought.EXAMPLES))
        (found, depth), num_tokens = computed(recursion_of_thought.solve, examples, [3, 4, 2, 1, 5, 2])
        assert (found, depth) == (17, 3)
        assert num_tokens <= 5 * 12, "five small problems; the examples are computed already"
        _, depth = recursion_of_thought.solve(examples, [1] * 16)
        assert depth == 4
        assert recursion_of_thought.solve(examples, [7]) == (7, 0)


def test_the_search_finds_the_value_and_the_reward_is_arithmetic(lips):
    search = mcts.Search(12)
    budget = sym.Budget(tokens=900)
    while budget and search.best[0] < 1:
        search.step()
    value, text = search.best
    assert value == 1
    assert eval(text) == 12
    assert re.fullmatch(r"\d([-+*]\d){3}", text)


def test_a_search_finds_better_than_drawing_with_the_same_tokens():
    """The tree's rewards are known: the search runs alone, without a model."""

    class Known(mcts.Search):
        def __init__(self, target, seed):
            self.target, self.random, self.best = target, random.Random(seed), (-1.0, "")
            self.texts = [bytes([char]) for char in range(256)]
            self.root = _Plain()

        def moves(self, _kv, _token, length):
            allowed = "+-*" if length % 2 else "0123456789"
            return [(ord(char), 1 / len(allowed)) for char in allowed]

    searched, drawn = 0, 0
    for target, seed in itertools.product((61, 83, 97), range(20)):
        search, chance = Known(target, seed), Known(target, seed)
        for _ in range(300):
            search.step()
            chance.rollout(chance.root)
        searched += search.best[0] == 1
        drawn += chance.best[0] == 1
    assert searched >= 1.5 * drawn > 0


class _Plain(mcts.Node):
    """A node without a file."""

    def __init__(self):
        file: Any = nullcontext()
        file.fork = lambda: file
        self.kv, self.parent, self.children, self.name, self.token = file, None, [], "", 0

    def fork(self):
        child: Any = type(self)()
        child.parent = self
        self.children.append(child)
        return child


RIGHT, WRONG = "def double(x):\n    return x * 2", "def double(x):\n    return x + 2"


def test_reflexion_tries_again_until_the_test_passes(tiny):
    """The attempts are scripted: a small model can't be told to fail first."""
    test = "assert double(5) == 10, 'double(5) is ' + str(double(5))"
    with sym.Chat(sym.kv_create()) as chat, scripted([WRONG, "It added two.", RIGHT, "never asked"]) as left:
        tried = list(reflexion.attempts(chat, "double", test, most=3))
        text = sym.detokenize([*chat.kv.read()[0], *chat.pending])
    assert tried == [(WRONG, "AssertionError: double(5) is 7"), (RIGHT, "")]
    assert left == ["never asked"]
    assert text.index(WRONG) < text.index("double(5) is 7") < text.index("It added two.") < text.index(RIGHT)


def test_reflexion_never_exceeds_its_attempts_and_reads_each_token_once(tiny, computed):
    with sym.Chat(sym.kv_create()) as chat, scripted([WRONG, "It added.", WRONG]):
        tried, num_tokens = computed(lambda: list(reflexion.attempts(chat, "double", "assert double(5) == 10", most=2)))
        with pytest.raises(NoAnswerLeft):
            chat.ask("One more?")
        assert [code for code, _ in tried] == [WRONG, WRONG]
        # Of a forced answer the last token is pending: computed and cut, if the grammar was late.
        assert 0 <= num_tokens - chat.kv.len() <= 3, "no attempt is prefilled again"


def test_a_number_is_one_however_it_is_written():
    texts = ["It is 3.50.", "so 3.5", "5-3", "x = -3", "(2)-3", "1,000,", "1000.0", "2024-05-03", "none"]
    expected = ["3.5", "3.5", "3", "-3", "3", "1000", "1000", "3", None]
    assert [self_consistency.last_number(text) for text in texts] == expected


def test_an_answer_that_was_cut_has_no_vote(tiny):
    """The third has come to 12, and would go on."""
    cut = sym.generate(sym.kv_create(), [65], grammar=sym.Grammar.regex("= 123"), max_tokens=4)
    whole = [sym.generate(sym.kv_create(), [65], grammar=sym.Grammar.regex(form)) for form in ("= 12", "12[.]0")]
    assert self_consistency.votes([*whole, cut]) == {"12": 2}


def test_a_test_that_fails_behind_what_it_prints_is_no_success(tiny):
    """The faulty code prints that it has passed."""
    test = "print('1 test passed')\nassert double(5) == 10"
    with sym.Chat(sym.kv_create()) as chat, scripted([WRONG, "It added.", "double = 1 +", "No code.", RIGHT]):
        tried = list(reflexion.attempts(chat, "double", test, most=3))
    assert [wrong for _, wrong in tried] == ["AssertionError", "SyntaxError: invalid syntax", ""]
