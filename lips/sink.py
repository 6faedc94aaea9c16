"""Attention sinks: a window that keeps the first few entries, too, writes for ever and stays sane.

    symphony run sink "The history of the city begins" --window 64 --max-tokens 100
    symphony run sink --compare README.md --window 128

A model puts attention that it needs nowhere else on the first entries of a text. Without them perplexity jumps, with
four it stays near that of all entries. Positions are counted in the file: a text may exceed the context. (Xiao 2023)
"""

from collections.abc import Iterator

import libsym as sym

STEP = 16  # so many tokens come, and so many entries go, at once


def make_room(kv: sym.KV, window: int, sinks: int) -> None:
    """Forgets the oldest entries behind the sinks, if STEP more would be too many. `rebase` gives new positions."""
    if kv.len() + STEP > window:
        kv.keep([(0, sinks), (sinks + STEP - window, None)], rebase=True)


def perplexity(tokens: list[int], window: int, sinks: int) -> float:
    """Of a text that is read through such a window. The first token of each step is not judged."""
    kv, logprobs = sym.kv_create(), list[float]()
    for at in range(0, len(tokens), STEP):
        make_room(kv, window, sinks)
        logprobs += sym.score(kv, tokens[at : at + STEP])
    return sym.perplexity(logprobs)


def generate(kv: sym.KV, prompt: list[int], window: int, sinks: int, max_tokens: int) -> Iterator[int]:
    """Reads a prompt of any length, and goes on with it for as long as is wanted."""
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
    arguments.whole("--sinks", "of these the first of the text", 4, least=0)
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
