"""Requests that append: PRED, PRED_BATCH and GENERATE, as a program may send them."""

import json
from array import array

from libsym.abi import REQUEST_STRUCT, ROWS_LAST, Op
from libsym.channel.server import Request
from libsym.rows.sampler import Sampler
from tests.scheduler.rings import padded

GREEDY = Sampler.greedy().block()


def int32(*numbers):
    return array("i", numbers).tobytes()


def pred(payload, *, flags=ROWS_LAST, handle=1, args=(1, 0, 0, 0), number=1):
    return Request(Op.PRED, flags, number, handle, args, payload)


def generate(payload, *, handle=1, args=(1, 0, 4, 0), number=1):
    return Request(Op.GENERATE, 0, number, handle, args, payload)


def frame(request, *, op=Op.PRED, frame_bytes=None, zero=0):
    """Return a request as it lies in a batch; numbers of its header may be wrong."""
    size = 64 + len(request.payload) if frame_bytes is None else frame_bytes
    header = REQUEST_STRUCT.pack(size, op, zero, request.flags, 0, request.id, request.handle, *request.args)
    return padded(header + request.payload)


def batch(count, payload, number=1):
    return Request(Op.PRED_BATCH, 0, number, 0, (count, 0, 0, 0), payload)


def options(**given):
    return json.dumps(given).encode()


def cancel(number, of=5):
    return Request(Op.CANCEL, 0, number, 0, (of, 0, 0, 0), b"")
