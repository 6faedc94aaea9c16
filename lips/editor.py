"""Suggests completions while you edit the files of a directory; undo computes nothing.

    symphony run editor src
    symphony run editor --undo-s 120 --idle-s 3600 src

Save a file of the directory in any editor: the program suggests a line at the place of the change. In this example of
the paper a program knows which KV it will need, while the cache of a server can only guess:

- a saved state is a fork of the state before it, cut at the first difference: only the rest is computed;
- the previous state stays for a while (TTL), since Ctrl-Z may bring it back;
- the KV of a deleted file is removed; the KV of an untouched file expires by itself (a longer TTL).
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from os.path import commonprefix
from pathlib import Path

import libsym as sym

POLL_S = 0.1


def changes(directory: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield the name and the path of each file, then of each saved file. The path of a deleted file is None."""
    known = dict[str, int]()
    while True:
        found = dict[str, int]()
        for path in filter(Path.is_file, directory.glob("[!.]*")):
            with suppress(FileNotFoundError):  # deleted since the listing
                found[path.name] = path.stat().st_mtime_ns
                if found[path.name] != known.get(path.name):
                    yield path.name, path
        for name in known.keys() - found.keys():
            yield name, None
        known = found
        time.sleep(POLL_S)


class Document:
    """A file that the user edits. Each of its states is a KV file with all tokens of the text but the last."""

    def __init__(self, name: str, undo_s: float, idle_s: float) -> None:
        self.name, self.undo_s, self.idle_s = name, undo_s, idle_s
        self.text = ""
        self.states = set[str]()

    def state(self, text: str) -> str:
        digest = sha256(f"{self.name}\0{text}".encode(errors="surrogateescape")).hexdigest()
        return f"editor/{os.fsencode(self.name)[:200].decode(errors='ignore')}-{digest[:16]}.kv"

    def tokens(self, text: str) -> list[int]:
        return sym.tokenize(f"File {self.name}:\n{text}", special=False)

    def save(self, text: str, max_tokens: int) -> str:
        """Store a new text; return a suggestion for the rest of the line at the change."""
        before, now = self.state(self.text), self.state(text)
        cursor, self.text = end_of_change(self.text, text), text
        self.states |= {before, now}
        with open_state(before, now) as kv:
            sym.kv_advise(before, sym.TTL(self.undo_s))
            sym.kv_advise(now, sym.TTL(self.idle_s))
            kv.write(sym.kv_rewind(kv, self.tokens(text))[:-1])
            with sym.kv_fork(kv) as fork:  # the suggestion is no part of the text yet
                missing = sym.kv_rewind(fork, self.tokens(text[:cursor]))
                return sym.generate(fork, missing, stop="\n", max_tokens=max_tokens).full_text()

    def delete(self) -> None:
        for state in self.states:
            with suppress(sym.NotFound):  # the state has expired
                sym.kv_remove(state)


def open_state(before: str, now: str) -> sym.KV:
    """Open the state `now` if it is still kept, as after an undo; else fork the state `before`, or an empty file."""
    with sym.kv_open(before, "a") as base:
        with suppress(sym.NotFound):
            return sym.kv_open(now, "rw")
        return sym.kv_fork(base, now)


def end_of_change(old: str, new: str) -> int:
    """Return the end of the changed part in the new text, where the cursor is."""
    start = len(commonprefix([old, new]))  # noqa: RUF071 - of characters, not of paths
    after = commonprefix([old[start:][::-1], new[start:][::-1]])  # noqa: RUF071
    return len(new) - len(after)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.directory("directory")
    arguments.number("--undo-s", "seconds that a state stays for undo", 60.0, least=0.01)
    arguments.number("--idle-s", "seconds that the KV of an untouched file stays", 1800.0, least=0.01)
    arguments.whole("--max-tokens", "of a suggestion", 24)
    args = arguments.parse_args()
    sym.kv_mkdir("editor", parents=True)
    documents = dict[str, Document]()
    for name, path in changes(args.directory):
        if path is None:
            documents.pop(name).delete()
            sym.send_to_user(f"{name}: forgotten\n")
        else:
            before = sym.getrusage().tokens
            document = documents.setdefault(name, Document(name, args.undo_s, args.idle_s))
            try:
                line = repr(document.save(path.read_text(errors="replace"), args.max_tokens))
            except (sym.Invalid, FileNotFoundError, PermissionError) as error:  # Invalid: longer than the context
                line = str(error)
            sym.send_to_user(f"{name}: {line} ({sym.getrusage().tokens - before} tokens computed)\n")
