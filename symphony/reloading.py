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
Prepare = Callable[[Config], Callable[[], None] | None]
"""Reads what a key's new value names, on a worker, and returns what makes it true. None: nothing is to change.
SymError: it is refused, and nothing changes.
"""

_OF_TIERS = "grace_ms", "pin_share", "policy"
_OF_USERS = "programs", "quota", "quota_files", "quota_memory", "starts", "weight"
_AT_ONCE = "disk", "disk_timeout", "drain", "log", "step_ms", "verbose"
CHANGEABLE = frozenset((*_OF_TIERS, *_OF_USERS, *_AT_ONCE, "watchdog"))
"""Keys that can change while the daemon runs."""
READ_LIMIT_S = 20.0
"""Seconds that the files may take to be read: one may lie where nothing answers."""
MAX_ERROR = 1000
"""Characters of what is wrong: a key or a value may have a million."""


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
        prepare: Mapping[str, Prepare],
    ) -> None:
        """`apply` and `prepare`: what makes a key's new value true, one of them for each key that can change."""
        assert apply.keys() | prepare.keys() == CHANGEABLE
        self.config = config
        """As it is now."""
        self._source = source
        self._apply = apply
        self._prepare = prepare
        self._reading = trio.CapacityLimiter(1)
        """Of its own: a worker that hangs in a file holds up no other work."""
        self._notifier = notifier
        self.outcome = Outcome(None if source.path is None else str(source.path))

    async def run(self, signals: AsyncIterator[int], status: Callable[[], str]) -> None:
        """Read again whenever a signal says so. For ever. `status`: what the service manager shows afterwards."""
        async for _ in signals:
            self._notifier.reloading()
            await self._read_again()
            self._notifier.ready(status())

    async def _read_again(self) -> None:
        try:
            with trio.fail_after(READ_LIMIT_S):
                wanted, prepared = await trio.to_thread.run_sync(
                    self._read, abandon_on_cancel=True, limiter=self._reading
                )
        except SymError as error:
            self._say((), (), str(error))
        except trio.TooSlowError:
            self._say((), (), f"{self._source.path}, or a file that it names, was not read in {READ_LIMIT_S:g} s")
        else:
            self._take(wanted, prepared)

    def _read(self) -> tuple[Config, dict[str, Callable[[], None]]]:
        wanted = self._source.read()
        prepared = {key: prepare(wanted) for key, prepare in self._prepare.items()}
        return wanted, {key: each for key, each in prepared.items() if each is not None}

    def _take(self, wanted: Config, prepared: Mapping[str, Callable[[], None]]) -> None:
        names = [field.name for field in fields(Config)]
        other = [key for key in names if getattr(wanted, key) != getattr(self.config, key) or key in prepared]
        changed = tuple(key for key in other if key in CHANGEABLE)
        self.config = _with(self.config, wanted, changed)
        for apply in {self._apply[key]: None for key in changed if key in self._apply}:  # once, where keys share one
            apply(self.config)
        for use in prepared.values():
            use()
        self._say(changed, tuple(key for key in other if key not in CHANGEABLE), None)

    def _say(self, changed: tuple[str, ...], needs_restart: tuple[str, ...], error: str | None) -> None:
        if error is not None and len(error) > MAX_ERROR:
            error = f"{error[:MAX_ERROR]}…"
        number = self.outcome.reloads + 1
        self.outcome = Outcome(self.outcome.file, number, changed, needs_restart, error)
        log.log(logging.INFO if error is None else logging.ERROR, "configuration: %s", self.outcome.sentence())

    def info(self) -> dict[str, Any]:
        """For `symphony stat`."""
        return asdict(self.outcome)


def _with(config: Config, wanted: Config, keys: tuple[str, ...]) -> Config:
    return replace(config, **{key: getattr(wanted, key) for key in keys})
