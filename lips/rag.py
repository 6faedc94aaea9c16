"""Answers questions from a directory of documents, and keeps the KV of the most used passages.

    symphony run rag --budget 20000 docs "What do bees eat?" "Where do ants live?"

A passage (the text below a heading) is computed for its first question, and is then a KV file that each question forks.
The program decides by popularity which files stay. A file's PRIORITY counts its questions: the count outlives the
program, and when memory runs short the daemon moves the least used passages to disk first. Beyond the budget the
program removes the least used passages. The next question removes the files of changed or deleted passages.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import libsym as sym

HIGHEST_PRIORITY, MOST_CHARS = 100, 2000  # passages this short leave room for a question


def read(directory: Path) -> dict[str, str]:
    """Return the passages by name: each document is cut at its headings, and long parts are cut between lines."""
    found = dict[str, str]()
    for path in sorted(path for path in directory.rglob("*") if path.suffix in {".md", ".txt"} and path.is_file()):
        parts = re.split(r"^(?=#)", path.read_text(errors="replace"), flags=re.MULTILINE)
        pieces = [piece for part in parts for piece in cut(part)]
        found |= {f"{path.relative_to(directory)}:{number}": text for number, text in enumerate(pieces) if text.strip()}
    return found


def cut(text: str) -> Iterator[str]:
    """Yield pieces of at most MOST_CHARS. Cuts are between lines, except inside a line that is longer."""
    while len(text) > MOST_CHARS:
        at = text.rfind("\n", 0, MOST_CHARS) + 1 or MOST_CHARS
        yield text[:at]
        text = text[at:]
    yield text


def find(question: str, passages: dict[str, str]) -> str | None:
    """Return the name of the passage that fits best by BM25, or None if no passage has a word of the question."""
    counts = {name: Counter(re.findall(r"\w+", text.lower())) for name, text in passages.items()}
    mean = sum(count.total() for count in counts.values()) / len(counts) or 1
    words = re.findall(r"\w+", question.lower())
    rare = {word: math.log((len(counts) + 1) / (sum(word in each for each in counts.values()) + 0.5)) for word in words}

    def worth(name: str, word: str) -> float:
        return rare[word] * (often := counts[name][word]) * 2.2 / (often + 0.3 + 0.9 * counts[name].total() / mean)

    scores = {name: sum(worth(name, word) for word in words) for name in counts}
    return max(scores, key=scores.__getitem__) if any(scores.values()) else None


class Shelf:
    """A directory on the mount with passages as KV files, of at most `budget` tokens together."""

    def __init__(self, path: str, budget: int) -> None:
        self.path, self.budget = path, budget
        sym.kv_mkdir(path, parents=True)

    def place(self, name: str, text: str) -> str:
        """Return the path of a passage. A changed text gets another path, so a file at this path is always valid."""
        digest = sha256(f"{name}\0{text}".encode(errors="surrogateescape")).hexdigest()
        return f"{self.path}/{name.replace('/', '-')[-40:]}-{digest[:16]}.kv"

    def take(self, name: str, text: str) -> sym.KV:
        """Open the file of a passage, or compute it; count one more question for it."""
        kv = sym.kv_open_or_compute(self.place(name, text), sym.chat_tokens([under(text)], add_generation_prompt=False))
        sym.kv_advise(kv, sym.PRIORITY(min((kv.stat().priority or 0) + 1, HIGHEST_PRIORITY)))
        return kv

    def tidy(self, passages: dict[str, str], in_use: sym.KV) -> None:
        """Remove files without a current passage; then, while the budget is exceeded, the least used files."""
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
    """Return the name of the passage that fits the question, and the answer from it. None: no passage fits."""
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
    place = (args := arguments.parse_args()).directory.resolve()  # other directories may have the same name
    shelf, failed = Shelf(f"rag/{place.name}-{sha256(bytes(place)).hexdigest()[:8]}", args.budget), ""
    for question in args.question:
        before = sym.getrusage().tokens
        if not (passages := read(args.directory)):
            arguments.error(f"{args.directory}: there is no text in files *.md or *.txt")
        try:
            name, text = answer(shelf, passages, question, args.max_tokens)
            sym.send_to_user(f"{text}\n    ({name}; {sym.getrusage().tokens - before} tokens computed)\n")
        except sym.Invalid as error:  # longer than the context: answer the other questions first
            failed = f"rag: {question[:40]!r}: {error}"
    raise SystemExit(failed or 0)
