"""Attention sinks: a window that also keeps the first few entries, so long texts stay coherent.

    symphony run sink "The history of the city begins" --window 64 --max-tokens 100
    symphony run sink --compare README.md --window 128

A model sends surplus attention to the first entries of a text. Without them perplexity jumps; with four of them it
stays near that of all entries. After each eviction the remaining entries get new positions, so a text may be longer
than the context. (Xiao 2023)
"""

from collections.abc import Iterator

import libsym as sym

STEP = 16  # tokens appended together, and entries evicted together


def make_room(kv: sym.KV, window: int, sinks: int) -> None:
    """Evict the oldest entries after the sinks if STEP more do not fit. `rebase` gives the rest new positions."""
    if kv.len() + STEP > window:
        kv.keep([(0, sinks), (sinks + STEP - window, None)], rebase=True)


def perplexity(tokens: list[int], window: int, sinks: int) -> float:
    """Return the perplexity of a text that is read through the window. The first token of each step does not count."""
    kv, logprobs = sym.kv_create(), list[float]()
    for at in range(0, len(tokens), STEP):
        make_room(kv, window, sinks)
        logprobs += sym.score(kv, tokens[at : at + STEP])
    return sym.perplexity(logprobs)


def generate(kv: sym.KV, prompt: list[int], window: int, sinks: int, max_tokens: int) -> Iterator[int]:
    """Append a prompt of any length, and yield its continuation up to `max_tokens`."""
    for at in range(0, len(prompt) - 1, STEP):
        make_room(kv, window, sinks)
        kv.write(prompt[:-1][at : at + STEP])
    pending = prompt[-1:]
    for at in range(0, max_tokens, STEP):
        make_room(kv, window, sinks)
        part = sym.generate(kv, pending, max_tokens=min(STEP, max_tokens - at))
        yield from part
        if part.finish == "stop_token":
            return
        pending = part.pending


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text to go on with", "Once upon a time")
    arguments.whole("--window", "entries of the file", 128)
    arguments.whole("--sinks", "how many of these are first entries of the text", 4, least=0)
    arguments.whole("--max-tokens", default=64)
    arguments.document("--compare", "print perplexities of this text instead", metavar="FILE")
    args = arguments.parse_args()
    if args.window < args.sinks + 2 * STEP:
        arguments.error(f"--window {args.window}: {2 * STEP} more than --sinks is the least")
    if args.window > (context := sym.model_info().max_positions):
        arguments.error(f"--window {args.window}: the model's context has {context} entries")
    if args.compare:
        tokens = sym.tokenize(args.compare.text)[:1024]
        for window, sinks in ((1024 + STEP, 0), (args.window, 0), (args.window, args.sinks)):
            print(f"{window} entries, {sinks} of them sinks: perplexity {perplexity(tokens, window, sinks):.2f}")
        return
    prompt = sym.tokenize(args.prompt)
    print(sym.detokenize(generate(sym.kv_create(), prompt, args.window, args.sinks, args.max_tokens)))
