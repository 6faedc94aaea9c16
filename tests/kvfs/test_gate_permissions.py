# ruff: noqa: PTH116 - the system calls themselves are what is tested here
"""The gate gives programs what the kernel would give them on the mount: the same calls, by both, on two equal trees."""

from __future__ import annotations

import ctypes
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from tests.kvfs.mounted import Mount, needs_mount

pytestmark = [needs_mount, pytest.mark.slow]

USERS: dict[str, tuple[int, int, list[int]]] = {
    "owner": (1000, 1000, []),
    "member": (1001, 1000, []),
    "other member": (1002, 1002, [999, 1000]),
    "stranger": (1003, 1003, [999]),
    "root": (0, 0, []),
    "alone": (1003, 1003, []),
}
SHIFTS = {"owner": 6, "member": 3, "other member": 3, "stranger": 0, "root": 0}


Thing: TypeAlias = tuple[str, str, int, int, int, str]
"""Path, kind, mode, uid, gid, target of a link."""
TOP: Thing = ("", "dir", 0o777, 0, 0, "")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Files and directories, and one call. Paths are relative to the scenario's own directory."""

    call: str
    arguments: tuple[Any, ...]
    things: list[Thing] = field(default_factory=list)

    @property
    def names_no_file(self) -> bool:
        """A path ends in a slash or dots. Then the gate refuses, as the kernel does, but perhaps by another number."""
        return any(isinstance(path, str) and path.endswith(("/", "/.", "/..")) for path in self.arguments)

    def within(self, directory: str) -> list[Any]:
        """The call with its paths below the directory."""
        return [self.call, *(f"{directory}/{each}" if isinstance(each, str) else each for each in self.arguments)]


def a_dir(path: str, mode: int = 0o777, uid: int = 1000) -> Thing:
    return path, "dir", mode, uid, uid, ""


def a_kv(path: str, mode: int = 0o666, uid: int = 1000) -> Thing:
    return path, "kv", mode, uid, uid, ""


def a_link(path: str, target: str) -> Thing:
    """Describe a link owned by the directory's owner. The gate does not follow links of others; the kernel does unless
    a sysctl forbids it.
    """
    return path, "link", 0o777, 0, 0, target


def _modes(user: str, *digits: int) -> list[int]:
    """Modes that give the user's class the digits, and the other classes the opposite."""
    shift = SHIFTS[user]
    others = 0o777 & ~(7 << shift)
    return [digit << shift | (digit ^ 7) * 0o111 & others for digit in digits]


def modes_of_files(user: str) -> Iterator[Scenario]:
    for mode in _modes(user, *range(8)):
        for call in ("open_to_read", "open_to_write", "stat"):
            yield Scenario(call, ("d/f",), [a_dir("d"), a_kv("d/f", mode)])
            yield Scenario(call, ("l",), [a_dir("d"), a_kv("d/f", mode), a_link("l", "d/f")])
        yield Scenario("chmod", ("f", 0o2755), [a_kv("f", mode)])
        yield Scenario("chmod", ("f", 0o6711), [a_kv("f", mode, 1003)])


CALLS_IN_DIRECTORIES: tuple[tuple[Any, ...], ...] = (
    *((call, "d/f") for call in ("open_to_read", "open_to_write", "stat", "open_or_make", "create", "remove")),
    *((call, "d/n") for call in ("create", "open_or_make")),
    *((call, "d/s") for call in ("create", "remove")),
    *((call, "d/none") for call in ("stat", "remove")),
    ("list", "d"),
    *(("mkdir", path, 0o755) for path in ("d/n", "d/f", "d/s")),
    ("chmod", "d/f", 0o640),
    ("chmod", "d", 0o750),
    *(("rename", "d/f", new) for new in ("d/n", "e/n", "e/x", "e/s")),
    *(("rename", "e/x", new) for new in ("d/n", "d/f", "d/s")),
    *(("rename", "e/s", new) for new in ("d/n", "d/s")),
    *(("rename", old, "e/n") for old in ("d/s", "d/none")),
)


def modes_of_directories(user: str) -> Iterator[Scenario]:
    for mode in _modes(user, 1, 3, 4, 5, 6):
        start = [a_dir("d", mode), a_dir("e"), a_kv("e/x"), a_dir("e/s")]
        for call, *arguments in CALLS_IN_DIRECTORIES:
            yield Scenario(call, tuple(arguments), [*start, a_kv("d/f"), a_dir("d/s")])


def sticky_directories(user: str) -> Iterator[Scenario]:
    uid = USERS[user][0]
    owners = (uid, 1009)
    for directory in owners:
        for file in owners:
            for target in owners:
                things = [a_dir("d", 0o1777, directory), a_kv("d/f", 0o666, file), a_dir("e", 0o1777, directory)]
                things += [a_kv("e/g", 0o666, target), a_kv("own", 0o666, uid), a_dir("d/s", 0o755, file)]
                yield Scenario("remove", ("d/f",), things)
                yield Scenario("rename", ("d/f", "d/n"), things)
                yield Scenario("rename", ("d/f", "e/g"), things)
                yield Scenario("rename", ("own", "e/g"), things)
                yield Scenario("rename", ("d/s", "e/s"), things)


PATHS = (
    *("to_d/f", "to_f", "to_d/../d/f", "round", "round/x", "nowhere", "nowhere/x", "up/f", "deep", "into"),
    *("d/f/", "d/f/x", "d/e/", "d/e/.", "d/e/..", "to_f/", "to_d/", "closed/../d/f", "d/none/x", "./d/./f", "d//f"),
    *("d/f/..", "n" * 255, "n" * 256, "d/" + "n" * 256),
)


