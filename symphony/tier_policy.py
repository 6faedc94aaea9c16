"""Which policy decides who goes to disk first: as the configuration says, and says otherwise when it is read again."""

from __future__ import annotations

import logging
from typing import Any

from kvfs.tiers import loading
from kvfs.tiers.pager import Pager
from libsym.errors import Invalid
from symphony.config import NO_POLICY

log = logging.getLogger(__name__)


class TierPolicy:
    """That of one daemon."""

    def __init__(self, pager: Pager, name: str) -> None:
        """Invalid: a file of the operator's is no policy."""
        self._pager = pager
        self._guarded: loading.Guarded | None = None
        self.name = name
        self._use(name)

    def use(self, name: str) -> None:
        """Decide by another one from now on; a file is read again. Invalid: it is none, and nothing has changed."""
        if NO_POLICY in (name, self.name) and name != self.name:
            raise Invalid(f"policy {self.name} can't become {name} while the daemon runs: start it again")
        self._use(name)
        self.name = name

    def _use(self, name: str) -> None:
        rank = loading.load(loading.DEFAULT if name == NO_POLICY else name)
        before, self._guarded = self._guarded, None
        if name not in loading.NAMES and name != NO_POLICY:
            default = loading.NAMES[loading.DEFAULT]
            rank = self._guarded = loading.Guarded(rank, default, log=log, name=name)
        self._pager.use(rank)
        if before is not None:
            before.close()

    def info(self) -> dict[str, Any]:
        """For `symphony stat`."""
        return {"policy": self.name, "policy_error": "" if self._guarded is None else self._guarded.failure or ""}
