"""Completes a text, one `pred()` a token: the first program of the paper.

    symphony run completion "Once upon a time"
    symphony run completion --max-tokens 100 --temperature 0.8 --seed 7 "The sea was"

A server of completions has this loop inside. Here it is the program's own: each line of it can be changed, and the
other programs are what comes of that. (`sym.generate` is the same loop where nothing is to be changed.)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import libsym as sym


def complete(prompt: str, sampler: sym.Sampler, max_tokens: int) -> Iterator[str]:
    """The text that goes on behind the prompt, in pieces as they come."""
    end = sym.model_info().eos_ids
    text, draws = sym.Detokenizer(), sampler.start()
    with sym.kv_create() as kv:
        tokens = sym.tokenize(prompt)
        for _ in range(max_tokens):
            dist = sym.pred(kv, tokens)  # appends the tokens to the file, and says what may come next
            token = draws.draw(dist)
            if token in end:
                break
            yield text.add(token)
            tokens = [token]
    yield text.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete a text with the model that runs beside this program.")
    parser.add_argument("prompt", help="the text that is to go on")
    parser.add_argument("--max-tokens", type=int, default=64, help="how long it gets (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--seed", type=int, help="the same seed draws the same tokens")
    args = parser.parse_args()
    for piece in complete(args.prompt, sym.Sampler(temperature=args.temperature, seed=args.seed), args.max_tokens):
        sym.send_to_user(piece)
    sym.send_to_user("\n")


if __name__ == "__main__":
    sym.main(main)
