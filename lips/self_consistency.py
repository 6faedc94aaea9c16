"""Self-consistency: draws several ways to an answer, and takes what most of them come to.

    symphony run self_consistency "Tom has 3 apples and buys 2. How many has he?" -n 9

The question is computed once. The ways are drawn on forks of its file, side by side. The last number of each is its
vote. (Wang et al. 2022)
"""

from __future__ import annotations

import re
from collections import Counter

import libsym as sym


def votes(kv: sym.KV, last: list[int], n: int, sampler: sym.Sampler, max_tokens: int) -> Counter[str]:
    """How many of n answers end in which number; `kv` holds the question up to its last tokens."""
    drawn = [  # each begins at once, and the daemon draws them in the same steps
        sym.generate(kv.fork(), last, sampler=sampler, seed=seed, max_tokens=max_tokens) for seed in range(n)
    ]
    numbers = (re.findall(r"-?\d[\d,]*(?:\.\d+)?", generation.full_text()) for generation in drawn)
    return Counter(found[-1].replace(",", "") for found in numbers if found)


def main() -> None:
    arguments = sym.Arguments(__doc__)
    arguments.text("question")
    arguments.whole("-n", "how many ways are drawn", 5, most=256)
    arguments.number("--temperature", "of the draws", 0.7, least=0)
    arguments.whole("--max-tokens", "of each way", 80)
    args = arguments.parse_args()
    question = sym.chat_tokens([{"role": "user", "content": f"{args.question} Think, then give the number."}])
    with sym.kv_create() as kv:
        kv.write(question[:-1])
        sampler = sym.Sampler(temperature=args.temperature)
        for answer, count in votes(kv, question[-1:], args.n, sampler, args.max_tokens).most_common():
            print(f"{count} of {args.n}: {answer}")


if __name__ == "__main__":
    sym.main(main)
