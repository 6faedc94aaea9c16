"""Jacobi decoding: each step corrects a whole window of guesses, until no guess changes.

    symphony run jacobi "1, 2, 3, 4, 5, 6," --max-tokens 60

Greedy decoding looks for a text in which each token is the likeliest after the tokens before it. Jacobi's iteration
finds several tokens of this text in parallel (Santilli et al., "Accelerating Transformer Inference for Translation via
Parallel Decoding", 2023): guess a window, compute all of it in one step, and replace each guess by the model's token. A
guess is right if it and all guesses before it stay the same. So each step finds at least one token, and more in
predictable text. The method needs neither a draft model nor earlier text. A model that was not trained for the method
gains little in prose.
"""

import sys
from collections.abc import Iterator
from itertools import islice, takewhile

import libsym as sym


def iterate(kv: sym.KV, tokens: list[int], window: int = 6) -> Iterator[list[int]]:
    """Append `tokens`; yield the tokens that each step finds, until the context is full. `kv` lacks the last token."""
    length, room, pending = kv.len(), kv.room(), tokens
    guesses = tokens[-window:]  # any first guess will do: here the end of the text
    while True:
        guesses = guesses[: max(0, room - len(pending))]
        rows = sym.pred(kv, [*pending, *guesses], rows="all", top_k=1)
        said = [row.argmax() for row in rows][len(pending) - 1 :]  # the tokens after `pending` and after each guess
        num_right = next((i for i, guess in enumerate(guesses) if guess != said[i]), len(guesses))
        length += len(pending) + num_right
        kv.truncate(length)
        found, corrected = said[: num_right + 1], said[num_right + 1 :]
        yield found
        pending, room = found[-1:], room - len(pending) - num_right
        if not room:
            return
        guesses = (corrected + pending * window)[:window]  # the window moves by the tokens found


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "the text to continue")
    arguments.whole("--max-tokens", "tokens to generate", 60)
    arguments.whole("--window", "tokens guessed together", 6, most=64)
    args = arguments.parse_args()
    end = sym.model_info().eos_ids
    with sym.kv_create() as kv:
        found = (token for step in iterate(kv, sym.tokenize(args.text), args.window) for token in step)
        answer = list(takewhile(lambda token: token not in end, islice(found, args.max_tokens)))
    sym.send_to_user(f"{args.text}{sym.detokenize(answer)}\n")
    print(f"{len(answer)} tokens in {sym.getrusage().steps} steps", file=sys.stderr)
