#!/usr/bin/env python3
"""Files without a name: one user opens files with O_PATH, unlinks them, and makes more.

    .venv/bin/python scripts/attacks/unlinked.py [--quick] [--tree CHECKOUT]

An unlinked file is charged until the kernel forgets it. The daemon must not keep the attributes of these files in
memory. In the end the whole quota must be free again. The kernel must also forget files that programs remove by libsym.
Needs root.
"""

from __future__ import annotations

import sys

from attacked import ATTACKER, as_user, daemon, memory_bytes, options, running_as, verdict

QUOTA, QUICK_QUOTA = 3000, 300
MOST_BYTES = 24 << 20
"""Largest growth of the daemon's memory for the attacker's files. In an early version, attributes took 60 KB for each
name.
"""

HOLD = """
    def file(name):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))
        os.setxattr(name, "user.x", bytes(60_000))
        return os.unlink

    def directory(name):
        os.mkdir(name)
        os.setxattr(name, "user.x", bytes(60_000))
        return os.rmdir

    def link(name):
        os.symlink("x" * 4000, name)
        return os.unlink

    quota = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.mkdir(sys.argv[1])
    os.chdir(sys.argv[1])
    kept = []
    try:
        while len(kept) < 5 * quota:
            remove = (file, directory, link)[len(kept) % 3]("held")
            kept.append(os.open("held", os.O_PATH | os.O_NOFOLLOW))
            remove("held")
    except OSError as error:
        assert error.errno == errno.EDQUOT, error
    print(len(kept), flush=True)
    sys.stdin.readline()
    for descriptor in kept:
        os.close(descriptor)
    until_s = time.monotonic() + 30  # the kernel forgets some time later
    for number in range(quota - 50):
        while True:
            try:
                os.close(os.open(f"again{number}", os.O_CREAT | os.O_WRONLY, 0o600))
                break
            except OSError as error:
                assert error.errno == errno.EDQUOT and time.monotonic() < until_s, error
                time.sleep(0.1)
    for number in range(quota - 50):
        os.unlink(f"again{number}")
    path = sys.argv[1] + "/seen.kv"
    for number in range(2 * quota):
        sym.kv_create(path).close()
        os.stat("seen.kv")
        sym.kv_remove(path)
    print("all", flush=True)
"""


def main() -> int:
    args = options(__doc__)
    quota = QUICK_QUOTA if args.quick else QUOTA
    broken = []
    with daemon("--kv-memory", "64M", "--quota-files", quota, tree=args.tree) as served:
        before = memory_bytes(served)
        with running_as(ATTACKER, HOLD, served.mount / "mine", quota, served=served) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            held = int(process.stdout.readline() or -1)
            grown = memory_bytes(served) - before
            if not 0 < held <= quota:
                broken.append(f"{held} files without a name are held under a quota of {quota}")
            if grown > MOST_BYTES:
                broken.append(f"they take {grown >> 20} MiB")
            process.stdin.write("\n")
            process.stdin.flush()
            if process.stdout.readline() != "all\n":
                broken.append("what is no longer held does not come back")
        check = as_user(0, "print(sym.daemon_check())", served=served)
        if check.returncode:
            broken.append(f"the books do not balance: {check.stderr.strip()[-200:]}")
    return verdict(f"{held} of {quota} files can be held without a name, in {grown >> 20} MiB", broken)


if __name__ == "__main__":
    sys.exit(main())
