#!/usr/bin/env python3
"""Files that the daemon or the gateway obeys, and another user can change: a policy of the tiers, a file of keys.

    .venv/bin/python scripts/attacks/operators_files.py [--quick] [--tree CHECKOUT]

The operator names a policy file that another user owns, may write to, can replace, or has linked to. The daemon gets
the name at its start and by a reload. The policy would write the daemon's uid to a file as a mark. A gateway that root
runs gets another user's file of keys. Needs root.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from attacked import ANSWER_S, ATTACKER, daemon, gateway, options, verdict

POLICY = """
import os
open({mark!r}, "a").write(str(os.geteuid()))
def rank(files, gaps):
    return files.idle_s
"""


def owned(file: Path, _elsewhere: Path) -> Path:
    """Make the attacker the owner of the file. Root still owns its directory."""
    os.chown(file, ATTACKER, ATTACKER)
    return file


def writable(file: Path, _elsewhere: Path) -> Path:
    file.chmod(0o666)
    return file


def replaceable(file: Path, _elsewhere: Path) -> Path:
    """Let all users write to the file's directory."""
    file.parent.chmod(0o777)
    return file


def linked(file: Path, elsewhere: Path) -> Path:
    """Return the attacker's link to the file, in a sticky directory. Root owns the target."""
    elsewhere.chmod(0o1777)
    link = elsewhere / "policy.py"
    link.symlink_to(file)
    os.lchown(link, ATTACKER, ATTACKER)
    return link


def starts(tree: Path, prepare: Callable[[Path, Path], Path]) -> list[str]:
    """Start a daemon with a policy file that `prepare` has changed. Return the failures."""
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        Path(directory).chmod(0o755)
        file, elsewhere, mark = (Path(directory, name) for name in ("of_root/policy.py", "shared", "mark"))
        file.parent.mkdir()
        elsewhere.mkdir()
        file.write_text(POLICY.format(mark=str(mark)))
        path = prepare(file, elsewhere)
        try:
            with daemon("--policy", path, tree=tree):
                pass
        except AssertionError as error:  # the daemon has not started
            said = str(error)
        else:
            said = ""
        if mark.exists():
            return [f"{prepare.__name__}: the policy ran as uid {mark.read_text()}"]
        return [] if f"policy {path}: " in said else [f"{prepare.__name__}: the daemon did not say why: {said!r}"]


def reloads_and_reads_keys(tree: Path) -> list[str]:
    """Name a policy file of the attacker to a running daemon, and a file of keys to a gateway. Return the failures."""
    with tempfile.TemporaryDirectory(prefix="attack-") as directory:
        Path(directory).chmod(0o755)
        config, file, mark, keys = (Path(directory, name) for name in ("symphony.toml", "policy.py", "mark", "keys"))
        config.touch()
        file.write_text(POLICY.format(mark=str(mark)))
        os.chown(file, ATTACKER, ATTACKER)
        keys.write_text(f"mine sha256:{'0' * 64}\n")
        keys.chmod(0o600)
        os.chown(keys, ATTACKER, ATTACKER)
        with daemon("--config", config, tree=tree) as served:
            config.write_text(f'policy = "{file}"\n')
            os.kill(served.pid, signal.SIGHUP)
            end_s = time.monotonic() + ANSWER_S
            while f"policy {file}" not in served.log.read_text() and not mark.exists() and time.monotonic() < end_s:
                time.sleep(0.1)
            broken = [f"a reload ran the policy as uid {mark.read_text()}"] if mark.exists() else []
            if not served.serves() or f"{file} belongs to uid {ATTACKER}" not in served.log.read_text():
                broken.append("a reload did not say why, or ended the daemon")
            try:
                with gateway(served, "--keys", keys, tree=tree):
                    broken.append("a gateway of root's takes the keys of another user")
            except RuntimeError as error:
                if f"belongs to uid {ATTACKER}" not in str(error):
                    broken.append(f"the gateway did not say why: {error}")
    return broken


def main() -> int:
    asked = options(__doc__)
    ways = [replaceable] if asked.quick else [owned, writable, replaceable, linked]
    broken = [line for prepare in ways for line in starts(asked.tree, prepare)] + reloads_and_reads_keys(asked.tree)
    return verdict("neither daemon nor gateway obeys a file that another user can change", broken)


if __name__ == "__main__":
    sys.exit(main())
