"""Prompts as a tree of forks: each part is computed once, and the answers are those of whole prompts."""

import itertools

import pytest

import libsym as sym
from lips.prefix_tree import grow, level

pytestmark = pytest.mark.slow
MAX_TOKENS = 3
SYSTEMS = ["You answer in one short sentence.", "You are a pirate."]
DOCUMENTS = ["Bees make honey. They live in hives.", "Ants live in hills."]
QUESTIONS = ["What do they make?", "Where do they live?"]
LEVELS = [
    level("system", [(text, text) for text in SYSTEMS]),
    level("user", [("doc", text) for text in DOCUMENTS]),
    level("user", [(text, text) for text in QUESTIONS]),
]


def answers(levels=LEVELS):
    """The texts by their nodes, and how many of their tokens were computed."""
    with sym.kv_open("tree.kv", "a") as root:
        grown = list(grow(root, [], levels, "tree", MAX_TOKENS))
        found = [(path, answer, answer.full_text()) for path, answer in grown]
    return {path: text for path, _, text in found}, sum(len(a.tokens) - len(a.pending) for _, a, _ in found)


def conversations():
    """Roles and texts that the levels combine, in the order in which the tree grows."""
    for texts in itertools.product(SYSTEMS, DOCUMENTS, QUESTIONS):
        yield list(zip(("system", "user", "user"), texts, strict=True))


def tokens_of(conversation, *, is_whole=True):
    messages = [{"role": role, "content": content} for role, content in conversation]
    return sym.chat_tokens(messages, add_generation_prompt=is_whole)


def test_answers_are_those_without_sharing_and_what_is_computed_is_what_differs(lips, computed):
    (found, num_answered), num_computed = computed(answers)
    prompts = list(map(tokens_of, conversations()))
    alone = [sym.generate(sym.kv_create(), prompt, max_tokens=MAX_TOKENS).full_text() for prompt in prompts]
    assert list(found.values()) == alone
    assert num_computed - num_answered == num_of_parts() < sum(map(len, prompts)) * 2 / 3


def num_of_parts():
    """The sum of the lengths of all different beginnings of conversations, each without the one that it goes on."""
    lengths, before = {}, 0
    for texts, end in itertools.product(conversations(), (1, 2, 3)):
        length = len(tokens_of(texts[:end], is_whole=end == 3))
        lengths[tuple(texts[:end])] = length - (before if end > 1 else 0)
        before = length
    return sum(lengths.values())


def test_the_next_run_computes_no_shared_part_and_a_changed_document_only_what_is_below_it(lips, computed):
    first, _ = answers()
    (again, num_answered), num_computed = computed(answers)
    assert again == first
    num_nodes = len(SYSTEMS) * (1 + len(DOCUMENTS) * (1 + len(QUESTIONS)))
    assert num_computed - num_answered == num_nodes, "the last token of each"
    changed = [LEVELS[0], level("user", [("doc", DOCUMENTS[0]), ("doc", "Ants live under stones.")]), LEVELS[2]]
    third, _ = answers(changed)
    kept = [path for path in third if "/0-doc/" in path]
    assert len(kept) == len(first) / 2
    assert all(third[path] == first[path] for path in kept)
    with sym.kv_open("tree/1-You-are-a-pirate/1-doc/0-What-do-they-make.kv") as kv:
        assert "Ants live under stones." in sym.detokenize(kv.read()[0])


def test_the_tree_is_directories_on_the_mount(lips, tmp_path):
    document = tmp_path / "bees.md"
    document.write_text(DOCUMENTS[0])
    told = lips.run("prefix_tree", "--max-tokens", "3", "--document", str(document), *QUESTIONS)
    assert [line.partition(": ")[0].rpartition("/")[2] for line in told.splitlines()[:1]] == ["0-What-do-they-make"]
    below = lips.mount / "prefix_tree" / "0-You-answer-in-one-short-sentence"
    assert sorted(str(path.relative_to(below)) for path in below.rglob("*.kv")) == [
        "0-bees-md.kv",
        "0-bees-md/0-What-do-they-make.kv",
        "0-bees-md/1-Where-do-they-live.kv",
    ]


def test_a_question_that_is_too_long_leaves_no_file_and_the_others_are_answered(tiny, tmp_path):
    document = tmp_path / "bees.md"
    document.write_text(DOCUMENTS[0])
    long = "x" * sym.model_info().max_positions
    done = tiny.finish("prefix_tree", "--max-tokens", "3", "--document", str(document), "Who?", long)
    assert (done.returncode, done.stderr) == (1, "prefix_tree: 1 prompts are longer than the context\n")
    below = tiny.mount / "prefix_tree" / "0-You-answer-in-one-short-sentence" / "0-bees-md"
    assert [path.name for path in below.iterdir()] == ["0-Who.kv"]
