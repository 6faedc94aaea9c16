"""The programs socket under attack by a launcher: no attempt reaches other users, or ends the daemon."""

import errno
import os
import socket
from contextlib import suppress

import pytest
import trio
import trio.testing

from scheduler.doors import launchers
from scheduler.doors.launchers import MAX_LAUNCHERS
from scheduler.programs.limits import OverLimit
from scheduler.programs.link import MAX_ASKED, MAX_MESSAGE_BYTES, MAX_WAITING_BYTES
from tests.scheduler.doors.houses import ID, House
from tests.scheduler.weapons import eventually

NOBODY = 65534


class Launching(House):
    """Connections that launchers pass on are the test's."""

    def __init__(self, path):
        super().__init__(path)
        self.passed_on = []
        self.uncounted = []
        """Pairs of what a program has used, and tokens that the run knows of alone."""

    def adopt(self, connection, program):
        self.passed_on.append((connection, program))

    def catch_up(self):
        for used, num_tokens in self.uncounted:
            used.tokens += num_tokens

    async def still_serves(self):
        assert await self.launcher().start("ffffffff") == {"n": 1, "ok": True, "protocol": 1}

    async def has_open(self, num):
        await eventually(lambda: self.num_open <= num)  # a collector may close what others left

    def pair(self, kind=socket.SOCK_STREAM):
        return [self.clients.enter_context(each) for each in socket.socketpair(socket.AF_UNIX, kind)]


@pytest.fixture
def house(tmp_path):
    return Launching(tmp_path)


NO_REQUESTS = {
    "no JSON": b"\xff\xfe{",
    "no object": b"[1, 2]",
    "deep": b'{"n": 1, "do": ' + b"[" * 900 + b"]" * 900 + b"}",
    "many values": b'{"n": 1, "do": [' + b"0," * 20_000 + b"0]}",
    "many texts": b'{"n": 1, "do": [' + b'"",' * 1000 + b'""]}',
    "no number": b'{"do": "start"}',
    "a number that is none": b'{"n": "1", "do": "start"}',
    "an answer that is none": b'{"d": [], "ok": true}',
    "too long": b'{"n": 1, "do": "' + b"x" * MAX_MESSAGE_BYTES + b'"}',
}


async def test_what_is_no_request_ends_the_launcher_s_connection_alone(house):
    other = house.launcher()
    for number, (what, data) in enumerate(NO_REQUESTS.items()):
        bad = house.launcher()
        await bad.send(data)
        assert await bad.receive() is None, what
        assert (await other.start(f"{number:08x}"))["ok"], what


START: dict[str, object] = {"do": "start", "id": ID, "name": "a"}
WRONG: dict[str, dict[str, object]] = {
    "no such request": {"do": "destroy"},
    "a request that is no text": {"do": {}},
    "no id": {"do": "start", "name": "a"},
    "an id of another kind": START | {"id": 7},
    "an id that is a path": START | {"id": "../../..", "name": "a"},
    "no name": {"do": "start", "id": ID},
    "an empty name": START | {"name": ""},
    "a name with an escape": START | {"name": "\x1b[2J"},
    "a long name": START | {"name": "n" * 65},
    "a pid below 0": START | {"pid": -1},
    "a pid that is true": START | {"pid": True},
    "a pid beyond all": START | {"pid": 1 << 70},
    "a pid of nobody": START | {"pid": (1 << 22) - 1},
    "a parent that is none": START | {"parent": 3},
    "limits that are none": START | {"limits": 7},
    "a limit on what there is not": START | {"limits": {"beer": 1}},
    "a limit below 0": START | {"limits": {"tokens": -1}},
    "a limit that is no number": START | {"limits": {"pages": "many"}},
    "an end of nobody": {"do": "end", "id": ID, "status": 0, "reason": "exit"},
    "a connection of nobody": {"do": "connect", "id": ID},
    "a limit of nobody": {"do": "limit", "id": ID},
}


