"""A disk that hangs or fails as the test says, call by call; otherwise the real one."""

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfs.names.disk import DISK_DEADLINE_S, Disk

CALLS = (
    *("open", "open_nowait", "close", "pread", "preadv", "pwritev", "ftruncate", "allocate", "begin_writing"),
    *("fdatasync", "unlink"),
)


class TroubledDisk:
    """`disk` is what a volume is given."""

    def __init__(self, deadline_s: float = DISK_DEADLINE_S, owner: threading.Thread | None = None) -> None:
        """`owner`: the thread that must never wait for it."""
        self.entered = threading.Semaphore(0)
        """Released when a call begins to hang."""
        self._owner = owner
        self.calls: list[str] = []
        """Calls so far, in order."""
        self._changed = threading.Condition()
        self._stalled: tuple[str, ...] = ()
        self._whose = ""
        self._errors: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        real = Disk(deadline_s)
        through: dict[str, Any] = {name: self._through(name, getattr(real, name)) for name in CALLS}
        self.disk = dataclasses.replace(real, **through)

    def stall(self, *calls: str, whose: str = "") -> None:
        """Have these calls hang from now on; all do if none is named. `whose`: prefix of the backing file's name."""
        with self._changed:
            self._stalled, self._whose = calls or CALLS, whose

    def go_on(self) -> None:
        with self._changed:
            self._stalled = ()
            self._changed.notify_all()

    def fail(self, call: str, code: int) -> None:
        self._errors[call] = code

    def mend(self) -> None:
        self._errors.clear()

    def _hangs(self, name: str, what: str) -> bool:
        return name in self._stalled and what.startswith(self._whose)

    def _through(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any) -> Any:
            what = first.name if isinstance(first, Path) else self._paths[first]
            is_nowait = name == "open_nowait" or (name in {"preadv", "pwritev"} and rest[-1] & os.RWF_NOWAIT)
            assert is_nowait or self._owner is not threading.current_thread(), f"{name} may hang the owner"
            with self._changed:
                if self._hangs(name, what):
                    if is_nowait:
                        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                    self.entered.release()
                    self._changed.wait_for(lambda: not self._hangs(name, what))
            if name in self._errors:
                raise OSError(self._errors[name], os.strerror(self._errors[name]))
            if name == "close":
                del self._paths[first]
            result = real(first, *rest)
            self.calls.append(name)
            if name in {"open", "open_nowait"}:
                self._paths[result] = what
            return result

        return call
