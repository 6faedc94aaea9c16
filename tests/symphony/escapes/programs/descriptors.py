"""Attacks by descriptors: by inherited ones, and by files that are executed or changed through them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from attack import World, attack


@attack(no_control="a test that runs may have more open")
def inherited(world: World) -> str | None:
    """Finds descriptors that nobody meant for it."""
    found = world["open_at_start"]
    return f"{found}" if found else None


@attack(no_control="a test that runs may have more open")
def writes_to_inherited(world: World) -> str | None:
    """Writes to pipes that nobody meant for it: to what waits at their other ends it speaks as another."""
    written = []
    for number in world["open_at_start"]:
        try:
            os.write(number, b"")  # nothing: whether it could is told all the same
        except OSError:
            continue
        written.append(world["open_at_start"][number])
    return f"{written}" if written else None


@attack(no_control="a test that runs may have more open")
def read_inherited(_world: World) -> str | None:
    """Reads what descriptors that nobody meant for it lead to."""
    for number in range(3, 64):
        try:
            found = os.pread(number, 1 << 20, 0)
        except OSError:
            continue
        if found:
            return f"{len(found)} bytes from {os.readlink(f'/proc/self/fd/{number}')}: {found[-60:]!r}"
    return None


@attack(no_control="a test that runs may have more open")
def up_from_inherited(_world: World) -> str | None:
    """Goes up from directories that it has open to the machine's tree."""
    for number in range(3, 64):
        for path in ("..", "../../../../../../../../..", "/etc/shadow", ""):
            try:
                found = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=number)
            except (OSError, ValueError):
                continue
            if path != "/etc/shadow":
                return f"{os.listdir(found)}"
    return None


@attack(no_control="the interpreter outside is the machine's")
def mapped_files(_world: World) -> str:
    """Opens what is mapped into it by /proc/self/map_files, past the mounts that make it read-only."""
    for path in sorted(Path("/proc/self/map_files").iterdir()):
        os.close(os.open(path, os.O_RDONLY))
        return f"opened {path}"
    return "none to open"


@attack(no_control="outside all is visible anyhow")
def standard_streams_lead_out(world: World) -> str | None:
    """Opens a file again, for writing, that its standard streams come from."""
    found = []
    for number in range(3):
        target = os.readlink(f"/proc/self/fd/{number}")
        if target.startswith("/") and not target.startswith("/dev/"):
            found.append(target)
    return f"{found}" if found else None


@attack(no_control="the interpreter outside is the machine's")
def interpreter_rewritten(_world: World) -> str:
    """Opens the running interpreter for writing, as runc's escape did."""
    os.close(os.open("/proc/self/exe", os.O_WRONLY))
    return "opened"


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
