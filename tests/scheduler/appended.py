"""Requests that append: PRED, PRED_BATCH and GENERATE, as a program may send them, and a gate for them."""

import json
from array import array

import trio
import trio.testing

from libsym.abi import REQUEST_STRUCT, ROWS_LAST, Op
from libsym.channel.server import Request
from libsym.rows.sampler import Sampler
from tests.scheduler.bench import ME, Bench
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


class Requests(Bench):
    def send(self, *requests, prepare=lambda _lip: None):
        """Send requests of one program to its file (handle 1) and to one that it may read (2); their replies."""
        lip = self.lip()
        prepare(lip)

        async def scenario():
            file = self.file()
            lip.add(file)
            reading = self.fs.kv_create(ME, "read.kv")
            lip.add(self.fs.kv_open(ME, "read.kv", write=False))
            async with trio.open_nursery() as nursery:
                for request in requests:
                    self.gate.handle(lip, request, nursery)
                lip.channel.asked()
                while len(lip.channel.over) < len({request.id for request in requests}):
                    await trio.testing.wait_all_tasks_blocked()
                    await trio.sleep(0.001)
            self.tokens = file.table.read()[0].tolist()
            assert lip.calls == {}
            assert lip.channel.num_lent_slots == 0, "every call is answered"
            assert lip.under_way.num_bytes == 0
            await self.gate.see_off(lip)
            self.fs.kv_remove(ME, "read.kv")
            self.fs.kv_close(reading)

        self.run_test(scenario)
        return lip.channel
