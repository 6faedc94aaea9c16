#!/usr/bin/env python3
"""Malformed frames against a real daemon, while the shared region changes underneath it.

The script starts a daemon with the tiny model, and an honest program of another user whose paths, texts, tokens and
messages contain a secret. The attacker (uid 65534, if the script runs as root) writes frames into its own ring: valid
frames of every operation with one broken field, and sometimes a frame that breaks the ring. Meanwhile a second thread
changes the region: indices, flags, slot states, published frames.

The run succeeds if the daemon lives, the honest program got only right answers, the attacker's region contains nothing
of the secret, the daemon's log has no traceback, and the daemon's memory and descriptors are about the same as before.

    scripts/fuzz/frames.py                        # 10,000,000 frames: some minutes
    scripts/fuzz/frames.py --frames 1000000 --json
    scripts/fuzz/frames.py --recorded             # frames that libsym sent, mutated: see recorded.py
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # imported before `attack` drops root: user NOBODY may be unable to read the module

HOUSE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HOUSE))

import libsym as sym  # noqa: E402 - found through the line above
from libsym import abi  # noqa: E402
from libsym.abi import RING_BYTES, Op  # noqa: E402
from libsym.channel.handshake import dial  # noqa: E402
from libsym.errors import SymError  # noqa: E402
from libsym.rows.attention import attention_block  # noqa: E402

NOBODY = 65534
SECRET_TEXT = "7c1f-the-honest-program-alone-knows-this-9e42"
SECRET_TOKENS = [201, 17, 233, 5, 190, 88, 142, 61, 249, 33]
SECRETS = (SECRET_TEXT.encode(), np.array(SECRET_TOKENS, np.int32).tobytes())

# Offsets in struct sym_region.
SUBMIT_TAIL, COMPLETE_HEAD, SUBMIT_HEAD, COMPLETE_TAIL = 128, 192, 256, 320
FLAGS = (384, 388, 396, 448, 452, 456, 460, 512, 516)  # fields daemon_asleep to space_waiters, without `gone`
GONE = 392
STATES = 4096
MAX_SLOTS = 1024
SUBMIT_RING = 8192
COMPLETE_RING = SUBMIT_RING + RING_BYTES
SLOTS = COMPLETE_RING + RING_BYTES

HEADER = np.dtype(
    [
        *[("bytes", "u4"), ("op", "u2"), ("zero", "u2"), ("flags", "u4"), ("zero2", "u4"), ("id", "u8")],
        *[("handle", "u8"), ("args", "i8", 4)],
    ]
)
STRIDES = (64, 128, 192, 320)
BURST = 2048
FRAMES_A_CONNECTION = 40_000
FATAL_IN_BURSTS = 0.2
"""Share of the bursts that end with a frame for which the daemon drops the connection."""
HANG_UP_S = 2.0
GIVE_UP_S = 10.0
QUICK = 60_000
LEAST_TAKEN, QUICK_LEAST_TAKEN = 0.9, 0.25
"""Least share of the frames that the daemon must take. Frames that are in a ring when its connection ends are lost. In
a short run, a larger share is lost.
"""
MAX_GROWTH_BYTES = 400 << 20
MAX_MORE_DESCRIPTORS = 16
WILD = np.array(
    [
        *[0, 1, 2, 3, 63, 64, 255, 256, 1023, 1024, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1],
        *[-1, -2, -64, -(2**31), -(2**63), -(2**63) + 1],
    ],
    np.int64,
)


def i32(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def i64(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def sampling(**fields: float | tuple[int, ...]) -> bytes:
    block = np.zeros(1, [(n, "f8") for n in ("temperature", "top_p", "min_p")] + [(n, "f4") for n in "rpf"]
                     + [("top_k", "u4"), ("seed", "u8"), ("counts", "u4", 4)])  # fmt: skip
    block["top_p"], block["r"] = 1.0, 1.0
    for name, value in fields.items():
        block[name] = value
    return block.tobytes()


def valid_calls() -> list[tuple[Op, int, int, tuple[int, ...], bytes, int]]:
    """Return valid or nearly valid calls of every operation: (operation, flags, handle, args, payload, weight)."""
    tokens = i32(5, 6, 7)
    reduction = np.array([4, 2, 1, 0], np.uint32).tobytes() + i32(3, 9) + sampling(temperature=0.7)
    part = np.zeros(1, HEADER)
    part["bytes"], part["op"], part["flags"], part["handle"] = 76, Op.PRED, abi.ROWS_LAST, 1
    part["args"][0, 0] = 3
    frame = part.tobytes() + tokens + bytes(52)
    numbers = np.array([4, 12, 1, 0], np.uint32).tobytes() + i32(*range(12)) + sampling(temperature=0.7)
    part["bytes"], part["flags"] = 76 + len(numbers), abi.ROWS_LAST | abi.REDUCED
    frame_with_numbers = part.tobytes() + tokens + numbers + bytes(-(12 + len(numbers)) % 64)
    more = np.zeros(1, [("reals", "f8", 5), ("numbers", "u4", 6)])
    more["reals"], more["numbers"] = (0.9, 0.8, 1.75, 3.0, 0.1), (2, 4, 5, 2, 4, 0)
    shaped = sampling(temperature=0.7, counts=(0, 3, 0, abi.SAMPLING_MORE)) + more.tobytes() + b":\0a\0" + tokens
    options = json.dumps({"stop_tokens": [0], "stop": ["."], "grammar": None, "draft": None}).encode()
    rare, often = 1, 40
    return [
        (Op.KV_CREATE, 0, 0, (0o600,), b"", 2 * rare),
        (Op.KV_CREATE, 0, 0, (0o600,), b"evil.kv", often),
        (Op.KV_OPEN, 1, 0, (), b"evil.kv", 2 * rare),
        (Op.KV_OPEN, 0, 0, (), b"../../etc/passwd", often),
        (Op.KV_OPEN, 0, 0, (), b"private/" + SECRET_TEXT[:4].encode(), often),
        (Op.KV_CLOSE, 0, 2, (), b"", often),
        (Op.KV_FORK, 0, 1, (0o600,), b"", rare),
        (Op.KV_FORK, abi.FORK_ENDED, 1, (0o600,), b"", rare),
        (Op.KV_REMOVE, 0, 0, (), b"evil.kv", often),
        (Op.KV_TRUNCATE, 0, 1, (1,), b"", often),
        (Op.KV_STAT, 0, 1, (), b"", often),
        (Op.KV_STAT, 0, 0, (), b"private", often),
        (Op.KV_LIST, 0, 0, (), b".\0evil", rare),
        (Op.KV_RENAME, 0, 0, (), json.dumps(["evil.kv", "devil.kv"]).encode(), often),
        (Op.KV_CHMOD, 0, 0, (0o644,), b"evil.kv", often),
        (Op.KV_READ, 0, 1, (0, 100), b"", often),
        (Op.KV_DU, 0, 0, (), b".", rare),
        (Op.KV_DU, 0, 0, (2,), b".", rare),
        (Op.USE_MODEL, 0, 0, (), b"tiny", often),
        (Op.MODEL_INFO, 0, 0, (), b"tiny", rare),
        (Op.KV_HOT, 0, 0, (100,), b"", often),
        (Op.KV_CHANGES, 0, 0, (0, 0, 10), b"", often),
        (Op.KV_CHANGES, 0, 0, (1, 1, 0), b"", rare),
        (Op.PRED, abi.ROWS_LAST, 1, (3, 0), tokens, rare),
        (Op.PRED, abi.ROWS_LAST, 1, (1, 0), i32(5), 2 * rare),  # as in decode loops
        (Op.PRED, abi.ROWS_LAST, 1, (1, 1), i32(5, 9), 2 * rare),
        (Op.PRED, abi.ROWS_ALL, 1, (3, 1), tokens + i32(9), rare),
        (Op.PRED, abi.ROWS_NONE, 2, (3, 3), tokens + i32(1, 2, 3), rare),
        (Op.PRED, abi.ROWS_LAST | abi.REDUCED, 1, (3, 0), tokens + reduction, rare),
        (Op.PRED, abi.ROWS_LAST | abi.ATTENTION, 1, (3, 0), tokens + attention_block("entries", "layer"), rare),
        (Op.PRED, abi.ROWS_NONE | abi.ATTENTION, 1, (3, 0), tokens + attention_block("pages", "sum"), rare),
        (Op.PRED, abi.ROWS_LAST | abi.MASKED, 1, (3, 0), tokens + np.array([1, 3, 7], np.uint32).tobytes(), rare),
        (Op.PRED, abi.ROWS_LAST, 77, (3, 0), tokens, often),
        (Op.TOKENIZE, 1, 0, (), "what is asked 世界".encode(), often),
        (Op.DETOKENIZE, 0, 0, (), i32(5, 300, 17), often),
        (Op.CHAT_TEMPLATE, 0, 0, (), b'{"messages": [{"role": "user", "content": "x"}]}', often),
        (Op.MODEL_INFO, 0, 0, (), b"", often),
        (Op.STAT, 0, 0, (), b"", rare),
        (Op.PING, 0, 0, (1, 2, 3, 4), b"ping", often),
        (Op.KV_EXTRACT, abi.REBASE, 1, (0o600, 1), i64(0, 2), rare),
        (Op.KV_MERGE, 0, 0, (0o600, 2), i64(1, 1), rare),
        (Op.KV_FETCH, 0, 0, (0o600,), json.dumps(["east", "evil.kv", None]).encode(), rare),
        (Op.FLEET_PLACE, abi.FLEET_BEGIN, 0, (), json.dumps(["evil.kv"]).encode(), rare),
        (Op.FLEET_MACHINES, 0, 0, (), json.dumps(["leave", "evil"]).encode(), rare),
        (Op.KV_LOCK, abi.LOCK_NOWAIT, 1, (), b"", often),
        (Op.KV_LOCK, 0, 1, (), b"", rare),
        (Op.KV_UNLOCK, 0, 1, (), b"", often),
        (Op.CHECK, 0, 0, (), b"", rare),
        (Op.SCRUB, 0, 0, (1 << 30,), b"", rare),
        (Op.TRACE, 0, 0, (1000, 2), b"", rare),
        (Op.CONFINE, 0, 0, (), b"private", often),
        (Op.PRED_BATCH, 0, 0, (2,), frame * 2, rare),
        (Op.PRED_BATCH, 0, 0, (1,), frame_with_numbers, rare),
        (Op.GENERATE, 0, 1, (3, 0, 2, 0), tokens + sampling() + options, rare),
        (Op.GENERATE, 0, 1, (3, 0, 2, 0), tokens + shaped + options, rare),
        (Op.CANCEL, 0, 0, (7,), b"", often),
        (Op.SEND, 0, 0, (1,), b"to the first process", often),
        (Op.SEND, 1, 0, (0,), b"topic\0data", often),
        (Op.RECV, 0, 0, (0,), b"", often),
        (Op.RECV, 0, 0, (-1,), b"topic", rare),
        (Op.SUBSCRIBE, 0, 0, (), b"topic", often),
        (Op.UNSUBSCRIBE, 0, 0, (), b"topic", often),
        (Op.GETRUSAGE, 0, 0, (), b"", often),
        (Op.KV_ADVISE, 0, 1, (abi.Advice.PIN, 0), b"", often),
        (Op.KV_ADVISE, 0, 0, (abi.Advice.TTL, 1000), b"evil.kv", often),
        (Op.KV_PRESSURE, 0, 0, (20,), b"", often),
        (Op.KV_SYNC, 0, 1, (), b"", rare),
        (Op.VOCABULARY, 0, 0, (0,), b"", rare),
        (Op.KV_CLAIM, 1, 0, (0o600,), b"evil.kv", rare),
        (Op.KV_CLAIM, 0, 0, (0o600,), b"private/made.kv", often),
        (Op.KV_NAME, 0, 1, (), b"", often),
        (Op.KV_MKDIR, 0, 0, (0o700,), b"evil", often),
        (Op.PROGRAMS, 0, 0, (0,), b'{"ended": true}', rare),
        (Op.SPAWN, 0, 0, (), b'{"program": "a.py", "args": ["b"], "env": {}, "limits": {"tokens": 5}}', often),
        (Op.WAIT, 0, 0, (), b"1f2e3d4c", often),
        (Op.KILL, 0, 0, (9,), b"1f2e3d4c", often),
        (Op.CHAT_TOKENS, 0, 0, (), b'{"messages": [{"role": "user", "content": "<eos>"}]}', rare),
    ]


def nudge() -> bytes:
    head = np.zeros(1, HEADER)
    head["bytes"], head["op"] = 64, Op.PING
    return head.tobytes()


NUDGE = nudge()


class Frames:
    """Bursts of frames of equal length. Most frames are valid but for one field."""

    num_in_a_burst = BURST

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        calls = valid_calls()
        assert {call[0] for call in calls} == set(Op), set(Op) - {call[0] for call in calls}
        self.pools = {stride: self._pool(calls, stride) for stride in STRIDES}

    def _pool(self, calls: list[Any], stride: int) -> np.ndarray:
        rows = []
        for op, flags, handle, args, payload, often in calls:
            if len(payload) > stride - 64:
                continue
            head = np.zeros(1, HEADER)
            head["bytes"], head["op"], head["flags"], head["handle"] = 64 + len(payload), op, flags, handle
            head["args"][0, : len(args)] = args
            # A frame that is longer than it need be has a broken length.
            head["bytes"] = max(64 + len(payload), stride - 63)
            rows += [np.frombuffer((head.tobytes() + payload).ljust(stride, b"\0"), np.uint8)] * often
        return np.array(rows)

    def burst(self, count: int, *, fatal: bool) -> bytes:
        rng = self.rng
        stride = int(rng.choice(STRIDES, p=[0.3, 0.4, 0.2, 0.1]))
        pool = self.pools[stride]
        frames = pool[rng.integers(len(pool), size=count)]
        heads = frames[:, :64].view(HEADER)[:, 0]
        heads["id"] = rng.integers(0, 2**11, count)
        heads["handle"] = np.where(heads["handle"] == 1, rng.integers(1, 40, count), heads["handle"])
        kind = rng.integers(0, 10, count)
        wild = rng.choice(WILD, count)
        wild = np.where(rng.random(count) < 0.3, rng.integers(-(2**63), 2**63 - 1, count), wild)
        for argument in range(4):
            heads["args"][kind == argument, argument] = wild[kind == argument]
        heads["flags"][kind == 4] = wild[kind == 4].astype(np.uint32)
        heads["handle"][kind == 5] = wild[kind == 5].astype(np.uint64)
        heads["id"][kind == 6] = wild[kind == 6].astype(np.uint64)
        heads["bytes"][kind == 7] = rng.integers(max(64, stride - 63), stride + 1, count)[kind == 7]
        if stride > 64:
            broken = np.flatnonzero(kind == 8)
            for _ in range(4):
                frames[broken, rng.integers(64, stride, len(broken))] = rng.integers(0, 256, len(broken))
        heads["op"][rng.random(count) < 0.01] = rng.choice([0, 999, 65535])  # operations of a newer library
        if fatal:
            last = heads[-1:]
            match rng.integers(3):
                case 0:
                    last["bytes"] = rng.choice([0, 1, 63, stride + 1, 2**20 + 1, 2**31, 2**32 - 1])
                case 1:
                    last["zero"] = 1
                case 2:
                    last["zero2"] = rng.integers(1, 2**32)
        return frames.tobytes()


class RecordedFrames:
    """Bursts of mutated copies of frames that libsym sent."""

    num_in_a_burst = 512

    def __init__(self, seed: int) -> None:
        from tests.scheduler.hostile import Mutator, recorded_frames

        self.rng = np.random.default_rng(seed)
        self._mutator = Mutator(recorded_frames(), seed, fatal_share=0)  # `burst` decides instead

    def burst(self, count: int, *, fatal: bool) -> bytes:
        frames: list[bytes] = []
        while len(frames) < count:
            frames += [frame for frame, _ in self._mutator.frames(1 + len(frames))]
        if fatal:
            frames[-1] = bytes(64)
        return b"".join(frames)


class Attacker:
    """Client that attacks through one connection after another, until the daemon has taken enough of its frames."""

    def __init__(self, path: str, seed: int, frames: Frames | RecordedFrames) -> None:
        self.path = path
        self.frames = frames
        self.counts: Counter[str] = Counter()
        self.leaks: list[str] = []
        self.mutating = threading.Event()
        self.region: mmap.mmap | None = None
        self.stop = False
        self.lock = threading.Lock()
        self.rng = np.random.default_rng(seed + 1)

    def run(self, num_frames: int) -> None:
        mutator = threading.Thread(target=self.mutate)
        mutator.start()
        try:
            while self.counts["frames"] < num_frames:
                self.one_connection(min(FRAMES_A_CONNECTION, num_frames - self.counts["frames"]))
        finally:
            self.stop = True
            mutator.join()

    def one_connection(self, num_frames: int) -> None:
        try:
            connection, memfd, doorbell, bell = dial(self.path)
        except SymError as error:
            if "many" not in str(error) and "later" not in str(error):
                raise
            time.sleep(0.01)
            return
        self.counts["connections"] += 1
        region = mmap.mmap(memfd, 0)
        with self.lock:
            self.region = region
        try:
            self.attack(connection, doorbell, num_frames, region)
        finally:
            with self.lock:
                self.region = None
            self.look_for_secrets(memfd)
            connection.close()  # the mapping is freed with its last view
            for fd in (memfd, doorbell, bell):
                os.close(fd)

    def attack(self, connection: socket.socket, doorbell: int, num_frames: int, region: mmap.mmap) -> None:
        """Send bursts of frames.

        A burst with a fatal frame is the last, because the daemon ignores all after that frame.
        """
        connection.setblocking(False)
        words = np.frombuffer(region, np.uint64, 80)
        ring = memoryview(region)[SUBMIT_RING : SUBMIT_RING + RING_BYTES]
        tail, burst = 0, self.frames.num_in_a_burst
        fatal = False
        for sent in range(burst, num_frames + 2 * burst, burst):
            fatal = sent >= num_frames or self.frames.rng.random() < FATAL_IN_BURSTS
            raw = self.frames.burst(burst, fatal=fatal)
            at = tail % RING_BYTES
            first = min(len(raw), RING_BYTES - at)
            ring[at : at + first] = raw[:first]
            ring[: len(raw) - first] = raw[first:]
            tail += len(raw)
            words[SUBMIT_TAIL // 8] = tail
            tail = self.wait(connection, doorbell, words, ring, tail, -1 if fatal else RING_BYTES // 2)
            if not tail:
                break
            self.counts["frames"] += burst
        self.counts["frames"] += burst * fatal

    def wait(
        self, connection: socket.socket, doorbell: int, words: np.ndarray, ring: memoryview, tail: int, most: int
    ) -> int:
        """Discard replies until the daemon has left at most `most` bytes of requests in the submission ring. Return the
        tail of that ring. 0: the connection is over.

        The other thread changes the head, too, and may restore an old head when the daemon has no reason to write the
        head again. Then the ring looks full. So a further frame is sent every second, and then the daemon writes the
        head.
        """
        begun = time.monotonic()
        seen, unchanged_since, nudges = tail, begun, 0
        while True:
            words[COMPLETE_HEAD // 8] = words[COMPLETE_TAIL // 8]
            left = tail - int(words[SUBMIT_HEAD // 8])  # wrong while the other thread changes the head
            if 0 <= left <= most:
                return tail
            try:
                connection.recv(1)
            except BlockingIOError:
                pass
            except ConnectionError:
                self.counts["dropped"] += 1
                return 0
            else:
                self.counts["dropped"] += 1
                return 0
            now = time.monotonic()
            if left == 0 and now > begun + HANG_UP_S:
                self.counts["not dropped"] += 1  # the other thread has repaired the frame
                return tail
            if left != seen:
                seen, unchanged_since, nudges = left, now, 0
            elif now > unchanged_since + GIVE_UP_S:
                self.counts["given up"] += 1
                return 0
            elif now > unchanged_since + 1 + nudges:
                at = tail % RING_BYTES
                ring[at : at + len(NUDGE)] = NUDGE
                tail += len(NUDGE)
                words[SUBMIT_TAIL // 8] = tail
                seen, nudges = seen + len(NUDGE), nudges + 1
                self.counts["nudges"] += 1
            with suppress(BlockingIOError):
                os.eventfd_write(doorbell, 1)
            time.sleep(0.0002)

    def mutate(self) -> None:
        """Change the region in a second thread: everything that a client can change while the daemon reads it."""
        rng = self.rng
        while not self.stop:
            with self.lock:
                region = self.region
                if region is not None:
                    view = np.frombuffer(region, np.uint8, SLOTS)
                    for _ in range(20):
                        self.mutate_once(view, rng)
                    del view
            time.sleep(0.0005)

    def mutate_once(self, view: np.ndarray, rng: np.random.Generator) -> None:
        self.counts["mutations"] += 1
        match rng.integers(0, 40):
            case 0:  # a wrong tail, for a moment; if the daemon reads it, the daemon drops the connection
                if rng.random() < 0.005:
                    tail = view[SUBMIT_TAIL : SUBMIT_TAIL + 8].view(np.uint64)
                    before = tail[0]
                    tail[0] = rng.integers(0, 2**63)
                    tail[0] = before
            case 1 | 2:  # an index that only the daemon writes
                index = view[SUBMIT_HEAD : SUBMIT_HEAD + 8].view(np.uint64)
                before = index[0]
                index[0] = rng.integers(0, 2**63)
                index[0] = before
            case 3 | 4:  # the header of the region
                view[rng.integers(0, 128)] = rng.integers(0, 256)
            case 5 | 6 | 7 | 8:  # a published frame: sometimes its length, mostly its other bytes
                at = int(rng.integers(0, RING_BYTES // 64)) * 64
                at += int(rng.integers(16, 64)) if rng.random() < 0.999 else int(rng.integers(0, 16))
                view[SUBMIT_RING + at] = rng.integers(0, 256)
            case 9 | 10 | 11:
                view[COMPLETE_RING + rng.integers(0, RING_BYTES)] = rng.integers(0, 256)
            case value if value < 26:
                at = STATES + 4 * int(rng.integers(0, MAX_SLOTS))
                view[at : at + 4].view(np.uint32)[0] = rng.choice([0, 0, 0, 1, 2, 2**32 - 1])
            case _:
                at = int(rng.choice(FLAGS))
                view[at : at + 4].view(np.uint32)[0] = rng.choice([0, 1, 2, 2**31, 2**32 - 1])

    def look_for_secrets(self, memfd: int) -> None:
        """Search the written parts of the region for secrets."""
        size, at = os.fstat(memfd).st_size, 0
        while at < size:
            try:
                at = os.lseek(memfd, at, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(memfd, at, os.SEEK_HOLE)
            found = os.pread(memfd, end - at, at)
            self.leaks += [f"{secret!r} at {at + found.find(secret)}" for secret in SECRETS if secret in found]
            self.counts["bytes searched"] += len(found)
            at = end


def attack(path: str, num_frames: int, seed: int, *, is_root: bool, recorded: bool) -> None:
    """Run the attacker's process."""
    frames = RecordedFrames(seed) if recorded else Frames(seed)  # user NOBODY may be unable to read sources
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    attacker = Attacker(path, seed, frames)
    attacker.run(num_frames)
    print(json.dumps({**attacker.counts, "leaks": attacker.leaks[:10]}), flush=True)


