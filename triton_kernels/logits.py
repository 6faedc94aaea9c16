"""From rows of logits to tokens: caps, masks, penalties, a draw, and what the drawn token's log-probability was.

The rule is that of libsym/sampler.c: the same row, settings and uniform number give the same token, unless a sum lies
so near an edge that its rounding decides. Four kernels, and the host learns nothing in between:

1. scan, by blocks of a row: caps, masks and penalties; each block's maximum and mass, the largest of every 32 entries
   for top_k, and for top_p how the mass lies below the maximum, in steps;
2. choose, by rows: the row's maximum and mass. A greedy row is done. One that is drawn by rank gets a value that all
   of its candidates reach: as many of the largest of 32 do as top_k asks for, or steps with as much mass as top_p does;
3. collect, by blocks: the candidates, or what the draw may fall on in pieces of 1,024 where no rank is asked for;
4. draw, by rows: candidates are sorted and cut; without ranks, the piece and in it the token are found.

Candidates are tens or hundreds in most rows. Where they are more than `ROOM` (so flat a row that its nucleus is), the
places that top_k, top_p and the draw ask for are found by narrowing down the value, two bits a pass over the row.
Which way it goes changes the time, and the result only as rounding does.

A row's sums are made the same way whatever else is in the batch.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Entries of a program that scans: 32 a thread, 8 loads of 16 bytes on their way. 32 of them in a row of 128k."""
GROUPS = 128
"""Of a block, whose largest are kept."""
STEPS = 24
"""Of a block's mass below its maximum: 16 of half a weight's e-th part, 8 of a whole one."""
PIECE = 1024
"""Entries whose mass is kept, for draws without ranks."""
ROOM = 1024
"""Candidates that are sorted."""

ALL_BUT_NOTHING = 1.1754943508222875e-38
"""FLT_MIN: what weighs less is never drawn."""
NOT_A_DISTRIBUTION = -errno.EDOM
NOTHING_POSSIBLE = -errno.ERANGE

_DONE: tl.constexpr = tl.constexpr(0)
_IN_ORDER: tl.constexpr = tl.constexpr(1)
_BY_RANK: tl.constexpr = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How each row's token is drawn, `[rows]` each, on the device; a row of zeros with penalty 1 is greedy."""

    temperature: torch.Tensor
    """float32; 0: the argmax."""
    top_k: torch.Tensor
    """int32; 0: off."""
    top_p: torch.Tensor
    """float32; 1: off."""
    min_p: torch.Tensor
    """float32; 0: off."""
    repetition: torch.Tensor
    """float32, above 0; 1: off."""
    presence: torch.Tensor
    """float32; 0: off."""
    frequency: torch.Tensor
    """float32; 0: off."""
    uniform: torch.Tensor
    """float64 in [0, 1): what chooses."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """What rows say of single tokens: row r's are those from `first[r]` up to `first[r + 1]`, each token once."""

    first: torch.Tensor
    """[rows + 1] int32"""
    tokens: torch.Tensor
    """int32"""
    biases: torch.Tensor
    """float32, added before the penalties"""
    counts: torch.Tensor
    """int32: how often it was generated; 0: it came before only; -1: never seen, it has a bias alone"""


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the kernels leave each other; kept by a step that is captured."""

    changed: torch.Tensor | None
    """[rows, vocab_size]: rows with masks and penalties; None where there will be none"""
    groups: torch.Tensor
    step_masses: torch.Tensor
    block_maxima: torch.Tensor
    block_masses: torch.Tensor
    block_indices: torch.Tensor
    raw_maxima: torch.Tensor
    raw_masses: torch.Tensor
    piece_masses: torch.Tensor
    kinds: torch.Tensor
    numbers: torch.Tensor
    """[rows, 3]: maximum, least candidate, log of the sum of exponentials"""
    totals: torch.Tensor
    counts: torch.Tensor
    candidates: torch.Tensor


def scratch_for(rows: int, vocab_size: int, device: torch.device | str, *, changes: bool = True) -> Scratch:
    """Scratch for up to so many rows; `changes`: there may be masks or token lists."""
    blocks = triton.cdiv(vocab_size, BLOCK)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return Scratch(
        changed=floats(rows, vocab_size) if changes else None,
        groups=floats(rows, blocks * GROUPS),
        step_masses=floats(rows, blocks * STEPS),
        block_maxima=floats(rows, blocks),
        block_masses=floats(rows, blocks),
        block_indices=torch.empty((rows, blocks), dtype=torch.int32, device=device),
        raw_maxima=floats(rows, blocks),
        raw_masses=floats(rows, blocks),
        piece_masses=floats(rows, blocks * (BLOCK // PIECE)),
        kinds=torch.empty(rows, dtype=torch.int32, device=device),
        numbers=floats(rows, 3),
        totals=torch.empty(rows, dtype=torch.float64, device=device),
        counts=torch.empty(rows, dtype=torch.int32, device=device),
        candidates=torch.empty((rows, ROOM), dtype=torch.int64, device=device),
    )


@triton.jit
def _inverse(temperature: tl.tensor) -> tl.tensor:
    """Of a temperature that is not 0, within what a product can bear."""
    return tl.minimum(1.0 / tl.maximum(temperature, 1e-30), 1e30)


@triton.jit
def _order(values: tl.tensor) -> tl.tensor:
    """int32 that ascend as the floats do; -0 and 0 are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _is_greedy(temperature: tl.tensor, top_k: tl.tensor) -> tl.tensor:
    return (temperature <= 0.0) | (top_k == 1)


