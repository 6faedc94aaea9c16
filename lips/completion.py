"""Completes a text with one `pred()` per token: the first program of the paper.

    symphony run completion "Once upon a time"
    symphony run completion --max-tokens 100 --temperature 0.8 --seed 7 "The sea was"

Servers of completions contain this loop. Here the loop belongs to the program, which can change each line; the other
programs are variants of it. (`sym.generate` is the same loop for programs that change nothing.) The text ends at
--max-tokens, or when the context is full. A prompt that is longer than the context is refused.
"""

from collections.abc import Iterator

import libsym as sym


def complete(prompt: str, sampler: sym.Sampler, max_tokens: int) -> Iterator[str]:
    """Yield the continuation of the prompt, piece by piece."""
    end = sym.model_info().eos_ids
    text, draws = sym.Detokenizer(), sampler.start()
    with sym.kv_create() as kv:
        tokens = sym.tokenize(prompt)
        for _ in range(max(1, min(max_tokens, kv.room() - len(tokens) + 1))):  # the last token needs no room
            dist = sym.pred(kv, tokens)  # appends the tokens, and returns the distribution of the next token
            token = draws.draw(dist)
            if token in end:
                break
            yield text.add(token)
            tokens = [token]
    yield text.flush()


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text that is to go on")
    arguments.whole("--max-tokens", "limit of the continuation", 64)
    arguments.number("--temperature", "0 takes the likeliest token", 0.0, least=0)
    arguments.whole("--seed", "the same seed draws the same tokens", least=0)
    args = arguments.parse_args()
    sampler = sym.Sampler(temperature=args.temperature, seed=args.seed)
    sym.send_to_user(complete(args.prompt, sampler, args.max_tokens), "\n")
