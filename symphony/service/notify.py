"""Notifications to the service manager as in sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger(__name__)


class Notifier:
    """Sender of notifications to the service manager. Without a service manager, it sends nothing."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Remove the service manager's variables from the environment, so that child processes do not get them."""
        name = environment.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        for_whom = environment.pop("WATCHDOG_PID", "")
        interval_us = environment.pop("WATCHDOG_USEC", "0")
        is_ours = for_whom in ("", str(os.getpid())) and interval_us.isdigit()
        self.watchdog_s = int(interval_us) * 1e-6 if is_ours and self._address else 0.0
        """Time limit of the watchdog: after that time without a notification, the service manager ends the daemon.
        0: no limit.
        """

    def tell(self, **states: str) -> None:
        """Send states to the service manager. A failure is only logged."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in states.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as connection:
                connection.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %r: %s", text, error)

    def ready(self, status: str) -> None:
        """Report that the daemon is ready: its mount and socket exist, or its reload is over."""
        self.tell(READY="1", STATUS=status)

    def reloading(self) -> None:
        """Report that a reload has begun. `ready` reports its end."""
        self.tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))

    def stopping(self, status: str) -> None:
        self.tell(STOPPING="1", STATUS=status)

    def status(self, text: str) -> None:
        self.tell(STATUS=text)

    def alive(self) -> None:
        """Feed the watchdog."""
        self.tell(WATCHDOG="1")
