"""The commonest slips of a program's author: one line that names the argument, what it was, and what to do."""

import gc
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import libsym

sym: Any = libsym
"""Without its types: wrong arguments are what is given here."""
TOKENS = [1, 2, 3]

pytestmark = pytest.mark.usefixtures("shared")


@pytest.fixture
def kv():
    with sym.kv_create("a.kv") as kv:
        sym.kv_write(kv, TOKENS)
        yield kv
        assert kv.read()[0] == TOKENS  # nothing was done
    sym.kv_remove("a.kv")


NEED_A_FILE = {
    **dict.fromkeys(("kv_close", "kv_lock", "kv_unlock", "kv_sync"), ()),
    **dict.fromkeys(("kv_write", "pred", "generate"), ([1],)),
    "kv_truncate": (1,),
}


def test_a_file_that_is_not_open_is_asked_for_by_every_call_that_needs_one_also_in_event_loops():
    for name, arguments in NEED_A_FILE.items():
        for wrong in ("a.kv", None, 7)[: 1 if name == "kv_sync" else 3]:  # None is everything
            with pytest.raises(sym.Invalid) as caught:
                getattr(sym, name)(wrong, *arguments)
            assert f"{name}() takes an open KV file, not {wrong!r}" in str(caught.value)
            assert "kv_open()" in str(caught.value)

    async def main():
        for name, arguments in NEED_A_FILE.items():
            with pytest.raises(sym.Invalid, match=rf"^{name}\(\) takes an open KV file, not 'a.kv': kv_open\(\) it"):
                await getattr(sym.aio, name)("a.kv", *arguments)

    anyio.run(main)


@pytest.mark.slow
def test_what_only_reads_a_file_takes_its_path_too(kv):
    async def main():
        assert await sym.aio.kv_read("a.kv") == (TOKENS, [0, 1, 2])
        assert len(await sym.aio.kv_fork("a.kv")) == 3
        assert len(await sym.aio.kv_extract("a.kv", [(1, None)])) == 2
        assert len(await sym.aio.kv_merge([kv, "a.kv"])) == 6

    handles = status("handles")
    assert sym.kv_read("a.kv", 1) == ([2, 3], [1, 2])
    assert sym.kv_write(sym.kv_fork("a.kv"), [4]) == 4
    assert sym.kv_extract("a.kv", [(0, 1)]).read() == ([1], [0])
    assert sym.kv_merge(["a.kv", kv, "a.kv"]).read()[0] == TOKENS * 3
    for call, wrong in ((sym.kv_read, "none.kv"), (sym.kv_fork, "none.kv"), (sym.kv_merge, [kv, "a.kv", "none.kv"])):
        with pytest.raises(sym.NotFound, match=r"none\.kv"):
            call(wrong)
    anyio.run(main)
    assert status("handles") == handles


def status(field):
    gc.collect()
    sym.kv_stat(".")  # whatever was to be closed with the next call
    text = Path(f"{sym.model_info().mount}/.symphony/proc/{sym.getpid()}/status").read_text()
    return dict(line.split(":") for line in text.splitlines())[field].strip()


