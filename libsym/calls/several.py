"""generate_n: several generations from one prompt, which is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

from libsym.arguments import int32, int64, seed64, shown
from libsym.calls.faces import script_of
from libsym.calls.generate import Generation, Options, Started, generate_call, sampler_of
from libsym.calls.kv import KV, kv_fork_n
from libsym.calls.open_file import channel_of
from libsym.calls.pred import write_script
from libsym.channel.scripts import Call, Script
from libsym.errors import Invalid
from libsym.rows.native import stream_of
from libsym.rows.sampler import Sampler, random_seed

MAX_SEVERAL = 256


def generate_n(
    kv: KV, tokens: Iterable[int], n: int | Sequence[Sampler], **options: Unpack[Options]
) -> list[Generation]:
    """Start `n` generations that continue `tokens`, each in a fork of `kv`. The tokens are computed once.

    Afterwards `kv` has all tokens but the last. Each fork appends the last token itself, so that all generations draw
    in the same steps. `generation.kv` is the fork. The options are the same as in `generate`.

    Each generation has its own seed. The first has the seed of `seed` or of the sampler; the other seeds are derived
    from it. So a larger `n` only adds generations, and a call with `generation.seed` repeats that generation. `n` may
    be a list of samplers, one for each generation. A sampler with a seed draws with that seed.

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
    """Compute the prompt, and return the forks, each with the request of its generation."""
    given, samplers = int32(tokens, "token"), _samplers(n, options)
    if not given:
        raise Invalid("generate_n() of no tokens: give at least the last token (kv_rewind() returns it)")
    first = samplers[0].seed if options.get("seed") is None else options.get("seed")
    seed = random_seed() if first is None else seed64(first)
    if len(given) > 1:
        yield from write_script(kv, given[:-1])
    forks, found = (yield from script_of(kv_fork_n)(kv, len(samplers))), []
    for number, (sampler, fork) in enumerate(zip(samplers, forks, strict=True)):
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
    """Return the sampler of each generation, changed by the call's own settings."""
    given = [options.get("sampler")] if not isinstance(n, Sequence) else n
    count = len(given) if isinstance(n, Sequence) else int64(n, "n")
    if not 1 <= count <= MAX_SEVERAL:
        raise Invalid(f"generate_n(n={shown(n)}): from 1 to {MAX_SEVERAL}")
    if given is n and options.get("sampler") is not None:
        raise Invalid("generate_n() takes a list of samplers, or a number and sampler=, not both")
    own = [sampler_of({**options, "sampler": each}) for each in given]
    return own if given is n else own * count
