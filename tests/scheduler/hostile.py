"""Frames that are almost right, for the daemon's own gate: recorded from libsym, mutated, and put into a real ring.

`recorded_frames` has real calls of libsym made, and keeps each as it arrived. `Mutator` breaks frames. `Fuzzer` has a
gate, a file system and a scheduler of its own, and no process between: it writes frames into the shared memory of a
connection as a program would, has the gate take them, and reads the replies. What must be true is in `Fuzzer`.
"""

import errno
import json
import logging
import math
import mmap
import os
import random
import struct
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

import libsym as sym
from decoder.cpu.backend import CpuDecoder
from kvfs.names.tree import Credentials
from libsym import abi
from libsym.abi import HEADER_BYTES, MAX_FRAME_BYTES, REQUEST_STRUCT, Op
from libsym.channel.server import MAX_OPEN, Request, ServerChannel
from libsym.errors import ProtocolError, SymError
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.call import FileCall
from scheduler.batch.states import CallState
from scheduler.connection.lip import Lip
from scheduler.connection.under_way import num_calls_in
from scheduler.doors.listener import Listener, bind
from scheduler.programs.link import Link, Message
from scheduler.programs.program import Program
from tests.scheduler.bench import ME, VOCAB_SIZE, Bench
from tests.scheduler.rings import STATES, SUBMIT_TAIL, Rings, frame_of, padded

ATTACKER = 1001
PREFIX = [72, 105, 33, 10] * 10
"""Tokens of the file that every connection of an attacker has forks of."""
NUM_HANDLES = 8
CONNECTION_FRAMES = 2_000
CHUNK = 200
"""Frames written at once."""
SETTLED_S = 30
NUM_PAGES = 160

WHOLE = [0, 1, 2, 3, 4, 31, 32, 63, 64, 255, 256, 257, 258, 259, 1023, 1024, 4096, 1 << 20, (1 << 31) - 1, 1 << 31]
WHOLE += [(1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 2, (1 << 64) - 64]
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 5e-324, 1e38, math.inf, -math.inf, math.nan, 1.0 + 2**-23)
STRANGE: list[Any] = [0, 1, -1, 2, 259, 2**31, 2**63, 10**30, 1.0, True, False, None, "", "x", "\ud800", [], [0], {}]
STRANGE += [[[1]], 1e999]
INSERTED = (b"[", b"{", b'"', b",", b"0", b"9" * 50, b"-", b"1e999", b"\\u0000", b"null", b"NaN", b"[" * 3000, b"\xff")
SHARES = {Op.PRED_BATCH: 12, Op.GENERATE: 12, Op.PRED: 5}
"""How often, beside 1 for any other operation that has a payload."""
FAMILY = 5
"""Frames of which each but the first is the first with a byte or an argument changed: making a new one takes as long as
taking it."""
HEAVY = frozenset({Op.CHECK, Op.SCRUB, Op.TRACE, Op.STAT, Op.CHAT_TEMPLATE, Op.CHAT_TOKENS, Op.VOCABULARY})


# ---- recording


def recorded_frames() -> list[Request]:
    """Every call that libsym makes for `calls_of_libsym`, as the gate takes it."""
    found = list[Request]()
    with tempfile.TemporaryDirectory(prefix="symphony-recorded-") as directory:
        bench = Bench(Path(directory), num_pages=NUM_PAGES)
        handle = bench.gate.handle

        def record(lip: Lip, request: Request, nursery: trio.Nursery) -> None:
            found.append(request)
            handle(lip, request, nursery)

        bench.gate.handle = record  # type: ignore[method-assign]
        path = Path(directory) / "symphony.sock"
        over, bound = threading.Event(), bind(path)

        async def main() -> None:
            with trio.socket.from_stdlib_socket(bound) as listening:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(bench.batches.run)
                    nursery.start_soon(Listener(bench.gate, VOCAB_SIZE).run, listening)
                    while not over.is_set():  # noqa: ASYNC110 - a thread sets it
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()

        daemon = threading.Thread(target=trio.run, args=(main,))
        daemon.start()
        try:
            with sym.connection(str(path)):
                calls_of_libsym()
        finally:
            over.set()
            daemon.join()
    return found


