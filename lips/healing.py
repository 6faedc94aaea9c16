"""Token healing: a text may end in the middle of a token, and goes on as if it had not.

symphony run healing "The capital of Fra"
symphony run healing 'An example link is <a href="http:'

Where a text is cut off, its last token is, too. Behind "http" and ":" a model hardly says "//": in all that it has read
"://" is one token, and ":" alone says that something else follows. Healing takes the last token back and draws again,
but only among tokens that agree with its text: those that begin with it, or that it begins with, until all of it is
there (Lundberg, "The Art of Prompt Design: Prompt Boundaries and Token Healing", 2023). The rest is plain decoding.
"""

from __future__ import annotations

import argparse

import libsym as sym


def agreeing(text: bytes) -> sym.TokenSet:
    """The tokens that begin with a text, and those that it begins with."""
    found = sym.token_set(lambda token: token != b"" and (token.startswith(text) or text.startswith(token)))
    return found - sym.token_set(sym.model_info().special_ids)  # these only look like text


def heal(kv: sym.KV, tokens: list[int]) -> list[int]:
    """Appends `tokens` without the last, and finds the likeliest ones whose text begins with that of the last.

    The last of what it gives is not in `kv` yet.
    """
    vocabulary, pending, healed = sym.vocabulary(), tokens[:-1], list[int]()
    left = vocabulary[tokens[-1]]
    while left:
        token = sym.pred(kv, pending).argmax(allowed=agreeing(left))
        left = left[len(vocabulary[token]) :]
        healed.append(token)
        pending = [token]
    return healed


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete a text that ends anywhere, even in the middle of a token.")
    parser.add_argument("text", help="what is to be gone on with: two tokens at least")
    parser.add_argument("--max-tokens", type=int, default=20, help="tokens to generate (default: %(default)s)")
    args = parser.parse_args()
    tokens = sym.tokenize(args.text)
    if len(tokens) < 2:
        parser.error("the text must have two tokens at least: the last one is taken back")
    with sym.kv_create() as cut, sym.kv_create() as whole:
        plain = sym.generate(cut, tokens, max_tokens=args.max_tokens)
        sym.send_to_user(f"as it is: {args.text}{plain.full_text()}\n")
        healed = heal(whole, tokens)
        answer = sym.generate(whole, healed[-1:], max_tokens=args.max_tokens)
        sym.send_to_user(f"healed:   {sym.detokenize([*tokens[:-1], *healed, *answer])}\n")


if __name__ == "__main__":
    sym.main(main)