def be_honest() -> None:
    """Run the honest program's process: the same calls again and again, whose answers are known."""
    rounds, stop = 0, threading.Event()

    def end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=end, daemon=True).start()
    expected: list[int] | None = None
    has_mail = hasattr(sym, "send") and hasattr(sym, "getpid")
    while not stop.is_set():
        path = f"private/{SECRET_TEXT}-{rounds}.kv"
        with sym.kv_create(path) as kv:
            tokens = sym.tokenize(SECRET_TEXT)
            assert sym.detokenize(tokens) == SECRET_TEXT
            sym.kv_write(kv, SECRET_TOKENS)
            row = sym.pred(kv, tokens)
            drawn = [row.argmax(), *(token for token, _ in row.topk(5))]
            expected = expected or drawn
            assert drawn == expected, (drawn, expected)
            assert sym.kv_read(kv)[0] == SECRET_TOKENS + tokens
            assert sym.kv_stat(path).tokens == len(SECRET_TOKENS) + len(tokens)
            if has_mail:
                sym.send(sym.getpid(), SECRET_TEXT)
                assert sym.recv() == SECRET_TEXT
        sym.kv_remove(path)
        rounds += 1
    print(json.dumps({"rounds": rounds}), flush=True)


class Daemon:
    """Daemon with the tiny model that other users can reach."""

    def __init__(self, directory: Path) -> None:
        self.mount = directory / "kv"
        self.socket = directory / "symphony.sock"
        self.log = directory / "daemon.log"
        environment = {**os.environ, "SYMPHONY_SOCKET": str(self.socket), "PYTHONPATH": str(HOUSE)}
        words: list[str | Path] = [
            "serve",
            "--mount",
            self.mount,
            "--state",
            directory / "state",
            "--model",
            "tiny",
            "--kv-memory",
            "64M",
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "symphony", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith("symphony: "):
            raise SystemExit(self.log.read_text())

    def memory_bytes(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if f" {self.mount} " in Path("/proc/mounts").read_text():
            subprocess.run(["fusermount3", "-uzq", self.mount], check=False)


def fuzz(num_frames: int, seed: int, num_attackers: int, least: float, *, recorded: bool) -> dict[str, object]:
    directory = Path(tempfile.mkdtemp(prefix="symphony-fuzz-"))
    directory.chmod(0o755)
    daemon = Daemon(directory)
    try:
        return judge(daemon, num_frames, seed, num_attackers, least, recorded=recorded)
    finally:
        daemon.stop()
        shutil.rmtree(directory, ignore_errors=True)


def judge(
    daemon: Daemon, num_frames: int, seed: int, num_attackers: int, least: float, *, recorded: bool
) -> dict[str, object]:
    (daemon.mount / "private").mkdir(0o700)
    environment = {**os.environ, "SYMPHONY_SOCKET": str(daemon.socket)}
    me = [sys.executable, __file__]
    honest = subprocess.Popen(
        [*me, "--honest"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    memory, descriptors, start = daemon.memory_bytes(), daemon.num_descriptors(), time.monotonic()
    share, kind = -(-num_frames // num_attackers), ["--recorded"] * recorded
    attackers = [
        subprocess.Popen(
            [*me, "--attack", str(daemon.socket), "--frames", str(share), "--seed", str(seed + 100 * number), *kind],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(num_attackers)
    ]
    told: Counter[str] = Counter()
    leaks: list[str] = []
    broken: list[str] = []
    for attacker in attackers:
        out, _ = attacker.communicate()
        if attacker.returncode:
            broken.append(f"the attacker ended with {attacker.returncode}")
            continue
        found = json.loads(out)
        leaks += found.pop("leaks")
        told.update(found)
    seconds = time.monotonic() - start
    out, _ = honest.communicate("")
    taken = sum(map(int, re.findall(r"^symphony_system_calls_total\S* (\d+)", metrics(daemon), re.MULTILINE)))
    lives = daemon.process.poll() is None
    log = daemon.log.read_text(errors="replace")
    more_memory = daemon.memory_bytes() - memory if lives else 0
    more_descriptors = daemon.num_descriptors() - descriptors if lives else 0
    rounds = json.loads(out)["rounds"] if honest.returncode == 0 else 0
    broken += [
        what
        for what, is_so in [
            ("the daemon ended", not lives),
            ("the honest program failed", honest.returncode != 0),
            ("the honest program was not served", rounds < 10),
            (f"{told['given up']} connections were stuck", told["given up"] > 0),
            (f"the gate took {taken} calls only", taken < num_frames * least),
            (f"the attacker saw {leaks[:3]}", bool(leaks)),
            ("the daemon's log has a traceback:\n" + log[-4000:], "Traceback" in log),
            (f"the daemon grew by {more_memory >> 20} MiB", more_memory > MAX_GROWTH_BYTES),
            (f"the daemon has {more_descriptors} descriptors more", more_descriptors > MAX_MORE_DESCRIPTORS),
        ]
        if is_so
    ]
    return {
        **told,
        "calls that the gate took": taken,
        "honest rounds": rounds,
        "seconds": round(seconds, 1),
        "daemon grew by MiB": more_memory >> 20,
        "more descriptors": more_descriptors,
        "broken": broken,
    }


def metrics(daemon: Daemon) -> str:
    return (daemon.mount / ".symphony/metrics").read_text() if daemon.process.poll() is None else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Throw malformed frames at a daemon.")
    parser.add_argument("--frames", type=int, default=10_000_000, help="frames to take from the attackers' rings")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--attackers", type=int, default=1, help="processes")
    parser.add_argument("--recorded", action="store_true", help="frames that libsym sent, mutated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} frames")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--honest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.honest:
        be_honest()
        return 0
    if args.attack:
        attack(args.attack, args.frames, args.seed, is_root=os.geteuid() == 0, recorded=args.recorded)
        return 0
    if args.quick:
        args.frames = QUICK
    least = QUICK_LEAST_TAKEN if args.quick else LEAST_TAKEN
    result = fuzz(args.frames, args.seed, args.attackers, least, recorded=args.recorded)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
