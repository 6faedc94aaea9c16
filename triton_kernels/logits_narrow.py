"""A draw from more candidates than the sort can hold.

A search finds the values at which top_k, top_p and the draw cut the row. Each pass over the row finds two more bits of
such a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels.logits_weights import exponentials, order_of


@triton.jit
def _kept(
    values: tl.tensor,
    weights: tl.tensor,
    entries: tl.tensor,
    last_order: tl.tensor,
    last_entry: tl.tensor,
    lightest: tl.tensor,
) -> tl.tensor:
    """Return a mask of the entries that rank at or above the last kept entry and weigh at least `lightest`."""
    order = order_of(values)
    is_before = (order > last_order) | ((order == last_order) & (entries <= last_entry))
    return is_before & (weights >= lightest) & (values > float("-inf"))


@triton.jit
def _held_above(
    values_ptr: tl.tensor,  # [vocab_size]
    vocab_size: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    lightest: tl.tensor,
    last_order: tl.tensor,
    last_entry: tl.tensor,
    low: tl.tensor,
    middle: tl.tensor,
    high: tl.tensor,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the mass, or the count, of the kept entries at or above each of three values."""
    above_low = tl.zeros([CHUNK], tl.float64)
    above_middle = tl.zeros([CHUNK], tl.float64)
    above_high = tl.zeros([CHUNK], tl.float64)
    for start in range(0, vocab_size, CHUNK):
        entries = start + tl.arange(0, CHUNK)
        values = tl.load(values_ptr + entries, mask=entries < vocab_size, other=float("-inf"))
        weights = exponentials(values, highest, factor)
        is_kept = _kept(values, weights, entries, last_order, last_entry, lightest)
        order = order_of(values).to(tl.int64)
        held = tl.where(is_kept, 1.0 if COUNT else weights, 0.0).to(tl.float64)
        above_low += tl.where(order >= low, held, 0.0)
        above_middle += tl.where(order >= middle, held, 0.0)
        above_high += tl.where(order >= high, held, 0.0)
    return tl.sum(above_low, axis=0), tl.sum(above_middle, axis=0), tl.sum(above_high, axis=0)


@triton.jit
def _narrow_down(
    values_ptr: tl.tensor,  # [vocab_size]
    vocab_size: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    lightest: tl.tensor,
    last_order: tl.tensor,
    last_entry: tl.tensor,
    target: tl.tensor,  # float64
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Find the entry at which the running mass or count of kept entries, likeliest first, reaches `target`.

    Return the entry's value as a key of `order_of`, and the entry's index. If rounding leaves the total below `target`,
    return the last kept entry.
    """
    place = tl.full([], -0x80000000, tl.int64)
    everything, _, _ = _held_above(
        values_ptr, vocab_size, highest, factor, lightest, last_order, last_entry, place, place, place, COUNT, CHUNK
    )
    target = tl.minimum(target, everything)
    for shift in range(30, -2, -2):
        step = tl.full([], 1, tl.int64) << shift
        low, middle, high = place + step, place + 2 * step, place + 3 * step
        at_low, at_middle, at_high = _held_above(
            values_ptr, vocab_size, highest, factor, lightest, last_order, last_entry, low, middle, high, COUNT, CHUNK
        )
        place = tl.where(
            at_high >= target, high, tl.where(at_middle >= target, middle, tl.where(at_low >= target, low, place))
        )
    above, _, _ = _held_above(
        values_ptr,
        vocab_size,
        highest,
        factor,
        lightest,
        last_order,
        last_entry,
        place + 1,
        place + 1,
        place + 1,
        COUNT,
        CHUNK,
    )
    # Several entries may have this value. They count in the order of their indexes. Find the entry at which the running
    # sum reaches the target.
    held = above
    found = tl.full([], -1, tl.int32)
    latest = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        entries = start + tl.arange(0, CHUNK)
        values = tl.load(values_ptr + entries, mask=entries < vocab_size, other=float("-inf"))
        weights = exponentials(values, highest, factor)
        is_kept = _kept(values, weights, entries, last_order, last_entry, lightest)
        is_equal = is_kept & (order_of(values).to(tl.int64) == place)
        each = tl.where(is_equal, 1.0 if COUNT else weights, 0.0).to(tl.float64)
        ends = held + tl.cumsum(each, axis=0)
        reached = tl.min(tl.where(is_equal & (ends >= target), entries, vocab_size), axis=0)
        found = tl.where((found < 0) & (reached < vocab_size), reached, found)
        latest = tl.maximum(latest, tl.max(tl.where(is_equal, entries, 0), axis=0))
        held += tl.sum(each, axis=0)
    return place.to(tl.int32), tl.where(found >= 0, found, latest)


@triton.jit
def draw_narrowing(
    values_ptr: tl.tensor,  # [vocab_size]
    vocab_size: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    lightest: tl.tensor,
    uniform: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Draw a token like `draw_sorted`, but from the whole row."""
    order = tl.full([], -0x80000000, tl.int32)
    entry = vocab_size
    all_of_them = tl.full([], -0x80000000, tl.int64)
    if top_k > 0:
        order, entry = _narrow_down(
            values_ptr, vocab_size, highest, factor, 0.0, order, entry, top_k.to(tl.float64), True, CHUNK
        )
        total, _, _ = _held_above(
            values_ptr,
            vocab_size,
            highest,
            factor,
            0.0,
            order,
            entry,
            all_of_them,
            all_of_them,
            all_of_them,
            False,
            CHUNK,
        )
    if top_p < 1.0:
        order, entry = _narrow_down(
            values_ptr, vocab_size, highest, factor, 0.0, order, entry, top_p.to(tl.float64) * total, False, CHUNK
        )
    mass, _, _ = _held_above(
        values_ptr,
        vocab_size,
        highest,
        factor,
        lightest,
        order,
        entry,
        all_of_them,
        all_of_them,
        all_of_them,
        False,
        CHUNK,
    )
    # The running mass must exceed `uniform * mass`, but the search tests `>=`: raise the target by one rounding step.
    target = tl.maximum(uniform * mass * (1.0 + 2.3e-16), 1e-300)
    order, entry = _narrow_down(values_ptr, vocab_size, highest, factor, lightest, order, entry, target, False, CHUNK)
    return entry
