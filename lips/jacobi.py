"""Jacobi decoding: guesses a whole row of tokens, and lets the model correct all of them at once until they stand.

symphony run jacobi "1, 2, 3, 4, 5, 6," --width 8 --max-tokens 32

Greedy decoding solves token[i] = f(tokens before i) for one i after the other. Jacobi iteration solves for a row of
them side by side: one `pred` gives what each should be if those before it were right. The first is right after every
step, and often some more; these stay in the file, the others are cut and guessed anew. The text is that of greedy
decoding. (Santilli et al. 2023)
"""

from __future__ import annotations

import argparse

import libsym as sym


def decode(kv: sym.KV, prompt: list[int], max_tokens: int, width: int = 8) -> tuple[list[int], int]:
    """The model's likeliest continuation of the prompt, and how many steps it took."""
    end, found, last, num_steps = sym.model_info().eos_ids, list[int](), prompt[-1], 0
    guesses = prompt[-width:]
    kv.write(prompt[:-1])
    while len(found) < max_tokens:
        rows = sym.pred(kv, [last, *guesses], rows="all", top_k=1)
        said, num_steps = [row.argmax() for row in rows], num_steps + 1
        num_right = next((i for i, token in enumerate(guesses) if token != said[i]), len(guesses))
        kv.truncate(kv.len() - len(guesses) + num_right)
        for token in said[: num_right + 1]:
            if token in end:
                return found[:max_tokens], num_steps
            found.append(token)
        last = found[-1]
        guesses = (said[num_right + 1 :] + found[-width:])[:width]  # what it said of later ones is a better guess
    return found[:max_tokens], num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt", help="the text to go on with")
    parser.add_argument("--max-tokens", type=int, default=48, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=8, help="tokens that are solved at once (default: %(default)s)")
    args = parser.parse_args()
    with sym.kv_create() as kv:
        tokens, num_steps = decode(kv, sym.tokenize(args.prompt), args.max_tokens, args.width)
    print(sym.detokenize(tokens))
    print(f"{len(tokens)} tokens in {num_steps} steps")


if __name__ == "__main__":
    sym.main(main)
