"""H2O: a cache of a fixed size keeps its heavy hitters, the entries that got most attention so far.

    symphony run h2o "The history of the city begins" --budget 64 --max-tokens 100
    symphony run h2o "In short, it is about" --context README.md --budget 128
    symphony run h2o "Programs call" --context README.md --compare " the model" --budget 1024

`pred(attention="entries")` returns the attention that each entry got. Summed over all tokens, a few entries get most
of it. The cache keeps these entries, and an equal number of the latest entries, which had no chance yet to get
attention. STEP entries are evicted together. In the paper each head evicts its own entries. An entry of a KV file
belongs to all heads, so here the sum over all heads decides. (Zhang et al. 2023)
"""

import numpy as np

import libsym as sym

STEP = 16  # tokens read together, and entries evicted together


class Cache:
    """A KV file of at most `budget` entries, and the attention that each entry has got so far."""

    def __init__(self, budget: int) -> None:
        self.kv, self.budget, self.mass = sym.kv_create(), budget, np.zeros(0)

    def make_room(self, num_tokens: int) -> None:
        """Evict the entries with least attention if `num_tokens` (at most STEP) do not fit."""
        length, recent = len(self.mass), self.budget // 2
        if length + num_tokens <= self.budget:
            return
        heaviest = np.argsort(-self.mass[: length - recent])
        heavy = np.sort(heaviest[: self.budget - recent - STEP])
        kept = [*heavy.tolist(), *range(length - recent, length)]
        self.kv.keep(kept, rebase=False)
        self.mass = self.mass[kept]

    def note(self, dist: sym.Dist) -> None:
        """Add the attention of the last tokens to the sums."""
        seen = np.asarray(dist.attention)
        self.mass = np.pad(self.mass, (0, len(seen) - len(self.mass))) + seen

    def append(self, tokens: list[int]) -> sym.Dist:
        """Append tokens; return the distribution of the next token."""
        for at in range(0, len(tokens), STEP):
            step = tokens[at : at + STEP]
            self.make_room(len(step))
            dist = sym.pred(self.kv, step, attention="entries")
            self.note(dist)
        return dist

    def generate(self, tokens: list[int], max_tokens: int) -> sym.Decoding:
        """Append tokens, and continue greedily."""
        if tokens[:-1]:
            self.append(tokens[:-1])
        self.make_room(1)
        return sym.decode(self.kv, tokens[-1:], self.draw, attention="entries", max_tokens=max_tokens)

    def draw(self, dist: sym.Dist) -> int:
        self.note(dist)
        self.make_room(1)
        return dist.argmax()


def perplexity(cache: Cache, prompt: list[int], continuation: list[int]) -> float:
    """Return the perplexity of a continuation after the prompt. The cache reads it token by token."""
    dist, logprobs = cache.append(prompt), list[float]()
    for token in continuation:
        logprobs.append(dist.logprob(token))
        dist = cache.append([token])
    return sym.perplexity(logprobs)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("prompt", "the text to go on with")
    arguments.document("--context", "a text that comes before it", metavar="FILE")
    arguments.whole("--budget", "entries of the file", 128, least=2 * STEP)
    arguments.whole("--max-tokens", default=64)
    arguments.text("--compare", "print perplexities of this continuation instead", metavar="TEXT")
    args = arguments.parse_args()
    context = args.context.text if args.context else ""
    prompt, judged = sym.tokenize(context + args.prompt), sym.tokenize(args.compare or "")
    if judged:
        for cache in (Cache(len(prompt) + len(judged)), Cache(args.budget)):
            print(f"{cache.budget} entries at most: perplexity {perplexity(cache, prompt, judged):.2f}")
        return
    sym.send_to_user(Cache(args.budget).generate(prompt, args.max_tokens).text(), "\n")
