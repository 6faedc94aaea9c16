"""Bytes of the requests under way: what the daemon keeps for a connection, and for all connections of a user.

What would exceed a limit is refused, with WouldBlock or OverQuota, and leaves nothing here. It does not wait in the
ring: CANCEL, or whatever else makes room, may be behind it. Such requests have no payload, or a short one, and always
get through.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfs.pages.holdings import Holdings, Kind
from libsym.abi import HEADER_BYTES, Op
from libsym.channel.server import Request
from libsym.errors import WouldBlock

FREE_BYTES = 256
"""A request up to here is not counted: the request costs as much without it, and requests are bounded by number."""
MAX_CONNECTION_BYTES = 64 << 20
"""As much as its shared region has: for each of a thousand calls a prompt of 16,000 tokens."""
MAX_USER_BYTES = 256 << 20
CALL_BYTES = 1536
"""What a call of a batch takes as our objects, whatever its payload has."""


def num_calls_in(request: Request) -> int:
    """Of a batch as many as it says that it has, and may have; of any other request one."""
    if request.op is not Op.PRED_BATCH:
        return 1
    return max(0, min(request.args[0], len(request.payload) // HEADER_BYTES))


def cost_of(request: Request) -> int:
    """The bytes that a request counts for while it is under way."""
    if request.op is not Op.PRED_BATCH:
        return len(request.payload)
    return len(request.payload) + CALL_BYTES * num_calls_in(request)


@dataclass(slots=True, weakref_slot=True)
class UserBytes:
    """Of all connections of a user."""

    num_bytes: int = 0


@dataclass(slots=True)
class UnderWay:
    """Of one connection."""

    user: UserBytes
    holdings: Holdings = field(default_factory=Holdings)
    num_bytes: int = 0
    _num_requests: int = 0
    _is_closed: bool = False

    def begin(self, num_bytes: int) -> None:
        """Count a request in. WouldBlock, OverQuota: it would be too much."""
        if self.num_bytes + num_bytes > MAX_CONNECTION_BYTES:
            raise WouldBlock(_too_much(num_bytes, self.num_bytes, "program", MAX_CONNECTION_BYTES))
        if self.user.num_bytes + num_bytes > MAX_USER_BYTES:
            raise WouldBlock(_too_much(num_bytes, self.user.num_bytes, "user", MAX_USER_BYTES))
        self.holdings.hold(Kind.FRAME, num_bytes=num_bytes)
        self._num_requests += 1
        self.num_bytes += num_bytes
        self.user.num_bytes += num_bytes

    def end(self, num_bytes: int) -> None:
        """A request that was counted in is answered."""
        if not self._is_closed:
            self.holdings.let_go(Kind.FRAME, num_bytes=num_bytes)
            self._num_requests -= 1
            self.num_bytes -= num_bytes
            self.user.num_bytes -= num_bytes

    def close(self) -> None:
        """The connection has gone, and what it had under way is nobody's."""
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
