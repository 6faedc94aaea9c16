#!/usr/bin/env python3
"""A gateway writes and reads files of its user through names that another user has made on the mount.

Another user makes the gateway's directory before the gateway does. Once the gateway serves, the attacker replaces
`responses` with a link to a directory of the gateway's user. GET then reads there, and a background response is written
there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from attacked import ATTACKER, Daemon, as_user, daemon, gateway, options, verdict

PLANTED = "resp_" + "0" * 24
MADE_FIRST = """
os.umask(0)
for each in ("", "/local", "/local/sessions", "/local/cached", "/local/responses"):
    os.mkdir(sys.argv[1] + each, 0o777)
"""
A_LINK = """
os.symlink(sys.argv[2], sys.argv[1])
"""
SWAPPED = """
os.rename(sys.argv[1] + "/local/responses", sys.argv[1] + "/local/away")
os.symlink(sys.argv[2], sys.argv[1] + "/local/responses")
"""


def sent(url: str, path: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url + path, data, {"content-type": "application/json"}), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def victims(directory: Path) -> Path:
    """Make a directory that only its owner may enter, with a secret in it."""
    directory.mkdir(mode=0o700)
    (directory / f"{PLANTED}.json").write_text('{"response": {"status": "completed", "it": "secret"}, "items": []}')
    return directory


def used(served: Daemon, place: Path, victim: Path, tree: Path) -> list[str]:
    """Use a gateway as its clients do.

    Return its accesses to the victim's directory, or a refusal that names no uid.
    """
    broken = ["it serves from a directory of another user"]
    try:
        with gateway(served, tree=tree) as gate:
            sent(gate.url, "/sessions")
            if as_user(ATTACKER, SWAPPED, place, victim).returncode == 0:
                status, _ = sent(gate.url, f"/v1/responses/{PLANTED}")
                broken += ["a file of its user was read"] if status == 200 else []
                sent(gate.url, "/v1/responses", {"input": "Hi", "background": True, "max_output_tokens": 2})
                broken += ["a file was written"] if len(list(victim.iterdir())) > 1 else []
    except RuntimeError as refused:
        broken = [] if f"uid {ATTACKER}" in str(refused) else [f"the refusal does not name the uid: {refused}"]
    return broken


def main() -> int:
    args = options(__doc__)
    broken = []
    with daemon(tree=args.tree) as served, tempfile.TemporaryDirectory() as directory:
        own, mount = f"gateway-{os.geteuid()}", served.mount
        for number, (name, how) in enumerate((name, how) for name in (own, "gateway") for how in (MADE_FIRST, A_LINK)):
            victim = victims(Path(directory, f"victim{number}"))
            as_user(ATTACKER, how, mount / name, victim).check_returncode()
            broken += [f"{name}: {each}" for each in used(served, mount / name, victim, args.tree)]
            for each in (own, "gateway"):
                if os.path.lexists(mount / each):
                    (mount / each).rename(mount / f"{each}.{number}")
        (mount / "open").mkdir()
        (mount / "open").chmod(0o777)
        try:
            with gateway(served, "--directory", "open/mine", tree=args.tree):
                broken.append("a directory that others may write to is on the way")
        except RuntimeError as refused:
            broken += [] if "others may write" in str(refused) else [f"a directory that others may write to: {refused}"]
        as_user(ATTACKER, MADE_FIRST, mount / own).check_returncode()
        try:
            with gateway(served, "--directory", "mine", tree=args.tree) as gate:
                question = {"messages": [{"role": "user", "content": "Hi"}], "conversation": "x", "max_tokens": 2}
                broken += (
                    [] if sent(gate.url, "/v1/chat/completions", question)[0] == 200 else ["--directory serves nobody"]
                )
            broken += [] if (mount / "mine/local/sessions/x.kv").is_file() else ["--directory was not used"]
        except RuntimeError as refused:
            broken.append(f"--directory is no way out: {refused}")
    return verdict("a directory of another user, a link, and one that others may write to are refused", broken)


if __name__ == "__main__":
    sys.exit(main())
