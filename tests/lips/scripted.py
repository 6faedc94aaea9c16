"""A model that follows: the answers of `Chat.ask` are given, where a small model cannot be expected to find them.

Each answer is forced through a grammar that allows this text alone. So the daemon computes, draws and appends as ever,
and what is in the file, and what it cost, is what it would be with a model that says so by itself.

    with scripted(["Action: add 1 2", "The sum is 3."]):    # for programs called in this process
        react.run(...)

    python tests/lips/scripted.py '["Action: add 1 2"]' lips/react.py ARGUMENTS    # for one that runs by itself
"""

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import libsym as sym


class NoAnswerLeft(Exception):
    """The program asked for one more answer than there are."""


def saying(text: str) -> sym.Grammar:
    """A grammar of one text."""
    return sym.Grammar.regex("".join(rf"\x{{{ord(char):x}}}" for char in text))


@contextmanager
def scripted(answers: Sequence[str]) -> Iterator[list[str]]:
    """Has each `ask` of this process give the next of `answers`, without begin; gives those that are left."""
    left = list(answers)
    plain, awaited = sym.Chat.ask, sym.aio.Chat.ask

    def options(how: dict[str, Any]) -> dict[str, Any]:
        if not left:
            raise NoAnswerLeft
        return {**how, "grammar": saying(left.pop(0)), "max_tokens": None, "sampler": None}

    def ask(chat: sym.Chat, content: Any, **how: Any) -> sym.Generation:
        return plain(chat, content, **options(how))

    async def ask_soon(chat: Any, content: Any, **how: Any) -> Any:
        return await awaited(chat, content, **options(how))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sym.Chat, "ask", ask)
        patch.setattr(sym.aio.Chat, "ask", ask_soon)
        yield left


def main() -> None:
    answers, program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    with scripted(json.loads(answers)):
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
