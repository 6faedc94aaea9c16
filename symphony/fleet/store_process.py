"""The process that calls Mooncake Store for a daemon: see `symphony.fleet.store`.

    python -m symphony.fleet.store_process SOCKET ROOM HOST MASTER MEMORY

SOCKET and ROOM are descriptors: of a socket for requests, and of the memory that pages pass through. A request is
[verb, names of values, bytes of each value]; the values lie in the room, one after the other. The answer has a code of
the store for each value. The process ends with its daemon, and by SIGALRM when a call of the store hangs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from pathlib import Path

from mooncake.store import MooncakeDistributedStore

DEAD_S = 60
"""Time limit of each call of the store. Calls last half of that if the master hangs, and then the store goes on."""
MAX_REQUEST_BYTES = 1 << 16


def main() -> int:
    """Answer requests until the daemon ends."""
    descriptor, room_descriptor, memory = (int(sys.argv[number]) for number in (1, 2, 5))
    host, master = sys.argv[3:5]
    room = mmap.mmap(room_descriptor, os.fstat(room_descriptor).st_size)
    at = ctypes.addressof(ctypes.c_char.from_buffer(room))
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # the store writes some lines each second
    signal.alarm(DEAD_S)
    store = MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", memory, 0, "tcp", "", master) or store.register_buffer(at, len(room))
    if code:
        return 1
    verbs = {"get": store.batch_get_into, "put": store.batch_upsert_from}
    answer: list[int] = []
    with socket.socket(fileno=descriptor) as daemon:
        while True:
            signal.alarm(0)
            daemon.send(json.dumps(answer).encode())
            request = daemon.recv(MAX_REQUEST_BYTES)
            if not request:
                return 0
            signal.alarm(DEAD_S)
            verb, names, size = json.loads(request)
            answer = verbs[verb](names, [at + number * size for number in range(len(names))], [size] * len(names))


if __name__ == "__main__":
    os._exit(main())  # the store's own threads go on, and its destructor waits for them
