"""The command line of a program: its docstring is the help, and a wrong argument ends it with one line."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from libsym.arguments import path_text, shown, utf8
from libsym.calls.program import main, program_name
from libsym.errors import Invalid, one_line

MOST = (1 << 31) - 1
_UNUSABLE = 2
Number = TypeVar("Number", int, float)
_SHIPPED = Path(__file__).resolve().parents[2] / "lips"


class Document(NamedTuple):
    """A text, and the name of its file without the directory."""

    name: str
    text: str


class Arguments(argparse.ArgumentParser):
    """The command line of a program, whose help is `text`, the program's docstring. Each method adds an argument.

    A name that begins with `-` is an option. Any other name is a positional argument, which is optional if it has a
    default. `about` describes the value in the help, which also shows the default. Further keywords, such as nargs,
    action and required, go to argparse's `add_argument`.

    A wrong argument, such as 0 tokens or a missing file, ends the program with one line and status 2. For errors that
    only the program can find, call `error`.

    >>> arguments = sym.Arguments("Says how a text goes on.")
    >>> arguments.text("prompt", "the text")
    >>> arguments.whole("--max-tokens", "of the answer", 64)
    >>> arguments.number("--temperature", "0 takes the likeliest token", 0.8, least=0)
    >>> args = arguments.parse_args(["Once upon a time", "--max-tokens", "3"])
    >>> args.prompt, args.max_tokens, args.temperature
    ('Once upon a time', 3, 0.8)
    """

    def __init__(self, text: str | None) -> None:
        super().__init__(
            prog=f"symphony run {_program()}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._negative_number_matcher = re.compile(r"-\.?\d")  # until Python 3.14, argparse sees an option in -1e3

    def text(self, name: str, about: str = "", default: str | list[str] | None = None, **more: Any) -> None:
        """Add a text that is not empty.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.text("--stop", "where the answer ends")
        >>> arguments.parse_args(["--stop", "the end"]).stop
        'the end'
        """
        self._add(name, about, default, _text, more)

    def whole(
        self, name: str, about: str = "", default: int | None = None, *, least: int = 1, most: int = MOST, **more: Any
    ) -> None:
        """Add a whole number from `least` to `most`.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.whole("--seed", "of the draws", 0, least=0)
        >>> arguments.parse_args([]).seed
        0
        """

        def whole(text: str) -> int:
            try:
                number = int(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number") from None
            return _within(number, text, least, most)

        self._add(name, about, default, whole, more)

    def number(
        self,
        name: str,
        about: str = "",
        default: float | None = None,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        **more: Any,
    ) -> None:
        """Add a finite number from `least` to `most`.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.number("--top-p", "keeps the likeliest tokens with this probability", least=0, most=1)
        >>> arguments.parse_args(["--top-p", "0.9"]).top_p
        0.9
        """

        def number(text: str) -> float:
            try:
                found = float(text)
            except ValueError:
                found = math.nan
            if not math.isfinite(found):
                raise argparse.ArgumentTypeError(f"{shown(text)} is no finite number")
            return _within(found, text, least, most)

        self._add(name, about, default, number, more)

    def file(self, name: str, about: str = "", **more: Any) -> None:
        """Add an existing, readable file: a `pathlib.Path`.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.file("--context", "a text to read first", metavar="FILE")
        >>> arguments.parse_args(["--context", "/dev/null"]).context.name
        'null'
        """
        self._add(name, about, None, _file, more)

    def document(self, name: str, about: str = "", **more: Any) -> None:
        """Add a text file: a `Document`, with its `name` and its `text`. Bytes that are not UTF-8 are replaced.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.document("file", "what is to be summarized")
        >>> arguments.parse_args([sym.__file__]).file.name
        '__init__.py'
        """
        self._add(name, about, None, _document, more)

    def directory(self, name: str, about: str = "", default: Path | None = None, **more: Any) -> None:
        """Add an existing, readable directory: a `pathlib.Path`.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.directory("directory", "with the texts")
        >>> arguments.parse_args(["/"]).directory.is_dir()
        True
        """
        self._add(name, about, default, _directory, more)

    def kv(self, name: str, about: str = "", default: str | None = None, **more: Any) -> None:
        """Add a path on the mount, of a file or a directory. The file need not exist.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.kv("--kv", "the conversation")
        >>> arguments.parse_args(["--kv", "a talk.kv"]).kv
        'a talk.kv'
        """
        self._add(name, about, default, _kv, more)

    def parse_args(  # type: ignore[override] # argparse has overloads for namespaces of other classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the arguments. An unknown argument ends the program; the message names a similar option.

        >>> arguments = sym.Arguments("A program.")
        >>> arguments.whole("--max-tokens", "of the answer", 64)
        >>> arguments.parse_args([])
        Namespace(max_tokens=64)
        """
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognized(self, unknown))
        return found

    def error(self, message: str) -> NoReturn:
        """End the program with `message` in one line, and with status 2.

        >>> try:
        ...     sym.Arguments("A program.").error("two agents make a swarm")
        ... except SystemExit as end:
        ...     print(end)
        2
        """
        self.exit(_UNUSABLE, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")

    def _add(self, name: str, about: str, default: object, kind: Callable[[str], Any], more: dict[str, Any]) -> None:
        if default is not None:
            more = {**more, "default": default}
            about = f"{about} (default: %(default)s)".lstrip()
            if not name.startswith("-"):
                more.setdefault("nargs", "?")
        self.add_argument(name, type=kind, help=about, **more)


Main = TypeVar("Main", bound=Callable[[Arguments], object])


def command(program: Main) -> Main:
    r"""Decorate the main function of a file. The function gets `Arguments` whose help is the file's docstring.

    If the file is the started program, the function runs immediately, as `main` runs it. So the function must be the
    last definition in the file. If another module imports the file, the function does not run, and is returned
    unchanged.

    >>> @sym.command
    ... def greet(arguments):
    ...     arguments.text("name")
    ...     sym.send_to_user("Hello, ", arguments.parse_args(["Ada"]).name, ".\n")
    >>> greet(sym.Arguments("Greets."))
    Hello, Ada.
    """
    file = sys._getframe(1).f_globals  # noqa: SLF001 - under cProfile sys.modules["__main__"] is cProfile, not the file
    if file.get("__name__") == "__main__":
        main(partial(program, Arguments(file.get("__doc__"))))
    return program


def unrecognized(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the message for unknown arguments."""
    options = parser._option_string_actions  # noqa: SLF001 - argparse has no public name for this
    return f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(unknown[0], options)}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: a similar known word, if there is one."""
    names = {each.lstrip("-"): each for each in known}  # the dashes, which all options have, would count as similar
    near = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f": did you mean {names[near[0]]}?" if near else ""


def _program() -> str:
    """Return this program's name if it ships with Symphony, else its file."""
    file = sys.argv[0] if sys.argv else ""
    return program_name() if Path(file).is_relative_to(_SHIPPED) else file


def _within(number: Number, text: str, least: float, most: float) -> Number:
    if least <= number <= most:
        return number
    beyond = f"{least} or more" if most in {MOST, math.inf} and number < least else f"from {least} to {most}"
    raise argparse.ArgumentTypeError(f"{shown(text)} is not {beyond}")


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    try:
        utf8(text, "the text")
    except Invalid:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no UTF-8 text") from None
    return text


def _kv(path: str) -> str:
    try:
        return path_text(path)
    except Invalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(path: str) -> Path:
    return _there(path, is_directory=False)


def _document(path: str) -> Document:
    place = _file(path)
    try:
        text = place.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{shown(path)}: {error.strerror}") from None
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{shown(path)} has no text")
    return Document(place.name, text)


def _directory(path: str) -> Path:
    return _there(path, is_directory=True)


def _there(path: str, *, is_directory: bool) -> Path:
    place = Path(path)
    try:
        place.stat()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{shown(path)}: {error.strerror}") from None
    if not path or place.is_dir() != is_directory:
        raise argparse.ArgumentTypeError(f"{shown(path)} is no {'directory' if is_directory else 'file'}")
    if not os.access(place, os.R_OK):
        raise argparse.ArgumentTypeError(f"{shown(path)} may not be read")
    return place
