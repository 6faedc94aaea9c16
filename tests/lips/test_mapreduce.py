"""A text longer than the context ends in one summary: every piece is seen, and the instruction is computed once."""

import pytest

import libsym as sym
from lips.mapreduce import INSTRUCTION, conversation, pieces, summarize

pytestmark = pytest.mark.slow
CONTEXT, MAX_TOKENS = 120, 6
TEXT = "\n".join(f"On day {day} the crew of the ship sailed {day * 7} miles to the west." for day in range(1, 20))


@pytest.fixture
def seen(monkeypatch):
    """Record each generation, round by round: its prompt as text, the number of given tokens, the generation."""
    given, plain = [], sym.generate

    def generate(kv, tokens, **how):
        whole = kv.read()[0] + tokens
        given.append((sym.detokenize(whole), len(tokens), generation := plain(kv, tokens, **how)))
        return generation

    monkeypatch.setattr(sym, "generate", generate)
    return given


def test_every_piece_is_seen_and_one_summary_is_left(lips, seen, computed):
    assert len(conversation(TEXT)) > CONTEXT
    summary, num_computed = computed(summarize, TEXT, CONTEXT, MAX_TOKENS)
    told = [generation.full_text().strip() for _, _, generation in seen]
    text, done, num_parts = TEXT, 0, []
    while done < len(seen):  # round by round
        parts = pieces(text, CONTEXT - MAX_TOKENS)
        assert "".join(parts) == text
        assert all(part in given for part, (given, _, _) in zip(parts, seen[done:], strict=False))
        assert max(len(conversation(part)) for part in parts) + MAX_TOKENS <= CONTEXT
        text = "\n".join(told[done : done + len(parts)])
        done += len(parts)
        num_parts.append(len(parts))
    assert summary == text
    assert num_parts[0] > 4
    assert num_parts[-1] == 1
    instruction = len(sym.chat_tokens([INSTRUCTION], add_generation_prompt=False))
    of_pieces = sum(num + len(each.tokens) - len(each.pending) for _, num, each in seen)
    assert num_computed == instruction + of_pieces, "the instruction is computed once"
    assert [num for _, num, _ in seen[: num_parts[0]]] == [
        len(conversation(part)) - instruction for part in pieces(TEXT, CONTEXT - MAX_TOKENS)
    ]


def test_a_text_without_spaces_is_cut_all_the_same(lips):
    text = "é" * 700
    parts = pieces(text, CONTEXT)
    assert "".join(parts) == text
    assert len(parts) > 1
    assert max(len(conversation(part)) for part in parts) <= CONTEXT


def test_summaries_that_would_not_shorten_the_text_are_refused(lips, tmp_path):
    path = tmp_path / "text.md"
    path.write_text(TEXT)
    refused = lips.refused("mapreduce", "--context", "100", "--max-tokens", "60", str(path))
    assert refused.startswith("mapreduce: summaries of 60 tokens do not shorten")
    told = lips.run("mapreduce", "--context", "200", "--max-tokens", "3", str(path)).splitlines()
    assert told[0].startswith(f"(characters: {len(TEXT)}, pieces: ")
    assert told[-2].endswith(", pieces: 1)")
    assert told[-1]
