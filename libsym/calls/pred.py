"""pred, kv_write and pred_batch: append tokens, run the model, and return the distribution of the next token.

A decode loop makes thousands of calls that append one token and ask for one full row. `request` has a fast path for
such calls.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypedDict, Unpack, overload

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
from libsym.calls.open_file import OpenFile, channel_of, length_script, not_open
from libsym.channel.client import ClientChannel
from libsym.channel.reply import Reply
from libsym.channel.scripts import Call, Script
from libsym.errors import BadHandle, BatchFailed, Invalid, SymError
from libsym.rows.attention import Attention, AttentionColumns, AttentionRows, attention_block
from libsym.rows.dist import Dist
from libsym.rows.native import bits_of
from libsym.rows.reduced import ReducedDist, reduction_block, row_bytes
from libsym.rows.sampler import Sampler

Rows = Literal["last", "all"]
Positions = int | Sequence[int] | None
Mask = Sequence[Any]
"""A mask: one row with a bool for each earlier entry; or a row for each new token, also with bools for the new entries.
"""

MAX_DEADLINE_S = 1e9
"""Largest deadline in seconds, about thirty years. A greater value is a mistake, for example an absolute time."""
_ROWS = {"last": ROWS_LAST, "all": ROWS_ALL}
_OLDER_SAYS = ("bytes that nothing announced", "bytes is malformed")
"""Endings of the error messages of a daemon that does not know SYM_ATTENTION. Newer daemons never send these messages.
"""


@dataclass(frozen=True, slots=True)
class Pred:
    """Arguments of one `pred` in a `pred_batch`.

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
            object.__setattr__(self, "logprobs", _named(self.logprobs))  # a tuple, because it is iterated over twice


class CallOptions(TypedDict, total=False):
    """Options of `pred` that do not change the type of its result."""

    rows: Rows
    mask: Mask | None
    priority: int | None
    deadline: float | None
    attention: AttentionColumns | None
    by: AttentionRows


class RowOptions(CallOptions, total=False):
    """Options of a `pred` that returns whole rows, a Dist."""

    top_k: None
    logprobs: None
    sampler: None


