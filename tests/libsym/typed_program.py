"""A program for a type checker alone (see test_types.py), which uses what overloads and twins give types."""

from collections.abc import Iterator
from typing import Any, assert_type

import libsym as sym


def model(kv: sym.KV) -> None:
    dist = assert_type(sym.pred(kv, [1, 2], 0, rows="all", mask=[True], priority=1, deadline=1), sym.Dist)
    few = sym.pred(kv, [3], top_k=4, logprobs=[5], sampler=sym.Sampler(temperature=0.5, seed=1))
    assert isinstance(few, sym.ReducedDist)
    assert_type(few.token, int)
    for found in (dist, few):
        assert_type(found.argmax(), int)
        assert_type(found.topk(2).logprobs, list[float])
        assert_type(found.logprob(5) + found.entropy(), float)
    assert_type(dist.sample(0.7, top_p=0.9, allowed=[1, 2], seed=3), int)
    assert_type(dist.probs(), memoryview[float])
    assert_type(dist[0], sym.Dist)
    assert_type(sym.pred_batch([sym.Pred(kv, [1], rows="last")]), list[sym.Dist | sym.ReducedDist])
    asking = assert_type(sym.pred(kv, [1], attention="entries", by="layer"), sym.Dist)
    assert_type(asking.attention, sym.Attention)
    assert_type(asking.attention.mass(0, head=1), memoryview[float])
    try:
        sym.pred_batch([sym.Pred(kv, [-1])])
    except sym.BatchFailed as error:
        assert_type(error.results, list[Any])
    assert_type(sym.kv_write(kv, [1], positions=[7]), int)
    draws: sym.Draws = sym.Sampler.greedy().start(before=[1])
    assert_type(draws.draw(dist), int)
    assert_type(sym.model_info(), sym.ModelInfo)


def generation(kv: sym.KV) -> str:
    found = sym.generate(
        kv,
        [1],
        sampler=sym.Sampler(top_k=5, dry=sym.Dry(breakers=["\n"]), mirostat=sym.Mirostat(tau=3)),
        stop=["\n", 7],
        max_tokens=9,
        grammar=sym.Grammar.json({"type": "object"}, compact=True),
        draft=sym.Ngram(max_tokens=4),
        logprobs=5,
        seed=1,
    )
    assert_type(found, sym.Generation)
    assert_type(sym.generate_n(kv, [1], 3, sampler=sym.Sampler(top_k=5), stop="x", seed=1)[0], sym.Generation)
    with found:
        tokens: Iterator[int] = iter(found)
        assert_type(next(tokens), int)
    assert_type(found.pending, list[int])
    assert_type(found.dists[0], sym.ReducedDist | None)
    return "".join(found.text())


def loops(kv: sym.KV, other: sym.KV) -> None:
    decoding = sym.decode(kv, [1], sym.Dist.argmax, beside=[(other, [2])], stop=["x", 3], max_tokens=4)
    assert_type([token for token in decoding], list[int])  # noqa: C416 - what an iteration gives
    with sym.Chat(sym.kv_open("chat.kv", "a"), "You are brief.") as chat:
        assert_type(chat.ask("Who?", begin="I am ", grammar=sym.Grammar.regex("a|b"), temperature=0.5), sym.Generation)
    digits = sym.token_set(bytes.isdigit) | sym.token_set([1, 2])
    assert_type(sym.pred(kv, [1]).argmax(allowed=~digits), int)
    sym.kv_keep(kv, [0, (1, None)], rebase=False)
    with sym.Interpreter({"double": lambda x: 2 * x}, read=["log.txt"]) as python:
        assert_type(python.ask(sym.Chat(kv), "What is 1 + 1?", max_tokens=64), tuple[str, str])
    assert_type(sym.generate_n(kv, [1], [sym.Sampler(0.7), sym.Sampler.greedy()], top_p=0.9), list[sym.Generation])
    assert_type(sym.Dist.mixed([(sym.pred(kv, [1]), 2.0)]), sym.Dist)


def files(kv: sym.KV) -> None:
    with sym.kv_open("other.kv", "rw") as other, sym.kv_lock(other, shared=True):
        assert_type(sym.kv_read(other), tuple[list[int], list[int]])
    assert_type([sym.kv_fork("a.kv"), sym.kv_extract("a.kv", [(0, 1)]), sym.kv_merge(["a.kv", kv])], list[sym.KV])
    advice: list[sym.Advised] = [sym.PIN, sym.UNPIN, sym.COLD, sym.WILLNEED, sym.TTL(60), sym.PRIORITY(5)]
    pin: sym.Pinning = sym.PIN
    sym.kv_advise(kv, *advice, pin(60))
    assert_type(sym.kv_open_or_compute("a.kv", [1, 2], "rw", mode=0o640), sym.KV)
    assert_type(sym.kv_open_or_compute("a.kv", lambda kv: sym.kv_write(kv, [1]), owner="any"), sym.KV)


def others() -> None:
    sym.connect("/run/symphony/symphony.sock", domain="guests")
    with sym.connection(domain="guests") as other, other.use():
        assert_type(other, sym.Connection)
        assert_type(other.domain, str | None)
        assert_type(other.is_open, bool)


def program() -> None:
    arguments = sym.Arguments(__doc__)
    arguments.whole("--max-tokens", "of the answer", 64, most=4096)
    arguments.file("--context", metavar="FILE", required=True)
    sym.main(program)


@sym.command
async def command(arguments: sym.Arguments) -> None:
    assert_type(arguments, sym.Arguments)


async def coroutines() -> None:
    async with await sym.aio.kv_create() as kv:
        assert_type(await sym.aio.pred(kv, [1]), sym.Dist)
        assert_type(await sym.aio.tokenize("Hello"), list[int])
        assert_type(await sym.aio.wait(await sym.aio.spawn("summary.py")), sym.Ended)
        assert_type(await sym.aio.kv_chmod("a.kv", mode=0o600), None)
        assert_type(await sym.aio.kv_read(kv, 1), tuple[list[int], list[int]])
        assert_type(await sym.aio.kv_fork("a.kv", mode=0o640), sym.KV)
        answer = await sym.aio.Chat(kv).ask("Who?")
        assert_type(await answer.full_text(), str)
        assert_type(await sym.aio.score(kv, [1, 2]), list[float])
        generation = await sym.aio.generate(kv, [1], max_tokens=3, deadline=60.0)
        async for token in generation:
            assert_type(token, int)
        async for piece in generation.text():
            assert_type(piece, str)
        assert_type(await generation.cancel(), None)
        assert_type(await sym.aio.recv(timeout=0), Any)
