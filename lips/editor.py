"""Completes what is edited in a directory: undo computes nothing, and what is deleted or left is not kept.

    symphony run editor src
    symphony run editor --undo-s 120 --idle-s 3600 src

Save a file of the directory in any editor: a line is suggested at the place of the change. This is the paper's example
of a program that knows what will be needed, where a server's cache can only guess:

- each saved state is a fork of the one before, cut where they differ: an edit computes what comes after it;
- the state before it is kept for a moment (TTL), for Ctrl-Z may bring it back;
- the KV of a deleted file is removed, and that of a file that nobody touches goes by itself (a longer TTL).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import libsym as sym

POLL_S = 0.1


def changes(directory: Path) -> Iterator[tuple[str, str | None]]:
    """The name and the text of each file, then of each that is saved; None as the text of one that is deleted."""
    known = dict[str, int]()
    while True:
        found = dict[str, int]()
        for path in (path for path in directory.iterdir() if path.is_file() and not path.name.startswith(".")):
            with suppress(FileNotFoundError):  # it was deleted just now
                found[path.name] = path.stat().st_mtime_ns
                if found[path.name] != known.get(path.name):
                    yield path.name, path.read_text(errors="replace")
        for name in known.keys() - found.keys():
            yield name, None
        known = found
        time.sleep(POLL_S)


class Document:
    """A file that is edited, and the KV files of its states. Each holds all tokens of its text but the last."""

    def __init__(self, name: str, undo_s: float, idle_s: float) -> None:
        self.name, self.undo_s, self.idle_s = name, undo_s, idle_s
        self.text = ""
        self.states: list[str] = []
        """Where they are on the mount, unless their time is over; the last one is that of the text."""

    def tokens(self, text: str) -> list[int]:
        return sym.tokenize(f"File {self.name}:\n{text}", special=False)

    def save(self, text: str, max_tokens: int) -> str:
        """Takes a new text, and suggests how the line goes on where it was changed."""
        before, now = self.states[-1:], f"editor/{self.name}-{sha256(text.encode()).hexdigest()[:16]}.kv"
        self.states = [*(state for state in self.states if state != now), now]
        cursor, self.text = end_of_change(self.text, text), text
        with open_state(now, before) as kv:
            if missing := sym.kv_rewind(kv, self.tokens(text))[:-1]:
                sym.kv_write(kv, missing)
            for state, seconds in [*((state, self.undo_s) for state in before), (now, self.idle_s)]:
                with suppress(sym.NotFound):  # the one before may have been left for too long
                    sym.kv_advise(state, sym.TTL(seconds))
            with sym.kv_fork(kv) as fork:  # what is suggested is not in the text yet
                missing = sym.kv_rewind(fork, self.tokens(text[:cursor]))
                return sym.generate(fork, missing, stop="\n", max_tokens=max_tokens).full_text()

    def delete(self) -> None:
        for state in self.states:
            with suppress(sym.NotFound):
                sym.kv_remove(state)


def open_state(path: str, before: list[str]) -> sym.KV:
    """A state that is kept (it was undone, or done again), or a fork of the one before, or an empty file."""
    with suppress(sym.NotFound):
        return sym.kv_open(path, "rw")
    for state in before:
        with suppress(sym.NotFound):
            return sym.kv_fork(state, path)
    return sym.kv_create(path)


def end_of_change(old: str, new: str) -> int:
    """Where in the new text that ends which is not in the old one: the cursor is there."""
    start = num_alike(old, new)
    return len(new) - num_alike(old[start:][::-1], new[start:][::-1])


def num_alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Suggest how the text goes on where files of a directory are edited.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--undo-s", type=float, default=60, help="of what may be undone (default: %(default)s)")
    parser.add_argument("--idle-s", type=float, default=1800, help="of an untouched file (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a suggestion (default: %(default)s)")
    args = parser.parse_args()
    sym.kv_mkdir("editor", parents=True)
    documents = dict[str, Document]()
    for name, text in changes(args.directory):
        before = sym.getrusage().tokens
        if text is None:
            documents.pop(name).delete()
            sym.send_to_user(f"{name}: forgotten\n")
        else:
            document = documents.setdefault(name, Document(name, args.undo_s, args.idle_s))
            line = document.save(text, args.max_tokens)
            sym.send_to_user(f"{name}: {line!r} ({sym.getrusage().tokens - before} tokens computed)\n")


if __name__ == "__main__":
    sym.main(main)
