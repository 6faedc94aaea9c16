"""Calls on a file, by its path and by forged numbers of handles, and on a program of another user.

kv_calls.py calls|handles PATH, or programs ID. It prints one JSON line: what each gave, {"got": …} or
{"refused": the error's name}.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libsym as sym
from libsym import abi
from libsym.abi import Op
from libsym.channel.process import process

Calls = dict[str, Callable[[], Any]]
MAX_HANDLE = 500


def calls_on(path: str) -> Calls:
    """Return calls of libsym and of the mount on a file; those that change or remove it come last."""
    mount = Path(sym.model_info().mount)
    file, text = mount / path, mount / ".symphony/text" / path
    return {
        "kv_open": lambda: sym.kv_open(path).read(),
        "kv_open_or_compute": lambda: sym.kv_open_or_compute(path, [1]).read(),
        "kv_fork": lambda: sym.kv_fork(path).read(),
        "kv_extract": lambda: sym.kv_extract(path, [(0, 8)]).read(),
        "kv_merge": lambda: sym.kv_merge([sym.kv_create(), path]).read(),
        "exclusive pages": lambda: sym.kv_stat(path).exclusive_pages,
        "kv_advise": lambda: sym.kv_advise(path, sym.TTL(3600)) or "advised",
        "kv_write": lambda: sym.kv_write(sym.kv_open(path, "rw"), [1]),
        "read": file.read_bytes,
        "text": text.read_bytes,
        "attribute": lambda: os.getxattr(file, "user.kv.exclusive"),
        "chmod": lambda: file.chmod(0o666),
        "rename": lambda: file.rename(mount / "stolen.kv").rename(file),
        "kv_remove": lambda: sym.kv_remove(path),
    }


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
    ways = {"calls": lambda: calls_on(path), "handles": forged_handles, "programs": lambda: other_programs(path)}
    print(json.dumps(outcomes(ways[what]())))


if __name__ == "__main__":
    main()
