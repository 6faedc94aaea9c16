"""generate_n: several generations that go on from one text, which is computed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from libsym.arguments import int32, int64, seed64, shown
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid
from libsym.faces import script_of
from libsym.generate import Generation, Options, Started, generate_call
from libsym.kv import KV, kv_fork
from libsym.open_file import channel_of
from libsym.pred import write_script
from libsym.rows.native import stream_of
from libsym.rows.sampler import Sampler, random_seed

MAX_SEVERAL = 256


def generate_n(kv: KV, tokens: Iterable[int], n: int, **options: Unpack[Options]) -> list[Generation]:
    """Starts `n` generations that each go on from `tokens`, in forks of `kv`; the tokens are computed once.

    `kv` has all of the tokens afterwards but the last, which each fork takes for itself, so that all draw in the same
    steps. The rest is as in `generate`. Each has a seed of its own, the first that of `seed` or of the sampler, the
    others seeds that are mixed from it: what a number n gives is what a larger one begins with, and with
    `generation.seed` each can be had again alone. `generation.kv` is the fork.

    >>> kv = sym.kv_create()
    >>> answers = sym.generate_n(kv, sym.tokenize("Once"), 3, sampler=sym.Sampler(seed=1), max_tokens=4)
    >>> [len(list(answer)) for answer in answers], kv.len(), answers[0].kv.len() + len(answers[0].pending)
    ([4, 4, 4], 3, 8)
    """
    channel = channel_of(kv, "generate_n")
    return [Generation(fork, *call) for fork, call in channel.run(forked(kv, tokens, n, options))]


def forked(kv: KV, tokens: Iterable[int], n: int, options: Options) -> Script[list[tuple[KV, tuple[Call, Started]]]]:
    """The forks, and what is asked of each."""
    given, count = int32(tokens, "token"), int64(n, "n")
    if not 1 <= count <= MAX_SEVERAL:
        raise Invalid(f"generate_n(n={shown(n)}): from 1 to {MAX_SEVERAL}")
    if not given:
        raise Invalid("generate_n() of no tokens: give the last one at least (kv_rewind() says which it is)")
    seed = (options.get("sampler") or Sampler.greedy()).seed if options.get("seed") is None else options.get("seed")
    seed = random_seed() if seed is None else seed64(seed)
    if len(given) > 1:
        yield from write_script(kv, given[:-1])
    found = []
    for number in range(count):
        fork = yield from script_of(kv_fork)(kv)
        own: Options = {**options, "seed": stream_of(stream_of(seed, number), 0) if number else seed}
        if options.get("before") is None:
            own["before"] = given
        found.append((fork, generate_call(fork, given[-1:], own)))
    return found
