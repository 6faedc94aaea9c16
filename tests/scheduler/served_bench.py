"""A daemon's gate, and programs with rings, whose calls the core carries out by itself if it may."""

import json
import os
import struct
from collections import Counter
from typing import Any

import numpy as np
import trio

from kvfs.names.content import KvFile
from kvfs.names.tree import Credentials
from libsym.abi import RANGE_END, REPLY_STRUCT, ROWS_LAST, ROWS_NONE, Op
from libsym.channel.server import MAX_TAKEN, ServerChannel
from scheduler._loop import lib
from scheduler.connection.lip import Lip
from scheduler.programs.limits import NO_LIMITS
from tests.scheduler.bench import VOCAB_SIZE, Bench
from tests.scheduler.rings import Rings, frame_of

ANN, BOB = Credentials(1001, 1001), Credentials(1002, 1002)
FREE = 0
"""State of a slot."""
SAME = ("number", "mode", "uid", "gid", "opens")
SAME_OF_KV = ("born_length", "cuts", "fewest", "forked_from", "hits", "lost", "users")


def framed(op, handle=0, *args, flags=0, payload=b""):
    """A call, as `Side.ask` sends it."""
    return op, flags, handle, (*args, 0, 0, 0, 0)[:4], payload


CREATE, PING = framed(Op.KV_CREATE, 0, 0o600), framed(Op.PING)


def fork(handle):
    return framed(Op.KV_FORK, handle, 0o600)


def pred(handle, *tokens, flags=ROWS_LAST):
    return framed(Op.PRED, handle, len(tokens), flags=flags, payload=struct.pack(f"={len(tokens)}i", *tokens))


def length(handle):
    return framed(Op.KV_READ, handle, RANGE_END)


def close(handle):
    return framed(Op.KV_CLOSE, handle)


