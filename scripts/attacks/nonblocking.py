#!/usr/bin/env python3
"""A launcher makes a connection blocking that it has passed on, and the daemon sleeps in recv or sendmsg.

Both ends of the connection are the attacker's, and so are the flags of the description that the daemon shares.
"""

from __future__ import annotations

import sys
import threading
import time

from attacked import ATTACKER, Daemon, as_user, daemon, options, verdict

from libsym.channel.handshake import GREETING

HELD_UP_S = 3.0
ATTACK = """
import json, socket
path, how, hold_s, greeting = sys.argv[1], sys.argv[2], float(sys.argv[3]), bytes.fromhex(sys.argv[4])
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
time.sleep(hold_s)
"""


def longest_s(served: Daemon, how: str, hold_s: float) -> float:
    """How long `ls` takes at most while the attack lasts."""
    done = []
    arguments = (ATTACKER, ATTACK, served.socket, how, hold_s, GREETING.hex())
    attack = threading.Thread(target=lambda: done.append(as_user(*arguments, served=served)))
    attack.start()
    longest = 0.0
    while attack.is_alive():
        began_s = time.monotonic()
        as_user(0, ["ls", served.mount])
        longest = max(longest, time.monotonic() - began_s)
        time.sleep(0.05)
    attack.join()
    assert done[0].returncode == 0, done[0].stderr
    return longest


def main() -> int:
    """Run it both ways."""
    chosen = options(__doc__)
    broken = []
    with daemon(tree=chosen.tree) as served:
        for how in ("recv", "send"):
            held_s = longest_s(served, how, 2 * HELD_UP_S if chosen.quick else 20)
            if held_s > HELD_UP_S:
                broken.append(f"ls took {held_s:.1f} s while a {how} of the daemon's could block")
    return verdict("a connection's flags are its launcher's, and hold up nobody", broken)


if __name__ == "__main__":
    sys.exit(main())
