#!/usr/bin/env python3
"""Heads and tails of a connection's rings, set to odd values while its calls are in flight.

    .venv/bin/python scripts/attacks/rings.py [--quick] [--tree CHECKOUT]

Programs of uid 4242 compute with libsym: a loop over `pred()`, a `generate()` and plain calls. Each program then keeps
writing into its own shared region for a moment. The program moves an index backwards, beyond the ring, into the middle
of a frame, or to where no frame was written. The program also changes the daemon's own indices and the geometry.
Meanwhile uid 4243 computes the same row again and again, and must get the same bits. At the end no connection of the
attacker may be left. Needs root.
"""

from __future__ import annotations

import sys

from attacked import ATTACKER, VICTIM, Daemon, Program, as_user, daemon, memory_bytes, options, program, verdict

GEOMETRY, SUBMIT_TAIL, COMPLETE_HEAD, SUBMIT_HEAD, COMPLETE_TAIL = 0, 128, 192, 256, 320
INDICES = SUBMIT_TAIL, COMPLETE_HEAD, SUBMIT_HEAD, COMPLETE_TAIL
RING = 2 << 20
STEPS = [-64, -RING, -RING - 64, 1, 63, 64, 4096, RING - 64, RING, RING + 64, 2 * RING, 1 << 31, 1 << 63]
"""Numbers of bytes that the attacker adds to an index."""
QUICK = {SUBMIT_TAIL: [-64, 1, RING + 64], COMPLETE_HEAD: [-64, 64, 1 << 63]}
MAX_GROWTH_BYTES = 100 << 20
MAX_S, MAX_TIMES = 2.0, 20
"""Bounds on the victim's slowest call: in seconds, and as a multiple of the slowest call before the attack. Calls may
become slower, since the attacker's programs also compute.
"""

ATTACK = """
from libsym.channel import process
at, step = int(sys.argv[1]), int(sys.argv[2])
dialled, regions = process.dial, []

def dial(path):
    found = dialled(path)
    regions.append(mmap.mmap(found[1], 4096))
    return found

process.dial = dial
kv, other = sym.kv_create(), sym.kv_create()
sym.kv_write(kv, [1, 2, 3]), sym.kv_write(other, [4, 5, 6])
(region,) = regions

def loop():
    with sym.pred(kv, [7]): pass
    while True:
        sym.pred(kv, [7]).close()
        sym.kv_truncate(kv, 3)

def write():
    while True:
        for _ in sym.generate(other, [8], max_tokens=200): pass
        sym.kv_truncate(other, 3)

def ask():
    while True: sym.kv_stat(other)

def until_it_fails(what):
    try: what()
    except sym.SymError: pass

for what in (loop, write, ask):
    threading.Thread(target=until_it_fails, args=(what,), daemon=True).start()
time.sleep(0.15)
end_s = time.monotonic() + 0.3
while time.monotonic() < end_s:
    for offset in [at] if at else range(0, 120, 8):
        value = int.from_bytes(region[offset : offset + 8], "little")
        region[offset : offset + 8] = ((value + step) % (1 << 64)).to_bytes(8, "little")
    time.sleep(0.005)
os._exit(0)
"""

HONEST = """
def row():
    with sym.kv_create() as kv, sym.pred(kv, [9, 8, 7]) as found:
        return bytes(found.logits)

wanted = row()
print("begun", flush=True)
for line in sys.stdin:
    end_s = time.monotonic() + float(line.split()[1])
    longest_s = num_wrong = 0
    while time.monotonic() < end_s:
        since_s = time.monotonic()
        num_wrong += row() != wanted
        longest_s = max(longest_s, time.monotonic() - since_s)
    print(longest_s, num_wrong, flush=True)
"""


def honest(victim: Program, seconds: float) -> tuple[float, int]:
    """Return the duration of the victim's slowest call within `seconds`, and the number of wrong rows."""
    victim.begin("rows", seconds)
    longest_s, num_wrong = victim.wait().split()
    return float(longest_s), int(num_wrong)


def num_connections(served: Daemon) -> int:
    """Return the number of the attacker's connections."""
    code = "print(sum(each.connections for each in sym.programs() if each.uid == int(sys.argv[1])))"
    return int(as_user(0, code, ATTACKER, served=served).stdout)


def attack(served: Daemon, victim: Program, tried: dict[int, list[int]]) -> list[str]:
    """Move each index by its steps. Return the failures."""
    broken = []
    before_s, before_bytes = honest(victim, 1)[0], memory_bytes(served)
    for at, steps in tried.items():
        for step in steps:
            victim.begin("rows", 0.8)
            done = as_user(ATTACKER, ATTACK, at, step, served=served)
            longest_s, num_wrong = victim.wait().split()
            if done.returncode:
                broken.append(f"the attack on {at} by {step} has failed: {done.stderr.strip()[-300:]}")
            if int(num_wrong) or float(longest_s) > max(MAX_S, MAX_TIMES * before_s):
                broken.append(f"{at} by {step}: {num_wrong} wrong rows of another user, one after {longest_s} s")
    if (left := num_connections(served)) > 0:
        broken.append(f"{left} connections of the attacker are left")
    if (more := memory_bytes(served) - before_bytes) > MAX_GROWTH_BYTES:
        broken.append(f"the daemon has {more / 1e6:.0f} MB more")
    if not served.serves() or "Traceback" in served.log.read_text():
        broken.append(f"the daemon: {served.log.read_text()[-1000:]}")
    return broken


def main() -> int:
    asked = options(__doc__)
    tried = (QUICK if asked.quick else dict.fromkeys(INDICES, STEPS)) | {GEOMETRY: STEPS[:1]}
    with daemon("--kv-memory", "64M", tree=asked.tree) as served, program(served, VICTIM, HONEST) as victim:
        broken = attack(served, victim, tried)
    num = sum(map(len, tried.values()))
    return verdict(f"{num} moves of indices and the geometry, under calls; another user's rows are right", broken)


if __name__ == "__main__":
    sys.exit(main())