class Side(Bench):
    """`run_test` runs a scenario beside the scheduler; the books are right after it, and after its program has gone."""

    def __init__(self, directory, *, is_served=True, is_narrow=True):
        """`is_narrow`: the gate leaves files in the run after each call, as the core does. Else the core reserves more,
        and files share other pages.
        """
        directory.mkdir(exist_ok=True)
        super().__init__(directory, num_pages=512)
        self.is_served, self.is_narrow = is_served, is_narrow
        self.fs.volume.tree.root.mode = 0o1777
        self.rings: dict[Lip, Rings] = {}
        self.lips = [self.connect(ANN), self.connect(ANN), self.connect(BOB)]
        self.program = self.lips[0]

    def run_test(self, scenario):
        async def main():
            async with trio.open_nursery() as self.nursery:
                self.nursery.start_soon(self.batches.run)
                await scenario()
                self.fs.check()
                await self.gate.see_off(self.program)
                await self.until(lambda: not self.batches.num_waiting)
                self.nursery.cancel_scope.cancel()

        trio.run(main)
        self.fs.check()

    def connect(self, creds, limits=NO_LIMITS):
        lip = Lip(4711, creds, ServerChannel.create(VOCAB_SIZE))
        lip.launched = self.programs.of_process(4711, creds.uid, creds.gid)
        lip.launched.limits = limits
        self.gate.welcome(lip)
        self.rings[lip] = Rings(lip.channel.memory[1])
        if not self.is_served:
            lip.channel.serve_by(0, 0, 0)
        return lip

    async def ask(self, *frames, lip=None):
        """Send calls at once; returns the replies, in the order of the calls."""
        lip, found = lip or self.program, list[tuple]()
        self.send(frames, lip)
        os.eventfd_write(lip.channel.doorbell, 1)
        with trio.fail_after(20):
            while len(found) < len(frames):
                with trio.move_on_after(0.0002):
                    await trio.lowlevel.wait_readable(lip.channel.doorbell)
                self.handle_all(lip)
                found += self.replies(frames, lip)
        return sorted(found)

    async def call(self, frame, lip=None):
        """Return the first number of a call's answer."""
        ((_, code, _, args, _),) = await self.ask(frame, lip=lip)
        assert not code
        return args[0]

    async def branch(self, num_entries):
        """Return a handle of a fork of file 1, which is made."""
        file = await self.call(CREATE)
        await self.ask(pred(file, *[7] * num_entries, flags=ROWS_NONE))
        return await self.call(fork(file))

    async def computing(self, frame):
        """A call is in a step, which goes on when `steps.gate` is set."""
        self.steps.hold()
        self.send([frame])
        self.handle_all()
        await self.until(lambda: self.steps.entered.acquire(blocking=False))

    def send(self, frames, lip=None):
        lip = lip or self.program
        frames = [
            frame_of(op, number, handle, args, payload, flags)
            for number, (op, flags, handle, args, payload) in enumerate(frames, 1)
        ]
        assert self.rings[lip].write(b"".join(frames))

    def handle_all(self, lip=None):
        lip = lip or self.program
        lip.channel.clear_doorbell()
        while True:
            for request in self.gate.receive(lip, MAX_TAKEN):
                self.gate.handle(lip, request, self.nursery)
            if lip.channel.is_full or lip.channel.arm():
                break

    def replies(self, frames=(), lip=None):
        lip = lip or self.program
        found = []
        for number, err, has_more, args, payload in self.rings[lip].read():
            op = frames[number - 1][0] if frames and not err else None
            shown = payload if err else _without_times(payload)
            if op == Op.PRED:
                args, shown = self.row(lip, args, payload)  # noqa: PLW2901
            elif op == Op.PRED_BATCH:
                shown = [*self.calls(lip, payload)]
            found.append((number, err, has_more, [*args], shown))
        return found

    async def answered(self, frames=()):
        """Return the replies that come next, to these calls."""
        with trio.fail_after(20):
            while not (found := self.replies(frames)):  # noqa: ASYNC110 - a ring has no event
                await trio.sleep(0.001)
        return found

    def row(self, lip, args, payload):
        """Return the row that a PRED is answered by, wherever it is, if there is one; its slot is free again."""
        slot, num_rows, *_ = args
        if not num_rows or slot < 0:
            return args, payload
        row = np.array(lip.channel.row(slot))
        np.frombuffer(lip.channel.memory[1], np.uint32)[lip.channel._plan.states_offset // 4 + slot] = FREE
        return args[1:], row.tobytes()

    def calls(self, lip, payload):
        """Give the answers of a batch's calls."""
        at = 0
        while at < len(payload):
            size, err, number, *args, _, _, _ = REPLY_STRUCT.unpack_from(payload, at)
            body = payload[at + 64 : at + size]
            yield number, err, (args, body) if err else self.row(lip, args, body)
            at += -(-size // 64) * 64

    @property
    def num_calls(self):
        """Return the number of calls by operation, served by C and by Python."""
        return self.gate.num_calls + Counter({Op.PRED: self.batches.statistics.num_taken_calls})

    def look_at(self, handle, lip=None):
        """Look at a file as eviction does."""
        core = lib.sym_handle_find((lip or self.program).handles.core, handle % 2**64)
        table: Any = self.fs.volume.pager.residents.table_of(core.row) if core else None
        return table and table.length

    def facts(self):
        """Return all that there is, whoever has made it; nothing is changed."""
        self.batches.sync()
        used = [lip.program.used for lip in self.lips]
        accounts = [self.fs.pool.accounts.of(creds.uid) for creds in (ANN, BOB)]
        return [
            [(len(lip.handles), [*lip.handles], lip.program.page_seconds.num_pages) for lip in self.lips],
            [(each.num_files, each.holdings.num_bytes) for each in accounts],
            [(each.calls, each.failed_calls, each.tokens, each.tokens_in, each.tokens_out) for each in used],
            self.batches.statistics.num_calls,
            [lip.program.page_seconds.num_distinct_pages() for lip in self.lips if self.is_narrow],
            (len(self.tree), self.tree.next_number, self.fs.volume.num_kv_versions, self.num_calls),
        ]

    async def files(self):
        """Every file, after the audit of the books, which makes the objects of all; and pages, when no call has any."""
        self.fs.check()
        for lip in self.lips:
            for handle in lip.handles:
                self.batches.exclusive(lip.handles[handle], lambda: None)
        await self.until(lambda: not self.batches.num_waiting)
        accounts = [self.fs.pool.accounts.of(creds.uid) for creds in (ANN, BOB)]
        references = self.fs.pool.refcount[: self.fs.pool.num_pages]
        sizes: list[Any] = [[each.num_bytes for each in accounts], sorted(references.tolist())]
        found = sizes if self.is_narrow else []
        for inode in sorted(self.tree, key=lambda inode: inode.number):
            kv = inode.content
            assert inode.atime_ns <= inode.mtime_ns <= inode.ctime_ns or inode.is_directory
            shown = {name: getattr(inode, name) for name in SAME}
            if isinstance(kv, KvFile):
                shown |= {name: getattr(kv, name) for name in SAME_OF_KV} | {"warm": bool(kv.used_s)}
                shown |= {"length": kv.table.length, "owner": kv.table.owner}
            found.append(shown)
        return found

    async def until(self, condition):
        with trio.fail_after(20):
            while not condition():  # noqa: ASYNC110 - of the daemon's, which has no event
                await trio.sleep(0.001)

    async def see_off(self):
        for lip in self.lips:
            await self.gate.see_off(lip)


def _without_times(payload):
    if isinstance(payload, list):
        return payload
    try:
        found = json.loads(payload)
    except ValueError:
        return payload
    if not isinstance(found, dict):
        return found
    return {name: value for name, value in found.items() if not name.endswith("time_ns")}
