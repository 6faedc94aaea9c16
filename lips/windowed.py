"""A sliding window: only the latest entries of a text are kept, however long it grows.

    symphony run windowed "The history of the city begins" --window 64 --max-tokens 100

Each step takes the same time, and the file the same room, for ever: `kv.keep` forgets some of the oldest entries at
once. But a model puts attention that it needs nowhere else on the first entries of a text. When these are gone, the
perplexity of all that follows jumps: `sink --compare` shows it, and mends it with four entries.
"""

from collections.abc import Iterator

import libsym as sym

STEP = 16  # so many tokens come, and so many entries go, at once


def make_room(kv: sym.KV, window: int) -> None:
    """Forgets the oldest entries, if STEP more would be too many."""
    if kv.len() + STEP > window:
        kv.keep([(STEP - window, None)])


def generate(kv: sym.KV, prompt: list[int], window: int, max_tokens: int) -> Iterator[int]:
    """Reads a prompt of any length through the window, and goes on with it."""
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
