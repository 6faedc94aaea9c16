"""Error of a sandbox that can't be made, with a remedy for the user."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INSTEAD = "or run the program without a sandbox: --isolation none"
_SWITCHES = (
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ("/proc/sys/user/max_net_namespaces", "0", "user.max_net_namespaces=10000"),
    ("/proc/sys/user/max_mnt_namespaces", "0", "user.max_mnt_namespaces=10000"),
)
"""Kernel settings that may deny namespaces to users: the file, the denying value, and the setting that allows them."""


class Lacks(Exception):  # noqa: N818 - the name reads well: the kernel lacks something
    """Error: the kernel or the machine allows no sandbox. The message says why, and what to do."""


@contextmanager
def step(what: str, remedy: str | None = None) -> Iterator[None]:
    """Turn an OSError into Lacks. `remedy`: advice if the cause is known; None: look for a cause in the settings."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        why = remedy or _why(error.errno)
        raise Lacks(f"no sandbox: {what}: {where}{error.strerror}; {why}, {_INSTEAD}") from None


def _why(code: int | None) -> str:
    """Return why users get no namespaces on this machine, or where the user may find out."""
    for path, value, setting in _SWITCHES:
        if _read(path) == value:
            return f"an administrator has to allow it (sysctl {setting})"
    if code not in (errno.EACCES, errno.EINVAL, errno.ENOSPC, errno.ENOSYS, errno.EPERM, errno.EUSERS):
        return "the launcher's log may say more"
    if code == errno.ENOSPC:
        return "there are too many namespaces already (sysctl user.max_user_namespaces and its like)"
    return "this machine or its container allows no namespaces to users"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
