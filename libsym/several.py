"""generate_n: several generations that go on from one text, which is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

from libsym.arguments import int32, int64, seed64, shown
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid
from libsym.faces import script_of
from libsym.generate import Generation, Options, Started, generate_call, sampler_of
from libsym.kv import KV, kv_fork
from libsym.open_file import channel_of
from libsym.pred import write_script
from libsym.rows.native import stream_of
from libsym.rows.sampler import Sampler, random_seed

MAX_SEVERAL = 256


def generate_n(
    kv: KV, tokens: Iterable[int], n: int | Sequence[Sampler], **options: Unpack[Options]
) -> list[Generation]:
    """Starts `n` generations that each go on from `tokens`, in forks of `kv`; the tokens are computed once.

    `kv` has all of the tokens afterwards but the last, which each fork takes for itself, so that all draw in the same
    steps. The rest is as in `generate`. Each has a seed of its own, the first that of `seed` or of the sampler, the
    others seeds that are mixed from it: what a number n gives is what a larger one begins with, and with
    `generation.seed` each can be had again alone. `generation.kv` is the fork. `n` may be a list of samplers, one for
    each generation; a sampler that has a seed draws with that.

    >>> kv = sym.kv_create()
    >>> answers = sym.generate_n(kv, sym.tokenize("Once"), 3, sampler=sym.Sampler(seed=1), max_tokens=4)
    >>> [len(list(answer)) for answer in answers], kv.len(), answers[0].kv.len() + len(answers[0].pending)
    ([4, 4, 4], 3, 8)
    """
    channel = channel_of(kv, "generate_n")
    return [Generation(fork, *call) for fork, call in channel.run(forked(kv, tokens, n, options))]


def forked(
    kv: KV, tokens: Iterable[int], n: int | Sequence[Sampler], options: Options
) -> Script[list[tuple[KV, tuple[Call, Started]]]]:
    """The forks, and what is asked of each."""
    given, samplers = int32(tokens, "token"), _samplers(n, options)
    if not given:
        raise Invalid("generate_n() of no tokens: give the last one at least (kv_rewind() says which it is)")
    first = samplers[0].seed if options.get("seed") is None else options.get("seed")
    seed = random_seed() if first is None else seed64(first)
    if len(given) > 1:
        yield from write_script(kv, given[:-1])
    found = []
    for number, sampler in enumerate(samplers):
        fork = yield from script_of(kv_fork)(kv)
        own: Options = {
            **options,
            "sampler": sampler,
            "seed": stream_of(stream_of(seed, number), 0) if number else seed,
        }
        if isinstance(n, Sequence) and options.get("seed") is None and sampler.seed is not None:
            own["seed"] = sampler.seed
        if options.get("before") is None:
            own["before"] = given
        found.append((fork, generate_call(fork, given[-1:], own)))
    return found


def _samplers(n: int | Sequence[Sampler], options: Options) -> list[Sampler]:
    """Of each generation, with the settings that the call gives beside them."""
    given = [options.get("sampler")] if not isinstance(n, Sequence) else n
    count = len(given) if isinstance(n, Sequence) else int64(n, "n")
    if not 1 <= count <= MAX_SEVERAL:
        raise Invalid(f"generate_n(n={shown(n)}): from 1 to {MAX_SEVERAL}")
    if given is n and options.get("sampler") is not None:
        raise Invalid("generate_n() takes a list of samplers, or a number and sampler=, not both")
    own = [sampler_of({**options, "sampler": each}) for each in given]
    return own if given is n else own * count
