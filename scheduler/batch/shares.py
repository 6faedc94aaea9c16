"""Shares of service: the policy's tree of users, the domains within them, and programs."""

from __future__ import annotations

from typing import Any

from kvfs.pages.accounts import Account
from scheduler._loop import lib
from scheduler.batch.policy import ROOT
from scheduler.programs.program import Program

_OWN = -1
"""Last part of the path of an account's own files, beside the domains within the account. Programs with such files have
a share of their own above them, because a share holds accounts or programs, not both.
"""


class Shares:
    """Shares in the run, each known by its number there.

    A program has a share for each account that pays for a file of its calls. All its connections have the same share,
    so a program gets no more service by more connections or by forked children. The share stays until the program has
    gone, so that a program that has had much service cannot start again with a new share.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._accounts: dict[tuple[int, ...], int] = {(): self._new(-1, 1.0)}
        """Shares of accounts by path: a uid, then the domains within it."""
        self._num_within: dict[tuple[int, ...], int] = {(): 1}
        """Number of programs and accounts right below each path."""
        self._programs: dict[Program, dict[tuple[int, ...], int]] = {}
        self._num_calls: dict[Program, int] = {}
        self._gone: set[Program] = set()
        assert self._accounts[()] == ROOT

    def of(self, program: Program, account: Account) -> int:
        """Return the share for a call of a program. `account` pays for the file. Call `over` when the call is over."""
        shares = self._programs.setdefault(program, {})
        self._num_calls[program] = self._num_calls.get(program, 0) + 1
        path = (*account.numbers, _OWN)
        found = shares.get(path)
        if found is None:
            weights = [*[each.weight for each in account.chain()][::-1], 1.0]
            found = shares[path] = self._new(self._account(path, weights), 1.0)
            self._num_within[path] += 1
        return found

    def weigh(self, account: Account) -> None:
        """Apply an account's changed weight: later service is divided by it."""
        for path, share in self._accounts.items():
            if path and path[-1] == account.number:
                lib.sym_loop_set_weight(self._loop, share, account.weight)

    def over(self, program: Program) -> None:
        """Note that a call with a share from `of` has left the run."""
        self._num_calls[program] -= 1
        if program in self._gone and not self._num_calls[program]:
            self._forget(program)

    def forget(self, program: Program) -> None:
        """Forget a program that has gone, as soon as its last call has left the run."""
        if program not in self._programs:
            return
        if self._num_calls[program]:
            self._gone.add(program)
        else:
            self._forget(program)

    def _forget(self, program: Program) -> None:
        self._gone.discard(program)
        del self._num_calls[program]
        for path, share in self._programs.pop(program).items():
            lib.sym_loop_free_share(self._loop, share)
            self._left(path)

    def _left(self, path: tuple[int, ...]) -> None:
        """Subtract a share below an account. If no share is left there, free the account's share."""
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
