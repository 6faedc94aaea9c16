"""Who service is shared between: a tree of users, the domains within them, and programs, as the policy has it."""

from __future__ import annotations

from typing import Any

from kvfs.pages.table import PageTable
from scheduler._loop import lib
from scheduler.batch.call import Caller

ROOT = 0
_OWN = -1
"""In a path: what is of a user, and in no domain of theirs. A share has accounts in it, or programs, not both."""


class Shares:
    """Numbers of shares in the run. A program has one for each account that pays for a file of its calls.

    They are kept until the program has gone, so that one which has had more than its share does not begin anew.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._accounts: dict[tuple[int, ...], int] = {(): self._new(-1, 1.0)}
        """By path: a uid, then the domains within."""
        self._num_within: dict[tuple[int, ...], int] = {(): 1}
        """Programs and accounts right below each."""
        self._programs: dict[Caller, dict[tuple[int, ...], int]] = {}
        self._num_calls: dict[Caller, int] = {}
        self._gone: set[Caller] = set()
        assert self._accounts[()] == ROOT

    def of(self, caller: Caller, table: PageTable) -> int:
        """The share that a call is counted in; say `over` when the call is."""
        account = table.pool.accounts.of(table.owner)
        shares = self._programs.setdefault(caller, {})
        self._num_calls[caller] = self._num_calls.get(caller, 0) + 1
        path = (*account.numbers, _OWN)
        found = shares.get(path)
        if found is None:
            weights = [*[each.weight for each in account.chain()][::-1], 1.0]
            found = shares[path] = self._new(self._account(path, weights), 1.0)
            self._num_within[path] += 1
        return found

    def over(self, caller: Caller) -> None:
        """A call that `of` was asked about has left the run."""
        self._num_calls[caller] -= 1
        if caller in self._gone and not self._num_calls[caller]:
            self._forget(caller)

    def forget(self, caller: Caller) -> None:
        """It has gone: when its last call has left, too, nothing is known of it."""
        if caller not in self._programs:
            return
        if self._num_calls[caller]:
            self._gone.add(caller)
        else:
            self._forget(caller)

    def _forget(self, caller: Caller) -> None:
        self._gone.discard(caller)
        del self._num_calls[caller]
        for path, share in self._programs.pop(caller).items():
            lib.sym_loop_free_share(self._loop, share)
            self._left(path)

    def _left(self, path: tuple[int, ...]) -> None:
        """One less is below an account; without any it goes, too."""
        self._num_within[path] -= 1
        if not self._num_within[path]:
            del self._num_within[path]
            lib.sym_loop_free_share(self._loop, self._accounts.pop(path))
            self._left(path[:-1])

    def _account(self, path: tuple[int, ...], weights: list[float]) -> int:
        found = self._accounts.get(path)
        if found is None:
            parent = self._account(path[:-1], weights[:-1])
            found = self._accounts[path] = self._new(parent, weights[-1])
            self._num_within[path] = 0
            self._num_within[path[:-1]] += 1
        return found

    def _new(self, parent: int, weight: float) -> int:
        share = int(lib.sym_loop_new_share(self._loop, parent, weight))
        if share < 0:
            raise MemoryError("no memory for a share")
        return share
