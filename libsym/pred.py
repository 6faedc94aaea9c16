"""pred, kv_write and pred_batch: tokens are appended, and what the model says of the next one comes back.

One token and its full row is what a decode loop does thousands of times: `request` takes the short way there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, overload

from libsym.abi import (
    ATTENTION,
    FRAME_ALIGN,
    HEADER_BYTES,
    MASK_STRUCT,
    MASKED,
    MAX_BATCH,
    MAX_PRIORITY,
    REDUCED,
    REQUEST_STRUCT,
    ROWS_ALL,
    ROWS_LAST,
    ROWS_NONE,
    Op,
)
from libsym.arguments import int32, real, shown
from libsym.channel.client import ClientChannel
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.errors import BadHandle, BatchFailed, Invalid, SymError
from libsym.open_file import OpenFile, channel_of, length_script, not_open
from libsym.rows.attention import Attention, AttentionColumns, AttentionRows, attention_block
from libsym.rows.dist import Dist
from libsym.rows.native import bits_of
from libsym.rows.reduced import ReducedDist, reduction_block, row_bytes
from libsym.rows.sampler import Sampler

Rows = Literal["last", "all"]
Positions = int | Sequence[int] | None
Mask = Sequence[Any]
"""Bools, one for each entry before; or for each new token a sequence of them, also for the new entries."""

MAX_DEADLINE_S = 1e9
"""Thirty years: what is more is a mistake, a time of the clock for example."""
_ROWS = {"last": ROWS_LAST, "all": ROWS_ALL}
_OLDER_SAYS = ("bytes that nothing announced", "bytes is malformed")
"""Ends of messages of a daemon before SYM_ATTENTION; of a newer one no call of this library gets these."""


@dataclass(frozen=True, slots=True)
class Pred:
    """A call of a `pred_batch`: what `pred` takes, for later.

    >>> kv = sym.kv_create()
    >>> [dist] = sym.pred_batch([sym.Pred(kv, [65, 66], top_k=1)])
    >>> dist.argmax(), kv.len()
    (66, 2)
    """

    kv: OpenFile
    tokens: Iterable[int]
    positions: Positions = None
    rows: Rows = "last"
    top_k: int | None = None
    logprobs: Iterable[int] | None = None
    sampler: Sampler | None = None
    mask: Mask | None = None
    priority: int | None = None
    deadline: float | None = None
    attention: AttentionColumns | None = None
    by: AttentionRows = "sum"
    first_draw: int = 0

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", _named(self.logprobs))  # it is read twice


@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: None = None,
    logprobs: None = None,
    sampler: None = None,
    mask: Mask | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    attention: AttentionColumns | None = None,
    by: AttentionRows = "sum",
) -> Dist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: int,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    mask: Mask | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    attention: AttentionColumns | None = None,
    by: AttentionRows = "sum",
    first_draw: int = 0,
) -> ReducedDist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: int | None = None,
    logprobs: Iterable[int],
    sampler: Sampler | None = None,
    mask: Mask | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    attention: AttentionColumns | None = None,
    by: AttentionRows = "sum",
    first_draw: int = 0,
) -> ReducedDist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler,
    mask: Mask | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    attention: AttentionColumns | None = None,
    by: AttentionRows = "sum",
    first_draw: int = 0,
) -> ReducedDist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    mask: Mask | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    attention: AttentionColumns | None = None,
    by: AttentionRows = "sum",
    first_draw: int = 0,
) -> Dist | ReducedDist: ...
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    rows: Rows = "last",
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    mask: Mask | None = None,
    priority: int | None = None,
    deadline: float | None = None,
    attention: AttentionColumns | None = None,
    by: AttentionRows = "sum",
    first_draw: int = 0,
) -> Dist | ReducedDist:
    """Appends `tokens` to `kv`, runs the model, and gives the distribution of the token that follows.

    >>> kv = sym.kv_create()
    >>> dist = sym.pred(kv, sym.tokenize("Once upon"))
    >>> dist.argmax() == dist.topk(3)[0][0]
    True

    `positions`: one number for each token, or the first as a number and the others follow it; without them they
    continue after the last entry's. Causality is the order of the entries; positions only rotate. `rows="all"`: a
    distribution after every token, `dist[i]` after the i-th.

    A full row takes a result slot of the connection, of which there are 64 to 1,024. Any of these has the daemon reduce
    the rows to what is asked for, so that no slot is needed and any number of tokens can be asked about at once:

    `top_k`: the k likeliest tokens with their log-probabilities.
    `logprobs`: the log-probabilities of these tokens.
    `sampler`: a token drawn from each row, one draw of the seed after the other; `first_draw` is the number of the
    first. Penalties count `tokens` alone.

    `mask`: which entries the new ones see besides themselves. A bool for each entry of the file, for all new tokens
    alike; or such a row for each new token, which goes on with a bool for each new entry (a token sees itself, and none
    after).
    `priority`: -100 to 100; among the calls of one account that wait for a place in a step, higher ones go first.
    Accounts take turns, whatever their priorities.
    `deadline`: seconds from now. If the step that ends the call has not begun by then it is TimedOut, and nothing was
    appended.
    `attention`: "entries" or "pages": `dist.attention` says how much the new tokens attended to each entry of the file,
    or to each page of 32, as the sum over all heads and layers, or with `by="layer"` for each layer and KV head.
    The distributions are the same, bit for bit. What a message can't hold is TooLarge: pages need less than entries.
    """
    if logprobs is not None:
        logprobs = _named(logprobs)
    call = request(
        kv, tokens, positions, rows, top_k, logprobs, sampler, mask, priority, deadline, attention, by, first_draw
    )
    if call.flags & (REDUCED | ATTENTION):
        try:
            reply = kv.channel.perform(call)
        except Invalid as error:
            raise _known(error, call.flags) from None
        return _dist_of(kv, call.flags, reply, top_k, logprobs)
    channel = kv.channel
    reply = channel.perform(call)
    return Dist(reply.rows(), reply.args[1], channel.slot_bytes, channel.vocab_size)


def kv_write(kv: OpenFile, tokens: Iterable[int], positions: Positions = None) -> int:
    """Appends tokens, or none, as `pred` does, without asking for a distribution; gives the new length.

    >>> kv = sym.kv_create()
    >>> sym.kv_write(kv, [72, 105]), sym.kv_write(kv, [])
    (2, 2)
    """
    return channel_of(kv, "kv_write").run(write_script(kv, tokens, positions))


def pred_batch(preds: Iterable[Pred]) -> list[Dist | ReducedDist]:
    """Makes many `pred` calls at once, for the price of one crossing: the beams of a search, the branches of a tree.

    >>> root = sym.kv_create()
    >>> _ = sym.kv_write(root, sym.tokenize("A tree"))
    >>> dists = sym.pred_batch([sym.Pred(sym.kv_fork(root), [token]) for token in (65, 66, 67)])
    >>> len(dists)
    3

    At most 256 calls, whose full rows must fit the connection's result slots together. It ends when all have ended, in
    any order but those on one file. If one fails the others are made nevertheless: BatchFailed has what each gave. What
    can't be asked for at all is raised before anything is made, and says which call it is.
    """
    calls = batch_of(preds)
    return batch_channel(calls).run(batch_script(calls))


def pred_script(wanted: Pred) -> Script[Dist | ReducedDist]:
    """The same as `pred`, for event loops."""
    call = _request_of(wanted)
    try:
        reply = yield call
    except Invalid as error:
        raise _known(error, call.flags) from None
    return _dist_of(wanted.kv, call.flags, reply, wanted.top_k, wanted.logprobs)


def write_script(kv: OpenFile, tokens: Iterable[int], positions: Positions = None) -> Script[int]:
    request = write_request(kv, tokens, positions)
    if not request.args[0]:  # of no tokens, as of no bytes to write(2): the length stays
        return (yield from length_script(kv))
    reply = yield request
    return reply.args[2]


def batch_of(preds: Iterable[Pred]) -> list[Pred]:
    """The calls of a batch, each of which could be asked for."""
    if not isinstance(preds, Iterable) or isinstance(preds, (str, bytes, bytearray)):
        raise Invalid(f"pred_batch() takes a list of sym.Pred(kv, tokens, …), not {shown(preds)}")
    return list(preds)


def batch_channel(preds: Sequence[Pred]) -> ClientChannel:
    """The connection that the files of a batch are open on: on another one their handles would be other files."""
    if not 1 <= len(preds) <= MAX_BATCH:
        remedy = "use several" if preds else "give some"
        raise Invalid(f"pred_batch() makes 1 to {MAX_BATCH} calls, not {len(preds)}: {remedy}")
    for index, each in enumerate(preds):
        if not isinstance(each, Pred):
            raise Invalid(f"call {index} of {len(preds)} is no sym.Pred(kv, tokens, …): {shown(each)}")
        if not isinstance(each.kv, OpenFile):
            raise _of_call(index, len(preds), not_open(each.kv, "pred"))
        if each.kv.channel is not preds[0].kv.channel:
            earlier = BadHandle(f"{each.kv!r} belongs to an earlier connection of this program: open it again")
            raise _of_call(index, len(preds), earlier)
    return preds[0].kv.channel


def batch_script(preds: Sequence[Pred]) -> Script[list[Dist | ReducedDist]]:
    """For what `batch_channel` took."""
    calls = list[Call]()
    try:
        for each in preds:
            calls.append(_request_of(each))
    except SymError as wrong:
        raise _of_call(len(calls), len(preds), wrong) from wrong
    frames = b"".join(_frame(index, call) for index, call in enumerate(calls))
    reply = yield Call(Op.PRED_BATCH, args=(len(calls), 0, 0, 0), payload=frames)
    results: list[Dist | ReducedDist | SymError] = [
        _known(part.error, call.flags)
        if part.error
        else _dist_of(wanted.kv, call.flags, part, wanted.top_k, wanted.logprobs)
        for wanted, call, part in zip(preds, calls, reply.parts(), strict=True)
    ]
    failed = [(index, result) for index, result in enumerate(results) if isinstance(result, SymError)]
    if failed:
        index, error = failed[0]
        raise BatchFailed(f"call {index} of {len(results)}: {error}", error.errno, results)
    return [result for result in results if not isinstance(result, SymError)]


def request(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions,
    rows: Rows,
    top_k: int | None,
    logprobs: Iterable[int] | None,
    sampler: Sampler | None,
    mask: Mask | None,
    priority: int | None,
    deadline: float | None,
    attention: AttentionColumns | None,
    by: AttentionRows,
    first_draw: int,
) -> Call:
    """The call that asks for this."""
    if not isinstance(kv, OpenFile):
        raise not_open(kv, "pred")
    try:
        flags = _ROWS[rows]
    except (KeyError, TypeError):
        raise Invalid(
            f"rows={shown(rows)}: 'last' for the distribution after the last token, 'all' for one after each"
        ) from None
    ids = int32(tokens, "token")
    is_reduced = top_k is not None or logprobs is not None or sampler is not None
    is_plain = positions is None and mask is None and priority is None and deadline is None and attention is None
    if is_plain and not is_reduced and by == "sum" and first_draw == 0:
        return Call(Op.PRED, flags, kv.handle, (len(ids), 0, 0, 0), ids.tobytes())
    places = places_of(positions, len(ids))
    payload = ids.tobytes() + places.tobytes()
    if mask is not None:
        flags |= MASKED
        payload += _mask_bytes(mask)
    if attention is not None:
        flags |= ATTENTION
        payload += attention_block(attention, by)
    elif by != "sum":
        raise Invalid(f"by={shown(by)} is about attention: give attention='entries' or 'pages', too")
    if first_draw != 0 and sampler is None:
        raise Invalid(f"first_draw={shown(first_draw)} is about draws: give a sampler, too")
    if is_reduced:
        flags |= REDUCED
        payload += _reduction(ids, top_k, logprobs, sampler, first_draw)
    args = (len(ids), len(places), microseconds(deadline), checked_priority(priority))
    return Call(Op.PRED, flags, kv.handle, args, payload)


def write_request(kv: OpenFile, tokens: Iterable[int], positions: Positions) -> Call:
    ids = int32(tokens, "token")
    places = places_of(positions, len(ids))
    payload = ids.tobytes() + places.tobytes()
    return Call(Op.PRED, ROWS_NONE, kv.handle, (len(ids), len(places), 0, 0), payload)


def places_of(positions: Positions, num_tokens: int) -> array[int]:
    """Positions as they go over the wire: none, the first, or all."""
    if positions is None:
        return array("i")
    if isinstance(positions, (int, Integral)):
        return int32((int(positions),), "position")
    places = int32(positions, "position")
    if len(places) != num_tokens:
        raise Invalid(f"{num_tokens} tokens and {len(places)} positions: give one for each, or the first as a number")
    return places


def checked_priority(priority: int | None) -> int:
    if priority is None:
        return 0
    if not isinstance(priority, Integral) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise Invalid(
            f"priority={shown(priority)}: a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, higher goes first"
        )
    return int(priority)


def microseconds(deadline: float | None) -> int:
    """A deadline as it goes over the wire; 0: none."""
    if deadline is None:
        return 0
    seconds = real(deadline, "deadline")
    if not 0 < seconds < MAX_DEADLINE_S:
        raise Invalid(f"deadline={shown(deadline)}: seconds from now, more than 0 and less than {MAX_DEADLINE_S:g}")
    return math.ceil(seconds * 1e6)


def checked_sampler(sampler: object) -> Sampler:
    if not isinstance(sampler, Sampler):
        raise Invalid(f"sampler={shown(sampler)}: give a sym.Sampler, sym.Sampler.greedy() for instance")
    return sampler


def _of_call(index: int, num_calls: int, error: SymError) -> SymError:
    """An error that says which call of a batch it is about."""
    return type(error)(f"call {index} of {num_calls}: {error}", error.errno)


def _named(logprobs: Iterable[int] | None) -> tuple[int, ...] | None:
    if logprobs is None:
        return None
    if not isinstance(logprobs, Iterable) or isinstance(logprobs, (str, bytes, bytearray)):
        raise Invalid(f"logprobs={shown(logprobs)}: must be a list of token ids")
    return tuple(logprobs)


def _request_of(wanted: Pred) -> Call:
    return request(
        wanted.kv,
        wanted.tokens,
        wanted.positions,
        wanted.rows,
        wanted.top_k,
        wanted.logprobs,
        wanted.sampler,
        wanted.mask,
        wanted.priority,
        wanted.deadline,
        wanted.attention,
        wanted.by,
        wanted.first_draw,
    )


def _dist_of(
    kv: OpenFile, flags: int, reply: Reply, top_k: int | None, logprobs: Iterable[int] | None
) -> Dist | ReducedDist:
    num_rows, named, attention = reply.args[1], () if logprobs is None else tuple(logprobs), None
    num_reduced = num_rows * row_bytes(top_k or 0, len(named)) if flags & REDUCED else 0
    if flags & ATTENTION:
        attention = Attention(memoryview(reply.payload)[num_reduced:])
    if flags & REDUCED:
        reduced = memoryview(reply.payload)[:num_reduced] if flags & ATTENTION else reply.payload
        return ReducedDist(reduced, num_rows, top_k, named, attention)
    return Dist(reply.rows(), num_rows, kv.channel.slot_bytes, kv.channel.vocab_size, attention)


def _known(error: SymError, flags: int) -> SymError:
    """A daemon that does not know SYM_ATTENTION stumbles over what comes with it: say so."""
    is_unknown = isinstance(error, Invalid) and flags & ATTENTION and str(error).endswith(_OLDER_SAYS)
    return Invalid("this daemon is older than the library and gives no attention: upgrade it") if is_unknown else error


def _reduction(
    ids: array[int], top_k: int | None, logprobs: Iterable[int] | None, sampler: Sampler | None, first_draw: int
) -> bytes:
    if top_k is not None and (not isinstance(top_k, Integral) or top_k < 1):
        raise Invalid(f"top_k={shown(top_k)}: how many of the likeliest tokens, 1 or more")
    sampling = None
    if sampler is not None:
        sampler = checked_sampler(sampler)
        sampling = sampler.block(before=sampler.looked_at(ids), first_draw=first_draw)
    return reduction_block(top_k, () if logprobs is None else logprobs, sampling)


def _mask_bytes(mask: Mask) -> bytes:
    """As `struct sym_mask`: a bit for each bool, each row in words of 32 bits."""
    try:
        is_nested = len(mask) > 0 and hasattr(mask[0], "__len__")
        rows = [bytes(map(bool, row)) for row in (mask if is_nested else (mask,))]
    except (TypeError, ValueError) as error:
        raise Invalid(f"a mask is a list of bools, or a list of such lists: {error}") from error
    num_columns = len(rows[0])
    if any(len(row) != num_columns for row in rows):
        raise Invalid("the rows of the mask have different lengths: each needs a bool for every entry, old and new")
    return MASK_STRUCT.pack(len(rows), num_columns) + b"".join(map(bits_of, rows))


def _frame(index: int, call: Call) -> bytes:
    """A request as it would lie in the ring."""
    num_bytes = HEADER_BYTES + len(call.payload)
    header = REQUEST_STRUCT.pack(num_bytes, call.op, 0, call.flags, 0, index, call.handle, *call.args)
    return header + call.payload + bytes(-len(call.payload) % FRAME_ALIGN)