@triton.jit
def _depth(step: tl.tensor) -> tl.tensor:
    """How far below a block's maximum a step begins, in units of temperature."""
    return tl.where(step < 16, 0.5 * step, step - 8.0)


@triton.jit
def _exponentials(values: tl.tensor, highest: tl.tensor, factor: tl.tensor) -> tl.tensor:
    return tl.exp((values - highest) * factor)


@triton.jit
def _capped(values: tl.tensor, cap: tl.tensor) -> tl.tensor:
    small = tl.exp(-2.0 * tl.abs(values) / cap)
    capped = cap * (1.0 - small) / (1.0 + small)
    return tl.where(values < 0.0, -capped, capped)


@triton.jit
def _change_listed(
    row_ptr: tl.tensor,  # [vocab_size]
    token_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    count_ptr: tl.tensor,
    first: tl.tensor,  # of the row's tokens
    end: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    start: tl.tensor,  # of the block, whose tokens alone are changed
    BLOCK: tl.constexpr,
    LIST_LANES: tl.constexpr,
) -> None:
    for at in range(first, end, LIST_LANES):
        places = at + tl.arange(0, LIST_LANES)
        token = tl.load(token_ptr + places, mask=places < end, other=-1)
        listed = (token >= start) & (token < start + BLOCK)
        bias = tl.load(bias_ptr + places, mask=listed, other=0.0)
        count = tl.load(count_ptr + places, mask=listed, other=0)
        value = tl.load(row_ptr + token, mask=listed, other=0.0) + bias
        penalized = tl.where(value < 0.0, value * repetition, value / repetition)
        value = tl.where(count >= 0, penalized, value)
        value = tl.where(count > 0, value - frequency * count.to(tl.float32) - presence, value)
        tl.store(row_ptr + token, value, mask=listed)


