"""`symphony doctor --model SPEC`: what a model needs, and whether this machine has it. Nothing is loaded."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from decoder.checkpoints.llama import tensor_shapes
from decoder.checks import check_shape
from decoder.cores import available_cores
from decoder.cpu.backend import choose_isa
from decoder.cpu.packed_weights import packed_bytes
from decoder.cpu.precision import choose_precision
from decoder.memory import available_memory_bytes
from decoder.model import Model, load_model
from decoder.model_config import KV_DTYPE
from libsym.errors import SymError
from symphony.checks.doctor import Check
from symphony.launcher.asking.listing import printable
from symphony.views.reports import human_bytes

SHOWN_CONTEXT = 8192
READ_BYTES = 256 << 20
"""Bytes of memory that are read to measure the rate, far more than caches hold."""


def check_model_fit(spec: str, num_entries: int | None = None) -> list[Check]:
    """Say what the model is, and for each precision the memory and the fastest decoding. `num_entries`: length of the
    context whose KV is counted; None: the model's longest, but at most SHOWN_CONTEXT.
    """
    try:
        model = load_model(spec)
        check_shape(model.config)
    except SymError as error:
        return [Check("model", False, printable(str(error)))]
    rate = read_rate()
    found = [_check_precision(model, precision, num_entries, rate) for precision in KV_DTYPE]
    advice = "" if any(check.ok for check in found) else "choose a smaller model, or free or add memory"
    longest = model.config.max_positions
    if num_entries is not None and num_entries > longest:
        found.append(Check("context", None, f"{num_entries:,} entries need positions beyond the model's {longest:,}"))
    fit = Check("fit", not advice, f"{human_bytes(available_memory_bytes())} of memory are available", advice)
    precision, why = choose_precision(model, choose_isa())
    auto = Check("auto", True, f"{precision} at a first start: {why}")
    return [_check_kind(model), _check_stored(model), *found, auto, fit]


def _check_kind(model: Model) -> Check:
    config = model.config
    num_weights = sum(math.prod(shape) for _, shape in tensor_shapes(config))
    return Check(
        "model",
        True,
        f"{printable(config.name)}: {config.architecture}, {num_weights / 1e6:,.0f} million weights in "
        f"{config.num_layers} layers, {config.vocab_size:,} tokens, contexts of up to {config.max_positions:,}",
    )


def _check_stored(model: Model) -> Check:
    parts = [part for name in model.weights.names() for part in model.weights.stored(name).parts]
    size = human_bytes(sum(part.data.nbytes for part in parts))
    return Check("stored", True, f"{size}: tensors of {model.weights.kinds()}")


def _check_precision(model: Model, precision: str, num_entries: int | None, rate: float) -> Check:
    try:
        num_bytes, num_read = packed_bytes(model.config, model.weights, precision)
    except SymError as error:
        return Check(precision, None, printable(str(error)))
    entry_bytes, length = model.config.entry_bytes(KV_DTYPE[precision]), model.config.max_positions
    length = min(length, SHOWN_CONTEXT) if num_entries is None else num_entries
    left = available_memory_bytes() - num_bytes
    text = f"weights {human_bytes(num_bytes)}, KV {human_bytes(length * entry_bytes)} for {length:,} entries"
    if left < length * entry_bytes:
        return Check(precision, None, f"{text}: they do not fit in memory")
    speed = f"at most {rate / num_read:,.0f} tokens/s of one stream"
    return Check(precision, True, f"{text}, room for {left // entry_bytes:,}; {speed}")


def read_rate() -> float:
    """Return how many bytes of memory all cores together read in a second. The measurement takes a moment."""
    count = available_cores()
    parts = [np.ones(READ_BYTES // 8 // count, np.int64) for _ in range(count)]
    best_s = math.inf
    with ThreadPoolExecutor(count) as threads:
        for _ in range(4):
            began_s = time.perf_counter()
            list(threads.map(np.bitwise_or.reduce, parts))
            best_s = min(best_s, time.perf_counter() - began_s)
    return READ_BYTES / best_s
