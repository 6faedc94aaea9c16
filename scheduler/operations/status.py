"""Operations that describe the daemon: PING, its state, and the audit of its accounts and tables."""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvfs.fs import FileSystem
from kvfs.pages.accounts import Account
from libsym.abi import Op
from libsym.errors import SymError
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.operation import Operation, Table, require_operator
from scheduler.wire.replies import Reply, json_reply

log = logging.getLogger(__name__)


MAX_USERS = 64
"""Maximum number of users that one reply names. These are the users with the most memory."""


class Status:
    """Answers PING, STAT and CHECK."""

    def __init__(self, fs: FileSystem, daemon_info: Callable[[], dict[str, Any]]) -> None:
        self._fs = fs
        self._daemon_info = daemon_info

    def table(self) -> Table:
        return {
            Op.PING: Operation(lambda _call: Reply(), takes_payload=False),
            Op.STAT: Operation(self._stat, takes_payload=False),
            Op.CHECK: Operation(self._check, takes_payload=False),
        }

    def _stat(self, call: SystemCall) -> Reply:
        return json_reply(self._daemon_info() | self._account_of(call.lip))

    def _account_of(self, lip: Lip) -> dict[str, Any]:
        """Return the caller's use of pages and files, its quotas and weight, and the users that it may see."""
        account = self._fs.account_of(lip.credentials)
        return {
            "used_bytes": account.num_bytes,
            "used_files": account.num_files,
            "quota_bytes": account.limits.num_bytes,
            "quota_files": account.limits.num_files,
            "weight": account.weight,
            "users": [_user(each) for each in self._visible_to(lip)],
        }

    def _visible_to(self, lip: Lip) -> list[Account]:
        """Return the users whose numbers the caller may see: all users, or only itself.

        Root and the daemon's user may see all users. A connection of a gateway may see none.
        """
        accounts = self._fs.pool.accounts
        if lip.credentials.root is not None:  # a connection of a gateway: its domains must not see each other
            return []
        if lip.uid not in {0, os.geteuid()}:
            return [accounts.of(lip.uid)]
        users = (each for each in accounts if not each.is_domain)
        return heapq.nlargest(MAX_USERS, users, key=lambda each: each.holdings.num_bytes)

    def _check(self, call: SystemCall) -> Reply:
        """Audit all files in one go. Each file takes some microseconds, so only operators may ask for an audit."""
        require_operator(call, "check its books")
        try:
            return json_reply(asdict(self._fs.audit()))
        except SymError as error:
            log.error("%s", error)  # noqa: TRY400 - the error says it all
            raise


def _user(account: Account) -> dict[str, Any]:
    """Return the usage of one user: bytes of files, memory in the daemon, and the objects that it holds."""
    return {
        "uid": account.number,
        "used_bytes": account.num_bytes,
        "memory_bytes": account.holdings.num_bytes,
        "quota_memory": account.holdings.limit_bytes,
        "holds": account.holdings.facts(),
    }