@triton.jit(do_not_specialize_on_alignment=["first_ptr"])
def _scan_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab_size] float32; capped in place
    changed_ptr: tl.tensor,  # [rows, vocab_size] float32, contiguous, written when MASK or LISTS
    allowed_ptr: tl.tensor,  # [rows, words] int32, read when MASK
    first_ptr: tl.tensor,  # [rows + 1] int32, read when LISTS, as the next three
    token_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    count_ptr: tl.tensor,
    temperature_ptr: tl.tensor,  # [rows], as the next five
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    group_ptr: tl.tensor,  # [rows, blocks * GROUPS], written where top_k is on
    step_mass_ptr: tl.tensor,  # [rows, blocks * STEPS], written where top_p alone is
    block_maximum_ptr: tl.tensor,  # [rows, blocks], as the next four
    block_mass_ptr: tl.tensor,
    block_index_ptr: tl.tensor,
    raw_maximum_ptr: tl.tensor,
    raw_mass_ptr: tl.tensor,
    candidate_count_ptr: tl.tensor,  # [rows] int32, set to 0
    cap: tl.tensor,
    logits_row_stride: tl.tensor,
    allowed_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    LIST_LANES: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + block
    start = block * BLOCK
    entries = start + tl.arange(0, BLOCK)
    inside = entries < vocab_size
    values = tl.load(logits_ptr + row * logits_row_stride + entries, mask=inside, other=float("-inf"))
    if CAP:
        values = _capped(values, cap)
        tl.store(logits_ptr + row * logits_row_stride + entries, values, mask=inside)
        values = tl.where(inside, values, float("-inf"))
    # NaN and +inf are no logits: the maximum says so.
    is_bad = tl.max(tl.where(values < float("inf"), 0, 1), axis=0) > 0
    values = tl.where(values < float("inf"), values, float("-inf"))
    maximum = tl.max(values, axis=0)
    mass = tl.sum(_exponentials(values, tl.where(maximum > float("-inf"), maximum, 0.0), 1.0), axis=0)
    tl.store(raw_maximum_ptr + at, tl.where(is_bad, float("inf"), maximum))
    tl.store(raw_mass_ptr + at, mass)
    if MASK:
        words = tl.load(allowed_ptr + row * allowed_row_stride + entries // 32, mask=inside, other=0)
        values = tl.where((words >> (entries % 32)) & 1 != 0, values, float("-inf"))
    if MASK or LISTS:
        changed = changed_ptr + row * vocab_size
        tl.store(changed + entries, values, mask=inside)
    if LISTS:
        tl.debug_barrier()  # the block's values are there for the threads that change some of them
        _change_listed(
            changed,
            token_ptr,
            bias_ptr,
            count_ptr,
            tl.load(first_ptr + row),
            tl.load(first_ptr + row + 1),
            tl.load(repetition_ptr + row),
            tl.load(presence_ptr + row),
            tl.load(frequency_ptr + row),
            start,
            BLOCK,
            LIST_LANES,
        )
        tl.debug_barrier()
        values = tl.load(changed + entries, mask=inside, other=float("-inf"))
        is_bad = tl.max(tl.where(values < float("inf"), 0, 1), axis=0) > 0
        values = tl.where(values < float("inf"), values, float("-inf"))
    if MASK or LISTS:
        maximum = tl.max(values, axis=0)
    temperature = tl.load(temperature_ptr + row)
    factor = _inverse(temperature)
    finite = tl.where(maximum > float("-inf"), maximum, 0.0)
    weights = _exponentials(values, finite, factor)
    tl.store(block_maximum_ptr + at, tl.where(is_bad, float("inf"), maximum))
    tl.store(block_mass_ptr + at, tl.sum(weights, axis=0))
    tl.store(block_index_ptr + at, tl.min(tl.where(values == maximum, entries, vocab_size), axis=0))
    if block == 0:
        tl.store(candidate_count_ptr + row, 0)
    top_k = tl.load(top_k_ptr + row)
    if _is_greedy(temperature, top_k):
        return
    if (top_k > 0) & (top_k < vocab_size):
        largest = tl.max(tl.reshape(values, [BLOCK // GROUPS, GROUPS]), axis=0)
        tl.store(group_ptr + at * GROUPS + tl.arange(0, GROUPS), largest)
    elif tl.load(top_p_ptr + row) < 1.0:
        depths = (finite - values) * factor
        for step in range(STEPS):
            is_there = (depths >= _depth(step)) & (depths < _depth(step + 1))
            tl.store(step_mass_ptr + at * STEPS + step, tl.sum(tl.where(is_there, weights, 0.0), axis=0))


@triton.jit
def _least_candidate(
    values: tl.tensor,
    measure: tl.tensor,  # what each of them counts
    target: tl.tensor,
    highest: tl.tensor,
) -> tl.tensor:
    """A value such that those that reach it count `target` at least, and hardly more; -inf if all are too few."""
    low = tl.min(tl.where(values > float("-inf"), values, highest), axis=0)
    if tl.sum(tl.where(values >= low, measure, 0.0), axis=0) < target:
        low = float("-inf")
    else:
        high = highest
        for _ in range(16):
            middle = low + 0.5 * (high - low)
            enough = tl.sum(tl.where(values >= middle, measure, 0.0), axis=0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return low


@triton.jit
def _least_by_count(
    group_ptr: tl.tensor,  # [groups]
    num_groups: tl.tensor,
    top_k: tl.tensor,
    highest: tl.tensor,
    LANES: tl.constexpr,
) -> tl.tensor:
    """A value that the best `top_k` reach: as many groups' largest do."""
    lanes = tl.arange(0, LANES)
    groups = tl.load(group_ptr + lanes, mask=lanes < num_groups, other=float("-inf"))
    return _least_candidate(groups, tl.where(groups > float("-inf"), 1.0, 0.0), top_k.to(tl.float32), highest)


@triton.jit
def _least_by_mass(
    block_maximum_ptr: tl.tensor,  # [blocks]
    step_mass_ptr: tl.tensor,  # [blocks, STEPS]
    num_steps: tl.tensor,
    target: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """A value that is reached by as much of the row's mass as `target`."""
    lanes = tl.arange(0, LANES)
    tops = tl.load(block_maximum_ptr + lanes // STEPS, mask=lanes < num_steps, other=float("-inf"))
    masses = tl.load(step_mass_ptr + lanes, mask=lanes < num_steps, other=0.0)
    ends = tops - _depth(lanes % STEPS + 1) / factor
    # More than is asked for, by more than sums may be rounded; and lower, by more than differences are.
    least = _least_candidate(ends, masses * _exponentials(tops, highest, factor), target * 1.00001, highest)
    return least - tl.abs(highest) * 1e-5


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab_size] float32
    temperature_ptr: tl.tensor,  # [rows]
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    group_ptr: tl.tensor,  # [rows, blocks * GROUPS]
    step_mass_ptr: tl.tensor,  # [rows, blocks * STEPS]
    block_maximum_ptr: tl.tensor,  # [rows, blocks], as the next four
    block_mass_ptr: tl.tensor,
    block_index_ptr: tl.tensor,
    raw_maximum_ptr: tl.tensor,
    raw_mass_ptr: tl.tensor,
    kind_ptr: tl.tensor,  # [rows] int32
    number_ptr: tl.tensor,  # [rows, 3]
    total_ptr: tl.tensor,  # [rows] float64
    out_token_ptr: tl.tensor,  # [rows] int32
    out_logprob_ptr: tl.tensor,  # [rows] float32
    logits_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    blocks: tl.tensor,
    BLOCK_LANES: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP_LANES: tl.constexpr,
    STEPS: tl.constexpr,
    EDOM: tl.constexpr,
    ERANGE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_LANES)
    inside = lanes < blocks
    at = row * blocks + lanes
    raw_maxima = tl.load(raw_maximum_ptr + at, mask=inside, other=float("-inf"))
    maxima = tl.load(block_maximum_ptr + at, mask=inside, other=float("-inf"))
    raw_highest, highest = tl.max(raw_maxima, axis=0), tl.max(maxima, axis=0)
    tl.store(out_logprob_ptr + row, float("-inf"))
    tl.store(kind_ptr + row, _DONE)
    if (raw_highest == float("inf")) | (highest == float("inf")):
        tl.store(out_token_ptr + row, EDOM)
        return
    if highest == float("-inf"):
        tl.store(out_token_ptr + row, ERANGE)
        return
    raw_masses = tl.load(raw_mass_ptr + at, mask=inside, other=0.0)
    log_sum = raw_highest + tl.log(tl.sum(raw_masses * tl.exp(raw_maxima - raw_highest), axis=0))
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    if _is_greedy(temperature, top_k):
        indices = tl.load(block_index_ptr + at, mask=inside, other=vocab_size)
        token = tl.min(tl.where(maxima == highest, indices, vocab_size), axis=0)
        tl.store(out_token_ptr + row, token)
        tl.store(out_logprob_ptr + row, tl.load(logits_ptr + row * logits_row_stride + token) - log_sum)
        return
    factor = _inverse(temperature)
    masses = tl.load(block_mass_ptr + at, mask=inside, other=0.0)
    total = tl.sum((masses * _exponentials(maxima, highest, factor)).to(tl.float64), axis=0)
    top_p = tl.load(top_p_ptr + row)
    floor = tl.load(min_p_ptr + row)
    is_cut = (top_k > 0) & (top_k < vocab_size)
    least = float("-inf")
    if is_cut | (top_p < 1.0):
        tl.store(kind_ptr + row, _BY_RANK)
        if is_cut:
            largest = group_ptr + row * blocks * GROUPS
            least = _least_by_count(largest, blocks * GROUPS, top_k, highest, GROUP_LANES)
        else:
            tops = block_maximum_ptr + row * blocks
            steps = step_mass_ptr + row * blocks * STEPS
            least = _least_by_mass(tops, steps, blocks * STEPS, top_p * total, highest, factor, STEP_LANES, STEPS)
            if floor > 0.0:  # what is certainly below the floor, by more than an exponential is rounded
                lowest = highest + (tl.log(floor) - 0.01) / factor - tl.abs(highest) * 1e-5
                least = tl.maximum(least, lowest)
    else:
        tl.store(kind_ptr + row, _IN_ORDER)
    tl.store(number_ptr + row * 3, highest)
    tl.store(number_ptr + row * 3 + 1, least)
    tl.store(number_ptr + row * 3 + 2, log_sum)
    tl.store(total_ptr + row, total)


@triton.jit
def _collect_kernel(
    values_ptr: tl.tensor,  # [rows, vocab_size] float32: the logits, or what they were changed to
    temperature_ptr: tl.tensor,  # [rows]
    min_p_ptr: tl.tensor,
    block_maximum_ptr: tl.tensor,  # [rows, blocks]
    kind_ptr: tl.tensor,  # [rows] int32
    number_ptr: tl.tensor,  # [rows, 3]
    candidate_count_ptr: tl.tensor,  # [rows] int32
    candidate_ptr: tl.tensor,  # [rows, ROOM] int64: ascending as ranks do
    piece_mass_ptr: tl.tensor,  # [rows, blocks * (BLOCK // PIECE)]
    values_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kind_ptr + row)
    if kind == _DONE:
        return
    entries = block * BLOCK + tl.arange(0, BLOCK)
    values_at = values_ptr + row * values_row_stride + entries
    if kind == _BY_RANK:
        least = tl.load(number_ptr + row * 3 + 1)
        if tl.load(block_maximum_ptr + row * tl.num_programs(1) + block) >= least:
            values = tl.load(values_at, mask=entries < vocab_size, other=float("-inf"))
            is_candidate = (values >= least) & (values > float("-inf"))
            number = is_candidate.to(tl.int32)
            first = tl.atomic_add(candidate_count_ptr + row, tl.sum(number, axis=0))
            places = first + tl.cumsum(number, axis=0) - number
            keys = ((-1 - _order(values)).to(tl.int64) << 32) | entries.to(tl.int64)
            tl.store(candidate_ptr + row * ROOM + places, keys, mask=is_candidate & (places < ROOM))
    else:
        values = tl.load(values_at, mask=entries < vocab_size, other=float("-inf"))
        factor = _inverse(tl.load(temperature_ptr + row))
        weights = _exponentials(values, tl.load(number_ptr + row * 3), factor)
        weights = tl.where(weights < tl.load(min_p_ptr + row), 0.0, weights)
        pieces = tl.arange(0, BLOCK // PIECE)
        masses = tl.sum(tl.reshape(weights, [BLOCK // PIECE, PIECE]), axis=1)
        tl.store(piece_mass_ptr + (row * tl.num_programs(1) + block) * (BLOCK // PIECE) + pieces, masses)


@triton.jit
def _draw_in_order(
    values_ptr: tl.tensor,  # [vocab_size]
    piece_mass_ptr: tl.tensor,  # [pieces]
    highest: tl.tensor,
    factor: tl.tensor,
    floor: tl.tensor,
    uniform: tl.tensor,
    vocab_size: tl.tensor,
    pieces: tl.tensor,
    PIECE_LANES: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """The first token where what may be drawn holds more than `uniform` of its mass."""
    lanes = tl.arange(0, PIECE_LANES)
    masses = tl.load(piece_mass_ptr + lanes, mask=lanes < pieces, other=0.0).to(tl.float64)
    ends = tl.cumsum(masses, axis=0)
    target = uniform * tl.sum(masses, axis=0)
    # Where sums were rounded so that none holds more: the last that holds anything.
    last = tl.max(tl.where(masses > 0.0, lanes, 0), axis=0)
    piece = tl.minimum(tl.min(tl.where(ends > target, lanes, PIECE_LANES), axis=0), last)
    target -= tl.sum(tl.where(lanes < piece, masses, 0.0), axis=0)
    entries = piece * PIECE + tl.arange(0, PIECE)
    values = tl.load(values_ptr + entries, mask=entries < vocab_size, other=float("-inf"))
    weights = _exponentials(values, highest, factor)
    weights = tl.where(weights < floor, 0.0, weights)
    ends = tl.cumsum(weights.to(tl.float64), axis=0)
    last = tl.max(tl.where(weights > 0.0, entries, 0), axis=0)
    return tl.minimum(tl.min(tl.where((ends > target) & (weights > 0.0), entries, vocab_size), axis=0), last)


@triton.jit
def _bits_along(AXIS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    return tl.reshape(tl.arange(0, 2), [1] * AXIS + [2] + [1] * (LOG2 - 1 - AXIS))


@triton.jit
def _exchanged(cube: tl.tensor, descends: tl.tensor, AXIS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    """Each entry and its neighbour along an axis in ascending order, or descending."""
    partner = tl.sum(cube, axis=AXIS, keep_dims=True) - cube
    takes_larger = (descends ^ _bits_along(AXIS, LOG2)) != 0
    return tl.where((cube < partner) == takes_larger, partner, cube)


@triton.jit
def _ascending(keys: tl.tensor, LOG2: tl.constexpr) -> tl.tensor:
    """`keys [2 ** LOG2]` int64, sorted by a bitonic network.

    Not by `tl.sort`, which takes seconds in Triton's interpreter: it finds an entry's partner by an exclusive or, this
    by a sum, which may wrap around.
    """
    cube = tl.reshape(keys, [2] * LOG2)
    for stage in tl.static_range(1, LOG2):
        for step in tl.static_range(stage):
            cube = _exchanged(cube, _bits_along(LOG2 - 1 - stage, LOG2), LOG2 - stage + step, LOG2)
    for step in tl.static_range(LOG2):
        cube = _exchanged(cube, 0, step, LOG2)
    return tl.reshape(cube, [2**LOG2])


@triton.jit
def _draw_sorted(
    candidate_ptr: tl.tensor,  # [ROOM] int64
    num_candidates: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    lightest: tl.tensor,
    uniform: tl.tensor,
    ROOM: tl.constexpr,
    LOG2_ROOM: tl.constexpr,
) -> tl.tensor:
    """The token that is drawn from candidates, likeliest first. `top_k` 0: `total` is what top_p is a part of."""
    ranks = tl.arange(0, ROOM)
    keys = tl.load(candidate_ptr + ranks, mask=ranks < num_candidates, other=0x7FFFFFFFFFFFFFFF)
    keys = _ascending(keys, LOG2_ROOM)
    order = -1 - (keys >> 32).to(tl.int32)
    values = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
    is_kept = ranks < tl.where(top_k > 0, tl.minimum(top_k, num_candidates), num_candidates)
    values = tl.where(is_kept, values, float("-inf"))
    weights = tl.where(is_kept, _exponentials(values, highest, factor), 0.0)
    wide = weights.to(tl.float64)
    ends = tl.cumsum(wide, axis=0)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * tl.where(top_k > 0, tl.sum(wide, axis=0), total)
        is_kept = is_kept & ((ends - wide < target) | (ranks == 0))
    is_kept = is_kept & (weights >= lightest)
    kept = tl.sum(is_kept.to(tl.int32), axis=0)  # the first ones
    target = uniform * tl.sum(tl.where(is_kept, wide, 0.0), axis=0)
    rank = tl.minimum(tl.sum((is_kept & (ends <= target)).to(tl.int32), axis=0), kept - 1)
    return tl.sum(tl.where(ranks == rank, keys & 0xFFFFFFFF, 0), axis=0).to(tl.int32)


@triton.jit
def _kept(
    values: tl.tensor,
    weights: tl.tensor,
    entries: tl.tensor,
    last_order: tl.tensor,
    last_entry: tl.tensor,
    lightest: tl.tensor,
) -> tl.tensor:
    """What ranks no lower than the last that is kept, and is heavy enough."""
    order = _order(values)
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
    """What the kept entries hold (their mass, or their number) that come at or above each of three places."""
    above_low = tl.zeros([CHUNK], tl.float64)
    above_middle = tl.zeros([CHUNK], tl.float64)
    above_high = tl.zeros([CHUNK], tl.float64)
    for start in range(0, vocab_size, CHUNK):
        entries = start + tl.arange(0, CHUNK)
        values = tl.load(values_ptr + entries, mask=entries < vocab_size, other=float("-inf"))
        weights = _exponentials(values, highest, factor)
        is_kept = _kept(values, weights, entries, last_order, last_entry, lightest)
        order = _order(values).to(tl.int64)
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
    """The first place among the kept, likeliest first, up to which they hold `target`: its order and its entry.

    The last of them where they hold less, as sums may be rounded.
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
    # All that lie at this place are equal: the one at which the rest of the target is reached, in the order of entries.
    held = above
    found = tl.full([], -1, tl.int32)
    latest = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        entries = start + tl.arange(0, CHUNK)
        values = tl.load(values_ptr + entries, mask=entries < vocab_size, other=float("-inf"))
        weights = _exponentials(values, highest, factor)
        is_kept = _kept(values, weights, entries, last_order, last_entry, lightest)
        is_equal = is_kept & (_order(values).to(tl.int64) == place)
        each = tl.where(is_equal, 1.0 if COUNT else weights, 0.0).to(tl.float64)
        ends = held + tl.cumsum(each, axis=0)
        reached = tl.min(tl.where(is_equal & (ends >= target), entries, vocab_size), axis=0)
        found = tl.where((found < 0) & (reached < vocab_size), reached, found)
        latest = tl.maximum(latest, tl.max(tl.where(is_equal, entries, 0), axis=0))
        held += tl.sum(each, axis=0)
    return place.to(tl.int32), tl.where(found >= 0, found, latest)


@triton.jit
def _draw_narrowing(
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
    """As `_draw_sorted`, from all of the row."""
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
    # More than u of the mass: so the next number above, for sums that can be nothing between.
    target = tl.maximum(uniform * mass * (1.0 + 2.3e-16), 1e-300)
    order, entry = _narrow_down(values_ptr, vocab_size, highest, factor, lightest, order, entry, target, False, CHUNK)
    return entry


@triton.jit
def _draw_kernel(
    logits_ptr: tl.tensor,  # [rows, vocab_size] float32
    values_ptr: tl.tensor,  # the same, or what they were changed to
    temperature_ptr: tl.tensor,  # [rows], as the next four
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    kind_ptr: tl.tensor,  # [rows] int32
    number_ptr: tl.tensor,  # [rows, 3]
    total_ptr: tl.tensor,  # [rows] float64
    candidate_count_ptr: tl.tensor,  # [rows] int32
    candidate_ptr: tl.tensor,  # [rows, ROOM] int64
    piece_mass_ptr: tl.tensor,  # [rows, pieces]
    out_token_ptr: tl.tensor,  # [rows] int32
    out_logprob_ptr: tl.tensor,  # [rows] float32
    logits_row_stride: tl.tensor,
    values_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    pieces: tl.tensor,
    PIECE_LANES: tl.constexpr,
    PIECE: tl.constexpr,
    ROOM: tl.constexpr,
    LOG2_ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
    FLT_MIN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kind_ptr + row)
    if kind == _DONE:
        return
    values = values_ptr + row * values_row_stride
    highest = tl.load(number_ptr + row * 3)
    factor = _inverse(tl.load(temperature_ptr + row))
    floor = tl.load(min_p_ptr + row)
    uniform = tl.load(uniform_ptr + row)
    if kind == _IN_ORDER:
        token = _draw_in_order(
            values,
            piece_mass_ptr + row * pieces,
            highest,
            factor,
            floor,
            uniform,
            vocab_size,
            pieces,
            PIECE_LANES,
            PIECE,
        )
    else:
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where(top_k < vocab_size, top_k, 0)
        top_p = tl.load(top_p_ptr + row)
        total = tl.load(total_ptr + row)
        lightest = tl.where(floor > 0.0, floor, FLT_MIN)
        count = tl.load(candidate_count_ptr + row)
        if count <= ROOM:
            candidates = candidate_ptr + row * ROOM
            token = _draw_sorted(
                candidates, count, highest, factor, total, top_k, top_p, lightest, uniform, ROOM, LOG2_ROOM
            )
        else:
            token = _draw_narrowing(values, vocab_size, highest, factor, total, top_k, top_p, lightest, uniform, CHUNK)
    tl.store(out_token_ptr + row, token)
    log_sum = tl.load(number_ptr + row * 3 + 2)
    tl.store(out_logprob_ptr + row, tl.load(logits_ptr + row * logits_row_stride + token) - log_sum)


def process_logits(
    logits: torch.Tensor,
    settings: RowSettings,
    *,
    lists: TokenLists | None = None,
    allowed: torch.Tensor | None = None,
    softcap: float = 0.0,
    scratch: Scratch | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's token, `[rows]` int32, and its log-probability under the model's own distribution, `[rows]` float32.

    `logits [rows, vocab_size]` float32; with a `softcap`, each becomes `softcap * tanh(logit / softcap)`, in place.
    `allowed [rows, ceil(vocab_size / 32)]` int32: a bit for each token, the lowest first. A token below 0 says that
    there is none: `NOT_A_DISTRIBUTION` (NaN or +inf among the logits, or by a penalty) or `NOTHING_POSSIBLE`.
    """
    rows, vocab_size = logits.shape
    changes = lists is not None or allowed is not None
    scratch = scratch_for(rows, vocab_size, logits.device, changes=changes) if scratch is None else scratch
    if out is None:
        out = (
            torch.empty(rows, dtype=torch.int32, device=logits.device),
            torch.empty(rows, dtype=torch.float32, device=logits.device),
        )
    tokens, logprobs = out
    blocks = triton.cdiv(vocab_size, BLOCK)
    values = logits
    if changes:
        assert scratch.changed is not None
        values = scratch.changed
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert scratch.groups.shape[0] >= rows
    assert scratch.groups.shape[1] == blocks * GROUPS, scratch.groups.shape
    assert all(each.shape == (rows,) and each.is_contiguous() for each in _tensors(settings))
    assert settings.uniform.dtype == torch.float64
    assert allowed is None or (allowed.shape == (rows, triton.cdiv(vocab_size, 32)) and allowed.stride(1) == 1)
    assert tokens.shape == logprobs.shape == (rows,)
    by_blocks, by_rows = (rows, blocks), (rows,)
    unused = scratch.kinds
    _scan_kernel[by_blocks](
        logits,
        values,
        unused if allowed is None else allowed,
        *((unused,) * 4 if lists is None else (lists.first, lists.tokens, lists.biases, lists.counts)),
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.repetition,
        settings.presence,
        settings.frequency,
        scratch.groups,
        scratch.step_masses,
        scratch.block_maxima,
        scratch.block_masses,
        scratch.block_indices,
        scratch.raw_maxima,
        scratch.raw_masses,
        scratch.counts,
        float(softcap),
        logits.stride(0),
        0 if allowed is None else allowed.stride(0),
        vocab_size,
        CAP=softcap > 0.0,
        MASK=allowed is not None,
        LISTS=lists is not None,
        BLOCK=BLOCK,
        GROUPS=GROUPS,
        STEPS=STEPS,
        LIST_LANES=256,
        enable_fp_fusion=True,
        num_warps=8,
    )
    _choose_kernel[by_rows](
        logits,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        scratch.groups,
        scratch.step_masses,
        scratch.block_maxima,
        scratch.block_masses,
        scratch.block_indices,
        scratch.raw_maxima,
        scratch.raw_masses,
        scratch.kinds,
        scratch.numbers,
        scratch.totals,
        tokens,
        logprobs,
        logits.stride(0),
        vocab_size,
        blocks,
        BLOCK_LANES=int(triton.next_power_of_2(blocks)),
        GROUP_LANES=int(triton.next_power_of_2(blocks * GROUPS)),
        GROUPS=GROUPS,
        STEP_LANES=int(triton.next_power_of_2(blocks * STEPS)),
        STEPS=STEPS,
        EDOM=NOT_A_DISTRIBUTION,
        ERANGE=NOTHING_POSSIBLE,
        enable_fp_fusion=True,
        num_warps=8,
    )
    _collect_kernel[by_blocks](
        values,
        settings.temperature,
        settings.min_p,
        scratch.block_maxima,
        scratch.kinds,
        scratch.numbers,
        scratch.counts,
        scratch.candidates,
        scratch.piece_masses,
        values.stride(0),
        vocab_size,
        BLOCK=BLOCK,
        PIECE=PIECE,
        ROOM=ROOM,
        enable_fp_fusion=True,
        num_warps=8,
    )
    pieces = blocks * (BLOCK // PIECE)
    _draw_kernel[by_rows](
        logits,
        values,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.uniform,
        scratch.kinds,
        scratch.numbers,
        scratch.totals,
        scratch.counts,
        scratch.candidates,
        scratch.piece_masses,
        tokens,
        logprobs,
        logits.stride(0),
        values.stride(0),
        vocab_size,
        pieces,
        PIECE_LANES=int(triton.next_power_of_2(pieces)),
        PIECE=PIECE,
        ROOM=ROOM,
        LOG2_ROOM=ROOM.bit_length() - 1,
        CHUNK=2048,
        FLT_MIN=ALL_BUT_NOTHING,
        enable_fp_fusion=True,
        num_warps=8,
    )
    return tokens, logprobs


def _tensors(settings: RowSettings) -> tuple[torch.Tensor, ...]:
    return (
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.repetition,
        settings.presence,
        settings.frequency,
        settings.uniform,
    )
