"""Modular cache: joins texts that were computed separately, and measures the loss of accuracy.

    symphony run modular "Which of them make honey?" bees.md ants.md
    symphony run modular --choose 2 "Which of them make honey?" bees.md ants.md wasps.md

The method is from "Prompt Cache" (Gim et al., 2024). Each text is a module: a KV file, computed once, after the system
message alone. `kv_merge` joins modules by rotating their keys to new positions, so only the question is computed.
Accuracy suffers because a module has not seen the other modules. The program measures this loss along the answer that
the recomputed prompt gives: the mean KL divergence of the next-token distributions.
"""

from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations

import numpy as np
import numpy.typing as npt

import libsym as sym

SYSTEM = {"role": "system", "content": "You answer from the texts that the user gives you."}


def after_system(text: str, *, asks: bool) -> list[int]:
    """Return the tokens of a user's message that follows the system message."""
    head = sym.chat_tokens([SYSTEM], add_generation_prompt=False)
    return sym.chat_tokens([SYSTEM, {"role": "user", "content": text}], add_generation_prompt=asks)[len(head) :]


def open_module(head: sym.KV, text: str) -> sym.KV:
    """Open the file of a text, computed after the head, but without the head's entries. All joins share this file."""
    path = f"modules/{sha256(text.encode()).hexdigest()[:16]}.kv"
    with head.lock():
        try:
            return sym.kv_open(path)
        except sym.NotFound:
            with sym.kv_fork(head) as kv:
                sym.kv_write(kv, after_system(text, asks=False))
                return sym.kv_extract(kv, [(head.len(), None)], path, rebase=False)  # the merge rotates the keys


def log_probs(dist: sym.Dist) -> npt.NDArray[np.float64]:
    row = np.asarray(dist, np.float64)
    return np.asarray(row - np.logaddexp.reduce(row))


@dataclass
class Joined:
    """An answer over joined modules, beside the answer of the same prompt recomputed as a whole."""

    answer: str
    recomputed: str
    kl: float
    num_joined: int
    num_computed: int


def compare(files: list[sym.KV], question: str, max_tokens: int) -> Joined:
    """Ask the question on the joined files, and on a recomputed file of the same tokens."""
    tail = after_system(question, asks=True)
    with sym.kv_merge(files) as joined, sym.kv_create() as whole:
        num_joined = sym.kv_write(whole, joined.read()[0])
        with joined.fork() as one, whole.fork() as other:
            answers = [sym.generate(kv, tail, max_tokens=max_tokens) for kv in (one, other)]
            texts = [answer.full_text().strip() for answer in answers]
        forced, kl = tail + answers[1].tokens[:-1], 0.0
        with sym.pred(joined, forced, rows="all") as apart, sym.pred(whole, forced, rows="all") as together:
            for row in range(len(tail) - 1, len(forced)):
                p, q = log_probs(together[row]), log_probs(apart[row])
                kl += float(np.exp(p) @ (p - q)) / (len(forced) - len(tail) + 1)
    return Joined(texts[0], texts[1], kl, num_joined, len(tail))


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("question")
    arguments.document("file", "a text: a module", nargs="+")
    arguments.whole("--choose", "ask over each combination of this many files (default: over all files)")
    arguments.whole("--max-tokens", "of an answer", 48)
    args = arguments.parse_args()
    if not 1 <= (num_chosen := args.choose or len(args.file)) <= len(args.file):
        arguments.error(f"--choose {num_chosen}: there are {len(args.file)} files")
    sym.kv_mkdir("modules", parents=True)
    with sym.kv_open_or_compute("modules/head.kv", sym.chat_tokens([SYSTEM], add_generation_prompt=False)) as head:
        modules = [(name, open_module(head, text)) for name, text in args.file]
        for chosen in combinations(modules, num_chosen):
            found = compare([head, *(module for _, module in chosen)], args.question, args.max_tokens)
            sym.send_to_user(f"{' + '.join(name for name, _ in chosen)}: {found.answer}\n")
            sym.send_to_user(f"    recomputed: {found.recomputed}\n    KL {found.kl:.3f} nats a token; ")
            sym.send_to_user(f"{found.num_computed} of {found.num_joined + found.num_computed} tokens computed\n")
