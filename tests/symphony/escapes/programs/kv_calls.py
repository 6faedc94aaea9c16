"""Every call of libsym on a file, by its path and by forged numbers of handles: kv_calls.py PATH calls|handles|mount.

It prints one JSON line: what each gave, {"got": …} or {"refused": the error's name}.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libsym as sym
from libsym import abi
from libsym.abi import Op
from libsym.channel.process import process

Calls = dict[str, Callable[[], Any]]
MAX_HANDLE = 3000


def calls_on(path: str) -> Calls:
    """Return the calls that take a path; calls that change or remove the file come last."""
    return {
        "kv_open": lambda: sym.kv_open(path).read(),
        "kv_open for writing": lambda: sym.kv_open(path, "rw").read(),
        "kv_open_or_compute": lambda: sym.kv_open_or_compute(path, [1]).read(),
        "kv_read": lambda: sym.kv_read(path),
        "kv_fork": lambda: sym.kv_fork(path).read(),
        "kv_fork over it": lambda: sym.kv_fork(sym.kv_create(), path),
        "kv_extract": lambda: sym.kv_extract(path, [(0, 8)]).read(),
        "kv_merge": lambda: sym.kv_merge([sym.kv_create(), path]).read(),
        "kv_sync": lambda: sym.kv_sync(sym.kv_open(path, "rw")),
        "kv_lock": lambda: sym.kv_lock(sym.kv_open(path, "rw"), blocking=False),
        "exclusive pages": lambda: sym.kv_stat(path).exclusive_pages,
        "advice on it": lambda: sym.kv_stat(path).pinned,
        "kv_advise pin": lambda: sym.kv_advise(path, sym.PIN),
        "kv_advise ttl": lambda: sym.kv_advise(path, sym.TTL(3600)),
        "kv_advise cold": lambda: sym.kv_advise(path, sym.COLD),
        "pred": lambda: sym.pred(sym.kv_open(path, "rw"), [1]).argmax(),
        "generate": lambda: list(sym.generate(sym.kv_open(path, "rw"), [1], max_tokens=2)),
        "kv_write": lambda: sym.kv_write(sym.kv_open(path, "rw"), [1]),
        "kv_truncate": lambda: sym.kv_truncate(sym.kv_open(path, "rw"), 3),
        "kv_chmod": lambda: sym.kv_chmod(path, 0o666),
        "kv_mkdir": lambda: sym.kv_mkdir(path + ".d/below", parents=True),
        "kv_create below": lambda: sym.kv_create(str(Path(path).parent / "more.kv")),
        "kv_rename": lambda: (sym.kv_rename(path, path + "2"), sym.kv_rename(path + "2", path)),
        "kv_rename away": lambda: (sym.kv_rename(path, "stolen.kv"), sym.kv_rename("stolen.kv", path)),
        "kv_list": lambda: [each.name for each in sym.kv_list(str(Path(path).parent))],
        "kv_remove": lambda: sym.kv_remove(path),
    }


def through_the_mount(path: str) -> Calls:
    """Return attempts by the kernel's file system calls, and by tools."""
    mount = Path(sym.model_info().mount)
    file = mount / path
    text = mount / ".symphony/text" / path
    return {
        "read": lambda: bytes.hex(file.read_bytes()[:64]),
        "open for writing": lambda: file.open("r+b").close(),
        "append": lambda: file.open("ab").write(b"x"),
        "text": text.read_bytes,
        "append to text": lambda: text.open("a").write("more"),
        "listing": lambda: sorted(os.listdir(file.parent)),
        "attribute exclusive": lambda: os.getxattr(file, "user.kv.exclusive"),
        "attribute shared": lambda: os.getxattr(file, "user.kv.shared"),
        "attribute set": lambda: os.setxattr(file, "user.kv.pinned", b"1"),
        "link": lambda: os.link(file, mount / "linked.kv"),
        "chmod": lambda: file.chmod(0o666),
        "chown": lambda: os.chown(file, os.getuid() or 1, -1),
        "times": lambda: os.utime(file, (1, 1)),
        "truncate": lambda: os.truncate(file, 0),
        "copy": lambda: shutil.copy(file, mount / "copied.kv"),
        "tar": lambda: _ran(["tar", "-cf", "-", "-C", mount, path]),
        "cat": lambda: _ran(["cat", file]),
        "rename": lambda: file.rename(mount / "stolen.kv").rename(file),
        "unlink": file.unlink,
    }


def _ran(command: list[Any]) -> str:
    done = subprocess.run(command, check=False, capture_output=True)
    if done.returncode:
        raise PermissionError(13, done.stderr.decode()[-80:])
    return done.stdout[:64].hex()


def forged_handles() -> Calls:
    """Numbers that another program's handles have, on this program's connection; and numbers that none can have."""
    channel = process.channel()

    def all_of(op: Op, **words: Any) -> list[int]:
        served = []
        for handle in (*range(1, MAX_HANDLE), 2**31, 2**32 - 1, 2**63, 2**64 - 1):
            try:
                channel.call(op, handle=handle, **words)
            except sym.BadHandle:
                continue
            served.append(handle)
        return served

    return {
        "stat": lambda: all_of(Op.KV_STAT),
        "read": lambda: all_of(Op.KV_READ, args=(0, 100, 0, 0)),
        "fork": lambda: all_of(Op.KV_FORK, args=(0o600, 0, 0, 0)),
        "truncate": lambda: all_of(Op.KV_TRUNCATE, args=(1, 0, 0, 0)),
        "lock": lambda: all_of(Op.KV_LOCK, flags=abi.LOCK_NOWAIT),
        "close": lambda: all_of(Op.KV_CLOSE),
    }


def other_programs(victim: str) -> Calls:
    """Return calls on a program of another user, by its id."""
    return {
        "kill": lambda: sym.kill(victim),
        "wait": lambda: sym.wait(victim),
        "what they do": _told_of_others,
        "its names": lambda: [each.name for each in sym.programs() if each.uid != os.getuid()],
        "mail": lambda: [
            sym.send(each.pid, "forged")  # type: ignore[arg-type]  # None, while a program starts, is refused too
            for each in sym.programs()
            if each.uid != os.getuid()
        ],
        "books": sym.daemon_check,
    }


def _told_of_others() -> list[str]:
    """Return the mount's texts about programs of other users."""
    told = []
    for each in (Path(sym.model_info().mount) / ".symphony/proc").iterdir():
        try:
            if each.stat().st_uid != os.getuid():
                told += [path.read_text() for path in each.iterdir()]
        except OSError:
            continue
    return told


def outcomes(calls: Calls) -> dict[str, dict[str, str]]:
    found = {}
    for name, call in calls.items():
        try:
            got = call()
        except OSError as error:
            found[name] = {"refused": type(error).__name__}
        else:
            found[name] = {"got": repr(got)[:300]}
    return found


def main() -> None:
    what, path = sys.argv[1:]
    ways = {
        "calls": lambda: calls_on(path),
        "mount": lambda: through_the_mount(path),
        "handles": forged_handles,
        "programs": lambda: other_programs(path),
    }
    print(json.dumps(outcomes(ways[what]())))


if __name__ == "__main__":
    main()
