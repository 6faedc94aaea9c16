"""Token healing: a text that ends in the middle of a token goes on with what the model finds likelier."""

import pytest

import libsym as sym
from lips.healing import heal

pytestmark = pytest.mark.slow
FRANCE, LINK = "The capital of Fra", 'An example link is <a href="http:'


def behind(text: str, tokens: list[int]) -> float:
    """The log-probability of tokens that stand in the place of a text's last one."""
    kept = sym.tokenize(text)[:-1]
    return sum(sym.score(sym.kv_create(), [*kept, *tokens])[len(kept) - 1 :])


@pytest.mark.parametrize("text", [FRANCE, LINK, "The tag is <", "She lives in New Yo", "I said 'hel", "The end."])
def test_the_healed_text_begins_with_the_text_is_no_less_likely_and_no_mark(lips, text):
    *kept, last = sym.tokenize(text)
    healed = heal(kv := sym.kv_create(), [*kept, last])
    assert kv.read()[0] == kept
    word = {FRANCE: b" France", LINK: b"://"}.get(text, sym.vocabulary()[healed])
    assert sym.vocabulary()[healed] == word
    assert b"".join(sym.vocabulary()[token] for token in [*kept, healed]).startswith(text.encode())
    assert behind(text, [healed]) >= behind(text, [last])
    assert healed not in sym.model_info().special_ids


def test_the_command_shows_both(lips):
    plain, healed = lips.run("healing", FRANCE, "--max-tokens", "3").splitlines()[:2]
    assert plain.startswith("as it is: The capital of Fra")
    assert not plain.startswith("as it is: The capital of France")
    assert healed.startswith("healed:   The capital of France")
