"""A prefix that is computed once: the answers are those without it, and each query costs itself."""

import pytest

import libsym as sym
from lips import prefix

pytestmark = pytest.mark.slow
QUERIES = ["What is the capital of France?", "What do bees make?"]
MAX_TOKENS = 8


def conversation(query):
    return sym.chat_tokens([{"role": "system", "content": prefix.SYSTEM}, {"role": "user", "content": query}])


def test_a_query_computes_itself_where_without_the_prefix_it_computes_that_too(lips, computed, capsys):
    """The last token that is drawn is not computed: its answer is complete without."""
    with prefix.open_prefix() as base, sym.kv_create() as empty:
        length = base.len()
        for query in QUERIES:
            _, num_with = computed(prefix.answer, base, query, MAX_TOKENS)
            _, num_without = computed(prefix.answer, empty, query, MAX_TOKENS)
            shown = capsys.readouterr().out.splitlines()
            assert shown[: len(shown) // 2] == shown[len(shown) // 2 :], "the answer is the same"
            assert num_without - num_with == length > len(conversation(query)) / 3
            assert len(conversation(query)) <= num_without < len(conversation(query)) + MAX_TOKENS


def test_a_query_that_fails_is_one_line_and_the_others_are_answered(tiny):
    long = "x" * sym.model_info().max_positions
    done = tiny.finish("prefix", "--max-tokens", "2", long, "Who?")
    assert done.returncode == 1
    assert done.stdout.startswith("Who? ")
    assert done.stderr.startswith("prefix: ")
    assert done.stderr.count("\n") == 1
