"""Best of n: draws several answers to one question, and gives the one that the model itself finds likeliest.

symphony run best_of_n "Write one sentence about the sea." -n 8

The question is computed once. The answers are drawn in forks of it, all in the same steps, and then each is scored by
the mean log-probability of its tokens at temperature 1, whatever temperature they were drawn with.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import libsym as sym


def best_of(kv: sym.KV, last: list[int], n: int, sampler: sym.Sampler, max_tokens: int) -> list[tuple[float, str]]:
    """Answers to what `kv` holds up to its last tokens, each with its score, the best first."""
    forks = [kv.fork() for _ in range(n)]
    answers = [  # each begins at once: the daemon draws them side by side
        sym.generate(fork, last, sampler=sampler, seed=seed, max_tokens=max_tokens) for seed, fork in enumerate(forks)
    ]
    found = list[tuple[float, str]]()
    for fork, answer in zip(forks, answers, strict=True):
        text = answer.full_text()
        with fork, kv.fork() as scoring:
            found.append((fmean(sym.score(scoring, [*last, *answer.tokens])[len(last) - 1 :] or [-100.0]), text))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question")
    parser.add_argument("-n", type=int, default=4, help="how many answers are drawn (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the draws (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    args = parser.parse_args()
    question = sym.chat_tokens([{"role": "user", "content": args.question}])
    with sym.kv_create() as kv:
        kv.write(question[:-1])
        sampler = sym.Sampler(temperature=args.temperature)
        for score, text in best_of(kv, question[-1:], args.n, sampler, args.max_tokens):
            print(f"{score:7.3f} {text.strip()!r}")


if __name__ == "__main__":
    sym.main(main)
