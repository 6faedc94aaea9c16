"""Graph of thoughts: splits a task, solves the parts in several ways, and merges the best.

    symphony run graph_of_thought 5 3 9 1 7 2 8 4
    symphony run graph_of_thought 5 3 9 1 7 2 8 4 --ways 6

The task is to sort digits. A list is split into parts of up to four digits. Each part is sorted in `--ways` attempts,
side by side on forks of one file of examples. Mergers of two parts are attempted in the same way. The program counts
the faults of each attempt (digits out of order, missing or surplus), and keeps the attempt with the fewest. A merger
has two parents, so the thoughts form a graph. (Besta et al. 2024)
"""

from collections import Counter
from functools import partial
from itertools import pairwise

import libsym as sym

SORT = "Sort: 3, 1, 2, 1\nSorted: 1, 1, 2, 3\n\nSort: 9, 4, 8, 6\nSorted: 4, 6, 8, 9\n\nSort: {}\nSorted:"
SMALL = 4


def faults(wanted: list[int], attempt: list[int]) -> int:
    """Count the neighbours that are out of order, and the digits that are missing or surplus."""
    missing, more = Counter(wanted) - Counter(attempt), Counter(attempt) - Counter(wanted)
    return sum(a > b for a, b in pairwise(attempt)) + missing.total() + more.total()


def attempts(examples: sym.KV, tasks: list[list[int]], ways: int) -> list[list[int]]:
    """Return the best of several attempts at each task, all drawn side by side."""
    drawn = []
    samplers = [sym.Sampler.greedy(), *[sym.Sampler(0.5)] * (ways - 1)]  # the first attempt is greedy
    for number, task in enumerate(tasks):
        form = sym.Grammar.regex(rf" [0-9](, [0-9]){{{len(task) - 1}}}")
        question = sym.tokenize(SORT.format(", ".join(map(str, task))).removeprefix(SORT.partition("{")[0]))
        drawn.append(sym.generate_n(examples.fork(), question, samplers, seed=number, grammar=form))
    best = []
    for task, generations in zip(tasks, drawn, strict=True):
        found = [[int(digit) for digit in generation.full_text().split(",")] for generation in generations]
        best.append(min(found, key=partial(faults, task)))
    return best


def sort(examples: sym.KV, digits: list[int], ways: int) -> list[int]:
    """Return the digits as the model sorts them."""
    parts = [digits[at : at + SMALL] for at in range(0, len(digits), SMALL)]
    done = attempts(examples, parts, ways)
    while len(done) > 1:
        pairs = [a + b for a, b in zip(done[::2], done[1::2], strict=False)]
        done = attempts(examples, pairs, ways) + done[len(pairs) * 2 :]
    return done[0]


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.whole("digits", "to be sorted", least=0, most=9, nargs="+", metavar="DIGIT")
    arguments.whole("--ways", "attempts at each part", 4, most=64)
    args = arguments.parse_args()
    with sym.kv_create() as examples:
        examples.write(sym.tokenize(SORT.partition("{")[0]))
        found = sort(examples, args.digits, args.ways)
    print(*found)
    print(f"{faults(args.digits, found)} faults")
