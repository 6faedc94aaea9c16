"""Reload of the configuration: at SIGHUP, a running daemon reads its configuration again.

A reload is atomic: if the file has any error, nothing changes. A changed key that can't be applied while the daemon
runs is reported, and needs a restart.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import trio

from libsym.errors import SymError
from symphony.service.notify import Notifier
from symphony.settings.config import SETTINGS, Config
from symphony.settings.loading import load

log = logging.getLogger(__name__)

Apply = Callable[[Config], None]
Prepare = Callable[[Config], Callable[[], None] | None]
"""Function that reads the file that a key's new value names, and returns a function that applies the value.

The function runs on a worker thread. None: nothing has to change. SymError: the value is refused, so the reload changes
nothing.
"""

CHANGEABLE = frozenset(key for key, setting in SETTINGS.items() if setting.reload)
"""Keys that can change while the daemon runs."""
READ_LIMIT_S = 20.0
"""Time limit for reading the files, since a file may lie on a mount that hangs."""
MAX_ERROR = 1000
"""Number of characters of an error that are kept. An error quotes keys and values, which may be very long."""


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a configuration: a file and the command line."""

    path: Path | None
    told: Mapping[str, Any]
    """Values from the command line, which override the file's."""

    def read(self) -> Config:
        """Read the configuration. SymError: the configuration has an error."""
        return load(self.path, self.told)


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """Result of the last reload, for `symphony stat --json`."""

    file: str | None
    reloads: int = 0
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    """Keys whose new values wait for a restart of the daemon."""
    error: str | None = None

    def sentence(self) -> str:
        if self.error is not None:
            return f"nothing is changed: {self.error}"
        text = f"changed: {', '.join(self.changed)}" if self.changed else "nothing has changed"
        return f"{text}; needs a restart: {', '.join(self.needs_restart)}" if self.needs_restart else text


class Reloading:
    """The configuration of a running daemon, and its reloads."""

    def __init__(
        self,
        config: Config,
        source: Source,
        apply: Mapping[str, Apply],
        notifier: Notifier,
        prepare: Mapping[str, Prepare],
    ) -> None:
        """`apply`: functions that apply a new value immediately. `prepare`: functions that first read a file.
        Each changeable key is in one of these mappings.
        """
        assert apply.keys() | prepare.keys() == CHANGEABLE
        self.config = config
        """The present configuration."""
        self._source = source
        self._apply = apply
        self._prepare = prepare
        self._reading = trio.CapacityLimiter(1)
        """Limiter for these reads alone: a worker that hangs while it reads a file must not hold up other workers."""
        self._notifier = notifier
        self.outcome = ReloadOutcome(None if source.path is None else str(source.path))

    async def run(self, signals: AsyncIterator[int], status: Callable[[], str]) -> None:
        """Reload at each signal, until cancelled. `status` returns the status line for the service manager."""
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
        except (SymError, OSError, ValueError) as error:
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
        other = [key for key in SETTINGS if getattr(wanted, key) != getattr(self.config, key) or key in prepared]
        changed = tuple(key for key in other if key in CHANGEABLE)
        self.config = _with(self.config, wanted, changed)
        # Keys may share a function: call it once.
        for apply in {self._apply[key]: None for key in changed if key in self._apply}:
            apply(self.config)
        for use in prepared.values():
            use()
        self._say(changed, tuple(key for key in other if key not in CHANGEABLE), None)

    def _say(self, changed: tuple[str, ...], needs_restart: tuple[str, ...], error: str | None) -> None:
        if error is not None and len(error) > MAX_ERROR:
            error = f"{error[:MAX_ERROR]}…"
        number = self.outcome.reloads + 1
        self.outcome = ReloadOutcome(self.outcome.file, number, changed, needs_restart, error)
        log.log(logging.INFO if error is None else logging.ERROR, "configuration: %s", self.outcome.sentence())

    def info(self) -> dict[str, Any]:
        """Return the last outcome, for `symphony stat`."""
        return asdict(self.outcome)


def _with(config: Config, wanted: Config, keys: tuple[str, ...]) -> Config:
    return replace(config, **{key: getattr(wanted, key) for key in keys})