async def test_what_is_wrong_with_a_request_is_its_answer(house):
    launcher = house.launcher()
    for what, wrong in WRONG.items():
        await launcher.send({"n": 1, **wrong})
        answer = await launcher.receive()
        assert answer["n"] == 1, what
        assert answer["error"], what
        assert answer["errno"] in {errno.EINVAL, errno.ENOENT, errno.ESRCH}, what
        assert not house.programs.living, what


async def test_an_end_is_a_status_and_one_of_the_reasons_and_counts_what_was_used_first(house):
    launcher = house.launcher()
    await launcher.start()
    for status, reason in (("0", "exit"), (True, "exit"), (1 << 40, "exit"), (0, "boredom"), (0, [])):
        assert (await launcher.ask("end", id=ID, status=status, reason=reason))["errno"] == errno.EINVAL
        assert ID in house.programs.living
    house.uncounted.append((house.programs.living[ID].used, 11))
    assert (await launcher.ask("end", id=ID, status=0, reason="exit"))["usage"]["tokens"] == 11
    assert (await launcher.ask("end", id=ID, status=0, reason="exit"))["errno"] == errno.ENOENT


async def test_a_launcher_may_ask_which_limit_a_program_has_run_into(house):
    """A program may have ended by that before anybody was told."""
    launcher = house.launcher()
    await launcher.start(limits={"tokens": 5})
    program = house.programs.living[ID]
    program.require(5, 0)
    assert await launcher.ask("limit", id=ID) == {"n": 1, "ok": True, "what": None}
    with pytest.raises(OverLimit):
        program.require(6, 0)
    assert await launcher.ask("limit", id=ID) == {"n": 1, "ok": True, "what": "tokens"}


# ---- descriptors


async def test_a_connection_that_is_passed_on_is_served_and_no_descriptor_is_left(house):
    launcher = house.launcher()
    await launcher.start()
    num_open = house.num_open
    ours, theirs = house.pair()
    assert await launcher.ask("connect", [theirs.fileno()], id=ID) == {"n": 1, "ok": True}
    theirs.close()
    ((connection, program),) = house.passed_on
    assert program.id == ID
    connection.send(b"served")
    assert ours.recv(10) == b"served"
    connection.close()
    ours.close()
    assert house.num_open <= num_open


def listening_socket():
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("")
    listening.listen()
    return listening


NO_CONNECTIONS = {
    "a file": lambda _house: os.fdopen(os.open("/dev/null", os.O_RDONLY)),
    "a listening socket": lambda _house: listening_socket(),
    "a socket without a peer": lambda _house: socket.socket(socket.AF_UNIX),
    "packets": lambda house: house.pair(socket.SOCK_SEQPACKET)[1],
    "a network socket": lambda _house: socket.socket(socket.AF_INET),
}


@pytest.mark.parametrize("make", NO_CONNECTIONS.values(), ids=NO_CONNECTIONS)
async def test_what_is_no_connection_is_refused_and_closed(house, make):
    launcher = house.launcher()
    await launcher.start()
    with make(house) as sent:
        num_open = house.num_open
        assert "no connection" in (await launcher.ask("connect", [sent.fileno()], id=ID))["error"]
        await house.has_open(num_open)
    assert not house.passed_on


async def test_descriptors_that_nobody_asked_for_are_closed_and_many_at_once_end_the_launcher(house):
    launcher = house.launcher()
    await launcher.start()
    num_open = house.num_open
    ours, theirs = house.pair()
    assert (await launcher.start("00000002", fds=[theirs.fileno()]))["ok"]
    assert "none came" in (await launcher.ask("connect", id=ID))["error"]
    await house.has_open(num_open + 2)
    await launcher.send({"n": 1, "do": "connect", "id": ID}, [theirs.fileno()] * 200)
    assert await launcher.receive() is None
    theirs.close()
    ours.close()
    await house.has_open(num_open - 1)  # without the daemon's end


# ---- other users


