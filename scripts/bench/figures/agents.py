"""Savings of agents whose context stays in a KV file, against a server that gets the whole conversation each time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio

import libsym as sym
from figures import Row
from lips import async_tools, react, rlm
from tests.lips.scripted import scripted


def measure() -> Iterator[Row]:
    yield from of_react()
    yield from of_async_tools()
    yield from of_rlm()


def of_react() -> Iterator[Row]:
    """Measure the tokens that an agent computes. Its choices of tools are scripted."""
    tools = {"calculate": react.calculate}
    for num_calls in (2, 8):
        said = [f"Thought: I add {n}.\nAction: calculate[{n} + {n}]" for n in range(num_calls)] + ["Answer: done"]
        turns = list[int]()
        with sym.Chat(sym.kv_create(), react.prompt(tools)) as chat, scripted([*said]):
            before = sym.getrusage().tokens
            for _ in react.react(chat, "How much is all of it?", tools, max_calls=num_calls):
                turns.append(chat.kv.len())
            computed = sym.getrusage().tokens - before
        anew = sum(turns[::2])  # each turn of the model prefills the whole conversation
        yield Row("react", f"tokens computed, {num_calls} calls of tools", computed, "tokens", anew)


def of_async_tools() -> Iterator[Row]:
    pieces = list[str]()
    given = "\n<<result: "

    async def tool(_word: str) -> str:
        while len(pieces) < 12:
            await anyio.lowlevel.checkpoint()
        return "the sea is salt"

    async def converse() -> tuple[int, int]:
        async with await sym.aio.kv_create() as kv:
            before = (await sym.aio.getrusage()).tokens
            await async_tools.write(kv, "Tell me about the sea.", tool, pieces.append, max_tokens=48)
            return (await sym.aio.getrusage()).tokens - before, kv.len()

    computed, length = anyio.run(converse)
    at = next(index for index, piece in enumerate(pieces) if piece.startswith(given))
    yield Row("async_tools", "pieces written while the tool ran (it waits for 12)", at, "pieces", 1)
    yield Row("async_tools", "tokens computed, one interruption", computed, "tokens", 2 * length)


def of_rlm() -> Iterator[Row]:
    """Measure four questions about a text of 2,000 tokens. The code is scripted; the model answers its questions."""
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory, "atlas.txt")
        text.write_text("The treasure lies in the city of Lima. The river runs north. " * 130)
        view = Path(sym.model_info().mount, ".symphony", "text", "atlas.kv")
        view.write_text(text.read_text())
    length = sym.kv_stat("atlas.kv").tokens or 0
    said = [f"print(ask('atlas.kv', 'Question {n}?'))" for n in range(4)] + ["answer('Lima')"]
    with scripted(said):
        before = sym.getrusage().tokens
        list(rlm.explore("Where is the treasure?", ["atlas.kv"], max_turns=5))
        computed = sym.getrusage().tokens - before
    sym.kv_remove("atlas.kv")
    what = f"tokens computed, 4 questions about a text of {length}"
    yield Row("rlm", what, computed, "tokens", computed + 4 * length)
