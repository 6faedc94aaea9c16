"""Cost of caches of a fixed size: perplexity of a text with all entries, and with the few entries that each method
keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import libsym as sym
from figures import Row
from lips import h2o, sink, snapkv, tova, windowed

LICENSE = Path(__file__).resolve().parents[3] / "LICENSE"
BUDGET = 128
STREAM_TOKENS = 768
PROMPT_TOKENS, CONTINUATION_TOKENS = 512, 64
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = FILLER + "The pass key is 68274. Remember it. " + FILLER * 23 + "What is the pass key? The pass key is"


def measure() -> Iterator[Row]:
    text = sym.tokenize(LICENSE.read_text(encoding="utf-8"))
    stream = text[:STREAM_TOKENS]
    full = sink.perplexity(stream, STREAM_TOKENS + windowed.STEP, sinks=0)
    what = f"a text of {STREAM_TOKENS} tokens read within {BUDGET} entries"
    yield Row("windowed", what, sink.perplexity(stream, BUDGET, sinks=0), "perplexity", full)
    yield Row("sink", what, sink.perplexity(stream, BUDGET, sinks=4), "perplexity", full)
    after = text[PROMPT_TOKENS : PROMPT_TOKENS + CONTINUATION_TOKENS]
    yield from _continuation(
        f"{CONTINUATION_TOKENS} tokens behind {PROMPT_TOKENS} of a text", text[:PROMPT_TOKENS], after
    )
    needle = sym.tokenize(NEEDLE)
    yield from _continuation(f"a key asked for behind {len(needle)} tokens", needle, sym.tokenize(" 68274."))


def _continuation(what: str, prompt: list[int], continuation: list[int]) -> Iterator[Row]:
    """Yield the perplexity of a continuation. Each method keeps BUDGET entries of the prompt."""
    judged = [prompt[-1], *continuation]
    full = sym.kv_create()
    full.write(prompt[:-1])
    room = BUDGET - len(judged)
    files = {name: full.fork() for name in ("windowed", "sink", "snapkv")}
    files["windowed"].keep([(-room, None)])
    files["sink"].keep([(0, 4), (4 - room, None)])
    files["snapkv"] = sym.kv_create()
    snapkv.compress(files["snapkv"], prompt[:-1], room)
    without = sym.perplexity(sym.score(full, judged))
    what += f", {BUDGET} entries"
    for name, kv in files.items():
        yield Row(name, what, sym.perplexity(sym.score(kv, judged)), "perplexity", without)
    yield Row("h2o", what, h2o.perplexity(h2o.Cache(BUDGET), prompt, continuation), "perplexity", without)
    yield Row("tova", what, tova.perplexity(tova.Cache(BUDGET), prompt, continuation), "perplexity", without)
