"""Attention sinks: a window that also keeps the first few entries reads and writes for ever, and stays sane.

symphony run sink "The history of the city begins" --window 64 --max-tokens 100
symphony run sink --compare README.md --window 128

A model puts attention that it needs nowhere else on the first entries of a text, whatever they say. A plain window
drops them, and perplexity jumps (see `windowed`). With four of them kept it stays near that of the full cache. What is
kept gets new positions, counted within the file: so distances never exceed those that the model was trained with, and
a text may be longer than its context. (StreamingLLM: Xiao et al. 2023)
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


def make_room(kv: sym.KV, window: int, sinks: int) -> None:
    """Forgets the oldest entries behind the sinks, if STEP more would be too many. `rebase` gives new positions."""
    if kv.len() + STEP > window:
        kv.keep([(0, sinks), (sinks + STEP - window, None)], rebase=True)


def perplexity(tokens: list[int], window: int, sinks: int) -> float:
    """Of a text that is read through such a window. The first token of each step is not judged."""
    logprobs = list[float]()
    with sym.kv_create() as kv:
        for at in range(0, len(tokens), STEP):
            make_room(kv, window, sinks)
            logprobs += sym.score(kv, tokens[at : at + STEP])
    return math.exp(-sum(logprobs) / len(logprobs))


def generate(kv: sym.KV, prompt: list[int], window: int, sinks: int, max_tokens: int) -> Iterator[int]:
    """Reads a prompt of any length, and goes on with it for as long as is wanted."""
    for at in range(0, len(prompt) - 1, STEP):
        make_room(kv, window, sinks)
        kv.write(prompt[at : min(at + STEP, len(prompt) - 1)])
    pending = prompt[-1:]
    for at in range(0, max_tokens, STEP):
        make_room(kv, window, sinks)
        part = sym.generate(kv, pending, max_tokens=min(STEP, max_tokens - at))
        yield from part
        if part.finish == "stop_token":
            return
        pending = part.pending


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt", nargs="?", default="Once upon a time", help="the text to go on with")
    parser.add_argument("--window", type=int, default=128, help="entries of the file (default: %(default)s)")
    parser.add_argument("--sinks", type=int, default=4, help="of these the first of the text (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print perplexities of this text instead")
    args = parser.parse_args()
    if args.sinks < 0 or args.window < args.sinks + 2 * STEP:
        parser.error(f"--window {args.window}: {2 * STEP} more than --sinks is the least")
    if args.compare:
        tokens = sym.tokenize(args.compare.read_text(encoding="utf-8"))[:COMPARED_TOKENS]
        print(f"all {len(tokens)} entries: perplexity {perplexity(tokens, COMPARED_TOKENS + STEP, 0):.2f}")
        for sinks in (0, args.sinks):
            print(f"{args.window}, {sinks} of them sinks: perplexity {perplexity(tokens, args.window, sinks):.2f}")
        return
    text = sym.Detokenizer()
    with sym.kv_create() as kv:
        for token in generate(kv, sym.tokenize(args.prompt), args.window, args.sinks, args.max_tokens):
            sym.send_to_user(text.add(token))
    sym.send_to_user(text.flush() + "\n")


if __name__ == "__main__":
    sym.main(main)
