"""Tree of thoughts: proposes several next steps, has the model judge them, and keeps the best.

    symphony run tree_of_thought "Plan a day in a city." --breadth 3 --keep 2 --depth 3
    symphony run tree_of_thought "Plan a day in a city." --tree plan     # and in a shell: ls /kv/plan

A thought forks the file of the thought before it, so shared steps are computed once. All proposals of a level are drawn
side by side. One batch judges them by the probability of Yes. Rejected thoughts are removed, and their pages are free.
(Yao et al. 2023)
"""

import math
from itertools import count

import libsym as sym

JUDGE = "\nIs that a good step? Answer Yes or No:"


class Thought(sym.Tree):
    """A step. Its file holds all steps up to and including this step, except the pending tokens."""

    text = ""
    score = 0.0
    pending: list[int]


def judge(thoughts: list[Thought]) -> None:
    """Set the score of each thought: the probability of Yes against No."""
    yes, no = (sym.tokenize(word)[0] for word in (" Yes", " No"))
    question = sym.tokenize(JUDGE)
    asked = [sym.Pred(thought.kv.fork(), thought.pending + question, logprobs=[yes, no]) for thought in thoughts]
    for thought, row in zip(thoughts, sym.pred_batch(asked), strict=True):
        thought.score = 1 / (1 + math.exp(row.logprob(no) - row.logprob(yes)))


def think(root: Thought, breadth: int, keep: int, depth: int, seed: int = 0, max_tokens: int = 24) -> list[Thought]:
    """Return the best thoughts of the last level, the best first."""
    seeds, frontier = count(seed), [root]
    for level in range(1, depth + 1):
        step = sym.tokenize(f"\nStep {level}:")
        thoughts = [node.fork() for node in frontier for _ in range(breadth)]
        drawn = []
        for thought in thoughts:
            kv, tokens, seed = thought.kv, thought.line()[-2].pending + step, next(seeds)
            drawn.append(sym.generate(kv, tokens, temperature=0.8, seed=seed, stop="\n", max_tokens=max_tokens))
        for thought, generation in zip(thoughts, drawn, strict=True):
            thought.text = generation.full_text().strip()
            thought.pending = generation.pending
        judge(thoughts)
        thoughts.sort(key=lambda thought: thought.score, reverse=True)
        frontier = thoughts[:keep]
        for loser in thoughts[keep:]:
            loser.remove()
    return frontier


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("task")
    arguments.whole("--breadth", "steps proposed for each thought", 3, most=64)
    arguments.whole("--keep", "of a level", 2)
    arguments.whole("--depth", "levels", 3)
    arguments.kv("--tree", "a directory of the mount in which the thoughts have names", metavar="DIR")
    args = arguments.parse_args()
    root = Thought(sym.kv_create(), args.tree)
    root.pending = sym.tokenize(f"Task: {args.task}\nA plan in {args.depth} steps, each in one line.")
    root.kv.write(root.pending[:-1])
    root.pending = root.pending[-1:]
    for leaf in think(root, args.breadth, args.keep, args.depth):
        print(f"{leaf.score:.2f}", *(f"  {thought.name}: {thought.text}" for thought in leaf.line()[1:]), sep="\n")
