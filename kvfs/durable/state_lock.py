"""The lock of a state directory, for one daemon or one fsck at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libsym.errors import SymError


@contextmanager
def locked_by_daemon(state: Path) -> Iterator[None]:
    """Hold the lock of a state for a daemon. The directory is made if it does not exist."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"can't use the state directory {state}: {error.strerror}; choose another --state"
        raise SymError(message, error.errno) from None
    with _held(descriptor, f"another daemon uses the state directory {state}: stop it, or choose another --state"):
        yield


@contextmanager
def locked_by_fsck(state: Path) -> Iterator[None]:
    """Hold the lock of a state, for fsck. A copy of a state has no lock file until a daemon uses the copy. Until then
    the copy needs no lock.
    """
    in_use = (
        f"a daemon uses the state directory {state}: `symphony fsck` without --state asks that daemon, or stop it first"
    )
    try:
        descriptor = os.open(state / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    except OSError as error:
        raise SymError(f"can't use the state directory {state}: {error.strerror}", error.errno) from None
    with _held(descriptor, in_use):
        yield


@contextmanager
def _held(descriptor: int, in_use: str) -> Iterator[None]:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SymError(in_use, errno.EBUSY) from None
        yield
    finally:
        os.close(descriptor)
