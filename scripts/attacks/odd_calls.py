#!/usr/bin/env python3
"""Archives with extreme headers, thousands of locks, and children with environments of megabytes.

    .venv/bin/python scripts/attacks/odd_calls.py [--quick] [--tree CHECKOUT]

uid 4242 unpacks a tar file on the mount. No real archive has such dates, owners, modes, sizes, names, links, devices
and attributes, and one header promises 2^62 bytes. The user takes locks on one file and on many. A lock beside
thousands must not cost the daemon more than a lock beside a few. A program of root starts children with excessive
environments, arguments, paths and limits; its launcher is the same as any user's. Each such child is refused, and a
normal child still starts. Afterwards everything is committed, and a check of the state finds no error. Needs root.
"""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from attacked import ATTACKER, Daemon, as_user, daemon, options, program, verdict

from kvfs.mount.handlers import DESCRIPTORS_PART

MAX_TIMES = 4
"""Highest cost of a lock beside thousands, as a multiple of the cost beside a few."""

MEMBERS: list[tuple[str, Mapping[str, object], Mapping[str, str]]] = [
    *[(f"date{n}", {"mtime": date}, {}) for n, date in enumerate([-1, 1e18, -1e18, 2**63, 0.999999999, 253402300800])],
    *[(f"owner{uid}", {"uid": uid, "gid": gid}, {}) for uid, gid in ((2**32 - 2, 2**32 - 2), (2**31, 8), (2**63, 0))],
    *[(f"mode{mode:o}", {"mode": mode}, {}) for mode in (0o7777, 0o177777, 0)],
    *[(each, {}, {}) for each in ("n" * 256, f"{'l' * 255}/{'n' * 255}", "deep/" * 30 + "f", "\n\x1b[2J", "\udcff")],
    *[(name, {}, {}) for name in ("../up", "a/../../b", ".symphony", ".symphony/metrics", "none.kv")],
    *[(f"to{len(to)}", {"type": tarfile.SYMTYPE, "linkname": to}, {}) for to in ("x" * 4095, "y" * 5000)],
    *[(f"link-{to}", {"type": tarfile.LNKTYPE, "linkname": to}, {}) for to in ("date0", ".symphony/heat", "link-self")],
    *[(f"device{n}", {"type": tarfile.CHRTYPE, "devmajor": n, "devminor": n}, {}) for n in (1, 2**20)],
    ("fifo", {"type": tarfile.FIFOTYPE}, {}),
    ("attributes", {}, {f"SCHILY.xattr.{name}": value for name, value in {
        "user.kv.ttl": "9" * 30, "user.a": "v" * 70_000, "security.capability": "x", "trusted.t": "x"}.items()}),
    ("directory", {"type": tarfile.DIRTYPE}, {f"SCHILY.xattr.user.kv.{key}": "9" * 400 for key in ("quota", "weight")}),
]  # fmt: skip

LOCKS = """
import fcntl as f
kind, mount = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
one, held = f"{mount}/locked", []
os.close(os.open(one, os.O_CREAT, 0o600))
print("begun", flush=True)
for line in sys.stdin:
    what, count = line.split()
    for _ in range(int(count)):
        path = one if kind == "one" else f"{mount}/locked{len(held)}"
        held.append(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        if kind == "posix":
            f.lockf(held[-1], f.LOCK_EX)
        else:
            f.flock(held[-1], f.LOCK_SH)
    print("done", flush=True)
"""

SPAWNS = """
import sys
import libsym as sym

M = 1_000_000
odd = [
    {"env": {"A": "x" * M}}, {"env": {f"A{n}": "" for n in range(100_000)}}, {"env": {"A": "x" * 8 * M}},
    {"args": ["x" * M]}, {"args": [""] * 100_000}, {"args": ["\\x01" * 30_000]},
    {"cwd": "/" + "\\U0001f600" * 15_000}, {"cwd": "/x" * 20_000}, {"name": "n" * M},
    {"limits": {"time": float("nan")}}, {"limits": {"pages": 10**400}}, {"limits": {"memory": 1 << 70}},
    {"args": ["\\udc80"]}, {"args": ["\\0"]}, {"env": {"A=B": ""}},
]
for words in odd:
    try:
        child = sym.spawn("/bin/true", **words)
    except sym.SymError as error:
        if len(str(error)) > 5000: print("a reason of", len(str(error)), "characters")
    else:
        print("started:", next(iter(words)), child)
    if sym.wait(sym.spawn("/bin/true", env={"A": "x" * 30_000})).status != 0: print("the next one has failed")
"""


