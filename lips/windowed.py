"""Sliding window: keeps only the latest entries of a text, however long it grows.

    symphony run windowed "The history of the city begins" --window 64 --max-tokens 100

However long the text is, each step takes the same time, and the file takes the same memory. `kv.keep` evicts some of
the oldest entries together. But a model sends surplus attention to the first entries of a text. Without them the
perplexity of all later text jumps: `sink --compare` shows this, and cures it with four entries.
"""

from collections.abc import Iterator

import libsym as sym

STEP = 16  # tokens appended together, and entries evicted together


def make_room(kv: sym.KV, window: int) -> None:
    """Evict the oldest entries if STEP more do not fit."""
    if kv.len() + STEP > window:
        kv.keep([(STEP - window, None)])


def generate(kv: sym.KV, prompt: list[int], window: int, max_tokens: int) -> Iterator[int]:
    """Read a prompt of any length through the window, and yield its continuation."""
    for at in range(0, len(prompt) - 1, STEP):
        make_room(kv, window)
        kv.write(prompt[:-1][at : at + STEP])
    pending = prompt[-1:]
    for at in range(0, max_tokens, STEP):
        make_room(kv, window)
        part = sym.generate(kv, pending, max_tokens=min(STEP, max_tokens - at))
        yield from part
        if part.finish == "stop_token":
            return
        pending = part.pending


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text to go on with")
    arguments.whole("--window", "entries of the file", 128, least=2 * STEP)
    arguments.whole("--max-tokens", default=64)
    args = arguments.parse_args()
    if args.window > (context := sym.model_info().max_positions):
        arguments.error(f"--window {args.window}: the model's context has {context} entries")
    print(sym.detokenize(generate(sym.kv_create(), sym.tokenize(args.prompt), args.window, args.max_tokens)))
