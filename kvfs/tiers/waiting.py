"""Tickets in order: users take turns, and among those of one user priority goes first, then who came first.

So a priority says something of a user's own calls, and nothing of other users'.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from kvfs.tiers.tickets import Ticket


class Waiting:
    """Those who have no frames yet."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users: OrderedDict[int, list[tuple[tuple[bool, int, int], Ticket]]] = OrderedDict()
        """By user, whose turn it is first: a heap each. Some tickets may be over."""

    def __bool__(self) -> bool:
        return self.first() is not None

    def __len__(self) -> int:
        return sum(not ticket.is_over for tickets in self._users.values() for _, ticket in tickets)

    def add(self, ticket: Ticket) -> None:
        heapq.heappush(self._users.setdefault(ticket.user, []), (ticket.order, ticket))
        if ticket.is_answer:  # it is to make room for those who wait
            self._users.move_to_end(ticket.user, last=False)

    def first(self) -> Ticket | None:
        """Whose turn it is; it is its turn until it is over, or one of the same user's goes before it."""
        while self._users:
            user, tickets = next(iter(self._users.items()))
            while tickets and tickets[0][1].is_over:
                heapq.heappop(tickets)
            if tickets:
                return tickets[0][1]
            del self._users[user]
        return None

    def served(self, ticket: Ticket) -> None:
        """The first has had its turn: it is the next user's."""
        tickets = self._users[ticket.user]
        assert tickets[0][1] is ticket
        heapq.heappop(tickets)
        if tickets:
            self._users.move_to_end(ticket.user)
        else:
            del self._users[ticket.user]
