"""Answers from a directory of documents, and keeps the KV of those that are asked for most.

    symphony run rag --budget 20000 docs "What do bees eat?" "Where do ants live?"

A passage (what is below a heading) is computed when it is first asked about; from then on it is a KV file that each
question forks. Which files stay is this program's own policy: popularity. A file's PRIORITY counts its questions, so
the count outlives the program, and where memory runs short the daemon moves the least asked to disk first. Beyond the
budget the least asked is removed. A passage that has changed, or is gone, leaves the mount with the next question.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import libsym as sym

HIGHEST_PRIORITY, MOST_CHARS = 100, 2000  # of a passage: the context has room for it, and for the question


def read(directory: Path) -> dict[str, str]:
    """The passages by their names: each document, cut at its headings, and where a part is long, between lines."""
    found = dict[str, str]()
    for path in sorted(path for path in directory.rglob("*") if path.suffix in {".md", ".txt"} and path.is_file()):
        parts = re.split(r"^(?=#)", path.read_text(errors="replace"), flags=re.MULTILINE)
        pieces = [piece for part in parts for piece in cut(part)]
        found |= {f"{path.relative_to(directory)}:{number}": text for number, text in enumerate(pieces) if text.strip()}
    return found


def cut(text: str) -> Iterator[str]:
    """Passages of at most MOST_CHARS: whole lines, but for a line that is longer."""
    while len(text) > MOST_CHARS:
        at = text.rfind("\n", 0, MOST_CHARS) + 1 or MOST_CHARS
        yield text[:at]
        text = text[at:]
    yield text


def find(question: str, passages: dict[str, str]) -> str | None:
    """The passage that fits best, by BM25: rare words count, and in short passages more. None: no word is in any."""
    counts = {name: Counter(re.findall(r"\w+", text.lower())) for name, text in passages.items()}
    mean = sum(count.total() for count in counts.values()) / len(counts) or 1
    words = re.findall(r"\w+", question.lower())
    rare = {word: math.log((len(counts) + 1) / (sum(word in each for each in counts.values()) + 0.5)) for word in words}

    def worth(name: str, word: str) -> float:
        return rare[word] * (often := counts[name][word]) * 2.2 / (often + 0.3 + 0.9 * counts[name].total() / mean)

    scores = {name: sum(worth(name, word) for word in words) for name in counts}
    return max(scores, key=scores.__getitem__) if any(scores.values()) else None


class Shelf:
    """Passages that are KV files: at most `budget` tokens of them, in a directory of the mount."""

    def __init__(self, path: str, budget: int) -> None:
        self.path, self.budget = path, budget
        sym.kv_mkdir(path, parents=True)

    def place(self, name: str, text: str) -> str:
        """A changed text has another place: what is computed at one never has to be looked at."""
        digest = sha256(f"{name}\0{text}".encode(errors="surrogateescape")).hexdigest()
        return f"{self.path}/{name.replace('/', '-')[-40:]}-{digest[:16]}.kv"

    def take(self, name: str, text: str) -> sym.KV:
        """The passage's file, computed if it is not there, which now was asked for once more."""
        kv = sym.kv_open_or_compute(self.place(name, text), sym.chat_tokens([under(text)], add_generation_prompt=False))
        sym.kv_advise(kv, sym.PRIORITY(min((kv.stat().priority or 0) + 1, HIGHEST_PRIORITY)))
        return kv

    def tidy(self, passages: dict[str, str], in_use: sym.KV) -> None:
        """Removes what is of no passage any more; then, while there is too much, what was asked for least."""
        current = {self.place(name, text) for name, text in passages.items()}
        files = {(path := f"{self.path}/{entry.name}"): sym.kv_stat(path) for entry in sym.kv_list(self.path)}
        for path in sorted(files, key=lambda path: (path in current, files[path].priority or 0)):
            too_much = sum(file.tokens or 0 for file in files.values()) > self.budget
            if path not in current or (too_much and path != in_use.path):
                sym.kv_remove(path)
                del files[path]


def under(passage: str) -> dict[str, str]:
    return {"role": "system", "content": f"Answer in one sentence, from this text.\n\n{passage}"}


def answer(shelf: Shelf, passages: dict[str, str], question: str, max_tokens: int) -> tuple[str | None, str]:
    """The name of the passage that was asked, and what it says; None: no passage is about that."""
    if (name := find(question, passages)) is None:
        return None, "No passage has a word of this question."
    conversation = sym.chat_tokens([under(passages[name]), {"role": "user", "content": question}])
    with shelf.take(name, passages[name]) as passage, sym.kv_fork(passage) as kv:
        shelf.tidy(passages, passage)
        return name, sym.generate(kv, sym.kv_rewind(kv, conversation), max_tokens=max_tokens).full_text().strip()


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.directory("directory", "with text in files *.md and *.txt")
    arguments.text("question", nargs="+")
    arguments.whole("--budget", "tokens of passages to keep", 50000)
    arguments.whole("--max-tokens", "of an answer", 48)
    place = (args := arguments.parse_args()).directory.resolve()  # others may have its name
    shelf, failed = Shelf(f"rag/{place.name}-{sha256(bytes(place)).hexdigest()[:8]}", args.budget), ""
    for question in args.question:
        before = sym.getrusage().tokens
        if not (passages := read(args.directory)):
            arguments.error(f"{args.directory}: there is no text in files *.md or *.txt")
        try:
            name, text = answer(shelf, passages, question, args.max_tokens)
            sym.send_to_user(f"{text}\n    ({name}; {sym.getrusage().tokens - before} tokens computed)\n")
        except sym.Invalid as error:  # the question is beyond the context: others are answered first
            failed = f"rag: {question[:40]!r}: {error}"
    raise SystemExit(failed or 0)
