"""The first day with libsym: first guesses of users are accepted, and objects show what they are."""

import json
from typing import Any

import numpy as np
import pydantic
import pytest

import libsym as sym
import symphony
from libsym.calls.generate import Options, generate_call

pytestmark = pytest.mark.usefixtures("shared")


def tokens_of(generation):
    return generation.full_text(), generation.tokens


def test_settings_are_taken_without_a_sampler_and_beside_one():
    hot: dict[str, Any] = {"temperature": 9.0, "top_k": 50, "top_p": 0.9, "min_p": 0.001}
    expected = tokens_of(sym.generate(sym.kv_create(), [65], sampler=sym.Sampler(**hot, seed=3), max_tokens=12))
    assert tokens_of(sym.generate(sym.kv_create(), [65], **hot, seed=3, max_tokens=12)) == expected
    beside = sym.Sampler(0.1, seed=3)
    assert tokens_of(sym.generate(sym.kv_create(), [65], sampler=beside, **hot, max_tokens=12)) == expected
    (asked,) = sym.generate_n(sym.kv_create(), [65], 1, **hot, seed=3, max_tokens=12)
    assert tokens_of(asked) == expected
    said = [sym.Chat(sym.kv_create()).ask("Who?", temperature=9.0, seed=seed, max_tokens=12) for seed in (1, 1, 2)]
    assert len({answer.full_text() for answer in said}) == 2
    chat = sym.Chat(sym.kv_create(), temperature=9.0, seed=1)
    assert chat.fork().ask("Who?", max_tokens=12).full_text() == said[0].full_text()
    assert chat.ask("Who?", seed=2, max_tokens=12).full_text() == said[2].full_text(), "a question's own go first"
    chat.undo()
    plain = sym.Chat(sym.kv_create()).ask("Who?", max_tokens=12).full_text()
    assert chat.ask("Who?", sampler=sym.Sampler.greedy(), max_tokens=12).full_text() == plain
    assert sym.Sampler(0.7) == sym.Sampler(temperature=0.7)
    with pytest.raises(sym.Invalid, match="top_p=2"):
        sym.Chat(sym.kv_create(), top_p=2)
    with pytest.raises(sym.Invalid, match="temperature=-1"):
        sym.generate(sym.kv_create(), [65], temperature=-1)


def test_each_of_several_may_have_a_sampler_of_its_own():
    samplers = [sym.Sampler.greedy(), sym.Sampler(9.0), sym.Sampler(9.0), sym.Sampler(9.0, seed=7)]
    first, second, third, own = sym.generate_n(sym.kv_create(), [65], samplers, seed=None, max_tokens=12)
    assert first.full_text() == sym.generate(sym.kv_create(), [65], max_tokens=12).full_text()
    assert second.full_text() != third.full_text()
    assert own.seed == 7
    again = sym.generate(sym.kv_create(), [65], temperature=9.0, seed=third.seed, max_tokens=12)
    assert again.full_text() == third.full_text()
    for wrong in ([], [sym.Sampler()] * 257):
        with pytest.raises(sym.Invalid, match="from 1 to 256"):
            sym.generate_n(sym.kv_create(), [65], wrong)
    with pytest.raises(sym.Invalid, match="not both"):
        sym.generate_n(sym.kv_create(), [65], [sym.Sampler()], sampler=sym.Sampler())


def test_a_grammar_is_made_of_a_class_of_pydantics():
    class Answer(pydantic.BaseModel):
        years: int

    assert json.loads(sym.Grammar.json(Answer).source)["properties"]["years"]["type"] == "integer"


def test_the_likeliest_are_pairs_and_two_lists():
    dist = sym.pred(sym.kv_create(), [65], top_k=3)
    for likeliest in (dist.topk(3), sym.Dist.of([3.0, 1.0, 2.0]).topk(3)):
        assert list(zip(likeliest.tokens, likeliest.logprobs, strict=True)) == likeliest
    assert likeliest.tokens == [0, 2, 1]


def test_a_distribution_shows_its_likeliest_tokens_as_text():
    logits = [0.0] * 259
    logits[104], logits[10] = 9.0, 7.0
    assert repr(sym.Dist.of(logits)).startswith(r"<Dist of 259 tokens: 'h' 85.69%, '\n' 11.60%, ")
    assert repr(sym.Dist.of([2.0, 1.0])) == "<Dist of 2 tokens: 0 73.11%, 1 26.89%>"
    assert "NaN" in repr(sym.Dist.of([float("nan"), 1.0]))


