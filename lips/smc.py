"""Sequential Monte Carlo steering: draws texts from the model's distribution, given a rule.

    symphony run smc "The sea is" --longest 5 --particles 16 --max-tokens 24

The rule here is that no word is longer than --longest letters. If only the next token is masked, as with a grammar, a
text may reach places where the rule leaves only unlikely tokens. Here a population of forks, the particles, is drawn
under the mask. Each particle has a weight: the model's probability of keeping the rule, multiplied over the steps. When
the weights differ too much, particles are resampled by weight: likely ones are forked, the others closed. So a text is
drawn in proportion to its probability, given the rule. (Lew et al. 2023)
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import libsym as sym

Allowed = Callable[[int], sym.TokenSet]
"""A function from a state to the tokens that keep the rule in that state."""
After = Callable[[int, int], int]
"""A function from a state and a token to the next state."""


@dataclass(frozen=True, slots=True)
class Particle:
    """A text. `kv` holds all tokens before `pending`; `state` is the part of the text that the rule depends on."""

    kv: sym.KV
    pending: list[int]
    state: int
    tokens: tuple[int, ...] = ()
    weight: float = 0.0  # natural logarithm of the weight
    is_over: bool = False


def steer(
    kv: sym.KV, tokens: list[int], allowed: Allowed, after: After, count: int, max_tokens: int, rng: random.Random
) -> list[Particle]:
    """Append `tokens` except the last; return `count` weighted continuations of all `tokens`.

    Continuations end at `max_tokens`, or when the context is full.
    """
    kv.write(tokens[:-1])
    end, state = sym.model_info().eos_ids, reduce(after, tokens, 0)
    particles = [Particle(fork, tokens[-1:], state) for fork in kv.fork_n(count)]
    for _ in range(max(1, min(max_tokens, kv.room()))):
        live = [number for number, each in enumerate(particles) if not each.is_over]
        if not live:
            break
        dists = sym.pred_batch([sym.Pred(particles[number].kv, particles[number].pending) for number in live])
        for number, dist in zip(live, dists, strict=True):
            assert isinstance(dist, sym.Dist)
            old, can = particles[number], allowed(particles[number].state)
            token = dist.sample(u=rng.random(), allowed=can)
            kept = dist.logprob(token) - dist.logprob(token, allowed=can)  # log-probability of keeping the rule here
            found, state = (*old.tokens, token), after(old.state, token)
            particles[number] = Particle(old.kv, [token], state, found, old.weight + kept, token in end)
        particles = resampled(particles, rng)
    return particles


def resampled(particles: list[Particle], rng: random.Random) -> list[Particle]:
    """Resample the particles if their effective number is below half; each new particle has the mean weight."""
    most = max(each.weight for each in particles)
    weights = [math.exp(each.weight - most) for each in particles]
    total = math.fsum(weights)
    if total**2 >= len(particles) / 2 * math.fsum(weight**2 for weight in weights):
        return particles
    start, at, reached, drawn = rng.random(), 0, weights[0], list[Particle]()
    for place in range(len(particles)):  # systematic resampling: one random number, even distances
        while reached < (place + start) * total / len(particles) and at < len(particles) - 1:
            at += 1
            reached += weights[at]
        mean = most + math.log(total / len(particles))
        drawn.append(replace(particles[at], kv=particles[at].kv.fork(), weight=mean))
    for each in particles:
        each.kv.close()
    return drawn


def rule(longest: int) -> tuple[Allowed, After]:
    """Return the rule that no word has more than `longest` letters. Its state is the length of the last word."""
    ends, words = sym.model_info().eos_ids, [text.decode(errors="replace") for text in sym.vocabulary()]
    runs = [[len(run) for run in "".join(c if c.isalpha() else " " for c in word).split(" ")] for word in words]
    sets = [
        sym.token_set(ends | {t for t, run in enumerate(runs) if state + run[0] <= longest and max(run) <= longest})
        for state in range(longest + 1)
    ]
    return sets.__getitem__, lambda state, token: min(runs[token][-1] + state * (len(runs[token]) == 1), longest)


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.text("text", "the text to continue")
    arguments.whole("--longest", "letters of a word", 5, most=64)
    arguments.whole("--particles", "texts side by side", 8, most=32)
    arguments.whole("--max-tokens", "of each text", 24)
    arguments.whole("--seed", "of the draws", 0, least=0)
    args = arguments.parse_args()
    rng, prompt = random.Random(args.seed), sym.tokenize(args.text)  # noqa: S311 - draws of text
    with sym.kv_create() as kv:
        found = steer(kv, prompt, *rule(args.longest), args.particles, args.max_tokens, rng)
    most = max(each.weight for each in found)
    [drawn] = rng.choices(found, [math.exp(each.weight - most) for each in found])
    tokens = drawn.tokens[:-1] if drawn.is_over else drawn.tokens
    sym.send_to_user(f"{args.text}{sym.detokenize(list(tokens))}\n")