@pytest.mark.skipif(os.getuid() != 0, reason="another user's launcher is root's to make")
async def test_a_launcher_has_its_own_programs_and_connections_of_its_own_user(house):
    mine, theirs = house.launcher(), house.launcher(NOBODY)
    await mine.start()
    for do, fields in (("end", {"status": 0, "reason": "exit"}), ("pid", {"pid": os.getpid()}), ("connect", {})):
        assert (await theirs.ask(do, id=ID, **fields))["errno"] == errno.ENOENT, "as if it was not there"
    assert (await theirs.start())["errno"] == errno.EPERM
    assert (await theirs.start(again=True))["errno"] == errno.EPERM
    await theirs.start("00000002")
    _, passed = house.pair()  # of root
    answer = await theirs.ask("connect", [passed.fileno()], id="00000002")
    assert (answer["errno"], "can't pass on a connection of uid 0" in answer["error"]) == (errno.EPERM, True)
    answer = await theirs.ask("pid", id="00000002", pid=os.getpid())
    assert (answer["errno"], "is not of uid 65534" in answer["error"]) == (errno.EPERM, True)
    assert not house.passed_on
    assert [each.id for each in house.programs.visible_to(NOBODY)] == ["00000002"]


async def test_an_id_that_is_taken_is_not_started_again_nor_taken_from_a_launcher_that_is_there(house):
    launcher, other = house.launcher(), house.launcher()
    await launcher.start()
    assert (await launcher.start())["errno"] == errno.EEXIST
    assert (await other.start(again=True))["errno"] == errno.EEXIST
    launcher.connection.close()
    await trio.testing.wait_all_tasks_blocked()
    assert (await other.start(again=True))["ok"]
    assert house.programs.admission.num_refused == 0


# ---- floods


@pytest.mark.slow
async def test_a_launcher_that_never_reads_is_listened_to_no_more_and_then_dropped(house, monkeypatch):
    monkeypatch.setattr(launchers, "READ_WITHIN_S", 0.5)
    flood, other = house.launcher(), house.launcher()
    await flood.start()
    num_sent = 0
    with trio.fail_after(20), suppress(ConnectionError):  # it is dropped
        while True:
            await flood.send({"n": num_sent, "do": "x" * 50})
            num_sent += 1
    assert num_sent < 4 * MAX_WAITING_BYTES // 64
    assert (await other.start("00000002"))["ok"]


async def test_while_one_floods_others_are_answered(house):
    flood, other = house.launcher(), house.launcher()

    async def write():
        while True:
            await flood.send({"n": 1, "do": "nothing"})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_all, flood)
        nursery.start_soon(write)
        for number in range(100):
            with trio.fail_after(5):
                assert (await other.start(f"{number:08x}"))["ok"]
        nursery.cancel_scope.cancel()


async def read_all(launcher):
    while await launcher.receive() is not None:
        pass


async def test_one_user_s_launchers_leave_room_for_those_of_others(house):
    many = [house.launcher() for _ in range(MAX_LAUNCHERS // 2)]
    for index, each in enumerate(many):
        assert (await each.start(f"{index:08x}"))["ok"]
    assert await house.launcher().receive() is None
    house.clients.close()
    await trio.testing.wait_all_tasks_blocked()


async def test_an_answer_for_which_nobody_waits_any_more_goes_to_who_takes_late_ones(house):
    launcher, late = house.launcher(), list[dict]()
    await launcher.start()
    with trio.CancelScope() as scope:
        scope.cancel()
        await house.programs.living[ID].link.ask({"do": "spawn"}, late=late.append)
    asked = await launcher.receive()
    await launcher.send({"d": asked["d"], "ok": True, "id": "00000002"})
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert [each["id"] for each in late] == ["00000002"]


@pytest.mark.slow
async def test_questions_that_a_launcher_does_not_answer_are_bounded_and_answers_to_none_are_dropped(house):
    launcher = house.launcher()
    for number in (0, -1, 1, 1 << 60):
        await launcher.send({"d": number, "ok": True})
    await launcher.start()
    link, asked = house.programs.living[ID].link, []

    async def ask():
        with pytest.raises(OSError, match="launcher") as failed:
            await link.ask({"do": "wait", "id": ID})
        asked.append(failed.value.errno)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_all, launcher)
        for _ in range(MAX_ASKED + 10):
            nursery.start_soon(ask)
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.05)
        launcher.connection.shutdown(socket.SHUT_RDWR)
    assert asked.count(errno.EHOSTDOWN) == MAX_ASKED
