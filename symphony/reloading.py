"""What can be told to a daemon that runs: it reads its configuration again when it gets SIGHUP.

All or nothing: a file in which anything is wrong changes nothing. A key that can't change while the daemon runs is
named, and waits for a restart.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import trio

from libsym.errors import SymError
from symphony.config import Config, load
from symphony.service.notify import Notifier

log = logging.getLogger(__name__)

Apply = Callable[[Config], None]

_OF_TIERS = "grace_ms", "pin_share", "policy"
_AT_ONCE = "disk", "disk_timeout", "drain", "log", "programs", "quota", "quota_files", "starts", "step_ms", "verbose"
CHANGEABLE = frozenset((*_OF_TIERS, *_AT_ONCE, "watchdog", "weight"))
"""Keys that can change while the daemon runs."""
_MAY_REFUSE = ("policy",)
"""Keys whose new value may be refused when it is applied, and nothing has changed then: a file is read for it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration comes from."""

    path: Path | None
    told: Mapping[str, Any]
    """By the command line, which goes first."""

    def read(self) -> Config:
        """SymError: something in it is wrong."""
        return load(self.path, self.told)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the last time that the configuration was read again; `symphony stat --json` has it."""

    file: str | None
    reloads: int = 0
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    """Keys that the file has otherwise than the daemon, and that can't change while it runs."""
    error: str | None = None

    def sentence(self) -> str:
        if self.error is not None:
            return f"nothing is changed: {self.error}"
        text = f"changed: {', '.join(self.changed)}" if self.changed else "nothing has changed"
        return f"{text}; needs a restart: {', '.join(self.needs_restart)}" if self.needs_restart else text


class Reloading:
    """The configuration of one daemon as time goes by."""

    def __init__(
        self,
        config: Config,
        source: Source,
        apply: Mapping[str, Apply],
        notifier: Notifier,
        is_stale: Mapping[str, Callable[[], bool]] | None = None,
    ) -> None:
        """`apply`: what makes a key's new value true, for each key that can change. `is_stale`: whether what a key
        names is to be read again although the name is the same.
        """
        assert apply.keys() == CHANGEABLE
        self.config = config
        """As it is now."""
        self._source = source
        self._apply = apply
        self._is_stale = is_stale or {}
        self._notifier = notifier
        self.outcome = Outcome(None if source.path is None else str(source.path))

    async def run(self, signals: AsyncIterator[int], status: Callable[[], str]) -> None:
        """Read again whenever a signal says so. For ever. `status`: what the service manager shows afterwards."""
        async for _ in signals:
            self._notifier.reloading()
            try:
                wanted = await trio.to_thread.run_sync(self._source.read, abandon_on_cancel=True)
            except SymError as error:
                self._say((), (), str(error))
            else:
                self._take(wanted)
            self._notifier.ready(status())

    def _take(self, wanted: Config) -> None:
        other = [field.name for field in fields(Config) if self._differs(wanted, field.name)]
        changed = tuple(key for key in other if key in self._apply)
        before, self.config = self.config, _with(self.config, wanted, changed)
        done: list[Apply] = []
        try:
            in_order = sorted(changed, key=_MAY_REFUSE.__contains__)  # what may refuse is never put back
            for apply in {self._apply[key]: None for key in in_order}:  # once, where keys share one
                apply(self.config)
                done.append(apply)
        except SymError as error:
            self.config = before
            for apply in done:
                apply(before)
            self._say((), (), str(error))
        else:
            self._say(changed, tuple(key for key in other if key not in self._apply), None)

    def _differs(self, wanted: Config, key: str) -> bool:
        if getattr(wanted, key) != getattr(self.config, key):
            return True
        return key in self._is_stale and self._is_stale[key]()

    def _say(self, changed: tuple[str, ...], needs_restart: tuple[str, ...], error: str | None) -> None:
        number = self.outcome.reloads + 1
        self.outcome = Outcome(self.outcome.file, number, changed, needs_restart, error)
        log.log(logging.INFO if error is None else logging.ERROR, "configuration: %s", self.outcome.sentence())

    def info(self) -> dict[str, Any]:
        """For `symphony stat`."""
        return asdict(self.outcome)


def _with(config: Config, wanted: Config, keys: tuple[str, ...]) -> Config:
    return replace(config, **{key: getattr(wanted, key) for key in keys})
