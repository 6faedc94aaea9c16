"""What a service manager is told: sd_notify(3), a datagram on the socket that it names. Without one nothing is told."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger(__name__)


class Notifier:
    """One service manager, or none. It tells what is true of a daemon, and is told nothing."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Takes what is for this process alone out of the environment: none of its children is the daemon."""
        name = environment.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        for_whom = environment.pop("WATCHDOG_PID", "")
        interval_us = environment.pop("WATCHDOG_USEC", "0")
        is_ours = for_whom in ("", str(os.getpid())) and interval_us.isdigit()
        self.watchdog_s = int(interval_us) * 1e-6 if is_ours and self._address else 0.0
        """After so long without a word the service manager ends the daemon; 0: it never does."""

    def tell(self, **states: str) -> None:
        """A service manager that is gone is no reason to stop."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in states.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as connection:
                connection.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %r: %s", text, error)

    def ready(self, status: str) -> None:
        """Others find the mount and the socket; or what there was to read again is read."""
        self.tell(READY="1", STATUS=status)

    def reloading(self) -> None:
        """Until `ready`."""
        self.tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))

    def stopping(self, status: str) -> None:
        self.tell(STOPPING="1", STATUS=status)

    def status(self, text: str) -> None:
        self.tell(STATUS=text)

    def alive(self) -> None:
        """Feeds the watchdog."""
        self.tell(WATCHDOG="1")
