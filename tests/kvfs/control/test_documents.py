"""Control files that are made when they are read: how often, for whom, and what of them is kept."""

import os
from typing import cast

import numpy as np
import pytest
import trio

from kvfs.control.directory import CONTROL_ROOT, ControlTree
from kvfs.control.documents import MAX_PARTLY_READ, Documents
from kvfs.control.handles import ControlHandle, Document
from kvfs.control.sources import ConnectedProgram, ControlFiles
from kvfs.fs import FileSystem
from libsym.errors import NotFound, OverQuota


class Daemon:
    """A clock, and documents that take 10 ms each to make."""

    def __init__(self) -> None:
        self.now_s, self.num_made = 100.0, 0
        self.documents = Documents(lambda: self.now_s)

    def make(self) -> str:
        self.num_made += 1
        self.now_s += 0.01
        return f"document {self.num_made}\n" + "x" * 1000

    def open(self, uid: int = 1) -> Document:
        return Document(self.get, lambda: self.documents.hold(uid), lambda _handle: None)

    def get(self) -> bytes:
        return self.documents.get("metrics", self.make)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def read(handle: ControlHandle, offset: int, size: int) -> bytes:
    return trio.run(handle.read, offset, size)


def test_documents_take_a_tenth_of_the_time_and_who_reads_now_and_then_gets_a_new_one(daemon: Daemon) -> None:
    began_s = daemon.now_s
    while daemon.now_s < began_s + 10:
        daemon.get()
        daemon.now_s += 0.0001
    assert 95 <= daemon.num_made <= 130, "a burst of 25, and 10 a second"
    for number in range(daemon.num_made + 1, daemon.num_made + 40):
        daemon.now_s += 0.2
        assert daemon.get().startswith(b"document %d\n" % number)


def test_an_open_makes_nothing_and_a_reader_in_pieces_reads_one_document(daemon: Daemon) -> None:
    handle = daemon.open()
    assert daemon.num_made == 0
    first = read(handle, 0, 100)
    assert read(daemon.open(), 0, 9999).startswith(b"document 2\n")
    rest = b"".join(read(handle, at, 100) for at in range(100, 2000, 100))
    assert first + rest == b"document 1\n" + b"x" * 1000
    assert daemon.num_made == 2
    assert read(handle, 0, 11) == b"document 3\n", "a reader that goes back reads what is new"


def test_a_user_keeps_so_many_documents_and_others_are_none_the_worse(daemon: Daemon) -> None:
    handles = [daemon.open() for _ in range(MAX_PARTLY_READ)]
    for handle in handles:
        read(handle, 0, 1)
    late = daemon.open()
    with pytest.raises(OverQuota, match="in part"):
        read(late, 0, 1)
    assert len(read(late, 0, 9999)) > 1000, "all of it at once is kept by nobody"
    read(daemon.open(uid=2), 0, 1)
    read(handles[0], 0, 9999)
    read(late, 0, 1)
    handles[1].close()
    read(daemon.open(), 0, 1)
    with pytest.raises(OverQuota):
        read(daemon.open(), 0, 1)


class Processes:
    """Programs of one process number, one after the other."""

    token_lengths = np.zeros(1, np.int32)
    since_ns = 1

    def processes(self) -> dict[int, ConnectedProgram]:
        return {7: ConnectedProgram(self.since_ns, 0, self.since_ns)}

    def status(self, _pid: int) -> str:
        return f"of the program since {self.since_ns}\n"


def test_a_process_number_that_another_program_gets_shows_nobody_the_other_status(fs: FileSystem) -> None:
    processes = Processes()
    control = ControlTree(fs, cast(ControlFiles, processes))
    number = CONTROL_ROOT
    for name in (b"proc", b"7", b"status"):
        number = control.lookup(number, name).number

    def opened() -> ControlHandle:
        return trio.run(control.open, number, os.O_RDONLY, 1, 1)

    old, early = opened(), opened()
    assert read(early, 0, 99) == b"of the program since 1\n"
    processes.since_ns = 2
    with pytest.raises(NotFound):
        read(old, 0, 99)
    assert read(opened(), 0, 99) == b"of the program since 2\n"
