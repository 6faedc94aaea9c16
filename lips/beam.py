"""Beam search: several hypotheses grow side by side, and each step keeps the likeliest of them.

    symphony run beam "The capital of France is" --width 4 --max-tokens 20
    symphony run beam "The capital of France is" --normalize 0.7
    symphony run beam "Once upon a time" --width 6 --groups 3 --diversity 2

Each round computes the next token of all hypotheses in one step (`pred_batch`), and keeps the best of all their
likeliest continuations. The file of a hypothesis with two continuations is forked, in constant time. Beams share the
pages of their common beginning, so nothing is computed twice. The files of dropped hypotheses are closed, which frees
the pages that no other beam uses.

Each token lowers the probability of a text, so the likeliest text is short. --normalize sets a power of the length, by
which the log-probability is divided. Beams are mostly alike. With --groups, the beams form groups, and each group keeps
its own best beams. A token then costs --diversity for each time that an earlier group has taken it in this round
(Vijayakumar et al. 2016).
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

import libsym as sym


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A hypothesis. `kv` holds the tokens before `pending`, which the next round computes."""

    kv: sym.KV
    pending: list[int]
    tokens: tuple[int, ...] = ()  # the tokens so far, with the end token if there is one
    logprob: float = 0.0  # the sum over `tokens`
    is_over: bool = False

    def score(self, normalize: float) -> float:
        return self.logprob / math.pow(max(len(self.tokens), 1), normalize)


def beam_search(
    kv: sym.KV,
    tokens: list[int],
    width: int,
    max_tokens: int,
    normalize: float = 0.0,
    groups: int = 1,
    diversity: float = 0.0,
) -> list[Beam]:
    """Return up to `width` continuations of `kv` followed by `tokens`, the best first; `kv` stays unchanged.

    Continuations end at `max_tokens`, or when the context is full. Their last tokens have no entries in the files.
    """
    end = sym.model_info().eos_ids
    with sym.kv_fork(kv) as base:
        base.write(tokens[:-1])  # computed once for all groups
        rows = [[Beam(fork, tokens[-1:])] for fork in base.fork_n(groups)]
        room = base.room()
    for _ in range(max(1, min(max_tokens, room))):
        live = [beam for row in rows for beam in growing(row, normalize)]
        if not live:
            break
        dists = dict(zip(live, sym.pred_batch([sym.Pred(b.kv, b.pending, top_k=width) for b in live]), strict=True))
        taken = Counter[int]()
        for place, row in enumerate(rows):
            candidates = [(beam.score(normalize), beam) for beam in row if beam not in dists]
            for beam in row:
                for token, logprob in dists[beam].topk(width) if beam in dists else ():
                    found = (*beam.tokens, token)
                    new = Beam(beam.kv, [token], found, beam.logprob + logprob, token in end)
                    candidates.append((new.score(normalize) - diversity * taken[token], new))
            best = sorted(candidates, key=lambda pair: pair[0], reverse=True)[: width // groups]
            taken.update(beam.tokens[-1] for _, beam in best if beam not in row)
            forks = [replace(beam, kv=sym.kv_fork(beam.kv)) for _, beam in best]  # two beams may continue one file
            for beam in row:
                beam.kv.close()
            rows[place] = forks
    return sorted((beam for row in rows for beam in row), key=lambda beam: beam.score(normalize), reverse=True)


def growing(row: list[Beam], normalize: float) -> list[Beam]:
    """Return the unfinished hypotheses of a group. If its best can no longer change, return an empty list."""
    if max(row, key=lambda beam: beam.logprob).is_over and not normalize:
        return []  # each further token only makes an unfinished hypothesis less likely
    return [beam for beam in row if not beam.is_over]


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "the text to continue")
    arguments.whole("--width", "hypotheses side by side", 4, most=64)
    arguments.whole("--max-tokens", "length of each", 32)
    arguments.number("--normalize", "divide scores by the length to this power", 0.0, least=0, most=10)
    arguments.whole("--groups", "groups that the hypotheses are divided into", 1, most=64)
    arguments.number("--diversity", "penalty of a token for each earlier group that took it", 1.0, least=0)
    args = arguments.parse_args()
    if args.width % args.groups:
        arguments.error(f"--groups {args.groups}: --width {args.width} is no multiple of it")
    how = (args.normalize, args.groups, args.diversity)
    for beam in beam_search(sym.kv_create(), sym.tokenize(args.text), args.width, args.max_tokens, *how):
        tokens = beam.tokens[:-1] if beam.is_over else beam.tokens
        sym.send_to_user(f"{beam.score(args.normalize):8.2f}  {args.text + sym.detokenize(tokens)!r}\n")
