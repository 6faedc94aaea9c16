"""Tries attacks, each in a process of its own, and prints what each got: attacker.py WORLD NAME...

WORLD is JSON. Each line is {"attack": name, "got": what it achieved or null, "refused": why it came to nothing}.
With --list in place of WORLD it prints the attacks that there are.

Attacks that have no control would harm the machine where nothing holds them. They are tried only where this process
shares none of the namespaces of the test that made WORLD: it looks itself, whatever it was told to do.
"""

import errno
import json
import os
import signal
import sys
import traceback

import descriptors
import files
import kernel
import kernel_entries
import network
import processes
import terminal
from attack import Attack, Refused, World, attacks_in

SECONDS = 6
"""An attack that waits longer than this has got nothing."""
HOLDING = ("pid", "user", "mnt", "net", "ipc", "uts")
ATTACKS = attacks_in([network, processes, kernel, kernel_entries, files, descriptors, terminal])


def tried(attack: Attack, world: World) -> dict[str, object]:
    """Run an attack in a child, and return its outcome however the child ends."""
    answers, theirs = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.setsid()
        os.write(theirs, json.dumps(outcome(attack, world)).encode())
        os._exit(0)
    os.close(theirs)
    _, status = os.waitpid(child, 0)
    os.set_blocking(answers, False)  # what the attack left running may hold the other end
    try:
        said = os.read(answers, 1 << 20)
    except BlockingIOError:
        said = b""
    os.close(answers)
    if said:
        return {"attack": attack.name, **json.loads(said)}
    ended = signal.Signals(-os.waitstatus_to_exitcode(status)).name if os.WIFSIGNALED(status) else f"status {status}"
    return {"attack": attack.name, "got": None, "refused": ended}


def is_apart(world: World) -> bool:
    """Whether this process is in namespaces of its own, all of those that hold an attack."""
    return all(os.readlink(f"/proc/self/ns/{kind}") != world["namespaces"][kind] for kind in HOLDING)


def outcome(attack: Attack, world: World) -> dict[str, object]:
    """Run an attack; return its gain or its refusal. A defect of the attack itself is no refusal: it is noted as
    `broken`.
    """
    if attack.no_control is not None and not is_apart(world):
        return {"got": None, "refused": None, "broken": f"not tried outside of a sandbox: {attack.no_control}"}
    try:
        got = attack.run(world)
    except Refused as refused:
        return {"got": None, "refused": str(refused)}
    except OSError as error:
        return {"got": None, "refused": errno.errorcode.get(error.errno or 0, str(error))}
    except BaseException:
        return {"got": None, "refused": None, "broken": traceback.format_exc()}
    return {"got": got or None, "refused": None if got else "nothing there"}


def open_at_start() -> dict[int, str]:
    """Return the descriptors that this program was given beside its standard streams, without the listing's own."""
    found = {}
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
    return {number: target for number, target in found.items() if number > 2}


def main() -> None:
    if sys.argv[1] == "--list":
        rows = [{"name": each.name, "tries": each.tries, "no_control": each.no_control} for each in ATTACKS.values()]
        print(json.dumps(rows))
        return
    world = json.loads(sys.argv[1]) | {"open_at_start": open_at_start()}
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # some attacks signal all they can reach
    for name in sys.argv[2:] or list(ATTACKS):
        print(json.dumps(tried(ATTACKS[name], world)), flush=True)


if __name__ == "__main__":
    main()
