"""Classifier-free guidance: makes the model follow its instructions more than it would by itself.

    symphony run cfg "Describe a cat." --system "You speak like a pirate." --scale 3

Two files hold the same question, one with the instructions and one without (or with the opposite: --negative). Both are
given each token that is drawn. What the instructions change in the model's opinion is taken `scale` times: 1 is plain
decoding, 0 ignores them. (Sanchez et al. 2023)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

import libsym as sym


def guided(scale: float) -> Callable[[sym.Dist, sym.Dist], int]:
    """Draws the likeliest token where the guidance is `scale` times as strong as it is."""

    def draw(with_: sym.Dist, without: sym.Dist) -> int:
        follows, ignores = np.asarray(with_), np.asarray(without)
        return int(np.argmax(ignores + scale * (follows - ignores)))

    return draw


def answer(question: str, system: str, negative: str | None, scale: float, max_tokens: int) -> sym.Decoding:
    asked = {"role": "user", "content": question}
    tokens = sym.chat_tokens([{"role": "system", "content": system}, asked])
    plain = sym.chat_tokens([asked] if negative is None else [{"role": "system", "content": negative}, asked])
    return sym.decode(sym.kv_create(), tokens, guided(scale), beside=[(sym.kv_create(), plain)], max_tokens=max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--system", required=True, help="the instructions to follow")
    parser.add_argument("--negative", help="instructions to keep away from, in place of none")
    parser.add_argument("--scale", type=float, default=2.0, help="of the guidance (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    args = parser.parse_args()
    for piece in answer(args.question, args.system, args.negative, args.scale, args.max_tokens).text():
        sym.send_to_user(piece)
    sym.send_to_user("\n")


if __name__ == "__main__":
    sym.main(main)
