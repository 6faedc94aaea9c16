#!/usr/bin/env python3
"""Attributes and names: one user tries to store more bytes in them than the quota allows for files.

    .venv/bin/python scripts/attacks/attributes.py [--quick] [--tree CHECKOUT]

Each file has 64 KiB of attributes. The attacker also makes symbolic links and long names. A quota bounds the bytes of
all three. With `--disk` alone, the size of the disk bounds these bytes. Few bytes of attributes may stay in the
daemon's memory, even after a restart. When the files are gone, the index must shrink again. With neither option the
attacker fills a small file system. Then another user's sync must still succeed, and all syncs must succeed after the
attacker's files are gone. Needs root.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attacked import ATTACKER, ROOT, VICTIM, Daemon, as_user, daemon, memory_bytes, options, verdict

FILES, QUICK_FILES = 20_000, 400
QUOTA_BYTES = 1 << 20
FREE_BYTES = 128 * 255
"""Bytes of names that an account gets without charge."""
DISK_MIB, QUICK_DISK_MIB = 400, 24
MOST_BYTES = 32 << 20
"""Largest growth of the daemon's memory: 16 MiB for the index's cache, 8 MiB for attributes that the index lacks."""
EMPTY_BYTES = 14 << 20
"""Largest size of the index and its log after the files are gone. The index keeps a few free pages for later use."""
SHRINKS_S = 60
SMALL_MIB = 64
"""Size of the small file system: large enough for the attributes, and small enough to be filled quickly."""

HOARD = """
    where, number = sys.argv[1], int(sys.argv[2])
    os.mkdir(where)
    os.chdir(where)
    sums = {"attributes": 0, "links": 0, "names": 0}

    def noted(name):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))
        os.setxattr(name, "user.x", os.urandom(65000))
        return 65000

    def linked(name):
        os.symlink("x" * 4000, name)
        return 4000

    def named(name):
        os.mkdir(name.ljust(255, "n"))
        return 255

    for kind, make in {"attributes": noted, "links": linked, "names": named}.items():
        try:
            for each in range(number):
                sums[kind] += make(f"{kind}{each}")
        except OSError as error:
            assert error.errno in (errno.EDQUOT, errno.ENOSPC), error
    if sums["attributes"]:
        os.setxattr("attributes0", "user.x", bytes(65000))
        assert os.getxattr("attributes0", "user.x") == bytes(65000)
    print(json.dumps(sums))
"""
KEPT = """
    assert os.getxattr(sys.argv[1] + "/attributes0", "user.x") == bytes(65000)
"""


def hoarded(served: Daemon, number: int) -> dict[str, int]:
    """Return the bytes that the attacker could store, by kind."""
    made = as_user(ATTACKER, HOARD, served.mount / "mine", number, served=served, timeout=600)
    assert made.returncode == 0, made.stderr
    found: dict[str, int] = json.loads(made.stdout)
    return found


SYNCED = """
    path = sys.argv[1]
    sym.kv_create(path).close()
    file = os.open(sys.argv[2] + "/" + path, os.O_RDONLY)
    os.fsync(file)
"""


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a file system of SMALL_MIB."""
    image, where = directory / "image", directory / "small"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(SMALL_MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


def filled(directory: Path, tree: Path) -> list[str]:
    """Fill a small file system with the default limits. Return the failures."""
    broken = []
    with small_disk(directory) as small, daemon("--kv-memory", "16M", "--state", small / "state", tree=tree) as served:
        hoarded(served, 2 * (SMALL_MIB << 20) // 65000)
        if (synced := as_user(VICTIM, SYNCED, "a.kv", served.mount, served=served)).returncode:
            broken.append(f"on a small disk another user's sync fails: {synced.stderr.strip()[-200:]}")
        as_user(ATTACKER, ["rm", "-r", served.mount / "mine"], timeout=600)
        try:
            sync(served)
        except AssertionError as error:
            broken.append(f"on a small disk nothing is kept when the attributes are gone: {error}")
    return broken


def index_bytes(state: Path) -> int:
    return sum(path.stat().st_size for path in state.glob("index.db*"))


def sync(served: Daemon) -> None:
    done = as_user(0, [sys.executable, "-m", "symphony", "sync"], served=served, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


def smallest_index(served: Daemon, state: Path) -> int:
    """Return the size of the index after it has had time to shrink."""
    end_s = time.monotonic() + SHRINKS_S
    while (size := index_bytes(state)) > EMPTY_BYTES and time.monotonic() < end_s:
        time.sleep(0.2)
        sync(served)
    return size


def main() -> int:
    args = options(__doc__)
    number, disk_mib = (QUICK_FILES, QUICK_DISK_MIB) if args.quick else (FILES, DISK_MIB)
    common = ("--kv-memory", "16M", "--disk", f"{disk_mib}M")
    broken = []
    with daemon(*common, "--quota", QUOTA_BYTES, tree=args.tree) as served:
        sums = hoarded(served, number)
        if sum(sums.values()) > QUOTA_BYTES + FREE_BYTES:
            broken.append(f"{sums} bytes under a quota of {QUOTA_BYTES}")
        if (check := as_user(0, "print(sym.daemon_check())", served=served)).returncode:
            broken.append(f"the books do not balance: {check.stderr.strip()[-200:]}")
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        state = Path(directory) / "state"
        with daemon(*common, "--state", state, tree=args.tree) as served:
            before = memory_bytes(served)
            sums = hoarded(served, number)
            if sum(sums.values()) > disk_mib << 20:
                broken.append(f"{sums} bytes on a disk of {disk_mib} MiB")
            sync(served)
            grown, full = memory_bytes(served) - before, index_bytes(state)
        with daemon(*common, "--state", state, tree=args.tree) as served:
            grown_again = memory_bytes(served) - before
            if (kept := as_user(ATTACKER, KEPT, served.mount / "mine", served=served)).returncode:
                broken.append(f"attributes that were allowed are not kept: {kept.stderr.strip()[-200:]}")
            as_user(ATTACKER, ["rm", "-r", served.mount / "mine"], timeout=600)
            sync(served)
            left = smallest_index(served, state)
            if (check := as_user(0, "print(sym.daemon_check())", served=served)).returncode:
                broken.append(f"the books do not balance: {check.stderr.strip()[-200:]}")
        broken += filled(Path(directory), args.tree)
    sizes = (
        f"{sum(sums.values()) >> 20} MiB in attributes and names take {grown >> 20} MiB of memory, {grown_again >> 20} "
        f"after a restart; the index has {full >> 20} MiB, {left >> 20} when they are gone"
    )
    if max(grown, grown_again) > MOST_BYTES + (full >> 4):
        broken.append(f"memory grows: {sizes}")
    if left > EMPTY_BYTES:
        broken.append(f"the index does not shrink: {sizes}")
    return verdict(f"a quota holds, and the limit of a disk, and a small disk; {sizes}", broken)


if __name__ == "__main__":
    sys.exit(main())
