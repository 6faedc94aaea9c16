#!/usr/bin/env python3
"""Kill, stop and cut off the machines of a fleet, at random moments of their programs' work on `/kv/fleet`.

Three daemons run in network namespaces of their own, with a real etcd, and two machines keep each version. Programs of
all machines append to the same files, read them, and change names (`fleet_clients.py`). A model checks each content
that a program sees (`fleet_model.py`): nothing that was synced is lost, no two machines write at once, and no data are
wrong. Then etcd is gone for a minute: programs that use no name of the fleet must not notice, and inside, reads go on
and changes fail with ETIMEDOUT. Then each machine is killed once, right after a sync: the others must have what it
synced. In the end all machines must show the same names and contents. The exit status is 1 if anything differs.

Run as root, with the repository's interpreter: .venv/bin/python scripts/soak/fleet.py --kills 300 --partitions 300
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from fleet_machines import MACHINES, Fleet  # noqa: E402 - the path comes first


def soak(base: Path, arguments: argparse.Namespace) -> dict[str, object]:
    began_s, counts = time.monotonic(), {"kill": arguments.kills, "partition": arguments.partitions}
    counts |= {"pause": arguments.pauses, "etcd kill": arguments.etcd_kills}
    with ExitStack() as stack:
        fleet = Fleet(base, arguments.seed, stack)
        done, num_names, model = {}, 0, fleet.world.model
        try:
            done = fleet.disturb(counts, arguments.seed, limit_s=arguments.seconds, quick=arguments.quick)
            if not model.wrong:
                fleet.lose_etcd(arguments.etcd_gone)
                fleet.lose_machines(MACHINES[:1] if arguments.quick else MACHINES)
            num_names = fleet.finish()
            fleet.audit()
        finally:
            fleet.world.over.set()
            if model.wrong:
                print("\n".join(model.wrong), file=sys.stderr)
    world = fleet.world
    return {
        **{f"{what}s": count for what, count in done.items()},
        "etcd_gone_s": arguments.etcd_gone,
        "timed_out_without_etcd": sum(world.timed_out.values()),
        "acknowledged": model.num_acknowledged,
        "reads": model.num_reads,
        "reads_up_to_date": model.num_strict,
        "names": num_names,
        "answers": dict(sorted(world.answers.items())),
        "longest_s": {what: round(took_s, 2) for what, took_s in sorted(world.longest_s.items())},
        "longest_start_s": round(max(fleet.started_s), 1),
        "seconds": round(time.monotonic() - began_s),
        "processor": platform.processor() or platform.machine(),
        "wrong": len(model.wrong),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and cut off machines of a fleet, and see that promises hold.")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--partitions", type=int, default=300)
    parser.add_argument("--pauses", type=int, default=60, help="daemons that are stopped for a while (default 60)")
    parser.add_argument("--etcd-kills", type=int, default=20)
    parser.add_argument("--etcd-gone", type=float, default=60.0, help="seconds without etcd at the end (default 60)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="disturb no longer, even with fewer kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the scratch state where it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a few of each, in less than a minute")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kills, arguments.partitions, arguments.pauses, arguments.etcd_kills = 2, 2, 1, 1
        arguments.etcd_gone = 4.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no namespace stays
    directory = tempfile.TemporaryDirectory(prefix="symphony-soak-")
    if arguments.keep:
        directory._finalizer.detach()  # type: ignore[attr-defined]  # noqa: SLF001 - `delete=False` comes with Python 3.12
        print(directory.name, file=sys.stderr)
    result = soak(Path(directory.name), arguments)
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:22} {value}" for key, value in result.items()))
    if not arguments.keep:
        directory.cleanup()
    return int(bool(result["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
