"""A sliding window: only the latest entries of a text are kept, however long it grows; and what that costs.

symphony run windowed "The history of the city begins" --window 64 --max-tokens 100
symphony run windowed --compare README.md --window 128

Each step takes the same time, and the file the same room, for ever. To forget is one call: `kv.keep` of the latest
entries. A few go at once, because a call for each token would be slow; the file never has more than --window.
The fault of it is what --compare shows. A model puts attention that it needs nowhere else on the first entries of a
text. When these are gone, the perplexity of all that follows jumps. `sink` mends it with four entries.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import libsym as sym

STEP = 16
"""How many tokens come, and how many entries go, at once."""
COMPARED_TOKENS = 1024


def make_room(kv: sym.KV, window: int) -> None:
    """Forgets the oldest entries, if STEP more would be too many."""
    if kv.len() + STEP > window:
        kv.keep([(STEP - window, None)])


def perplexity(tokens: list[int], window: int) -> float:
    """Of a text that is read through the window. The first token of each step is not judged."""
    logprobs = list[float]()
    with sym.kv_create() as kv:
        for at in range(0, len(tokens), STEP):
            make_room(kv, window)
            logprobs += sym.score(kv, tokens[at : at + STEP])
    return math.exp(-sum(logprobs) / len(logprobs))


def generate(kv: sym.KV, prompt: list[int], window: int, max_tokens: int) -> Iterator[int]:
    """Reads a prompt of any length through the window, and goes on with it."""
    for at in range(0, len(prompt) - 1, STEP):
        make_room(kv, window)
        kv.write(prompt[at : min(at + STEP, len(prompt) - 1)])
    pending = prompt[-1:]
    for at in range(0, max_tokens, STEP):
        make_room(kv, window)
        part = sym.generate(kv, pending, max_tokens=min(STEP, max_tokens - at))
        yield from part
        if part.finish == "stop_token":
            return
        pending = part.pending


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt", nargs="?", default="Once upon a time", help="the text to go on with")
    parser.add_argument("--window", type=int, default=128, help="entries of the file (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print perplexities of this text instead")
    args = parser.parse_args()
    if args.window < 2 * STEP:
        parser.error(f"--window {args.window}: {2 * STEP} is the least")
    if args.compare:
        tokens = sym.tokenize(args.compare.read_text(encoding="utf-8"))[:COMPARED_TOKENS]
        print(f"all {len(tokens)} entries: perplexity {perplexity(tokens, COMPARED_TOKENS + STEP):.2f}")
        print(f"the latest {args.window}: perplexity {perplexity(tokens, args.window):.2f}")
        return
    text = sym.Detokenizer()
    with sym.kv_create() as kv:
        for token in generate(kv, sym.tokenize(args.prompt), args.window, args.max_tokens):
            sym.send_to_user(text.add(token))
    sym.send_to_user(text.flush() + "\n")


if __name__ == "__main__":
    sym.main(main)
