"""Beam search: keeps the likeliest beginnings, each in a KV file of its own.

symphony run beam "The capital of France is" --beams 4 --max-tokens 12

A beam that goes on in two ways is forked, in constant time, and what it has computed so far is there once. All beams
grow in one step (`pred_batch`), and only their likeliest tokens come back. A file that lost is closed, and its pages
are free.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import libsym as sym


@dataclass(frozen=True)
class Beam:
    """A text that may be the likeliest, and what it is computed in; `score` is its log-probability."""

    kv: sym.KV
    tokens: list[int]
    score: float
    is_over: bool = False


def search(kv: sym.KV, prompt: list[int], num_beams: int, max_tokens: int) -> list[Beam]:
    """The likeliest continuations of what is in `kv` and the prompt, the best first. `kv` stays as it is."""
    end = sym.model_info().eos_ids
    live, over = [Beam(kv.fork(), [], 0.0)], list[Beam]()
    for _ in range(max_tokens):
        rows = sym.pred_batch([sym.Pred(beam.kv, beam.tokens[-1:] or prompt, top_k=num_beams) for beam in live])
        grown = [
            (beam, token, beam.score + logprob)
            for beam, row in zip(live, rows, strict=True)
            for token, logprob in row.topk(num_beams)
        ]
        grown.sort(key=lambda each: each[2], reverse=True)
        best = [
            Beam(beam.kv.fork(), [*beam.tokens, token], score, token in end) for beam, token, score in grown[:num_beams]
        ]
        for beam in live:
            beam.kv.close()
        over += [beam for beam in best if beam.is_over]
        live = [beam for beam in best if not beam.is_over]
        if not live or (over and max(beam.score for beam in over) >= live[0].score):
            break  # a text gets no likelier as it grows
    return sorted(over + live, key=lambda beam: beam.score, reverse=True)[:num_beams]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt", help="the text to go on with")
    parser.add_argument("--beams", type=int, default=4, help="how many beginnings are kept (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="the longest continuation (default: %(default)s)")
    args = parser.parse_args()
    with sym.kv_create() as kv:
        for beam in search(kv, sym.tokenize(args.prompt), args.beams, args.max_tokens):
            print(f"{beam.score:8.3f} {args.prompt}{sym.detokenize(beam.tokens)}")


if __name__ == "__main__":
    sym.main(main)
