"""Monte Carlo tree search: the model proposes steps, and a computed reward directs the search.

    symphony run mcts 24 --tokens 600

The task is to write a sum of digits, like 4*5+1+3, with a given value. A node of the tree is a KV file with the
beginning of an expression, forked from its parent's file. The model's distribution over the tokens that may come is
the prior of a node's moves (PUCT). A rollout draws the rest of the expression. The nearer its value is to the target,
the higher is the reward. The published method keeps the mean reward of a node's rollouts; here a node keeps the best
reward. This search has no opponent, and needs only one good expression. With the mean, the search finds hardly more
than chance.
"""

import math
import random

import libsym as sym

PROMPT = "Expressions with the value 10:\n4+6+0+0\n2*3+4+0\n9-2*1+3\nExpressions with the value {}:\n"
LENGTH = 7


class Node(sym.Tree):
    """The beginning of an expression. `token` is the last token, and the node's file holds all tokens before it."""

    token: int
    text = ""
    prior, visits, best = 1.0, 0, 0.0

    def worth(self) -> float:
        """Return the PUCT value: the best reward below this node, plus the prior, which counts less with each visit."""
        assert self.parent is not None
        explored = self.prior * math.sqrt(self.parent.visits) / (1 + self.visits)
        return self.best + 2 * explored


class Search:
    """A search for an expression with the value `target`."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target, self.random = target, random.Random(seed)  # noqa: S311 - a game
        self.texts = sym.vocabulary()
        self.digits = sym.token_set(lambda text: text.isdigit() and len(text) == 1)
        self.signs = sym.token_set(lambda text: text in {b"+", b"-", b"*"})
        self.root = Node(sym.kv_create())
        *before, self.root.token = sym.tokenize(PROMPT.format(target))
        self.root.kv.write(before)
        self.best = (-math.inf, "")

    def moves(self, kv: sym.KV, token: int, length: int) -> list[tuple[int, float]]:
        """Return the tokens that may follow `token`, with their probabilities."""
        allowed = self.signs if length % 2 else self.digits
        with sym.pred(kv, [token]) as dist:
            return [(each, math.exp(p)) for each, p in dist.topk(len(allowed), allowed=allowed)]

    def reward(self, text: str) -> float:
        value = 1 / (1 + abs(int(eval(text)) - self.target) / 10)  # noqa: S307 - digits and signs, nothing else
        self.best = max(self.best, (value, text))
        return value

    def expand(self, node: Node) -> None:
        for token, prior in self.moves(node.kv, node.token, len(node.text)):
            child = node.fork()
            child.token, child.prior, child.text = token, prior, node.text + self.texts[token].decode()

    def rollout(self, node: Node) -> float:
        """Draw the rest of the expression on a fork; return its reward."""
        text, token = node.text, node.token
        with node.kv.fork() as kv:
            while len(text) < LENGTH:
                moves = self.moves(kv, token, len(text))
                token = self.random.choices([each for each, _ in moves], [p for _, p in moves])[0]
                text += self.texts[token].decode()
        return self.reward(text)

    def step(self) -> None:
        """Select a node, expand it, roll out, and update all nodes on the way."""
        node = self.root
        while node.children:
            node = max(node.children, key=Node.worth)
        if node.visits and len(node.text) < LENGTH:
            self.expand(node)
            node = max(node.children, key=Node.worth)
        value = self.rollout(node)
        for each in node.line():
            each.visits, each.best = each.visits + 1, max(each.best, value)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.whole("target", "the value that the expression is to have", least=-1_000_000)
    arguments.whole("--tokens", "what the search may compute", 600)
    arguments.whole("--seed", "of the rollouts", 0, least=0)
    args = arguments.parse_args()
    search, budget = Search(args.target, args.seed), sym.Budget(tokens=args.tokens)
    while budget and search.best[0] < 1:
        search.step()
    print(f"{search.best[1]} = {eval(search.best[1])}, {search.root.visits} rollouts")  # noqa: S307
