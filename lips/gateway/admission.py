"""Admission of requests: limits how many requests run and wait, and tells refused clients when to try again.

Tenants take turns, so a tenant with many requests does not delay the others. Each tenant's own queue is a FIFO.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from lips.gateway.errors import ApiError

_MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """Token bucket of a rate per minute. The bucket fills over time, and holds at most the amount of a minute."""

    per_minute: float | None
    level: float = field(init=False)
    filled_s: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.per_minute or 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the bucket holds at least 1."""
        if self.per_minute is None:
            return 0.0
        self.level = min(self.per_minute, self.level + (now_s - self.filled_s) * self.per_minute / _MINUTE_S)
        self.filled_s = now_s
        return max(0.0, (1.0 - self.level) * _MINUTE_S / self.per_minute)

    def take(self, amount: float) -> None:
        """Remove an amount from the bucket. The level may fall below zero; the next request then waits longer."""
        if self.per_minute is not None:
            self.level -= amount


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    concurrent: int | None = None


NO_LIMITS = TenantLimits()


class _Party:
    """A tenant's limits, running requests and queue."""

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        self.change(limits, now_s)
        self.num_running = 0
        self.num_bytes = 0
        """Bytes of the bodies of all requests in flight."""
        self.waiting: deque[anyio.Event] = deque()

    def change(self, limits: TenantLimits, now_s: float) -> None:
        self.limits = limits
        self.requests = Bucket(limits.requests_per_min, now_s)
        self.tokens = Bucket(limits.tokens_per_min, now_s)


class Admission:
    """Admission of all tenants to one server."""

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_bytes: int = 64 << 20,
    ) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._clock = clock
        self._parties: dict[str, _Party] = {}
        self._turns: deque[_Party] = deque()
        """Tenants with waiting requests, in the order of their turns."""
        self.num_running = self.num_waiting = self.num_refused = 0

    def count(self, name: str, limits: TenantLimits) -> None:
        """Count a request before any of it is read, even if it is refused later.

        ApiError 429: the tenant has used up a rate; the error says when to try again.
        """
        self._check_rates(name, self._party(name, limits))

    def hold(self, name: str, num_bytes: int) -> None:
        """Reserve bytes for a counted request until `release`. ApiError 429: the tenant holds too many bytes."""
        party = self._parties[name]
        if party.num_bytes + num_bytes > self._max_bytes:
            self.num_refused += 1
            raise self._full(f"requests of {name} that are under way have {party.num_bytes} bytes")
        party.num_bytes += num_bytes

    def release(self, name: str, num_bytes: int) -> None:
        """Release the bytes of a request at its end."""
        self._parties[name].num_bytes -= num_bytes

    @asynccontextmanager
    async def enter(self, name: str, limits: TenantLimits) -> AsyncIterator[None]:
        """Hold a place for a request within the block. ApiError 429: no place is free; the error says when to retry."""
        party = self._party(name, limits)
        await self._wait(name, party)
        try:
            yield
        finally:
            self.num_running -= 1
            party.num_running -= 1
            self._let_in()

    def charge(self, name: str, num_tokens: int) -> None:
        """Charge the tokens of a request to its tenant's rate, which delays the tenant's next requests."""
        self._parties[name].tokens.take(num_tokens)

    def _party(self, name: str, limits: TenantLimits) -> _Party:
        party = self._parties.get(name)
        if party is None:
            party = self._parties[name] = _Party(limits, self._clock())
        elif party.limits != limits:
            party.change(limits, self._clock())
        return party

    def _check_rates(self, name: str, party: _Party) -> None:
        now_s = self._clock()
        for bucket, what in ((party.requests, "requests"), (party.tokens, "tokens")):
            if wait_s := bucket.wait_s(now_s):
                self.num_refused += 1
                raise ApiError(
                    429,
                    f"{name} has used up its {bucket.per_minute:g} {what} a minute",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        party.requests.take(1)

    @staticmethod
    def _has_place(party: _Party) -> bool:
        most = party.limits.concurrent
        return most is None or party.num_running < most

    def _enter(self, party: _Party) -> None:
        self.num_running += 1
        party.num_running += 1

    async def _wait(self, name: str, party: _Party) -> None:
        """Wait for a place. Return immediately if a place is free and no earlier request is entitled to it."""
        turn = anyio.Event()
        if not party.waiting:
            self._turns.append(party)
        party.waiting.append(turn)
        self.num_waiting += 1
        self._let_in()
        if turn.is_set():
            return
        if self.num_waiting > self.max_waiting:
            self._give_up(party, turn)
            self.num_refused += 1
            raise self._full(f"{self.num_running} requests are being answered and {self.num_waiting} wait")
        try:
            with anyio.move_on_after(self._wait_s):
                await turn.wait()
        except BaseException:
            self._give_up(party, turn)
            raise
        if not turn.is_set():
            self._give_up(party, turn)
            self.num_refused += 1
            raise self._full(f"{name} has waited for {self._wait_s:g} s")

    def _give_up(self, party: _Party, turn: anyio.Event) -> None:
        """Leave the queue. If a place was assigned at the same moment, pass the place to the next request."""
        if turn.is_set():
            self.num_running -= 1
            party.num_running -= 1
            self._let_in()
            return
        party.waiting.remove(turn)
        self.num_waiting -= 1
        if not party.waiting:
            self._turns.remove(party)

    def _let_in(self) -> None:
        """Admit waiting requests while places are free, one tenant after another."""
        for _ in range(len(self._turns)):
            if self.num_running >= self.max_running:
                return
            party = self._turns.popleft()
            if self._has_place(party):
                self._enter(party)
                self.num_waiting -= 1
                party.waiting.popleft().set()
            if party.waiting:
                self._turns.append(party)

    def _full(self, why: str) -> ApiError:
        return ApiError(429, f"the server is busy: {why}", code="overloaded", retry_after_s=1 + self._wait_s / 10)
