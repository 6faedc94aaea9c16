"""Makes a process in new namespaces, and confines it to its sandbox."""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symphony.launcher.common.places import Refused
from symphony.launcher.machine import system
from symphony.launcher.sandbox import root
from symphony.launcher.sandbox.kernel import done, ffi, lib
from symphony.launcher.sandbox.lacks import Lacks, step
from symphony.launcher.sandbox.network import open_grants
from symphony.launcher.sandbox.rights import give_up
from symphony.launcher.sandbox.view import open_view, system_view

END_BYTES = ffi.sizeof("struct sym_end")
_FIRST_OPENED, _HIGHEST = 4, (1 << 31) - 1
"""Range of descriptors to close: all above the three standard streams and the report."""
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


_OF_USER = {"max_user_namespaces": 0, "max_inotify_instances": 32}
"""Limits in the sandbox's user namespace."""


@dataclass(frozen=True, slots=True)
class Outside:
    """The user, and descriptors that lead out of the sandbox. A process uses them before it is confined."""

    orders: int
    """Pipe to the first process. -1: the program has no sandbox."""
    uid: int
    gid: int
    door: int = -1
    """Socket to which the sandbox's listeners are sent. -1: the program has no grants."""


def clone(number: int, said: int, statuses: int) -> tuple[int, int]:
    """Fork into new namespaces, and return a pid and a pipe for orders. Lacks: the kernel refuses the namespaces.

    The first process of the namespaces forks the child. In the child, the pid is 0, and the pipe leads to the first
    process. In the caller, the pid is that of the first process, and there is no pipe (0). When the child ends, its
    status is written to the pipe `statuses` together with `number`, and can be read from `said`.
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
    """Decode the bytes of a `statuses` pipe: return the status of each ended program, by its launch's serial number."""
    found = ffi.from_buffer("struct sym_end[]", raw)
    return {end.number: end.status for end in found}


def enter(spec: dict[str, Any], outside: Outside) -> None:
    """Confine this process, made by `clone`, to a sandbox as `spec` describes. Lacks: the kernel refuses a part of it.

    All descriptors above 3 are closed.
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
    os.closerange(_FIRST_OPENED, _HIGHEST)  # these descriptors lead outside
    root.enter()
    kv = _parent_of_mount(spec["mount"]) if spec["mount"] else None
    give_up(writable, kv, network=bool(spec["allow_net"]))


def _open_network(spec: dict[str, Any], outside: Outside) -> str:
    """Open the sandbox's listeners, and send them to the launcher. Return the text of the sandbox's /etc/hosts."""
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
    """Resolve links in the paths of `spec`, while the machine's tree is still the root.
    Lacks: a writable bind contains Symphony's files or the mount of KV.
    """
    if spec["mount"]:
        spec["mount"] = os.path.realpath(spec["mount"])
    spec["hidden"] = {*spec["hidden"], *map(os.path.realpath, spec["hidden"])}
    for path, real, writable in spec["shows"]:
        below = [each for each in spec["hidden"] if writable and Path(each).is_relative_to(real)]
        if below:  # else the program could move them to a visible path
            raise Lacks(f"{path} can't be bound to be written to: {below[0]} in it is Symphony's own")
        if spec["mount"] and writable and Path(real) in Path(spec["mount"]).parents:
            raise Lacks(f"{path} can't be bound to be written to: KV is mounted in it, at {spec['mount']}")


def _map_ids(outside: Outside) -> None:
    """Map only the user's own uid and gid into the user namespace."""
    with step("the user can't be mapped"):
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{outside.uid} {outside.uid} 1\n", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{outside.gid} {outside.gid} 1\n", encoding="ascii")


def _bound_the_user() -> None:
    """Limit resources that the kernel counts for each user, so that the user's other programs keep their part."""
    with step("the user's numbers can't be bounded"):
        for name, number in _OF_USER.items():
            Path(f"/proc/sys/user/{name}").write_text(str(number), encoding="ascii")


def _parent_of_mount(path: str) -> str:
    """Return the directory for the Landlock rule that covers the mount.
    A rule for the mount's parent also covers a later mount at this place. But a rule for `/` would allow too much, so
    for a mount directly below `/` the directory is the mount itself.
    """
    parent = os.path.dirname(path)
    return path if parent == "/" else parent
