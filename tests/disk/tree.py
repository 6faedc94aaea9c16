"""The lower directory, and the files of it that the kernel knows.

The kernel's node number is the file's number in the log. Each known file is held open with O_PATH, so it is found
whatever its names are, and its inode number is no other file's.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.disk.extents import Extents
from tests.disk.log import ROOT

BLOCK_BYTES = 4096


@dataclass(slots=True)
class Node:
    number: int
    descriptor: int
    lookups: int = 0
    num_open: int = 0

    @property
    def lower(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"

    def status(self) -> os.stat_result:
        return os.fstat(self.descriptor)


@dataclass(slots=True)
class Tree:
    lower: Path
    nodes: dict[int, Node] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of a file by device and inode, for as long as the file has a name or is known."""
    room: dict[int, Extents] = field(default_factory=dict)
    """The blocks that files have, in whole blocks of bytes."""
    used_bytes: int = 0
    _last_number: int = ROOT - 1

    def __post_init__(self) -> None:
        root = os.open(self.lower, os.O_PATH | os.O_DIRECTORY)
        self.nodes[ROOT] = Node(self.number_of(os.fstat(root)), root, lookups=1)
        assert self.nodes[ROOT].number == ROOT

    def number_of(self, status: os.stat_result) -> int:
        return self.number_of_inode(status.st_dev, status.st_ino)

    def number_of_inode(self, device: int, inode: int) -> int:
        number = self.numbers.get((device, inode))
        if number is None:
            self._last_number += 1
            number = self.numbers[device, inode] = self._last_number
        return number

    def path(self, node: Node, name: str = "") -> str:
        """Relative to the mount. Of a file that has lost its name: what was its name."""
        path = os.readlink(node.lower)  # noqa: PTH115  a Path would cost more than the call
        path = path.removesuffix(" (deleted)").removeprefix(str(self.lower)).lstrip("/")
        return f"{path}/{name}".strip("/") if name else path

    def look_up(self, parent: Node, name: str) -> tuple[Node, os.stat_result]:
        """The file of that name, which the kernel knows once more."""
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.descriptor)
        status = os.fstat(descriptor)
        number = self.number_of(status)
        node = self.nodes.get(number)
        if node is None:
            node = self.nodes[number] = Node(number, descriptor)
        else:
            os.close(descriptor)
        node.lookups += 1
        return node, status

    def forget(self, number: int, lookups: int) -> None:
        node = self.nodes[number]
        node.lookups -= lookups
        if node.lookups or number == ROOT:
            return
        status = node.status()
        if not status.st_nlink:
            self._free(number)
            del self.numbers[status.st_dev, status.st_ino]
        os.close(node.descriptor)
        del self.nodes[number]

    def name_lost(self, number: int) -> None:
        """Note that a file has lost a name. The file's storage is freed with its last name, unless it is open."""
        node = self.nodes.get(number)
        if node is not None and not node.num_open and not node.status().st_nlink:
            self._free(number)

    def room_of(self, number: int) -> Extents:
        room = self.room.get(number)
        if room is None:
            room = self.room[number] = Extents()
        return room

    def needs(self, number: int, offset: int, size: int) -> list[tuple[int, int]]:
        """The blocks of this range that the file does not have yet."""
        start, end = offset // BLOCK_BYTES * BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES) * BLOCK_BYTES
        return list(self.room_of(number).gaps(start, end))

    def take(self, number: int, ranges: list[tuple[int, int]]) -> None:
        room = self.room_of(number)
        before = room.total
        for start, end in ranges:
            room.add(start, end)
        self.used_bytes += room.total - before

    def give_back(self, number: int, start: int, end: int | None = None) -> None:
        """The whole blocks of this range."""
        room = self.room_of(number)
        before = room.total
        first = -(-start // BLOCK_BYTES) * BLOCK_BYTES
        room.remove(first, None if end is None else end // BLOCK_BYTES * BLOCK_BYTES)
        self.used_bytes += room.total - before

    def _free(self, number: int) -> None:
        room = self.room.pop(number, None)
        self.used_bytes -= room.total if room is not None else 0
