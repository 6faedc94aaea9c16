"""Recursion of thought: divides a problem that is too long for one context among several contexts.

    symphony run recursion_of_thought 3 4 2 1 5 2

The problem is a sum. The model adds two numbers. A longer sum is divided into parts, and each part is solved in a
separate context. The results are a new, smaller problem. So each context holds only the examples and one small problem,
however long the sum is. In the paper the model was trained to divide the problem. Here the program pairs the numbers,
so any model will do. Problems of one level are solved side by side. (Lee and Kim 2023)
"""

import libsym as sym

EXAMPLES = "2 + 3 = 5\n1 + 8 = 9\n7 + 6 = 13\n12 + 5 = 17\n9 + 9 = 18\n14 + 11 = 25\n"


def add(examples: sym.KV, pairs: list[tuple[int, int]]) -> list[int]:
    """Return the model's sums of the pairs. Each sum is computed in a separate context."""
    number = sym.Grammar.regex(" [0-9]{1,20}\n")
    asked = [sym.generate(examples.fork(), sym.tokenize(f"{a} + {b} ="), grammar=number) for a, b in pairs]
    return [int(generation.full_text()) for generation in asked]


def solve(examples: sym.KV, problem: list[int]) -> tuple[int, int]:
    """Return the sum and the number of levels. Each level adds pairs of numbers, all at the same time."""
    depth = 0
    while len(problem) > 1:
        pairs = list(zip(problem[::2], problem[1::2], strict=False))
        problem = add(examples, pairs) + problem[len(pairs) * 2 :]
        depth += 1
    return problem[0], depth


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.whole("numbers", "to be added", least=0, most=10**12, nargs="+", metavar="NUMBER")
    args = arguments.parse_args()
    with sym.kv_create() as examples:
        examples.write(sym.tokenize(EXAMPLES))
        found, depth = solve(examples, args.numbers)
    print(f"{found} (it is {sum(args.numbers)}), {depth} levels")
