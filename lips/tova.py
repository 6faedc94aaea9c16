"""TOVA: a cache of a fixed size evicts the entries that the latest token attends to least.

    symphony run tova "The history of the city begins" --budget 64 --max-tokens 100
    symphony run tova "In short, it is about" --context README.md --budget 128
    symphony run tova "Programs call" --context README.md --compare " the model" --budget 1024

The entries that the latest token attends to most stay, old or new: the method needs no sums and no window. A prompt is
read as a whole, and its last token decides the first eviction. So if the prompt ends with a question, entries on its
subject stay. From then on the file stays within --budget entries. STEP entries are evicted together; STEP = 1 is the
published method. In the paper each layer evicts its own entries. An entry of a KV file belongs to all layers, so here
the sum over all layers decides. (Oren et al. 2024, who call the method Token Omission Via Attention)
"""

import numpy as np

import libsym as sym

STEP = 16  # entries evicted together


class Cache:
    """A KV file that each `append` cuts to fewer than `budget` entries."""

    def __init__(self, budget: int) -> None:
        self.kv, self.budget = sym.kv_create(), budget

    def append(self, tokens: list[int]) -> sym.Dist:
        """Append tokens; return the distribution of the next token. A call for the last token reports attention."""
        self.kv.write(tokens[:-1])
        dist = sym.pred(self.kv, tokens[-1:], attention="entries")
        self.evict(dist)
        return dist

    def evict(self, dist: sym.Dist) -> None:
        """Evict the entries that the latest token attends to least. The latest entry stays, since it sets the next
        position.
        """
        mass = np.asarray(dist.attention)
        if len(mass) >= self.budget:
            seen = np.argsort(-mass[:-1])[: self.budget - STEP - 1]
            self.kv.keep([*np.sort(seen).tolist(), -1], rebase=False)

    def generate(self, tokens: list[int], max_tokens: int) -> sym.Decoding:
        """Append tokens, and continue greedily."""
        self.kv.write(tokens[:-1])
        return sym.decode(self.kv, tokens[-1:], self.draw, attention="entries", max_tokens=max_tokens)

    def draw(self, dist: sym.Dist) -> int:
        self.evict(dist)
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
        for cache in (Cache(len(prompt) + len(judged) + 1), Cache(args.budget)):
            print(f"{cache.budget} entries at most: perplexity {perplexity(cache, prompt, judged):.2f}")
        return
    sym.send_to_user(Cache(args.budget).generate(prompt, args.max_tokens).text(), "\n")