def archive(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x" * 100_000}) as tar:
        for name, fields, pax in MEMBERS:
            member = tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(member, field, value)
            member.pax_headers = pax
            tar.addfile(member, io.BytesIO())
        end = tar.offset
    header = bytearray(tarfile.TarInfo("huge").tobuf())
    header[124:136] = b"\x80" + (2**62).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(path.read_bytes()[:end] + bytes(header) + b"D" * 1024)


def unpack(served: Daemon) -> list[str]:
    path = served.state.parent / "odd.tar"
    archive(path)
    broken = []
    for number, how in enumerate(([], ["--xattrs", "--xattrs-include=*", "--same-owner"])):
        where = served.mount / f"unpacked{number}"
        as_user(ATTACKER, ["mkdir", where])
        try:
            done = as_user(ATTACKER, ["tar", "-C", where, *how, "-xpf", path], errors="replace")
        except subprocess.TimeoutExpired:
            return ["tar hangs on the mount"]
        if not (where / "date0").exists() or "Unexpected EOF" not in done.stderr:
            broken.append(f"tar has not come to the end of the archive: {done.stderr[-300:]}")
        if (synced := as_user(ATTACKER, ["sync", where / "date0"])).returncode or not served.serves():
            broken.append(f"after tar nothing is committed: {synced.stderr}")
    return broken


def lock(served: Daemon, kind: str, count: int) -> list[str]:
    directory = served.mount / kind
    as_user(ATTACKER, ["mkdir", directory])
    with program(served, ATTACKER, LOCKS, kind, directory) as attacker:
        attacker.cost_us("lock", 100)
        few = attacker.cost_us("lock", 300)
        attacker.begin("lock", count)
        attacker.wait()
        many = min(attacker.cost_us("lock", 300) for _ in range(2))  # a commit of names may fall into one of them
    return [f"locks, {kind}: {few:.0f} us beside some, {many:.0f} beside {count}"] if many > MAX_TIMES * few else []


def spawn(served: Daemon, tree: Path) -> list[str]:
    file = served.state.parent / "prog.py"
    file.write_text(SPAWNS)
    environment = served.environment | {"PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(served.state.parent)}
    command = [sys.executable, "-P", "-m", "symphony", "run", "--isolation", "none", str(file)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=served.state.parent, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return ["a spawn() is never answered"]
    return [f"spawn(): {line}" for line in (done.stdout + done.stderr).splitlines()]


def attack(served: Daemon, tree: Path, num_locks: int) -> list[str]:
    broken = unpack(served) + spawn(served, tree)
    for kind in ("one", "many", "posix"):
        broken += lock(served, kind, num_locks)
    if not served.serves() or "Traceback" in served.log.read_text():
        broken.append(f"the daemon: {served.log.read_text()[-1000:]}")
    served.process.terminate()
    if served.process.wait(60):
        broken.append(f"the daemon has not written all: {served.log.read_text()[-1000:]}")
    command = [sys.executable, "-P", "-m", "symphony", "fsck", "--state", str(served.state)]
    done = subprocess.run(command, env=served.environment, capture_output=True, text=True, check=False, timeout=60)
    return broken + ([f"the state: {done.stdout[-500:]}"] if done.returncode else [])


def main() -> int:
    asked = options(__doc__)
    of_one_user = resource.getrlimit(resource.RLIMIT_NOFILE)[1] // DESCRIPTORS_PART
    num_locks = 1000 if asked.quick else min(10_000, of_one_user - 1000)
    with daemon("--kv-memory", "64M", "--disk", "200M", tree=asked.tree) as served:
        broken = attack(served, asked.tree, num_locks)
    return verdict(f"{len(MEMBERS)} odd members of an archive, {num_locks} locks of each kind, odd children", broken)


if __name__ == "__main__":
    sys.exit(main())