def test_every_public_class_has_a_repr_of_its_own():
    classes = [each for name in (*sym.__all__, *sym.aio.__all__) if isinstance(each := getattr(sym, name, None), type)]
    classes += [each for name in sym.aio.__all__ if isinstance(each := getattr(sym.aio, name), type)]
    assert [each.__name__ for each in classes if getattr(each, "__repr__") is object.__repr__] == []  # noqa: B009


def test_a_generation_says_that_it_failed_when_it_has():
    """The end of a generation and its reason are two facts: between them the generation is under way."""
    seen = []

    class Watched(sym.Generation):
        @property
        def finish(self):
            return self._finish

        @finish.setter
        def finish(self, ending):
            self._finish = None
            if ending is not None:
                seen.append(repr(self))
            self._finish = ending

    kv = sym.kv_create()
    watched = Watched(kv, *generate_call(kv, [65], Options(max_tokens=2)))
    assert len(list(watched)) == 2
    assert seen == ["<Watched: 2 tokens, under way>"]
    failed = sym.generate(sym.kv_create(), [65], grammar=sym.Grammar.regex("("))
    with pytest.raises(sym.Invalid):
        list(failed)
    assert repr(failed) == "<Generation: 0 tokens, failed>"


def test_completion_offers_what_is_documented_and_the_library_says_which_release_it_is():
    kv = sym.kv_create()
    shown = {*dir(kv), *dir(sym.generate(kv, [65], max_tokens=1))}
    assert shown & {"give_up", "moved", "named", "take", "came", "read_part", "drop_stop", "is_lost"} == set()
    assert shown >= {"fork", "room", "handle", "cancel", "full_text", "is_complete", "tokens"}
    assert sym.__version__ == symphony.__version__


def test_a_weighted_sum_of_distributions_is_that_of_their_logits():
    rows = [sym.Dist.of(np.random.default_rng(seed).normal(size=300)) for seed in range(3)]
    weights = [2.0, -1.0, 0.25]
    expected = sum(weight * np.asarray(row, np.float64) for weight, row in zip(weights, rows, strict=True))
    mixed = sym.Dist.mixed(zip(rows, weights, strict=True))
    assert np.asarray(mixed) == pytest.approx(expected, abs=1e-6)
    impossible = sym.Dist.of([-np.inf, 1.0])
    assert sym.Dist.mixed([(impossible, -1.0), (sym.Dist.of([5.0, 2.0]), 2.0)]).probs().tolist() == [0.0, 1.0]


def test_a_sum_that_has_no_meaning_is_refused():
    one = sym.Dist.of([1.0])
    rows: list[tuple[Any, str]] = [
        *((wrong, "takes pairs") for wrong in ([], 5, [1.0, 2.0])),
        *(([(one, weight)], "must be finite") for weight in (float("nan"), float("inf"))),
        ([(one, "2")], "must be a number"),
        *(([(one, 1.0), (other, 1.0)], "of one vocabulary") for other in (sym.Dist.of([1.0, 2.0]), [1.0])),
        ([(sym.Dist.of([float("nan")]), 1.0)], "NaN"),
        ([(sym.Dist.of([3e38]), 10.0)], "inf"),
    ]
    for weighted, why in rows:
        with pytest.raises(sym.Invalid, match=why):
            sym.Dist.mixed(weighted)


@pytest.mark.slow
def test_code_that_raised_is_told_from_code_that_prints_the_same():
    with sym.Interpreter(seconds=0.5) as python:
        for code, raised in (
            ("print('1 passed')", ""),
            ("print('1 passed')\nassert False, 'one\\ntwo'", "AssertionError: one"),
            ("1 +", "SyntaxError"),
            ("while True: pass", "the code was ended after 0.5 s"),
            ("1", ""),
        ):
            python.run(code)
            assert (python.raised or "").startswith(raised)
            assert (python.raised is None) == (raised == "")


def test_pieces_go_to_the_user_as_they_come(capsys):
    shown = []

    def pieces():
        for piece in ("a", "b\n"):
            shown.append(capsys.readouterr().out)
            yield piece

    sym.send_to_user(pieces())
    assert [*shown, capsys.readouterr().out] == ["", "a", "b\n"]
