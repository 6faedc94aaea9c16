#!/usr/bin/env python3
"""Images and archives made by another user: false claims in them, delays by them, unwanted contents.

    .venv/bin/python scripts/attacks/images.py [--quick] [--tree CHECKOUT]

An image can name tokens that do not belong to its KV, and this cannot be detected. So a program that asks for tokens
never gets another user's image of them. The program's own computation stays correct, even if its account has a copy of
the false image. Large images full of holes delay no other user. Root unpacks an archive on the mount: nothing in it may
run as root, be a device, or lead outside the mount. Needs root.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attacked import _BECOME, ATTACKER, VICTIM, Daemon, as_user, daemon, options, verdict

LIMIT_S = 4.0
TRUTH, LIE = list(range(64)), list(range(100, 164))
KEEP = """
    sym.kv_open_or_compute(sys.argv[1], json.loads(sys.argv[2])).close()
    os.chmod(f"{sys.argv[3]}/{sys.argv[1]}", 0o644)
"""
PUT = """
    with open(sys.argv[1], "rb") as file, open(sys.argv[2], "wb", buffering=0) as image:
        image.write(file.read())
    os.chmod(sys.argv[2], 0o644)
"""
TAKE = """
    try:
        sym.kv_open_or_compute("handbook.kv", json.loads(sys.argv[1]))
        print("another user's image was taken for a computation")
    except sym.NoAccess:
        pass
"""
ASK = """
    with sym.kv_create() as kv:
        print(sym.pred(kv, json.loads(sys.argv[1])).topk(5))
