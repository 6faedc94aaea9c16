"""The launcher's process: `symphony run` starts it, nobody else has to.

It starts its zygote before it loads what it needs itself: the two load side by side, so the first program comes sooner.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

from symphony.launcher import system
from symphony.launcher.zygote_start import start_zygote

_STANDARD = 2
"""Descriptors up to here are those that each process has."""


def _let_go(ready: int, lock: str) -> None:
    """Locks, pipes and the directory of the command that came first are not ours to hold: but `ready`, and our lock."""
    os.chdir("/")
    ours = os.stat(lock)  # noqa: PTH116 - pathlib is not there yet
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers
        with suppress(OSError):  # the directory that was read
            if number > _STANDARD and number != ready and not os.path.samestat(os.fstat(number), ours):
                os.close(number)


def main() -> None:
    """Arguments: the directory, the daemon's socket, a descriptor to tell when it listens, seconds of idleness."""
    directory, daemon, ready, idle_s = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0o077)
    system.adopt_orphans()
    _let_go(int(ready), f"{directory}/lock")
    zygote = start_zygote(directory)

    import asyncio  # noqa: PLC0415 - beside the zygote
    import logging  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    from symphony.launcher import launcher  # noqa: PLC0415
    from symphony.launcher.places import Places  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    places = Places(Path(directory), daemon)
    places.lock.write_text(f"{os.getpid()}\n", encoding="ascii")
    asyncio.run(launcher.run(places, int(ready), float(idle_s), zygote))


if __name__ == "__main__":
    main()
