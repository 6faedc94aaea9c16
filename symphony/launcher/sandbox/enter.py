"""How a process in new namespaces becomes a program in a sandbox."""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symphony.launcher import system
from symphony.launcher.places import Refused
from symphony.launcher.sandbox import root
from symphony.launcher.sandbox.kernel import done, ffi, lib
from symphony.launcher.sandbox.lacks import Lacks, step
from symphony.launcher.sandbox.network import open_grants
from symphony.launcher.sandbox.rights import give_up
from symphony.launcher.sandbox.view import open_view, system_view

END_BYTES = ffi.sizeof("struct sym_end")
_FIRST_OPENED, _HIGHEST = 4, (1 << 31) - 1
"""0 to 3 are the program's three, and what says why there is none."""
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


_OF_USER = {"max_user_namespaces": 0, "max_inotify_instances": 32}
"""Settings of the sandbox's user namespace."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What a program's process has of the world that it comes from, until it is inside."""

    orders: int
    """The pipe to the first process; -1: there is no sandbox."""
    uid: int
    gid: int
    door: int = -1
    """Where listeners are sent to; -1: it may connect to nothing."""


def clone(number: int, said: int, statuses: int) -> tuple[int, int]:
    """As os.fork(), with a pipe in the child, which is in namespaces of its own. What is returned here is the process
    between the two. Lacks: there are none.

    The end of the child, with `number`, comes to who reads `said`, the other end of `statuses`.
    """
    orders = ffi.new("int *")
    with step("its namespaces can't be made"):
        pid = system.forked_by(
            _address(ffi.addressof(lib, "sym_clone_sandbox")), number, said, statuses, _address(orders)
        )
    return pid, orders[0]


def _address(pointer: Any) -> int:
    return int(ffi.cast("intptr_t", pointer))


def ends(raw: bytes) -> dict[int, int]:
    """Statuses by number, of what came from `statuses`."""
    found = ffi.from_buffer("struct sym_end[]", raw)
    return {end.number: end.status for end in found}


def enter(spec: dict[str, Any], outside: Outside) -> None:
    """Confines this process, which `clone` made, to what `spec` allows. Lacks: it can't be.

    No descriptor stays open but 0 to 3.
    """
    os.umask(0o022)
    _map_ids(outside)
    _bound_the_user()
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    tasks = spec["tasks"] if most == resource.RLIM_INFINITY else min(spec["tasks"], most)
    resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))  # counted in this user namespace
    with step("its cgroups can't be hidden"):
        done(lib.unshare(lib.CLONE_NEWCGROUP))
    _resolve(spec)
    root.build(spec, system_view(), list(open_view(spec)), _open_network(spec, outside))
    writable = [
        "/dev",
        *root.PRIVATE,
        *([spec["home"][1]] if spec["home"] else []),
        *(real for _, real, may_write in spec["shows"] if may_write),
    ]
    if spec["mount"]:
        os.write(outside.orders, root.mount_kv(spec["mount"]))
    os.closerange(_FIRST_OPENED, _HIGHEST)  # what leads outside
    root.enter()
    kv = _parent_of_mount(spec["mount"]) if spec["mount"] else None
    give_up(writable, kv, network=bool(spec["allow_net"]))


def _open_network(spec: dict[str, Any], outside: Outside) -> str:
    """The names of hosts that it has. Its listeners go to the launcher, which serves them from outside."""
    if outside.door < 0:
        return _HOSTS
    try:
        hosts, listening = open_grants([(host, port) for host, port in spec["allow_net"]])
    except Refused as error:
        raise Lacks(str(error)) from None
    with socket.socket(fileno=outside.door) as door:
        socket.send_fds(door, [b"+"], [each.fileno() for each in listening])
    for each in listening:
        each.close()
    return hosts


def _resolve(spec: dict[str, Any]) -> None:
    """Paths that links lead to, while links lead there."""
    if spec["mount"]:
        spec["mount"] = os.path.realpath(spec["mount"])
    spec["hidden"] = {*spec["hidden"], *map(os.path.realpath, spec["hidden"])}
    for path, real, writable in spec["shows"]:
        below = [each for each in spec["hidden"] if writable and Path(each).is_relative_to(real)]
        if below:  # it could move them, and its children would see them
            raise Lacks(f"{path} can't be bound to be written to: {below[0]} in it is Symphony's own")
        if spec["mount"] and writable and Path(real) in Path(spec["mount"]).parents:
            raise Lacks(f"{path} can't be bound to be written to: KV is mounted in it, at {spec['mount']}")


def _map_ids(outside: Outside) -> None:
    """The user's own uid and gid, and no others."""
    with step("the user can't be mapped"):
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{outside.uid} {outside.uid} 1\n", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{outside.gid} {outside.gid} 1\n", encoding="ascii")


def _bound_the_user() -> None:
    """What the kernel counts for each user: a part is for the program, the rest stays for the user's others."""
    with step("the user's numbers can't be bounded"):
        for name, number in _OF_USER.items():
            Path(f"/proc/sys/user/{name}").write_text(str(number), encoding="ascii")


def _parent_of_mount(path: str) -> str:
    """Rules hold for directories, not for names: that of the parent holds for the next mount, too. `/` is too much."""
    parent = os.path.dirname(path)
    return path if parent == "/" else parent