"""
CROWD = """
    with open(sys.argv[2], "rb") as file:
        head = file.read()
    def claim(number):
        fd = os.open(f"{sys.argv[1]}/claim-{number}", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(fd, head)
        os.ftruncate(fd, int(sys.argv[3]))
        print("claimed", flush=True)
        os.close(fd)
    for number in range(40):
        threading.Thread(target=claim, args=(number,)).start()
"""


def forged(image: bytes, tokens: list[int]) -> bytes:
    """Return the image with other tokens, and with the digest that matches them."""
    start, header = _parsed(image)
    page_bytes = header["pages"]["data_offsets"][1] // header["pages"]["shape"][0]
    first, last = header["tokens"]["data_offsets"]
    data = bytearray(image[start:])
    data[first:last] = b"".join(token.to_bytes(4, "little") for token in tokens)
    pages = [data[at : at + page_bytes] for at in range(0, header["pages"]["data_offsets"][1], page_bytes)]
    whole = b"".join(_digest(page) for page in pages) + bytes(data[first:])
    was = header["__metadata__"]["digest"].encode()
    return image[:start].replace(was, _digest(whole).hex().encode()) + bytes(data)


def claim(image: bytes, num_entries: int) -> tuple[bytes, int]:
    """Return the header of an image of `num_entries` entries, and the size of the whole image."""
    start, header = _parsed(image)
    page_bytes = header["pages"]["data_offsets"][1] // header["pages"]["shape"][0]
    num_pages = -(-num_entries // 32)
    ends = [0, num_pages * page_bytes]
    ends += [ends[1] + 4 * num_entries, ends[1] + 8 * num_entries]
    header["pages"]["shape"][0] = num_pages
    for number, name in enumerate(("pages", "tokens", "positions")):
        header[name]["data_offsets"] = ends[number : number + 2]
        if number:
            header[name]["shape"] = [num_entries]
    return image[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(start - 8), start + ends[-1]


def _parsed(image: bytes) -> tuple[int, dict[str, Any]]:
    start = 8 + int.from_bytes(image[:8], "little")
    return start, json.loads(image[8:start])


def _digest(data: bytes | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def lies(served: Daemon, where: Path) -> list[str]:
    """Import images with forged tokens. Return a failure if a victim's tokens then differ from the model's own."""
    honest = as_user(VICTIM, ASK, LIE, served=served).stdout
    as_user(ATTACKER, KEEP, "own.kv", TRUTH, served.mount, served=served)
    lie = where / "lie"
    lie.write_bytes(forged((served.mount / "own.kv").read_bytes(), LIE))
    for uid, name in ((ATTACKER, "handbook.kv"), (VICTIM, "copied.kv")):
        if (done := as_user(uid, PUT, lie, served.mount / name, served=served)).returncode:
            return [done.stderr]
    taken, found = (as_user(VICTIM, source, LIE, served=served) for source in (TAKE, ASK))
    if taken.returncode or found.returncode or not honest:
        return [taken.stderr + found.stderr]
    broken = taken.stdout.splitlines()
    if found.stdout != honest:
        broken.append("a lie in the account has changed what was computed beside it")
    return broken


@contextmanager
def crowd(served: Daemon, head: Path, size: int) -> Iterator[None]:
    """Import forty images of the attacker at the same time."""
    command = [sys.executable, "-c", _BECOME + "\n".join(line[4:] for line in CROWD.splitlines()), ATTACKER]
    command += [served.mount, head, size]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=served.environment, cwd="/"
    ) as program:
        try:
            assert program.stdout is not None
            for _ in range(40):
                program.stdout.readline()
            yield
        finally:
            program.kill()


def holds_up(served: Daemon, where: Path, num_entries: int) -> list[str]:
    """Import a small image of the victim during the attacker's imports. Return a failure if that takes too long."""
    image = (served.mount / "own.kv").read_bytes()
    small, head = where / "small", where / "head"
    small.write_bytes(image)
    text, size = claim(image, num_entries)
    head.write_bytes(text)
    with crowd(served, head, size):
        began_s = time.monotonic()
        try:
            done = as_user(VICTIM, PUT, small, served.mount / "small.kv", served=served, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return [f"forty images of one user hold up another's for more than {time.monotonic() - began_s:.0f} s"]
    return [done.stderr] if done.returncode else []


def unpacks(served: Daemon, where: Path) -> list[str]:
    """Unpack an archive of the attacker as root, with the owners and modes that the archive states. Return the
    failures.
    """
    escaped, archive = where / "escaped", where / "archive.tar"
    outside = where / "outside"
    outside.mkdir()
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        program = Path("/usr/bin/id").read_bytes()
        for name, how in (
            ("runs-as-root", {"mode": 0o6755, "size": len(program)}),
            ("memory", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5, "mode": 0o666}),
            (f"../../../../../../..{escaped}", {"size": 1}),
            ("way", {"type": tarfile.SYMTYPE, "linkname": str(outside)}),
            ("way/written", {"size": 1}),
        ):
            member = tarfile.TarInfo(name)
            for key, value in how.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(program if name == "runs-as-root" else b"x") if member.size else None)
    target = served.mount / "unpacked"
    as_user(0, ["mkdir", target])
    as_user(0, ["tar", "xpf", archive, "-C", target])
    broken = []
    if "euid=0" in as_user(ATTACKER, [target / "runs-as-root"]).stdout:
        broken.append("a program from an archive runs as root")
    if as_user(ATTACKER, ["head", "-c", "1", target / "memory"]).returncode == 0:
        broken.append("a device from an archive can be read")
    if escaped.exists() or list(outside.iterdir()):
        broken.append("an archive has written outside of the mount")
    if not (target / "runs-as-root").exists() or not served.serves():
        broken.append("the archive was not unpacked, or the daemon is gone")
    return broken


def main() -> int:
    asked = options(__doc__)
    with daemon("--kv-memory", "64M", tree=asked.tree) as served:
        where = served.state.parent / "made"
        where.mkdir()
        broken = lies(served, where) + unpacks(served, where)
        broken += holds_up(served, where, 1 << (20 if asked.quick else 23))
    return verdict("no program got a false image, archives brought no rights, and images delayed no other user", broken)


if __name__ == "__main__":
    sys.exit(main())
