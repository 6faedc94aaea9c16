"""Jacobi decoding: a window of guesses, all corrected in each step, until they stay as they are.

    symphony run jacobi "1, 2, 3, 4, 5, 6," --max-tokens 60

Greedy decoding solves "each token is the likeliest behind those before it". Jacobi's iteration solves it for several
tokens in parallel (Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding", 2023):
guess a window, compute all of it in one step, and replace each guess by what the model says there. A guess that did not
change is right if all before it are. So each step finds one token at least; more where text is predictable. It needs
neither a draft model nor earlier text, but a model that was not trained for it gains little in prose.
"""

import sys
from collections.abc import Iterator
from itertools import islice, takewhile

import libsym as sym


def iterate(kv: sym.KV, tokens: list[int], window: int = 6) -> Iterator[list[int]]:
    """Appends `tokens` and goes on as far as the context: what each step found. Its last token is not in `kv` yet."""
    length, room, pending = kv.len(), kv.room(), tokens
    guesses = tokens[-window:]  # anything will do: the end of the text comes again
    while True:
        guesses = guesses[: max(0, room - len(pending))]
        rows = sym.pred(kv, [*pending, *guesses], rows="all", top_k=1)
        said = [row.argmax() for row in rows][len(pending) - 1 :]  # behind `pending`, and behind each guess
        num_right = next((i for i, guess in enumerate(guesses) if guess != said[i]), len(guesses))
        length += len(pending) + num_right
        kv.truncate(length)
        found, corrected = said[: num_right + 1], said[num_right + 1 :]
        yield found
        pending, room = found[-1:], room - len(pending) - num_right
        if not room:
            return
        guesses = (corrected + pending * window)[:window]  # the window moves on by what was found


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "what is to be gone on with")
    arguments.whole("--max-tokens", "tokens to generate", 60)
    arguments.whole("--window", "tokens guessed at once", 6, most=64)
    args = arguments.parse_args()
    end = sym.model_info().eos_ids
    with sym.kv_create() as kv:
        found = (token for step in iterate(kv, sym.tokenize(args.text), args.window) for token in step)
        answer = list(takewhile(lambda token: token not in end, islice(found, args.max_tokens)))
    sym.send_to_user(f"{args.text}{sym.detokenize(answer)}\n")
    print(f"{len(answer)} tokens in {sym.getrusage().steps} steps", file=sys.stderr)