@overload
def pred(kv: OpenFile, tokens: Iterable[int], positions: Positions = None, **options: Unpack[RowOptions]) -> Dist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
) -> ReducedDist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int | None = None,
    logprobs: Iterable[int],
    sampler: Sampler | None = None,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
) -> ReducedDist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
) -> ReducedDist: ...
@overload
def pred(
    kv: OpenFile,
    tokens: Iterable[int],
    positions: Positions = None,
    *,
    top_k: int | None = None,
    logprobs: Iterable[int] | None = None,
    sampler: Sampler | None = None,
    first_draw: int = 0,
    **options: Unpack[CallOptions],
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
    """Append `tokens` to `kv`, run the model, and return the distribution of the token that follows.

    >>> kv = sym.kv_create()
    >>> dist = sym.pred(kv, sym.tokenize("Once upon"))
    >>> dist.argmax() == dist.topk(3)[0][0]
    True

    `positions`: one position for each token, or the first position, from which the others count up. By default
    positions continue after the last entry's. Attention is causal in the order of the entries; positions only set the
    rotation.
    `rows="all"`: a distribution after every token, `dist[i]` after the i-th. By default, only the last token has a
    distribution.

    A full row needs a result slot, and a connection has 64 to 1,024 slots. With any of the next three options the
    daemon reduces each row to a few numbers, and the result is a ReducedDist, which needs no slots:

    `top_k`: the k likeliest tokens with their log-probabilities.
    `logprobs`: token ids whose log-probabilities are wanted.
    `sampler`: a token drawn from each row. The rows take consecutive draws of the seed; `first_draw` is the serial
    number of the first draw. Penalties count only `tokens`.

    `mask`: the entries that the new tokens attend to. A single row of bools, one for each entry of the file, holds for
    all new tokens. Alternatively each new token has a row, which also has a bool for each new entry. A token always
    attends to itself, and never to a later token.
    `priority`: -100 to 100. Among the waiting calls of one account, those with a higher priority get a seat in a step
    first. Priorities do not count between accounts, which take turns.
    `deadline`: seconds from now. TimedOut: the step that would end the call had not begun by then, and no token was
    appended.
    `attention`: "entries" or "pages". `dist.attention` has the attention that the new tokens gave to each entry of the
    file, or to each page of 32 entries. By default this is the sum over all heads and layers; with `by="layer"` there
    is a number for each layer and KV head. The distributions stay the same, bit for bit. TooLarge: the answer does not
    fit into a message; ask for pages.
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
    """Append tokens as `pred` does, without asking for a distribution; return the file's new length.

    `tokens` may be empty.

    >>> kv = sym.kv_create()
    >>> sym.kv_write(kv, [72, 105]), sym.kv_write(kv, [])
    (2, 2)
    """
    return channel_of(kv, "kv_write").run(write_script(kv, tokens, positions))


def pred_batch(preds: Iterable[Pred]) -> list[Dist | ReducedDist]:
    """Make many `pred` calls in one message to the daemon: for the beams of a search or the branches of a tree.

    >>> root = sym.kv_create()
    >>> _ = sym.kv_write(root, sym.tokenize("A tree"))
    >>> dists = sym.pred_batch([sym.Pred(sym.kv_fork(root), [token]) for token in (65, 66, 67)])
    >>> len(dists)
    3

    A batch has at most 256 calls, whose full rows must together fit the connection's result slots. The batch ends when
    all its calls have ended. Calls on one file keep their order. If a call fails, the daemon still makes the other
    calls: BatchFailed has the result of each. A wrong argument raises an error before any call is made; the message has
    the index of the wrong call.
    """
    calls = batch_of(preds)
    return batch_channel(calls).run(batch_script(calls))


def pred_script(wanted: Pred) -> Script[Dist | ReducedDist]:
    """Run one `pred`, as a script for event loops."""
    call = _request_of(wanted)
    try:
        reply = yield call
    except Invalid as error:
        raise _known(error, call.flags) from None
    return _dist_of(wanted.kv, call.flags, reply, wanted.top_k, wanted.logprobs)


def write_script(kv: OpenFile, tokens: Iterable[int], positions: Positions = None) -> Script[int]:
    request = write_request(kv, tokens, positions)
    if not request.args[0]:  # without tokens the call changes nothing, like a write(2) of no bytes
        return (yield from length_script(kv))
    reply = yield request
    return reply.args[2]


def batch_of(preds: Iterable[Pred]) -> list[Pred]:
    """Return the calls of a batch as a list. Invalid: `preds` is not iterable, or is text."""
    if not isinstance(preds, Iterable) or isinstance(preds, (str, bytes, bytearray)):
        raise Invalid(f"pred_batch() takes a list of sym.Pred(kv, tokens, …), not {shown(preds)}")
    return list(preds)


def batch_channel(preds: Sequence[Pred]) -> ClientChannel:
    """Return the connection of all files of a batch. BadHandle: the files are on different connections."""
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
    """Make the calls of a batch that `batch_channel` has checked."""
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
    """Return the request of a `pred`."""
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
    """Return positions for the request: none, only the first position, or one for each token."""
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
    """Return a deadline in whole microseconds, for the request. 0: no deadline."""
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
    """Return the error of a call, with the call's index in the batch."""
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
    """Return the error, or a clearer one if the daemon is too old to know SYM_ATTENTION."""
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
    """Return a mask as `struct sym_mask`: a bit for each bool, each row in words of 32 bits."""
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
    """Return a request as a frame of the ring, padding included."""
    num_bytes = HEADER_BYTES + len(call.payload)
    header = REQUEST_STRUCT.pack(num_bytes, call.op, 0, call.flags, 0, index, call.handle, *call.args)
    return header + call.payload + bytes(-len(call.payload) % FRAME_ALIGN)