def calls_of_libsym() -> None:
    """Calls in every form, PRED_BATCH and GENERATE above all; refused ones are recorded, too."""
    kv = sym.kv_create("recorded.kv", mode=0o666)
    sym.kv_write(kv, PREFIX)
    sampler = sym.Sampler(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias={5: 1.0, 7: -math.inf}, seed=3,
    )  # fmt: skip
    forms: list[dict[str, Any]] = [
        {},
        {"positions": 77},
        {"positions": [50, 60, 70], "rows": "all"},
        {"top_k": 3, "rows": "all"},
        {"logprobs": [1, 2, 3], "sampler": sampler},
        {"sampler": sym.Sampler.greedy(), "priority": 5, "deadline": 10.0},
        {"attention": "entries", "by": "layer"},
        {"attention": "pages", "top_k": 2},
    ]
    for form in forms:
        sym.pred(sym.kv_fork(kv), [5, 6, 7], **form)
        sym.pred_batch([sym.Pred(sym.kv_fork(kv), [5, 6, 7], **form) for _ in range(2)])
    for mask in ([True] * len(PREFIX), [[True] * (len(PREFIX) + 3)] * 3):
        sym.pred(sym.kv_fork(kv), [5, 6, 7], mask=mask)
        sym.pred_batch([sym.Pred(sym.kv_fork(kv), [5, 6, 7], mask=mask)])
    sym.pred_batch([sym.Pred(sym.kv_fork(kv), [5, 6, 7], **form) for form in forms])
    sym.pred_batch([sym.Pred(sym.kv_create(), [5]) for _ in range(40)])
    generations: list[dict[str, Any]] = [
        {},
        {"sampler": sampler, "stop": ["\n\n", "stop", 3, 4]},
        {"grammar": sym.Grammar.regex("[ab]{3}")},
        {"draft": "ngram", "logprobs": 2},
        {"draft": sym.Ngram(max_tokens=3, min_match=2), "deadline": 5.0, "priority": -3},
        {"stop_at_end": False, "stop": "é"},
        {"positions": 90, "logprobs": 0, "seed": 5},
    ]
    for options in generations:
        list(sym.generate(sym.kv_fork(kv), [5, 6, 7], max_tokens=4, **options))
    calls_of_files(kv)
    calls_of_others()


def calls_of_files(kv: sym.KV) -> None:
    sym.kv_fork(kv, "fork.kv").close()
    sym.kv_extract(kv, [(0, 2), (5, 9)], "extract.kv").close()
    sym.kv_merge([kv, "fork.kv"], "merged.kv").close()
    with suppress(sym.NotFound):
        sym.kv_fetch("east", "merged.kv", "fetched.kv")
    with suppress(sym.NotFound):
        sym.fleet_place("merged.kv")
    with suppress(sym.NotFound):
        sym.fleet_machines("drain", "east")
    sym.kv_advise(kv, sym.PIN(1.0), sym.PRIORITY(3), sym.UNPIN)
    sym.kv_advise("fork.kv", sym.TTL(100.0), sym.WILLNEED)
    sym.kv_mkdir("made")
    sym.kv_rename("fork.kv", "made/fork.kv")
    sym.kv_chmod("made/fork.kv", 0o644)
    sym.kv_list("made")
    sym.kv_stat("merged.kv")
    sym.kv_du("made")
    sym.kv_open("merged.kv", "rw").close()
    sym.kv_open_or_compute("claimed.kv", lambda new: sym.kv_write(new, [1, 2])).close()
    with suppress(SymError):
        sym.kv_sync(kv)
    sym.kv_lock(kv)
    sym.kv_unlock(kv)
    sym.kv_truncate(kv, len(PREFIX))
    sym.kv_read(kv)
    sym.kv_hot(5)
    sym.kv_changes(sym.kv_changes().since, timeout=0.01)
    sym.kv_remove("extract.kv")


