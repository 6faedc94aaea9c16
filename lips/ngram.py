"""N-gram speculation: guesses that a text goes on as it did before, and checks all guesses in one step.

symphony run ngram "Repeat: one two three, one two three, one two" --max-tokens 40

A guess costs nothing: it is what followed the last time that the latest two tokens came. One `pred` over the guess says
what the model would have drawn after each of its tokens. What agrees stays, the rest is cut off the file. So the text
is the model's own, token for token, in fewer steps. `generate(draft="ngram")` has the daemon do this.
"""

from __future__ import annotations

import argparse

import libsym as sym


def guess(tokens: list[int], length: int, match: int = 2) -> list[int]:
    """What followed where the last `match` tokens came before, the latest place first."""
    for at in range(len(tokens) - match - 1, -1, -1):
        if tokens[at : at + match] == tokens[-match:]:
            return tokens[at + match : at + match + length]
    return []


def decode(kv: sym.KV, prompt: list[int], max_tokens: int, length: int = 8) -> tuple[list[int], int]:
    """The model's likeliest continuation of the prompt, and how many steps it took."""
    end, found, last, num_steps = sym.model_info().eos_ids, list[int](), prompt[-1], 0
    kv.write(prompt[:-1])
    while len(found) < max_tokens and last not in end:
        guessed = guess(prompt + found, min(length, max_tokens - len(found) - 1))
        rows = sym.pred(kv, [last, *guessed], rows="all", top_k=1)
        said = [row.argmax() for row in rows]
        num_right = next((i for i, token in enumerate(guessed) if token != said[i]), len(guessed))
        kv.truncate(kv.len() - len(guessed) + num_right)
        new = said[: num_right + 1]
        new = new[: next((i + 1 for i, token in enumerate(new) if token in end), len(new))]
        found, last, num_steps = found + new, new[-1], num_steps + 1
    return [token for token in found if token not in end], num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt", help="the text to go on with")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--length", type=int, default=8, help="tokens of a guess; 0: no guesses (default: %(default)s)")
    args = parser.parse_args()
    with sym.kv_create() as kv:
        tokens, num_steps = decode(kv, sym.tokenize(args.prompt), args.max_tokens, args.length)
    print(sym.detokenize(tokens))
    print(f"{len(tokens)} tokens in {num_steps} steps")


if __name__ == "__main__":
    sym.main(main)
