"""Completes a text, one `pred()` a token: the first program of the paper.

    symphony run completion "Once upon a time"
    symphony run completion --max-tokens 100 --temperature 0.8 --seed 7 "The sea was"

A server of completions has this loop inside. Here it is the program's own: each line of it can be changed, and the
other programs are what comes of that. (`sym.generate` is the same loop where nothing is to be changed.) A full context
ends the text as --max-tokens does; a prompt that is longer than the context is refused.
"""

from collections.abc import Iterator

import libsym as sym


def complete(prompt: str, sampler: sym.Sampler, max_tokens: int) -> Iterator[str]:
    """The text that goes on behind the prompt, in pieces as they come."""
    end = sym.model_info().eos_ids
    text, draws = sym.Detokenizer(), sampler.start()
    with sym.kv_create() as kv:
        tokens = sym.tokenize(prompt)
        for _ in range(max(1, min(max_tokens, kv.room() - len(tokens) + 1))):  # the last token needs no room
            dist = sym.pred(kv, tokens)  # appends the tokens to the file, and says what may come next
            token = draws.draw(dist)
            if token in end:
                break
            yield text.add(token)
            tokens = [token]
    yield text.flush()


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text that is to go on")
    arguments.whole("--max-tokens", "how long it gets", 64)
    arguments.number("--temperature", "0 takes the likeliest token", 0.0, least=0)
    arguments.whole("--seed", "the same seed draws the same tokens", least=0)
    args = arguments.parse_args()
    sampler = sym.Sampler(temperature=args.temperature, seed=args.seed)
    sym.send_to_user(complete(args.prompt, sampler, args.max_tokens), "\n")