def paths(user: str) -> Iterator[Scenario]:
    links = {"to_d": "d", "to_f": "d/f", "round": "round", "nowhere": "none", "up": "../{}/d"}
    links |= {"deep": "to_d/e/../f", "into": "closed/f"}
    things = [a_dir("d"), a_kv("d/f"), a_dir("d/e"), *(a_link(*link) for link in links.items())]
    things += [a_dir("closed", 0o700, 1009), a_kv("closed/f")]
    for path in PATHS:
        for call in ("stat", "create", "remove"):
            yield Scenario(call, (path,), things)
        yield Scenario("mkdir", (path, 0o700), things)
        yield Scenario("chmod", (path, 0o640), things)
        yield Scenario("rename", (path, "new"), things)
        yield Scenario("rename", ("d/f", path), things)
        yield Scenario("rename", ("d/e", path), things)


def new_files(user: str) -> Iterator[Scenario]:
    for mode in (0o600, 0o644, 0o2755, 0o4711, 0o1777, 0):
        for directory in (0o777, 0o2777):
            for call in ("create", "open_or_make", "mkdir"):
                yield Scenario(call, ("d/n", mode), [a_dir("d", directory)])


def both(mount: Mount, user: str, scenarios: list[Scenario], become: Callable[[], None]) -> list[tuple[int, int]]:
    """What the kernel said of each scenario to a process that became somebody, and the gate to the user."""
    mount.path.chmod(0o777)
    for face in ("kernel", "gate"):
        things = [_placed(thing, f"{face}{i}") for i, scene in enumerate(scenarios) for thing in (TOP, *scene.things)]
        mount.call("populate", things)
    kernel = in_child(become, mount, [scene.within(f"kernel{i}") for i, scene in enumerate(scenarios)])
    gate = mount.call("attempts", *USERS[user], [scene.within(f"gate{i}") for i, scene in enumerate(scenarios)])
    return list(zip(kernel, gate, strict=True))


@pytest.mark.parametrize("user", SHIFTS)
def test_the_gate_gives_what_the_kernel_gives(mount: Mount, user: str) -> None:
    for group in (modes_of_files, modes_of_directories, sticky_directories, paths, new_files):
        scenes = list(group(user))
        answers = both(mount, user, scenes, lambda: _become(*USERS[user]))
        for scene, (by_kernel, by_gate) in zip(scenes, answers, strict=True):
            is_alike = by_kernel == by_gate or (by_kernel and by_gate and scene.names_no_file)
            assert is_alike, f"the kernel says {os.strerror(by_kernel)}, the gate {os.strerror(by_gate)}: {scene}"
        assert 0 in [by_kernel for by_kernel, _ in answers]
        left: dict[str, dict[str, Any]] = defaultdict(dict)
        for path, what in mount.call("everything").items():
            top, _, name = path.partition("/")
            left[top][name] = what
        for i, scene in enumerate(scenes):
            assert left[f"gate{i}"] == left[f"kernel{i}"], f"after {scene}"
        mount.call("clear")


def test_root_of_a_user_namespace_is_nobody_special(mount: Mount) -> None:
    """Root of a user namespace has its user's rights on files of others, on the mount and through the gate."""
    uid, gid, _ = USERS["alone"]

    def become() -> None:
        _become(uid, gid, [])
        _enter_user_namespace(uid, gid)
        assert os.getuid() == 0, "it is root there"

    scenarios = [*modes_of_files("stranger"), *modes_of_directories("stranger")]
    foreign = [scene for scene in scenarios if not any(thing[3] == uid for thing in scene.things)]
    for scene, (by_kernel, by_gate) in zip(foreign, both(mount, "alone", foreign, become), strict=True):
        assert by_kernel == by_gate, scene
    assert len(foreign) > 150
    mount.call("clear")


def _placed(thing: Thing, directory: str) -> Thing:
    path, kind, mode, uid, gid, target = thing
    return f"{directory}/{path}".rstrip("/"), kind, mode, uid, gid, target.replace("{}", directory)


# The kernel's side


def in_child(become: Callable[[], None], mount: Mount, calls: list[list[Any]]) -> list[int]:
    """The errnos that the calls give on the mount, made by a process that has become somebody."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(mount.path)
            os.umask(0)
            become()
            with os.fdopen(write_end, "w") as pipe:
                json.dump([_by_kernel(*call) for call in calls], pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        told = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    answer: list[int] = json.loads(told)
    return answer


def _by_kernel(call: str, *arguments: Any) -> int:
    try:
        _KERNEL[call](*arguments)
    except OSError as error:
        return error.errno or -1
    return 0


def _open(path: str, flags: int, mode: int = 0o600) -> None:
    os.close(os.open(path, flags, mode))


def _list(path: str) -> None:
    """List a directory with sizes, as the gate does; so the directory has to be searchable too."""
    with os.scandir(path) as entries:
        for entry in entries:
            entry.stat(follow_symlinks=False)
    os.stat(f"{path}/.")


_KERNEL: dict[str, Callable[..., Any]] = {
    "open_to_read": lambda path: _open(path, os.O_RDONLY),
    "open_to_write": lambda path: _open(path, os.O_RDWR),
    "create": lambda path, mode=0o600: _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode),
    "open_or_make": lambda path, mode=0o600: _open(path, os.O_RDONLY | os.O_CREAT, mode),
    "mkdir": os.mkdir,
    "stat": os.stat,
    "list": _list,
    "remove": os.unlink,
    "rename": os.rename,
    "chmod": os.chmod,
}


def _become(uid: int, gid: int, groups: list[int]) -> None:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _enter_user_namespace(uid: int, gid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(4, 1, 0, 0, 0)  # dumpable again: else /proc/self belongs to root
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "no user namespaces here")
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        handle = os.open(f"/proc/self/{file}", os.O_WRONLY)
        os.write(handle, text.encode())
        os.close(handle)
