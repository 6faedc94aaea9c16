"""How likely the tokens of a prompt are: what `echo` and `prompt_logprobs` tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libsym as sym
from lips.gateway.gateway import Gateway
from lips.gateway.logprobs import LEAST
from lips.gateway.tenants import Tenant

_CHUNK_TOKENS = 128


async def scored(gateway: Gateway, tenant: Tenant, prompt: Sequence[int], top: int) -> list[sym.ReducedDist | None]:
    """Score each token of a prompt; the first has nothing before it. `top`: so many of the likeliest beside it."""
    gateway.check_length(len(prompt))
    found: list[sym.ReducedDist | None] = [None]
    async with gateway.admission.enter(tenant.name, tenant.limits):
        with tenant.use():
            async with await sym.aio.kv_create() as kv:
                tokens = list(prompt)
                for start in range(0, len(tokens), _CHUNK_TOKENS):
                    chunk = tokens[start : start + _CHUNK_TOKENS]
                    following = tokens[start + 1 : start + _CHUNK_TOKENS + 1]
                    gateway.admission.charge(tenant.name, len(chunk))  # whatever comes of it
                    rows = await sym.aio.pred(
                        kv, chunk, rows="all", top_k=max(top, 1), logprobs=sorted({*following, 0})
                    )
                    found += [rows[index] for index in range(len(following))]
    return found


def prompt_form(
    prompt: Sequence[int], dists: Sequence[sym.ReducedDist | None], vocabulary: Sequence[bytes], top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's form, by token numbers. The rank of a token that is not among the likeliest is null."""
    found = list[dict[str, Any] | None]()
    for token, dist in zip(prompt, dists, strict=True):
        if dist is None:
            found.append(None)
            continue
        likeliest = {each: (logprob, rank) for rank, (each, logprob) in enumerate(dist.topk(top) if top else (), 1)}
        own = likeliest.pop(token, (dist.logprob(token), None))
        entries = {token: own, **likeliest}
        found.append(
            {
                str(each): {
                    "logprob": max(logprob, LEAST),
                    "rank": rank,
                    "decoded_token": vocabulary[each].decode(errors="replace"),
                }
                for each, (logprob, rank) in entries.items()
            }
        )
    return found
