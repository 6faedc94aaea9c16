#!/usr/bin/env python3
"""A launcher makes a connection blocking after passing it on, so that the daemon would sleep in recv or sendmsg.

The attacker owns both ends of the connection. The daemon and the attacker share one file description, with its flags.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from subprocess import TimeoutExpired

from attacked import ATTACKER, Daemon, as_user, daemon, options, running_as, verdict

from libsym.channel.handshake import GREETING

HELD_UP_S = 15.0
"""Time until a hang is certain. A busy machine takes some seconds for a command."""
ATTACK = """
import json, socket
path, how, greeting = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
number = os.urandom(4).hex()
launcher = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
launcher.connect(path + ".programs")
launcher.send(json.dumps({"n": 1, "do": "start", "id": number, "name": "a", "limits": {}}).encode())
assert json.loads(launcher.recv(65536))["ok"]
copy, program = socket.socketpair()
if how == "send":
    copy.setblocking(False)
    try:
        while True:
            copy.send(bytes(4096))
    except BlockingIOError:
        pass
socket.send_fds(launcher, [json.dumps({"n": 2, "do": "connect", "id": number}).encode()], [copy.fileno()])
assert json.loads(launcher.recv(65536))["ok"]
copy.setblocking(True)
program.send(greeting if how == "send" else greeting[:1])
print("done", flush=True)
sys.stdin.read()
"""


def longest_s(served: Daemon, how: str, num_times: int) -> float:
    """Return the longest time that `ls` takes during the attack, in seconds."""
    longest = 0.0
    with running_as(ATTACKER, ATTACK, served.socket, how, GREETING.hex(), served=served) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "done\n"
        for _ in range(num_times):
            began_s = time.monotonic()
            with suppress(TimeoutExpired):
                as_user(0, ["ls", served.mount])
            longest = max(longest, time.monotonic() - began_s)
            if longest > HELD_UP_S:
                break
    return longest


def main() -> int:
    """Attack recv and sendmsg."""
    chosen = options(__doc__)
    broken = []
    with daemon(tree=chosen.tree) as served:
        for how in ("recv", "send"):
            held_s = longest_s(served, how, 5 if chosen.quick else 200)
            if held_s > HELD_UP_S:
                broken.append(f"ls took {held_s:.1f} s while a {how} of the daemon's could block")
    return verdict("a launcher may change its connection's flags, and delays no other call by it", broken)


if __name__ == "__main__":
    sys.exit(main())
