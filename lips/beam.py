"""Beam search: a few hypotheses grow side by side, and the likeliest continuation is found among them.

    symphony run beam "The capital of France is" --width 4 --max-tokens 20

Each round computes the next token of all hypotheses in one step (`pred_batch`), and keeps the best of all their
likeliest continuations. A hypothesis that goes on in two ways is forked, in constant time. Beams share the pages of
what they have in common, so nothing is computed twice. The files of those that fall behind are closed, and pages that
no other beam uses are free again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import libsym as sym


@dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis. `kv` holds what comes before `pending`, which the next round computes."""

    kv: sym.KV
    pending: list[int]
    tokens: tuple[int, ...] = ()  # that were found, with the end token if there is one
    logprob: float = 0.0  # of all of these
    is_over: bool = False


def beam_search(kv: sym.KV, tokens: list[int], width: int, max_tokens: int) -> list[Beam]:
    """Up to `width` continuations of `kv` and then `tokens`, the likeliest first; `kv` stays as it is.

    A full context ends them as `max_tokens` does: what comes after the last entry is known, and has no room.
    """
    end = sym.model_info().eos_ids
    beams = [Beam(sym.kv_fork(kv), tokens)]
    for _ in range(max(1, min(max_tokens, kv.room() - len(tokens) + 1))):
        if beams[0].is_over:
            break  # whatever the others append, they only become less likely
        live = [beam for beam in beams if not beam.is_over]
        dists = sym.pred_batch([sym.Pred(beam.kv, beam.pending, top_k=width) for beam in live])
        candidates = [beam for beam in beams if beam.is_over]
        for beam, dist in zip(live, dists, strict=True):
            for token, logprob in dist.topk(width):
                found = (*beam.tokens, token)
                candidates.append(Beam(beam.kv, [token], found, beam.logprob + logprob, token in end))
        best = sorted(candidates, key=lambda beam: beam.logprob, reverse=True)[:width]
        forks = [replace(beam, kv=sym.kv_fork(beam.kv)) for beam in best]  # two may go on from the same file
        for beam in beams:
            beam.kv.close()
        beams = forks
    return beams


def main() -> None:
    arguments = sym.Arguments(__doc__)
    arguments.text("text", "what is to be gone on with")
    arguments.whole("--width", "hypotheses side by side", 4)
    arguments.whole("--max-tokens", "length of each", 32)
    args = arguments.parse_args()
    with sym.kv_create() as kv:
        for beam in beam_search(kv, sym.tokenize(args.text), args.width, args.max_tokens):
            tokens = beam.tokens[:-1] if beam.is_over else beam.tokens
            sym.send_to_user(f"{beam.logprob:8.2f}  {args.text + sym.detokenize(tokens)!r}\n")


if __name__ == "__main__":
    sym.main(main)
