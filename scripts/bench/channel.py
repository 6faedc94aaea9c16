#!/usr/bin/env python3
"""What an empty system call costs: PING from Python to a daemon's half in another process, and back.

Rows: the daemon as a plain loop and under trio; the two processes on one CPU and on two. Times are in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from libsym.abi import Op
from libsym.channel.client import ClientChannel
from libsym.channel.handshake import GREETING_BYTES, check_greeting, dial, welcome
from libsym.channel.server import ServerChannel

VOCAB_SIZE = 49_152


def answer_all(channel: ServerChannel) -> None:
    while not channel.arm():
        for request in channel.receive():
            channel.reply(request.id, request.args, request.payload)


def serve_plain(connection: socket.socket, channel: ServerChannel) -> None:
    poll = select.poll()
    poll.register(channel.doorbell, select.POLLIN)
    poll.register(connection, select.POLLIN)
    while True:
        answer_all(channel)
        if any(fd == connection.fileno() for fd, _ in poll.poll()):
            return
        channel.clear_doorbell()


async def serve_trio(connection: socket.socket, channel: ServerChannel) -> None:
    import trio

    async def answer_for_ever() -> None:
        while True:
            answer_all(channel)
            await trio.lowlevel.wait_readable(channel.doorbell)
            channel.clear_doorbell()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_for_ever)
        await trio.lowlevel.wait_readable(connection)
        nursery.cancel_scope.cancel()


def serve(listening_fd: int, loop: str) -> None:
    """The other process."""
    connection, _ = socket.socket(fileno=listening_fd).accept()
    check_greeting(connection.recv(GREETING_BYTES, socket.MSG_WAITALL))
    channel = ServerChannel.create(VOCAB_SIZE)
    socket.send_fds(connection, [welcome()], channel.fds)
    if loop == "trio":
        import trio

        trio.run(serve_trio, connection, channel)
    else:
        serve_plain(connection, channel)
    channel.close()


def ping(channel: ClientChannel, num_calls: int, times_us: list[float]) -> None:
    for _ in range(num_calls):
        start = time.perf_counter_ns()
        channel.call(Op.PING)
        times_us.append((time.perf_counter_ns() - start) / 1000)


def measure(loop: str, cpus: tuple[int, int], num_threads: int, num_calls: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listening:
        path = f"{directory}/bench.sock"
        listening.bind(path)
        listening.listen()
        fd = listening.fileno()
        daemon = subprocess.Popen([sys.executable, __file__, "--serve", str(fd), "--loop", loop], pass_fds=[fd])
        os.sched_setaffinity(daemon.pid, {cpus[1]})
        os.sched_setaffinity(0, {cpus[0]})
        channel = ClientChannel(*dial(path), path)
        ping(channel, 1000, [])
        times_us: list[float] = []
        threads = [
            threading.Thread(target=ping, args=(channel, num_calls // num_threads, times_us))
            for _ in range(num_threads)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed_s = time.perf_counter() - start
        channel.close()
        daemon.wait()
    times_us.sort()
    return {
        "loop": loop,
        "cpus": "one" if cpus[0] == cpus[1] else "two",
        "threads": num_threads,
        "p50_us": round(times_us[len(times_us) // 2], 1),
        "p99_us": round(times_us[len(times_us) * 99 // 100], 1),
        "calls_per_s": round(len(times_us) / elapsed_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the round trip of an empty system call.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--calls", type=int, default=20_000, help="calls for each row")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--loop", default="plain", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.loop)
        return
    available = sorted(os.sched_getaffinity(0))
    pairs = [(available[0], available[0])] + ([(available[0], available[1])] if len(available) > 1 else [])
    rows = [
        measure(loop, cpus, num_threads, args.calls)
        for loop in ("plain", "trio")
        for cpus in pairs
        for num_threads in (1, 8)
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'daemon':8}{'CPUs':>6}{'threads':>9}{'p50 us':>10}{'p99 us':>10}{'calls/s':>10}")
    for row in rows:
        print("{loop:8}{cpus:>6}{threads:>9}{p50_us:>10}{p99_us:>10}{calls_per_s:>10}".format(**row))


if __name__ == "__main__":
    main()
