"""Token healing: a prompt may end in the middle of a token, and goes on as if it had not.

symphony run healing "The capital of Fra"
symphony run healing 'An example link is <a href="http:' --without

Where a text is cut off, its last token is, too. Behind "http" and ":" a model hardly says "//": in all that it has read
"://" is one token, and ":" alone says that something else follows. Healing takes the last token back and draws again,
but only among tokens that agree with its text: those that begin with it, or that it begins with, until all of it is
there (Lundberg, "The Art of Prompt Design: Prompt Boundaries and Token Healing", 2023). The rest is plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import libsym as sym


def spelling(text: bytes) -> Callable[[sym.Dist], int]:
    """A draw for `sym.decode`: the likeliest tokens that spell out `text`, and behind it whatever is likeliest."""
    vocabulary, end, left = sym.vocabulary(), sym.token_set(sym.model_info().eos_ids), text

    def draw(dist: sym.Dist) -> int:
        nonlocal left
        if not left:
            return dist.argmax()
        agreeing = sym.token_set(lambda token: token != b"" and (token.startswith(left) or left.startswith(token)))
        token = dist.argmax(allowed=agreeing - end)
        left = left[len(vocabulary[token]) :]
        return token

    return draw


def heal(kv: sym.KV, tokens: list[int], max_tokens: int) -> sym.Decoding:
    """Goes on behind all of `tokens` but the last, with a text that begins with the last one's."""
    last = b"".join(sym.vocabulary()[token] for token in tokens[-1:])
    return sym.decode(kv, tokens[:-1], spelling(last), max_tokens=max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete a text that ends anywhere, even in the middle of a token.")
    parser.add_argument("text", help="what is to be gone on with")
    parser.add_argument("--max-tokens", type=int, default=20, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--without", action="store_true", help="go on behind the last token, to compare")
    args = parser.parse_args()
    tokens = sym.tokenize(args.text)
    if len(tokens) < 2:
        parser.error("the text must have two tokens at least, one of which can be taken back")
    with sym.kv_create() as kv:
        if args.without:
            answer = args.text + sym.generate(kv, tokens, max_tokens=args.max_tokens).full_text()
        else:
            answer = sym.detokenize(tokens[:-1]) + heal(kv, tokens, args.max_tokens).full_text()
    sym.send_to_user(answer + "\n")


if __name__ == "__main__":
    sym.main(main)
