"""Sets of tokens: as Python's sets are, and as `allowed=` takes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import libsym as sym

SIZE = 77
TOKENS = st.sets(st.integers(0, SIZE - 1))


@given(TOKENS, TOKENS)
def test_it_is_what_pythons_sets_are(first, second):
    ours, others = sym.TokenSet(first, SIZE), sym.TokenSet(second, SIZE)
    everything = set(range(SIZE))
    assert set(ours & others) == first & second
    assert set(ours | others) == first | second
    assert set(ours - others) == first - second
    assert set(ours ^ others) == first ^ second
    assert set(~ours) == everything - first
    assert (len(ours), list(ours)) == (len(first), sorted(first))
    assert {token for token in range(-3, SIZE + 3) if token in ours} == first
    assert (ours == others, hash(ours) == hash(sym.TokenSet(list(first), SIZE))) == (first == second, True)


@pytest.mark.slow
@given(TOKENS.filter(bool), st.lists(st.floats(-9, 9), min_size=SIZE, max_size=SIZE))
def test_it_narrows_a_question_as_ids_do(allowed, logits):
    dist, mask = sym.Dist.of(logits), sym.TokenSet(allowed, SIZE)
    assert dist.argmax(allowed=mask) == dist.argmax(allowed=sorted(allowed))
    assert dist.probs(allowed=mask).tolist() == dist.probs(allowed=sorted(allowed)).tolist()
    assert dist.topk(1, allowed=mask) == dist.topk(1, allowed=sorted(allowed))
    assert sym.Sampler(seed=1).start().draw(dist, allowed=mask) in allowed


def test_what_does_not_fit_is_refused():
    ours = sym.TokenSet([1], 8)
    for wrong in (
        lambda: sym.TokenSet([8], 8),
        lambda: sym.TokenSet([-1], 8),
        lambda: ours | sym.TokenSet([1], 9),
        lambda: ours & {1},  # type: ignore[operator]  # which is refused
        lambda: sym.Dist.of([0.0] * 9).argmax(allowed=ours),
        lambda: sym.Dist.of([0.0] * 8).argmax(allowed=sym.TokenSet([], 8)),
    ):
        with pytest.raises(sym.Invalid):
            wrong()
