"""Display of a Dist, a ReducedDist and a KV in notebooks, which never fails; entries that a program keeps."""

from typing import Any

import pytest

import libsym as sym
from libsym.channel.process import process

pytestmark = pytest.mark.usefixtures("shared")


def shown(thing: Any) -> Any:
    return thing._repr_html_()


@pytest.mark.slow
def test_a_distribution_is_shown_with_the_text_of_its_likeliest_tokens():
    kv = sym.kv_create()
    dist = sym.pred(kv, [60, 62])
    html = shown(dist)
    assert (html.count("<tr>"), f">{dist.argmax()}</td>" in html) == (10, True)
    logits = [0.0] * 259
    logits[60], logits[0xC3] = 9.0, 8.0  # < and half of a character
    html = shown(sym.Dist.of(logits))
    assert all(each in html for each in ("<code>'&lt;'</code>", "b'\\xc3'"))
    assert not any(each in html for each in ("'<'", "color:#", "http")), "any theme, and nothing from elsewhere"
    rows = sym.pred(kv, [65, 66], rows="all")
    assert "the last of 2 rows" in shown(rows)
    assert repr(rows).startswith("<Dist of 259 tokens, 2 rows: ")
    assert len(repr(rows)) < 120


def test_what_was_asked_for_is_all_that_is_shown():
    kv = sym.kv_create()
    dist = sym.pred(kv, [65], top_k=3, logprobs=[7], sampler=sym.Sampler(seed=4))
    html = shown(dist)
    assert html.count("<tr>") == len({7, dist.token, *(token for token, _ in dist.topk(3))})
    assert f"{dist.token}, drawn" in html
    many = shown(sym.pred(kv, [65], logprobs=range(50), sampler=sym.Sampler.greedy()))
    assert 10 <= many.count("<tr>") <= 11
    assert "tokens</div>" in many


def test_a_file_is_shown_with_its_name_its_entries_and_the_end_of_its_text():
    kv = sym.kv_create("<b>.kv")
    kv.write(sym.tokenize("The end of this text is <bold>"))
    html = shown(kv)
    for each in ("KV &lt;b&gt;.kv", ">30</td>", "this text is &lt;bold&gt;", ">memory</td>"):
        assert each in html
    kv.remove()
    assert (shown(kv), repr(kv)) == (None, "<KV <b>.kv, closed>")


def test_more_distributions_are_shown_and_kept_than_there_are_slots():
    """Out and _ of a notebook hold what it showed."""
    kv, held = sym.kv_create(), []
    for _ in range(process.channel().num_slots + 8):
        held.append(sym.pred(kv, [65]))
        before = held[-1].argmax(), held[-1].entropy()
        shown(held[-1])
        assert (held[-1].argmax(), held[-1].entropy()) == before


def test_nothing_fails_because_the_daemon_is_gone_or_a_row_has_no_answer():
    kv = sym.kv_create()
    dist = sym.pred(kv, [65])
    sym.close()
    assert repr(kv) == "<KV anonymous, of a connection that is over>"
    assert "<table" in shown(dist)
    assert shown(kv) is None
    dist.close()
    assert shown(dist) is None
    assert shown(sym.Dist.of([float("nan"), 1.0])) is None
    assert "<table" in shown(sym.Dist.of([1.0, float("-inf")]))


def test_entries_are_kept_in_place():
    kv = sym.kv_create()
    kv.write([10, 11, 12, 13])
    fork = kv.fork()
    kv.keep([0, (-2, None)], rebase=False)
    assert (kv.read(), fork.len()) == (([10, 12, 13], [0, 2, 3]), 4)
    assert (kv.write([14]), kv.read(-1)) == (4, ([14], [4]))
    with pytest.raises(sym.Invalid):
        kv.keep([(0, 9)])
    assert kv.len() == 4, "it is what it was"
    kv.keep([])
    assert kv.len() == 0
    with sym.kv_create("named.kv") as named, pytest.raises(sym.Invalid, match=r"named\.kv has a name"):
        named.keep([])
    sym.kv_remove("named.kv")


async def test_a_file_in_an_event_loop_goes_on_with_what_is_kept():
    kv = await sym.aio.kv_create()
    await sym.aio.kv_write(kv, [1, 2, 3])
    await sym.aio.kv_keep(kv, [0, 2])
    assert await sym.aio.kv_read(kv) == ([1, 3], [0, 1])
