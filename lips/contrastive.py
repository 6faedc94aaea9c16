"""Contrastive decoding: prefers what an expert says, and an amateur does not.

    symphony run contrastive "The history of the city begins" --window 16 --max-tokens 48

What a weak model is sure of, too, is mostly the dull and the repeated. So its log-probabilities are taken off those of
a strong one, among the tokens that the strong one finds plausible (at least --alpha times as likely as its first). One
daemon serves one model: the amateur is the same model, but it has read the last --window tokens alone. (Li et al. 2022;
a short memory as the amateur is from its section 3.4)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

import libsym as sym


def contrast(alpha: float) -> Callable[[sym.Dist, sym.Dist], int]:
    """Draws the plausible token that the expert prefers most, beside the amateur."""

    def draw(expert: sym.Dist, amateur: sym.Dist) -> int:
        knows, guesses = np.asarray(expert.probs()), np.asarray(amateur.probs())
        plausible = knows >= alpha * knows.max()
        return int(np.argmax(np.where(plausible, np.log(knows) - np.log(guesses), -np.inf)))

    return draw


def decode(prompt: list[int], window: int, alpha: float, max_tokens: int) -> list[int]:
    """Goes on with the prompt. The amateur's file is begun anew when it has read twice the window."""
    expert, found, pending = sym.kv_create(), list[int](), prompt
    while len(found) < max_tokens:
        memory = (prompt + found)[-window:]
        with sym.kv_create() as amateur:
            rest = min(window, max_tokens - len(found))
            part = sym.decode(expert, pending, contrast(alpha), beside=[(amateur, memory)], max_tokens=rest)
            found += list(part)
        if part.finish == "stop_token":
            break
        pending = part.pending
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt", help="the text to go on with")
    parser.add_argument("--window", type=int, default=16, help="tokens the amateur remembers (default: %(default)s)")
    parser.add_argument("--alpha", type=float, default=0.1, help="how plausible a token must be (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="(default: %(default)s)")
    args = parser.parse_args()
    print(args.prompt + sym.detokenize(decode(sym.tokenize(args.prompt), args.window, args.alpha, args.max_tokens)))


if __name__ == "__main__":
    sym.main(main)
