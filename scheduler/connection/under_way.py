"""Count of the bytes of requests in flight, for one connection and for all connections of a user.

A request that would exceed a limit is refused with WouldBlock or OverQuota, and is not counted. The request does not
wait in the ring, because CANCEL, or another request that frees bytes, may stand behind it. Requests that free bytes
have a short payload or none, and are always accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfs.pages.holdings import Holdings, Kind
from libsym.abi import HEADER_BYTES, Op
from libsym.channel.server import Request
from libsym.errors import WouldBlock
from scheduler._loop import lib

FREE_BYTES = int(lib.SYM_FREE_BYTES)
"""Requests up to this size are not counted. Each request costs about as many bytes anyway, and the
number of requests is limited."""
MAX_CONNECTION_BYTES = 64 << 20
"""Limit of one connection, as large as its shared region: enough for a thousand prompts of 16,000 tokens."""
MAX_USER_BYTES = 256 << 20
CALL_BYTES = int(lib.SYM_CALL_BYTES)
"""Bytes that the daemon's objects for one call of a batch take, beside its payload."""


def num_calls_in(request: Request) -> int:
    """Return the number of calls in a request: 1, or for a PRED_BATCH at most as many as its payload can hold."""
    if request.op is not Op.PRED_BATCH:
        return 1
    return max(0, min(request.args[0], len(request.payload) // HEADER_BYTES))


def cost_of(request: Request) -> int:
    """Return the number of bytes that a request in flight costs."""
    if request.op is not Op.PRED_BATCH:
        return len(request.payload)
    return len(request.payload) + CALL_BYTES * num_calls_in(request)


@dataclass(slots=True, weakref_slot=True)
class UserBytes:
    """Bytes in flight of all connections of a user."""

    num_bytes: int = 0


@dataclass(slots=True)
class UnderWay:
    """Requests in flight of one connection."""

    user: UserBytes
    holdings: Holdings = field(default_factory=Holdings)
    num_bytes: int = 0
    _num_requests: int = 0
    _is_closed: bool = False

    def begin(self, num_bytes: int) -> None:
        """Count a request. WouldBlock, OverQuota: a limit would be exceeded."""
        if self.num_bytes + num_bytes > MAX_CONNECTION_BYTES:
            raise WouldBlock(_too_much(num_bytes, self.num_bytes, "program", MAX_CONNECTION_BYTES))
        if self.user.num_bytes + num_bytes > MAX_USER_BYTES:
            raise WouldBlock(_too_much(num_bytes, self.user.num_bytes, "user", MAX_USER_BYTES))
        self.holdings.hold(Kind.FRAME, num_bytes=num_bytes)
        self._num_requests += 1
        self.num_bytes += num_bytes
        self.user.num_bytes += num_bytes

    def end(self, num_bytes: int) -> None:
        """Stop counting a request that is answered."""
        if not self._is_closed:
            self.holdings.let_go(Kind.FRAME, num_bytes=num_bytes)
            self._num_requests -= 1
            self.num_bytes -= num_bytes
            self.user.num_bytes -= num_bytes

    def close(self) -> None:
        """Release all bytes of a connection that has gone."""
        if not self._is_closed:
            self.holdings.let_go(Kind.FRAME, self._num_requests, self.num_bytes)
            self.user.num_bytes -= self.num_bytes
            self.num_bytes = 0
            self._is_closed = True


def _too_much(num_bytes: int, under_way: int, whose: str, most: int) -> str:
    return (
        f"a request of {num_bytes} bytes, and this {whose} has {under_way} under way, of {most} that it may have: let "
        "some calls end first"
    )
