"""Tickets in order: users take turns; of one user's tickets, the ticket with the highest priority is served first, and
of several such tickets the oldest.

So a priority orders a user's own calls, and does not affect other users.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from kvfs.tiers.tickets import Ticket


class Waiting:
    """Queue of tickets that have no frames yet."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users: OrderedDict[int, list[tuple[tuple[bool, int, int], Ticket]]] = OrderedDict()
        """A heap of tickets for each user, in the order of the users' turns. Tickets that have ended may remain in
        their heap.
        """

    def __bool__(self) -> bool:
        return self.first() is not None

    def __len__(self) -> int:
        return sum(not ticket.is_over for tickets in self._users.values() for _, ticket in tickets)

    def add(self, ticket: Ticket) -> None:
        heapq.heappush(self._users.setdefault(ticket.user, []), (ticket.order, ticket))
        if ticket.is_answer:  # an answer to pressure makes room for the tickets that wait
            self._users.move_to_end(ticket.user, last=False)

    def first(self) -> Ticket | None:
        """Return the first ticket. It stays first until it ends, or until a ticket of the same user precedes it."""
        while self._users:
            user, tickets = next(iter(self._users.items()))
            while tickets and tickets[0][1].is_over:
                heapq.heappop(tickets)
            if tickets:
                return tickets[0][1]
            del self._users[user]
        return None

    def served(self, ticket: Ticket) -> None:
        """Remove the first ticket. The next user's ticket becomes the first."""
        tickets = self._users[ticket.user]
        assert tickets[0][1] is ticket
        heapq.heappop(tickets)
        if tickets:
            self._users.move_to_end(ticket.user)
        else:
            del self._users[ticket.user]
