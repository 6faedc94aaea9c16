"""The program's side of a connection's shared region, without libsym: frames go in, replies come out."""

from typing import Any, NamedTuple

import numpy as np

from libsym.abi import HEADER_BYTES, MAX_FRAME_BYTES, MORE, REPLY_STRUCT, REQUEST_STRUCT, RING_BYTES

# Offsets in struct sym_region.
SUBMIT_TAIL, COMPLETE_HEAD, SUBMIT_HEAD, COMPLETE_TAIL, STATES = 128, 192, 256, 320, 4096
SUBMIT_RING = 8192
COMPLETE_RING = SUBMIT_RING + RING_BYTES


class Answer(NamedTuple):
    number: int
    errno: int
    has_more: bool
    args: tuple[int, ...]
    payload: bytes


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def frame_of(op: int, number: int, handle: int, args: tuple[int, ...], payload: bytes = b"", flags: int = 0) -> bytes:
    """Return a request as it lies in a ring."""
    size = HEADER_BYTES + len(payload)
    return padded(REQUEST_STRUCT.pack(size, op, 0, flags, 0, number, handle % 2**64, *args) + payload)


class Rings:
    def __init__(self, region: Any) -> None:
        self.region = region
        self.words = np.frombuffer(region, np.uint64, 64)
        self._tail = self._head = 0

    @property
    def num_replied(self) -> int:
        """Bytes of answers."""
        return int(self.words[COMPLETE_TAIL // 8])

    def write(self, frame: bytes) -> bool:
        """Put a frame in, without a doorbell. False: it has no room yet."""
        if self._tail + len(frame) - int(self.words[SUBMIT_HEAD // 8]) > RING_BYTES:
            return False
        at = self._tail % RING_BYTES
        first = min(len(frame), RING_BYTES - at)
        self.region[SUBMIT_RING + at : SUBMIT_RING + at + first] = frame[:first]
        self.region[SUBMIT_RING : SUBMIT_RING + len(frame) - first] = frame[first:]
        self._tail += len(frame)
        self.words[SUBMIT_TAIL // 8] = self._tail
        return True

    def read(self) -> list[Answer]:
        """Take all replies."""
        found, end = list[Answer](), self.num_replied
        while self._head < end:
            at = self._head % RING_BYTES
            header = bytes(self.region[COMPLETE_RING + at : COMPLETE_RING + at + HEADER_BYTES])
            frame_bytes, code, number, *args, flags, first, second = REPLY_STRUCT.unpack(header)
            assert HEADER_BYTES <= frame_bytes <= MAX_FRAME_BYTES, frame_bytes
            assert (first, second) == (0, 0), "reserved"
            start, stop = at + HEADER_BYTES, at + frame_bytes
            payload = bytes(self.region[COMPLETE_RING + start : COMPLETE_RING + min(stop, RING_BYTES)])
            payload += self.region[COMPLETE_RING : COMPLETE_RING + max(0, stop - max(start, RING_BYTES))]
            found.append(Answer(number, code, bool(flags & MORE), tuple(args), payload))
            self._head += -(-frame_bytes // 64) * 64
        self.words[COMPLETE_HEAD // 8] = self._head
        return found

    def close(self) -> None:
        """Let the region go."""
        del self.words, self.region
