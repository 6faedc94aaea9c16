"""Examples as a prompt shows them (`>>>`), from docstrings and manuals: each is run, and has to print what it says.

`await` may stand at the prompt, as in `python -m asyncio`: such examples run under anyio.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import shutil
import sys
import traceback
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

import libsym as sym

_OPTIONS = doctest.ELLIPSIS


@dataclass(slots=True)
class Session:
    """The examples of one prompt."""

    source: str
    examples: list[doctest.Example]
    names: dict[str, Any]
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, text: str, source: str, **names: Any) -> Session:
        return cls(source, doctest.DocTestParser().get_examples(text, source), {"sym": sym, **names})

    @property
    def awaits(self) -> bool:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        codes = [compile(each.source, self.source, "exec", flags) for each in self.examples]
        return any(code.co_flags & inspect.CO_COROUTINE for code in codes)

    async def run_awaiting(self) -> None:
        for example in self.examples:
            await self._step(example)

    def run(self) -> None:
        for example in self.examples:
            with contextlib.suppress(StopIteration):
                self._step(example).send(None)  # nothing in it awaits: it ends here

    async def _step(self, example: doctest.Example) -> None:
        printed, raised = io.StringIO(), ""
        code = compile(example.source, self.source, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        try:
            with contextlib.redirect_stdout(printed):
                ending = eval(code, self.names)
                if isinstance(ending, Coroutine):
                    await ending
        except Exception as error:  # noqa: BLE001 - the example may be about this
            raised = traceback.format_exception_only(error)[-1]
        checker, wanted, got = doctest.OutputChecker(), example.want, printed.getvalue()
        if raised or example.exc_msg:
            wanted, got = example.exc_msg or wanted, raised or got
        got += "" if got.endswith("\n") or not got else "\n"  # a prompt begins on a line of its own
        if not checker.check_output(wanted, got, _OPTIONS):
            report = checker.output_difference(doctest.Example(example.source, wanted), got, _OPTIONS)
            self.failures.append(f"{self.source}, line {example.lineno + 1}: {example.source}{report}")


def run_examples(text: str, source: str, mount: Path, **names: Any) -> None:
    """Runs the examples of a text at one prompt, with a connection and an empty mount of their own."""
    session = Session.of(text, source, **names)
    assert session.examples, f"{source} has no example"
    backends = ["asyncio", "trio"] if session.awaits else [None]
    for backend in backends:
        session = Session.of(text, source, **names)
        with _fresh(mount):
            if backend is None:
                session.run()
            else:
                anyio.run(session.run_awaiting, backend=backend)
        assert not session.failures, "\n".join([*session.failures, f"({backend})" if backend else ""])


@contextlib.contextmanager
def _fresh(mount: Path) -> Iterator[None]:
    stdin = sys.stdin
    try:
        yield
    finally:
        sys.stdin = stdin
        sym.close()
        for path in mount.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