def calls_of_others() -> None:
    for text in ("what is asked 世界 <eos>", "a long text, for a worker " * 400):
        sym.detokenize(sym.tokenize(text))
    sym.vocabulary()
    messages = [{"role": "user", "content": "x"}]
    for chat in (sym.chat_template, sym.chat_tokens):
        with suppress(SymError):
            chat(messages, tools=[])
    sym.model_info()
    sym.model_info("tiny")
    sym.kv_create(model="tiny").close()
    sym.getrusage()
    for data in ("text", b"bytes", {"json": [1]}):
        sym.send(sym.getpid(), data)
        sym.recv(timeout=1.0)
    sym.subscribe("topic")
    sym.send("topic", "data")
    sym.recv("topic", timeout=1.0)
    sym.unsubscribe("topic")
    sym.programs(ended=True)
    for child in (partial(sym.spawn, "a.py", ["b"]), partial(sym.wait, "1f2e3d4c"), partial(sym.kill, "1f2e3d4c")):
        with suppress(SymError):
            child()


# ---- mutation


class Mutator:
    """Breaks recorded frames in one to three places."""

    def __init__(self, frames: list[Request], seed: int, fatal_share: float = 0.0004) -> None:
        """`fatal_share`: of frames that are none, and cost the connection."""
        self.rng, self._fatal_share = random.Random(seed), fatal_share
        self.unnamed_share = 0.01
        """Share of calls without an id, which nobody can cancel."""
        by_op = defaultdict[Op, list[Request]](list)
        for each in [*frames, *_frames_of_no_call()]:
            by_op[each.op].append(each)
        assert {Op.PRED, Op.PRED_BATCH, Op.GENERATE} <= by_op.keys()
        self._by_op = list(by_op.values())
        self._shares = [0.0]
        for op, found in by_op.items():
            share = SHARES.get(op, 0.05 if op in HEAVY else 1 if any(each.payload for each in found) else 0.2)
            self._shares.append(self._shares[-1] + share)
        self._payloads = [each.payload for each in frames if each.payload]
        self._preds = by_op[Op.PRED]
        ways = [self._number, self._number, self._number, self._bits, self._byte, self._cut, self._longer]
        self._ways: list[Callable[[bytearray], None]] = [*ways, self._gap, self._twice, self._splice]

    def frames(self, first: int) -> Iterator[tuple[bytes, int]]:
        """A mutated frame and its id, `first` or 0; then others like it, with one byte or argument more broken."""
        frame, number = self._frame(first)
        yield frame, number
        frame_bytes = min(len(frame), int.from_bytes(frame[:4], "little"))
        for number in range(first + 1, first + FAMILY):
            data = bytearray(frame)
            struct.pack_into("=Q", data, 16, number)
            if frame_bytes > HEADER_BYTES + 4 and self.rng.random() < 0.9:
                at = HEADER_BYTES + int(self.rng.random() * (frame_bytes - HEADER_BYTES))
                data[at] = (data[at] + self.rng.choice((1, -1, 2, 16, 64, 128))) % 256
            else:
                struct.pack_into("=Q", data, 32 + 8 * int(self.rng.random() * 4), self.rng.choice(WHOLE))
            yield bytes(data), number

    def _frame(self, number: int) -> tuple[bytes, int]:
        rng = self.rng
        share = rng.random() * self._shares[-1]
        place = next(at for at, end in enumerate(self._shares[1:]) if share < end)
        request = self._mutated(rng.choice(self._by_op[place]), 3)
        if request.op is Op.CANCEL and rng.random() < 0.8:
            request = request._replace(args=(max(1, number - int(rng.random() * CHUNK)), 0, 0, 0))
        number = number if rng.random() >= self.unnamed_share else 0
        header = [HEADER_BYTES + len(request.payload), request.op, 0, request.flags, 0, number, request.handle]
        if rng.random() < 0.003:
            header[1] = rng.choice((0, 999, 65535, rng.choice(list(Op))))
        if rng.random() < self._fatal_share:
            at = rng.choice((0, 2, 4))
            header[at] = rng.choice((0, 1, 63, MAX_FRAME_BYTES + 1) if at == 0 else (1, (1 << 16) - 1))
        raw = REQUEST_STRUCT.pack(*header, *request.args) + request.payload
        return padded(raw), number

    def _mutated(self, request: Request, most: int) -> Request:
        rng = self.rng
        if rng.random() < 0.03:
            return request._replace(handle=self._handle(request.handle))
        for _ in range(1 + int(rng.random() * most)):
            request = self.mutated_once(request)
        return request._replace(handle=self._handle(request.handle))

    def mutated_once(self, request: Request) -> Request:
        rng = self.rng
        chance = rng.random()
        if chance < 0.15:
            args, at = list(request.args), int(rng.random() * 4)
            args[at] = _signed(rng.choice(WHOLE)) if rng.random() < 0.5 else _signed(args[at] + rng.choice((-1, 1, 2)))
            return request._replace(args=tuple(args))  # type: ignore[arg-type]
        if chance < 0.23:
            flags = request.flags ^ 1 << int(rng.random() * 8) if rng.random() < 0.8 else rng.choice(WHOLE) % 2**32
            return request._replace(flags=flags)
        if chance < 0.26:
            return request._replace(handle=rng.choice(WHOLE) % 2**64)
        if request.op is Op.PRED_BATCH and chance < 0.85:
            return self._in_a_batch(request)
        if chance < 0.55 and (begin := _json_begin(request)) is not None:
            return request._replace(payload=request.payload[:begin] + self._json(request.payload[begin:]))
        payload = bytearray(request.payload)
        rng.choice(self._ways)(payload)
        return request._replace(payload=bytes(payload[: MAX_FRAME_BYTES - HEADER_BYTES]))

    def _in_a_batch(self, request: Request) -> Request:
        """Change, repeat or remove one call of a batch; the count is adjusted."""
        rng, calls = self.rng, _calls_of(request.payload)
        if not calls:
            return request
        at = int(rng.random() * len(calls))
        chance = rng.random()
        if chance < 0.1:
            calls.insert(at, calls[at])
        elif chance < 0.2:
            del calls[at]
        elif chance < 0.4:
            calls[at] = self._mutated(rng.choice(self._preds), 2)
        else:
            calls[at] = self._mutated(calls[at], 2)
        payload = b"".join(_packed(each) for each in calls)
        return request._replace(args=(len(calls), *request.args[1:]), payload=payload)

    def _handle(self, handle: int) -> int:
        """Return a handle that is most likely open."""
        return 1 + int(self.rng.random() * (NUM_HANDLES + 1)) if 0 < handle < 1 << 20 else handle

    # ---- of a payload

    def _number(self, data: bytearray) -> None:
        """A field at an extreme, or one off."""
        rng = self.rng
        form = rng.choice(("I", "I", "I", "Q", "f", "d"))
        size = struct.calcsize(form)
        if len(data) < size:
            return
        at = 4 * int(rng.random() * ((len(data) - size) // 4 + 1))
        if form in "fd":
            struct.pack_into(f"={form}", data, at, rng.choice(REAL))
        elif rng.random() < 0.3:
            value = struct.unpack_from(f"={form}", data, at)[0] + rng.choice((-1, 1))
            struct.pack_into(f"={form}", data, at, value % (1 << 8 * size))
        else:
            struct.pack_into(f"={form}", data, at, rng.choice(WHOLE) % (1 << 8 * size))

    def _bits(self, data: bytearray) -> None:
        for _ in range(self.rng.choice((1, 1, 2, 8)) if data else 0):
            data[int(self.rng.random() * len(data))] ^= 1 << int(self.rng.random() * 8)

    def _byte(self, data: bytearray) -> None:
        if data:
            data[int(self.rng.random() * len(data))] = int(self.rng.random() * 256)

    def _cut(self, data: bytearray) -> None:
        del data[int(self.rng.random() * (len(data) + 1)) :]

    def _longer(self, data: bytearray) -> None:
        data += bytes(self.rng.choice((1, 2, 3, 4, 8, 36, 64, 300)))

    def _gap(self, data: bytearray) -> None:
        at = int(self.rng.random() * (len(data) + 1))
        del data[at : at + self.rng.choice((1, 2, 4, 8, 16, 64))]

    def _twice(self, data: bytearray) -> None:
        at = int(self.rng.random() * (len(data) + 1))
        data[at:at] = data[at : at + self.rng.choice((1, 4, 8, 64))]

    def _splice(self, data: bytearray) -> None:
        """The end of another payload, behind the beginning of this one or aligned with it."""
        other = self.rng.choice(self._payloads)
        at = int(self.rng.random() * (len(data) + 1))
        data[at:] = other[min(at, len(other)) :] if self.rng.random() < 0.5 else other

    def _json(self, text: bytes) -> bytes:
        """Another value, name or order in it; or other bytes."""
        rng = self.rng
        if rng.random() < 0.3:
            at = int(rng.random() * (len(text) + 1))
            return text[:at] + rng.choice(INSERTED) + text[at + int(rng.random() * 3) :]
        try:
            whole = json.loads(text.decode())
        except (ValueError, RecursionError):
            return text
        node = whole
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
                node = node[key]
                continue
            match int(rng.random() * 4):
                case 0:
                    del node[key]
                case 1 if type(node[key]) is int:
                    node[key] += rng.choice((-1, 1, 1000))
                case _:
                    node[key] = rng.choice(STRANGE)
            break
        return json.dumps(whole).encode()


def _frames_of_no_call() -> list[Request]:
    """Return requests that the ABI allows and `calls_of_libsym` does not make."""
    allowed = bytes(4 * -(-VOCAB_SIZE // 32) - 1) + b"\x07"
    tokens = np.array([5, 6, 7], np.int32).tobytes()
    block = sym.Sampler(temperature=0.5, seed=1, presence_penalty=0.1).block([1, 2], [3], allowed=allowed)
    reduction = np.array([2, 0, 1, 0], np.uint32).tobytes() + block
    return [
        Request(Op.GENERATE, 0, 1, 1, (3, 0, 2, 0), tokens + block + b'{"stop_at_end": true, "turn_at": 1}'),
        Request(Op.CANCEL, 0, 1, 0, (1, 0, 0, 0), b""),
        Request(Op.CONFINE, 0, 1, 0, (0, 0, 0, 0), b"made"),
        Request(Op.PRED, abi.ROWS_ALL | abi.REDUCED, 1, 1, (3, 0, 0, 0), tokens + reduction),
    ]


def _json_begin(request: Request) -> int | None:
    """Return the offset of JSON in a payload; None: it has none."""
    if request.op is Op.GENERATE:
        begin = request.payload.rfind(b'{"stop_at_end"')
        return None if begin < 0 else begin
    return 0 if request.payload[:1] in (b"{", b"[") else None


def _calls_of(payload: bytes) -> list[Request]:
    found, at = [], 0
    while at + HEADER_BYTES <= len(payload):
        frame_bytes, op, _, flags, _, number, handle, *args = REQUEST_STRUCT.unpack_from(payload, at)
        if op != Op.PRED or frame_bytes < HEADER_BYTES:
            break
        body = payload[at + HEADER_BYTES : at + frame_bytes]
        found.append(Request(Op.PRED, flags, number, handle, tuple(args), body))
        at += -(-frame_bytes // 64) * 64
    return found


def _packed(request: Request) -> bytes:
    return frame_of(request.op, request.id, request.handle, request.args, request.payload, request.flags)


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


# ---- the fuzzer


class AnsweringLink(Link):
    """A launcher that starts nothing, and answers."""

    async def ask(self, message: Message, **_options: Any) -> Message:
        await trio.lowlevel.checkpoint()
        return {"id": message.get("id", "1f2e3d4c"), "name": "a", "pid": 1, "status": 0, "reason": None}

    def demand(self, message: Message) -> None:
        pass


class Client:
    """The program's side of a real region, without libsym: frames go in, replies come out and are looked at."""

    def __init__(self, gate: Any, uid: int) -> None:
        self.channel = ServerChannel.create(VOCAB_SIZE, region_bytes_limit=0)  # 64 slots: some calls have to wait
        self.region = mmap.mmap(self.channel.fds[0], 0)
        self.lip = Lip(os.getpid(), Credentials(uid, uid), self.channel)
        self.lip.launched = Program.of_nobody(os.getpid(), uid, uid)
        self.lip.launched.is_launched = True
        self.lip.launched.link = AnsweringLink(uid, uid)
        gate.welcome(self.lip)
        self.open: set[int] = set()
        """Ids that are to be answered."""
        self.outcomes: Counter[int] = Counter()
        """Final answers, by errno."""
        self._rings = Rings(self.region)

    def write(self, frame: bytes) -> bool:
        """False: it has no room yet."""
        return self._rings.write(frame)

    def spoil(self, tail: int) -> None:
        self._rings.words[SUBMIT_TAIL // 8] = tail

    def read(self, *, keep_rows: bool = False) -> None:
        """Take all replies, and give back the slots that they bring."""
        for number, code, has_more, _, payload in self._rings.read():
            assert number in self.open, f"{number} is answered twice, or was never asked"
            if code:
                text = payload.decode()
                assert text, f"error {code} says nothing"
                assert "inside the daemon" not in text, text
            if not has_more:
                self.open.discard(number)
                self.outcomes[code] += 1
        if not keep_rows:
            self.region[STATES : STATES + 4096] = bytes(4096)

    def close(self) -> None:
        self._rings.close()
        self.region.close()


class MaybeComputing(BatchScheduler):
    """Computes nothing unless it is told to: then a call that was submitted, and has its rows, ends with ECANCELED."""

    computes = False

    def submit(self, call: FileCall) -> None:
        if self.computes:
            super().submit(call)
        elif call.state is not CallState.WAITS_FOR_SLOTS:
            self.have_rows(call)

    def have_rows(self, call: FileCall) -> None:
        if self.computes:
            super().have_rows(call)
        else:
            self.refuse(call, SymError("it is not computed here", errno.ECANCELED))

    def refuse(self, call: FileCall, error: SymError) -> None:
        if self.computes:
            super().refuse(call, error)
        else:
            call.move(CallState.OVER)
            call.let_go()
            call.end(error)

    def cancel(self, call: FileCall) -> None:
        if self.computes:
            super().cancel(call)
        elif call.state is CallState.WAITS_FOR_SLOTS:
            self.have_rows(call)


class FuzzedBench(Bench):
    @cached_property
    def decoder(self) -> CpuDecoder:
        return CpuDecoder(self.model.config, self.model.weights, self.arena, 1)

    @cached_property
    def batches(self) -> MaybeComputing:
        config, native = self.model.config, self.decoder.native
        return MaybeComputing(
            self.fs, self.decoder, config.max_positions, config.vocab_size, self._limits, native=native
        )


class Fuzzer:
    """Throws mutated frames at a gate. After each connection these hold, or AssertionError:

    - every request that had an id was answered once; no answer tells of an exception that is no SymError, and nothing
      was logged as an error;
    - used and free pages are all pages, what the program had is free again, and nobody's handle is open;
    - no result slot is lent, no byte of a request is counted, no call waits;
    - an honest program's valid call gets the row that it always got.
    """

    def __init__(self, frames: list[Request], seed: int, computing: int = 12) -> None:
        """`computing`: of so many connections one has its calls computed; other calls end where they would begin."""
        self._computing = computing
        self.mutator = Mutator(frames, seed)
        self.rng = random.Random(seed + 1)
        self.outcomes: Counter[int] = Counter()
        self.num_frames = self.num_dropped = self.num_connections = 0

    def run(self, count: int) -> None:
        """Send `count` frames through one daemon's gate."""
        with tempfile.TemporaryDirectory(prefix="symphony-hostile-") as directory, _no_errors_logged():
            bench = FuzzedBench(Path(directory), num_pages=NUM_PAGES)
            bench.fs.kv_chmod(ME, ".", 0o777)
            trio.run(self._run, bench, count)

    async def _run(self, bench: FuzzedBench, count: int) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.batches.run)
            bench.batches.computes = True
            template = bench.fs.kv_create(ME, None, 0o600)
            result = bench.submit(template, PREFIX)
            await result.wait()
            expected = await self._honest_row(bench, template)
            end = self.num_frames + count
            while self.num_frames < end:
                bench.batches.computes = self.num_connections % self._computing == 0
                await self._connection(bench, template, min(end - self.num_frames, CONNECTION_FRAMES))
                bench.batches.computes = True
                assert np.array_equal(await self._honest_row(bench, template), expected)
            bench.fs.kv_close(template)
            nursery.cancel_scope.cancel()

    async def _honest_row(self, bench: FuzzedBench, template: Any) -> Any:
        """Return the row of a valid call on a fork."""
        fork = bench.fs.kv_fork(ME, template, None)
        with trio.fail_after(SETTLED_S):
            (row,) = await bench.submit(fork, [5, 6, 7]).wait()
        bench.fs.kv_close(fork)
        return row

    async def _connection(self, bench: FuzzedBench, template: Any, count: int) -> None:
        free = bench.fs.pool.num_free
        client = Client(bench.gate, self.rng.choice((0, ATTACKER)))
        lip = client.lip
        for number in range(NUM_HANDLES):
            file = bench.fs.kv_fork(lip.credentials, template, f"f{number}.kv" if number < 2 else None)
            lip.add(file)
        file = bench.fs.kv_open(lip.credentials, "f0.kv", write=False)
        lip.add(file)
        is_killed = self.rng.random() < 0.5
        """Whether the connection goes with calls under way; else all calls are answered first."""
        self.mutator.unnamed_share = 0.01 if is_killed else 0
        async with trio.open_nursery() as nursery:
            try:
                await self._attack(bench, client, nursery, count, goes=is_killed)
                if not is_killed:
                    await self._settle(bench, client)
            except ProtocolError:
                self.num_dropped += 1
            nursery.cancel_scope.cancel()
        await bench.gate.see_off(lip)
        self.outcomes += client.outcomes
        self.num_connections += 1
        client.close()
        await self._check(bench, lip, free)

    async def _attack(
        self, bench: FuzzedBench, client: Client, nursery: trio.Nursery, count: int, *, goes: bool
    ) -> None:
        number = 0
        while count > 0:
            for _ in range(-(-min(CHUNK, count) // FAMILY)):
                for frame, call_id in self.mutator.frames(number + 1):
                    while not client.write(frame):
                        await self._take(bench, client, nursery)
                    if call_id:
                        client.open.add(call_id)
                number += FAMILY
            count -= CHUNK
            self.num_frames += CHUNK
            if self.rng.random() < 0.003:
                client.spoil(self.rng.choice(WHOLE))
            if goes and count <= 0:
                client.read()
                self._take_once(bench, client, nursery)
                return
            await self._take(bench, client, nursery)
            if bench.batches.computes and self.rng.random() < 0.5:
                number = await self._decode_loop(bench, client, nursery, number)

    async def _take(self, bench: FuzzedBench, client: Client, nursery: trio.Nursery) -> None:
        """Take calls as the listener does, until the ring is empty."""
        lip, keep_rows = client.lip, self.rng.random() < 0.3
        while True:
            lip.slots.serve()
            requests = self._take_once(bench, client, nursery)
            await trio.lowlevel.checkpoint()
            client.read(keep_rows=keep_rows)
            if lip.channel.is_full:
                await self._make_room(bench, client)
            elif not requests and lip.channel.arm():
                return

    def _take_once(self, bench: FuzzedBench, client: Client, nursery: trio.Nursery) -> Sequence[Request]:
        """Take the calls in the ring; no step ends meanwhile."""
        requests = client.lip.channel.receive()
        for request in requests:
            bench.gate.handle(client.lip, request, nursery)
            assert num_calls_in(request) <= abi.MAX_BATCH or request.op is Op.PRED_BATCH
        return requests

    async def _make_room(self, bench: FuzzedBench, client: Client) -> None:
        """End calls under way, since with this many no more are taken."""
        assert len(client.open) <= 2 * MAX_OPEN + CONNECTION_FRAMES
        for call in list(client.lip.calls.values()):
            call.cancel()
        await trio.sleep(0.001)
        client.read()

    async def _decode_loop(self, bench: FuzzedBench, client: Client, nursery: trio.Nursery, number: int) -> int:
        """Write one token after the other, as the run takes them from the ring; some of the calls are broken."""
        handle, length = 1 + int(self.rng.random() * NUM_HANDLES), len(PREFIX)
        for step in range(8):
            number += 1
            tokens = struct.pack("=2i", 5, length + step) if self.rng.random() < 0.5 else struct.pack("=i", 5)
            request = Request(Op.PRED, abi.ROWS_LAST, number, handle, (1, len(tokens) // 4 - 1, 0, 0), tokens)
            if step > 2 and self.rng.random() < 0.3:
                request = self.mutator.mutated_once(request)
            if not client.write(_packed(request)):
                break
            client.open.add(number)
            if step == 0:
                await self._take(bench, client, nursery)
            for _ in range(10):
                await trio.sleep(0.0002)
                bench.batches.sync()
                client.read()
                if number not in client.open:
                    break
            else:
                await self._take(bench, client, nursery)
        return number

    async def _settle(self, bench: FuzzedBench, client: Client) -> None:
        """Cancel all calls, and check that they are answered."""
        lip = client.lip
        with trio.move_on_after(SETTLED_S) as scope:
            while client.open or lip.channel.num_waiting_replies:
                for call in list(lip.calls.values()):
                    call.cancel()
                lip.slots.serve()
                await trio.sleep(0.0005)
                lip.channel.arm()  # sends what waited
                bench.batches.sync()
                client.read()
        assert not scope.cancelled_caught, f"unanswered: {sorted(client.open)[:5]} {lip.waits_for}"
        assert lip.channel.num_lent_slots == 0
        assert lip.channel.num_held_slots == 0
        assert lip.under_way.num_bytes == lip.num_later == 0
        for call in list(lip.calls.values()):  # answers that may still be given back
            assert call.is_answered
            call.cancel()
        assert not lip.calls
        assert not lip.tied

    async def _check(self, bench: FuzzedBench, lip: Lip, free: int) -> None:
        """Check what has to be true when a program has gone."""
        fs = bench.fs
        _remove_all(fs.volume.tree, fs.volume.tree.root)
        with trio.move_on_after(SETTLED_S) as scope:
            while bench.batches.num_waiting or bench.batches.is_stepping or fs.volume.num_kv_versions > 1:
                await trio.sleep(0.0005)
                bench.batches.sync()
        assert not scope.cancelled_caught, f"{bench.batches.num_waiting} calls, {fs.volume.num_kv_versions} versions"
        assert not lip.handles
        assert lip.under_way.user.num_bytes == 0
        assert len(fs.volume.locks) == 0
        fs.check()
        assert fs.pool.num_free == free, f"{free - fs.pool.num_free} pages are not given back"


def _remove_all(tree: Any, directory: Any) -> None:
    for name, inode in list(directory.entries.items()):
        if inode.is_directory:
            _remove_all(tree, inode)
            tree.rmdir(directory, name)
        else:
            tree.unlink(directory, name)


@contextmanager
def _no_errors_logged() -> Iterator[None]:
    """AssertionError if something was."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert not found, found[0]