DIST = sym.Dist.of([0.0, 2.0, 1.0])
SLIPS = {
    "a sampler by its name": (lambda kv: sym.pred(kv, [1], sampler="greedy"), "sampler='greedy'.*Sampler.greedy()"),
    "the same, of generate": (lambda kv: sym.generate(kv, [1], sampler="greedy"), "sampler='greedy'.*Sampler"),
    "a length as text": (lambda kv: kv.truncate("3"), "num_tokens='3'.*whole number"),
    "a length that is no whole number": (lambda kv: sym.kv_truncate(kv, 1.5), "num_tokens=1.5"),
    "an entry's number as text": (lambda kv: kv.read("a"), "start='a'"),
    "the last one as text": (lambda kv: sym.kv_read(kv, 0, "a"), "stop='a'"),
    "a token as text": (lambda _: DIST.logprob("a"), "token='a'"),
    "how many as text": (lambda _: DIST.topk("3"), "k='3'"),
    "a temperature as text": (lambda _: DIST.sample("hot"), "temperature='hot'.*number"),
    "u as text": (lambda _: DIST.sample(u="0.5"), "u='0.5'"),
    "logprobs of one": (lambda kv: sym.pred(kv, [1], logprobs=5), "logprobs=5.*list"),
    "the same, of a Pred": (lambda kv: sym.Pred(kv, [1], logprobs=5), "logprobs=5.*list"),
    "logprobs of text": (lambda kv: sym.pred(kv, [1], logprobs="abc"), "logprobs='abc'"),
    "two dimensions": (lambda _: sym.Dist.of([[1.0], [2.0]]), "one row of logits.*2.0"),
    "bytes for logits": (lambda _: sym.Dist.of(b"12345678"), "one row of logits"),
    "a set of tokens": (lambda kv: sym.kv_write(kv, {1, 2}), r"tokens must be a list.*\{1, 2\}"),
    "a dict of tokens": (lambda kv: sym.pred(kv, {1: 2}), r"tokens must be a list.*\{1: 2\}"),
    "a set of positions": (lambda kv: sym.pred(kv, [1], {1}), r"positions must be a list"),
    "a set to be read": (lambda _: sym.detokenize({72}), "tokens must be a list"),
    "a draft of nothing": (lambda _: sym.Ngram(0), r"Ngram\(max_tokens=0\).*1 to 64"),
    "a draft after nothing": (lambda _: sym.Ngram(4, 17), r"Ngram\(min_match=17\).*1 to 16"),
    "a draft of text": (lambda _: sym.Ngram("8"), r"max_tokens='8'"),
    "a sampler of text": (lambda _: sym.Sampler(temperature="0.5"), "temperature='0.5'"),
    "a penalty of text": (lambda _: sym.Sampler(presence_penalty="x"), "presence_penalty='x'"),
    "biases in a list": (lambda _: sym.Sampler(logit_bias=[1]), r"logit_bias=\[1\].*dict"),
    "a bias of text": (lambda _: sym.Sampler(logit_bias={1: "x"}), "logit_bias of token 1='x'"),
    "a token noted as text": (lambda _: sym.Sampler().start().note("a"), "token='a'"),
    "a number for a path": (lambda _: sym.kv_stat(5), "a path must be text, not 5"),
    "bytes for a path": (lambda _: sym.kv_open(b"a.kv"), "a path must be text, not b'a.kv'"),
    "one path to be merged": (lambda _: sym.kv_merge("a.kv"), "kv_merge.. takes a list.*'a.kv'"),
    "no advice": (sym.kv_advise, "1 to 16 pieces of advice.*not 0"),
    "too much advice": (lambda kv: sym.kv_advise(kv, *[sym.PIN] * 17), "1 to 16 pieces of advice.*not 17"),
    "a priority as text": (lambda _: sym.PRIORITY("high"), "n='high'"),
    "too many stop texts": (lambda kv: sym.generate(kv, [1], stop=["x"] * 100), "100 texts.*at most 64"),
    "a stop text that is too long": (lambda kv: sym.generate(kv, [1], stop="x" * 1025), "1025 char.*at most 1024"),
    "no batch": (lambda _: sym.pred_batch(5), "pred_batch.. takes a list of sym.Pred.*not 5"),
    "one call for a batch": (lambda kv: sym.pred_batch(sym.Pred(kv, [1])), "pred_batch.. takes a list"),
    "something else in a batch": (lambda kv: sym.pred_batch([sym.Pred(kv, [1]), "x"]), "call 1 of 2 .*'x'"),
    "a batch with a path": (lambda kv: sym.pred_batch([sym.Pred(kv, [1]), sym.Pred("b.kv", [1])]), "1 of 2: .*'b.kv'"),
    "a batch of no tokens": (lambda kv: sym.pred_batch([sym.Pred(kv, "text")]), "call 0 of 1: tokens must be"),
    "a set of tokens before": (lambda _: sym.Sampler().start(before={1}), r"tokens must be a list.*\{1\}"),
    "a mode as text": (lambda _: sym.kv_create("q.kv", "rw"), "mode='rw': .*as 0o600"),
    "a directory's mode as text": (lambda _: sym.kv_mkdir("d", "0700"), "mode='0700'"),
    "a computed file's mode as text": (lambda _: sym.kv_open_or_compute("q.kv", [1], mode="0600"), "mode='0600'"),
    "an owner by name": (lambda _: sym.kv_open_or_compute("q.kv", [1], owner="ann"), "owner='ann': give a uid"),
    "an owner that is no uid": (lambda _: sym.kv_open_or_compute("q.kv", [1], owner=-1), "owner=-1: give a uid"),
    "a pattern that is a number": (lambda _: sym.Grammar.regex(5), "regular expression must be text, not 5"),
    "no grammar": (lambda _: sym.Grammar.lark(None), "Lark grammar must be text, not None"),
    "a text for a conversation": (lambda _: sym.chat_tokens("hi"), "a conversation is a list of messages"),
    "a number for variables": (lambda _: sym.chat_tokens([], variables=5), "variables must be what JSON can say"),
    "a file for a path": (sym.kv_list, r"a path must be text.*kv\.path of a KV"),
    "a row by its name": (lambda _: DIST["a"], "the row that is asked for='a'"),
    "rows by a slice": (lambda _: DIST[0:1], "the row that is asked for=slice"),
    "an empty batch": (lambda _: sym.pred_batch([]), "makes 1 to 256 calls, not 0: give some"),
    "far too long a life": (lambda _: sym.TTL(1e30), r"TTL\(1e\+30\): give a number of seconds"),
    "a dict to be merged": (lambda _: sym.kv_merge({"a.kv": 1}), "kv_merge.. takes a list"),
    "a token of no vocabulary": (lambda _: sym.Sampler().start().note(10**12), "token=1000000000000"),
    "compactness as text": (lambda _: sym.Grammar.json(True, compact="yes"), "compact='yes'"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_told_in_one_line(slip, kv):
    call, words = SLIPS[slip]
    with pytest.raises(sym.Invalid, match=words) as caught:
        call(kv)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_a_closed_file_in_a_batch_is_named_and_nothing_is_made(kv):
    closed = sym.kv_create("closed.kv")
    sym.kv_remove(closed)
    with pytest.raises(sym.BadHandle, match=r"call 2 of 3: closed\.kv is closed"):
        sym.pred_batch([sym.Pred(kv, [1]), sym.Pred(kv, [1]), sym.Pred(closed, [1])])


def test_draws_ask_for_the_whole_row():
    reduced = sym.pred(sym.kv_create(), [1], top_k=1)
    with pytest.raises(sym.Invalid, match="whole row, not <ReducedDist: 1 row, top 1>: ask pred"):
        sym.Sampler.greedy().start().draw(reduced)
    with pytest.raises(sym.Invalid, match="token='a'"):
        reduced.logprob("a")
    with pytest.raises(sym.Invalid, match="k='a'"):
        reduced.topk("a")
    with pytest.raises(sym.Invalid, match="no row of logits"):
        np.asarray(reduced)


def test_a_distribution_is_an_array_to_numpy_and_several_rows_are_an_array_of_rows():
    dist, rows = sym.pred(sym.kv_create(), TOKENS), sym.pred(sym.kv_create(), TOKENS, rows="all")
    row = np.asarray(dist)
    assert (row.shape, row.flags.writeable) == ((259,), False)
    assert row.dtype == np.float32
    assert row.tolist() == dist.logits.tolist()
    assert np.shares_memory(row, np.asarray(dist.logits))
    assert np.asarray(dist.probs()).sum() == pytest.approx(1)
    assert np.array(dist, np.float64).flags.writeable
    assert np.asarray(rows).tolist() == [each.logits.tolist() for each in rows]
    dist.close()
    assert row.argmax() >= 0  # the view keeps the slot
    with pytest.raises(sym.Invalid, match="closed"):
        np.asarray(dist)


def test_what_is_allowed_may_be_a_bool_for_each_token():
    for allowed in ([True, False, True], np.array([True, False, True]), (True, False, True)):
        assert DIST.argmax(allowed=allowed) == 2
    assert DIST.argmax(allowed={0, 1}) == 1
    assert DIST.argmax(allowed=np.array([0, 2])) == 2
    with pytest.raises(sym.Invalid, match="none that is allowed"):
        DIST.argmax(allowed=[False] * 3)


def test_what_an_object_is_shows_at_the_prompt(kv):
    assert repr(kv) == "<KV a.kv, 3 entries, open for writing>"
    with sym.kv_open("a.kv") as reader:
        assert repr(reader) == "<KV a.kv, 3 entries, open for reading>"
    assert repr(reader) == "<KV a.kv, closed>"
    fork = kv.fork()
    generation = sym.generate(fork, [1], max_tokens=3)
    assert repr(generation) == "<Generation: 0 tokens, under way>"
    list(generation)
    assert repr(generation) == "<Generation: 3 tokens, length>"
    draws = sym.Sampler(seed=7).start()
    draws.draw(DIST)
    assert repr(draws) == "<Draws: 1 drawn, seed 7>"


def test_the_namespace_holds_what_programs_use_and_nothing_else():
    names = [name for name in dir(sym) if not name.startswith("__")]
    assert sorted(names) == sorted(sym.__all__)
    assert "aio" in names
    assert "arguments" not in names


@pytest.mark.slow
def test_what_drafts_cost_shows_where_they_were_wrong():
    before, steps, kv = sym.getrusage(), sym.daemon_stat(), sym.kv_create()
    how = {"sampler": sym.Sampler(temperature=6, seed=3), "draft": sym.Ngram(8, 1), "stop_at_end": False}
    list(sym.generate(kv, [*b"one two three one two four one two "], max_tokens=60, **how))
    used = sym.getrusage()
    rejected = used.rejected_tokens - before.rejected_tokens
    assert rejected > 0
    assert used.tokens - before.tokens == len(kv) + rejected
    assert sym.daemon_stat()["num_tokens"] - steps["num_tokens"] == len(kv) + rejected
    assert status("rejected_tokens") == str(used.rejected_tokens)
