"""The launcher's process, which `symphony run` starts.

The launcher starts its zygote before it imports its own modules. Both processes load in parallel, so the first program
starts sooner.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

from symphony.launcher.machine import system
from symphony.launcher.zygote.zygote_start import start_zygote

_STANDARD = 2
"""Number of standard error, the last standard stream."""


def _let_go(ready: int, lock: str) -> None:
    """Close inherited descriptors, except `ready` and the lock, and leave the inherited working directory."""
    os.chdir("/")
    ours = os.stat(lock)  # noqa: PTH116 - pathlib is not imported yet
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - names are needed
        with suppress(OSError):  # the descriptor of listdir is closed already
            if number > _STANDARD and number != ready and not os.path.samestat(os.fstat(number), ours):
                os.close(number)


def main() -> None:
    """Run a launcher. Arguments: its directory, the daemon's socket, a descriptor for its report, idle seconds."""
    directory, daemon, ready, idle_s = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0o077)
    system.adopt_orphans()
    _let_go(int(ready), f"{directory}/lock")
    zygote = start_zygote(directory)

    import asyncio  # noqa: PLC0415 - imported while the zygote loads
    import logging  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    from symphony.launcher.common.places import Places  # noqa: PLC0415
    from symphony.launcher.supervising import launcher  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    places = Places(Path(directory), daemon)
    places.lock.write_text(f"{os.getpid()}\n", encoding="ascii")
    asyncio.run(launcher.run(places, int(ready), float(idle_s), zygote))


if __name__ == "__main__":
    main()
