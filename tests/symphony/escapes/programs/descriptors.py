"""Attacks by descriptors: by inherited ones, and by files that are executed or changed through them."""

import fcntl
import os
from pathlib import Path

from attack import World, attack


@attack(no_control="a test that runs may have more open")
def inherited(world: World) -> str | None:
    """Finds descriptors that nobody meant for it."""
    found = world["open_at_start"]
    return f"{found}" if found else None


@attack(no_control="outside all is visible anyhow")
def standard_streams_lead_out(world: World) -> str | None:
    """Opens a file again, for writing, that its standard streams come from."""
    found = []
    for number in range(3):
        target = os.readlink(f"/proc/self/fd/{number}")
        if target.startswith("/") and not target.startswith("/dev/"):
            found.append(target)
    return f"{found}" if found else None


@attack(no_control="the libraries outside are the machine's")
def libraries_rewritten(_world: World) -> str | None:
    """Opens what is mapped into it, and into all programs, for writing."""
    paths = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    found = []
    for path in paths:
        try:
            os.close(os.open(path.strip(), os.O_WRONLY))
        except OSError:
            continue
        found.append(path)
    return f"{found}" if found else None


@attack(no_control="there is nothing that the memory is shared with")
def zygote_memory(_world: World) -> str | None:
    """Has memory mapped that it shares with the zygote, and may write to."""
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if " rw-s " in line or " rwxs " in line]
    shared = [line for line in shared if "memfd:symphony" in line or "/dev/zero" in line]
    return f"{shared}" if shared else None


@attack(no_control="a lease needs a file of the caller's own")
def lease(_world: World) -> str:
    """Takes a lease on a file that others open, so that they wait."""
    fd = os.open("/etc/passwd", os.O_RDONLY)
    fcntl.fcntl(fd, 1024, fcntl.F_RDLCK)
    return "a lease on /etc/passwd"
