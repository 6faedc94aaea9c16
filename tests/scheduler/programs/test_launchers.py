"""The programs socket under attack by a launcher: no attempt reaches other users, or ends the daemon."""

import array
import errno
import json
import os
import socket
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from scheduler.doors import launchers
from scheduler.doors.launchers import MAX_LAUNCHERS, Launchers
from scheduler.doors.listener import bind
from scheduler.programs.admission import Admission
from scheduler.programs.limits import OverLimit
from scheduler.programs.link import MAX_ASKED, MAX_MESSAGE_BYTES, MAX_WAITING_BYTES
from scheduler.programs.registry import Programs
from scheduler.wire.peer_socket import Threads
from tests.scheduler.weapons import eventually

ID = "1f2e3d4c"
NOBODY = 65534


class House:
    """The socket, the connections that were passed on, and the test's launchers."""

    def __init__(self, path):
        self.path = path / "socket.programs"
        self.programs = Programs(Admission(), path / "programs.json")
        self.passed_on = []
        self.threads = Threads()
        self.launchers = Launchers(
            self.programs,
            lambda *what: self.passed_on.append(what),
            threads=self.threads,
            catch_up=self.catch_up,
        )
        self.uncounted = []
        """Pairs of what a program has used, and tokens that the run knows of alone."""

    def catch_up(self):
        for used, num_tokens in self.uncounted:
            used.tokens += num_tokens

    def launcher(self, uid=0):
        """A connection; the kernel says that it is of `uid`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if uid:
            os.seteuid(uid)
        try:
            connection.connect(str(self.path))
        finally:
            os.seteuid(0)
        return Talk(trio.socket.from_stdlib_socket(connection))


class Talk:
    """A launcher's connection."""

    def __init__(self, connection):
        self.connection = connection

    async def send(self, data, fds=()):
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        await self.connection.sendmsg([raw], ancillary)

    async def receive(self):
        """A message; None: the daemon has hung up."""
        with trio.fail_after(20):
            try:
                data = await self.connection.recv(MAX_MESSAGE_BYTES)
            except ConnectionError:
                return None
        return json.loads(data) if data else None

    async def ask(self, do, fds=(), **fields):
        await self.send({"n": 1, "do": do, **fields}, fds)
        return await self.receive()

    async def start(self, number=ID, fds=(), **fields):
        return await self.ask("start", fds, id=number, name="prog", pid=None, parent=None, limits={}, **fields)


@asynccontextmanager
async def serving(path):
    house = House(path)
    with trio.socket.from_stdlib_socket(bind(house.path, socket.SOCK_SEQPACKET)) as listening:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.launchers.run, listening)
            yield house
            # Whatever was tried: the next launcher is served.
            last = house.launcher()
            assert await last.start("ffffffff") == {"n": 1, "ok": True, "protocol": 1}
            last.connection.close()
            nursery.cancel_scope.cancel()
    for connection, _program in house.passed_on:
        connection.close()
    house.threads.end()


def run(tmp_path, scenario):
    async def main():
        async with serving(tmp_path) as house:
            await scenario(house)

    trio.run(main)


def pair(kind=socket.SOCK_STREAM):
    return socket.socketpair(socket.AF_UNIX, kind)


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


@pytest.mark.parametrize("data", NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_what_is_no_request_ends_the_launcher_s_connection_alone(tmp_path, data):
    async def scenario(house):
        other, bad = house.launcher(), house.launcher()
        await other.start("00000001")
        await bad.send(data)
        assert await bad.receive() is None
        assert (await other.start("00000002"))["ok"]
        bad.connection.close()
        other.connection.close()

    run(tmp_path, scenario)


WRONG = {
    "no such request": {"do": "destroy"},
    "a request that is no text": {"do": {}},
    "no id": {"do": "start", "name": "a"},
    "an id of another kind": {"do": "start", "id": 7, "name": "a"},
    "an id that is a path": {"do": "start", "id": "../../..", "name": "a"},
    "no name": {"do": "start", "id": ID},
    "an empty name": {"do": "start", "id": ID, "name": ""},
    "a name with an escape": {"do": "start", "id": ID, "name": "\x1b[2J"},
    "a long name": {"do": "start", "id": ID, "name": "n" * 65},
    "a pid below 0": {"do": "start", "id": ID, "name": "a", "pid": -1},
    "a pid that is true": {"do": "start", "id": ID, "name": "a", "pid": True},
    "a pid beyond all": {"do": "start", "id": ID, "name": "a", "pid": 1 << 70},
    "a pid of nobody": {"do": "start", "id": ID, "name": "a", "pid": (1 << 22) - 1},
    "a parent that is none": {"do": "start", "id": ID, "name": "a", "parent": 3},
    "limits that are none": {"do": "start", "id": ID, "name": "a", "limits": 7},
    "a limit on what there is not": {"do": "start", "id": ID, "name": "a", "limits": {"beer": 1}},
    "a limit below 0": {"do": "start", "id": ID, "name": "a", "limits": {"tokens": -1}},
    "a limit that is no number": {"do": "start", "id": ID, "name": "a", "limits": {"pages": "many"}},
    "an end of nobody": {"do": "end", "id": ID, "status": 0, "reason": "exit"},
    "a connection of nobody": {"do": "connect", "id": ID},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_request_is_its_answer(tmp_path, wrong):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.send({"n": 1, **wrong})
        answer = await launcher.receive()
        assert answer["n"] == 1
        assert answer["error"]
        assert answer["errno"] in {errno.EINVAL, errno.ENOENT, errno.ESRCH}
        assert not house.programs.living
        launcher.connection.close()

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("status", "reason"), [("0", "exit"), (True, "exit"), (1 << 40, "exit"), (0, "boredom"), (0, [])]
)
def test_an_end_is_a_status_and_one_of_the_reasons(tmp_path, status, reason):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.start()
        assert (await launcher.ask("end", id=ID, status=status, reason=reason))["errno"] == errno.EINVAL
        assert ID in house.programs.living
        assert (await launcher.ask("end", id=ID, status=0, reason="exit"))["usage"]["tokens"] == 0
        assert (await launcher.ask("end", id=ID, status=0, reason="exit"))["errno"] == errno.ENOENT
        launcher.connection.close()

    run(tmp_path, scenario)


def test_the_usage_of_a_program_that_ends_is_counted_first(tmp_path):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.start()
        used = house.programs.living[ID].used
        house.uncounted.append((used, 11))
        assert (await launcher.ask("end", id=ID, status=0, reason="exit"))["usage"]["tokens"] == 11
        launcher.connection.close()

    run(tmp_path, scenario)


# ---- descriptors


def test_a_launcher_may_ask_which_limit_a_program_has_run_into(tmp_path):
    """A program may have ended by that before anybody was told."""

    async def scenario(house):
        launcher = house.launcher()
        await launcher.ask("start", id=ID, name="prog", pid=None, parent=None, limits={"tokens": 5})
        program = house.programs.living[ID]
        program.require(5, 0)
        assert await launcher.ask("limit", id=ID) == {"n": 1, "ok": True, "what": None}
        with pytest.raises(OverLimit):
            program.require(6, 0)
        assert await launcher.ask("limit", id=ID) == {"n": 1, "ok": True, "what": "tokens"}
        assert "error" in await launcher.ask("limit", id="ffffffff")
        launcher.connection.close()

    run(tmp_path, scenario)


def open_descriptors(house):
    found = os.listdir("/proc/self/fd")  # noqa: PTH208 - links that may be gone by now
    return len(found) - len(house.threads._idle)


async def only_open(house, num_open):
    await eventually(lambda: open_descriptors(house) == num_open)


def test_a_connection_that_is_passed_on_is_served_and_no_descriptor_is_left(tmp_path):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.start()
        num_open = open_descriptors(house)
        ours, theirs = pair()
        assert await launcher.ask("connect", [theirs.fileno()], id=ID) == {"n": 1, "ok": True}
        theirs.close()
        (connection, program), house.passed_on = house.passed_on[0], []
        assert program.id == ID
        connection.send(b"served")
        assert ours.recv(10) == b"served"
        connection.close()
        ours.close()
        assert open_descriptors(house) == num_open
        launcher.connection.close()

    run(tmp_path, scenario)


def a_file():
    return os.open("/dev/null", os.O_RDONLY), "no connection"


def a_listening_socket():
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("")
    listening.listen()
    return listening.detach(), "no connection"


def a_socket_without_a_peer():
    return socket.socket(socket.AF_UNIX).detach(), "no connection"


def packets():
    ours, theirs = pair(socket.SOCK_SEQPACKET)
    ours.close()
    return theirs.detach(), "no connection"


def a_network_socket():
    return socket.socket(socket.AF_INET).detach(), "no connection"


@pytest.mark.parametrize("make", [a_file, a_listening_socket, a_socket_without_a_peer, packets, a_network_socket])
def test_what_is_no_connection_is_refused_and_closed(tmp_path, make):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.start()
        fd, why = make()
        num_open = open_descriptors(house)
        answer = await launcher.ask("connect", [fd], id=ID)
        assert why in answer["error"]
        await only_open(house, num_open)
        assert not house.passed_on
        os.close(fd)
        launcher.connection.close()

    run(tmp_path, scenario)


def test_a_connection_without_a_descriptor_and_a_descriptor_without_a_connection(tmp_path):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.start()
        num_open = open_descriptors(house)
        ours, theirs = pair()
        assert (await launcher.start("00000002", fds=[theirs.fileno()]))["ok"], "one that nobody asked for is closed"
        assert "none came" in (await launcher.ask("connect", id=ID))["error"]
        theirs.close()
        ours.close()
        await only_open(house, num_open)
        launcher.connection.close()

    run(tmp_path, scenario)


def test_many_descriptors_at_once_end_the_launcher_and_are_closed(tmp_path):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.start()
        num_open = open_descriptors(house)
        ours, theirs = pair()
        await launcher.send({"n": 1, "do": "connect", "id": ID}, [theirs.fileno()] * 200)
        assert await launcher.receive() is None
        theirs.close()
        ours.close()
        await only_open(house, num_open - 1)  # without the daemon's end
        launcher.connection.close()

    run(tmp_path, scenario)


# ---- other users


@pytest.mark.skipif(os.getuid() != 0, reason="another user's launcher is root's to make")
def test_a_launcher_has_its_own_programs_and_connections_of_its_own_user(tmp_path):
    tmp_path.chmod(0o755)
    for each in tmp_path.parents:
        if each.owner() == "root" and each != each.parent and str(each).startswith("/tmp/"):
            each.chmod(0o755)

    async def scenario(house):
        mine, theirs = house.launcher(), house.launcher(NOBODY)
        await mine.start()
        for do, fields in (
            ("end", {"status": 0, "reason": "exit"}),
            ("pid", {"pid": os.getpid()}),
            ("connect", {}),
        ):
            answer = await theirs.ask(do, id=ID, **fields)
            assert answer["errno"] == errno.ENOENT, "as if it was not there"
        assert (await theirs.start())["errno"] == errno.EPERM
        assert (await theirs.start(again=True))["errno"] == errno.EPERM
        await theirs.start("00000002")
        ours, passed = pair()  # of root
        answer = await theirs.ask("connect", [passed.fileno()], id="00000002")
        assert (answer["errno"], "can't pass on a connection of uid 0" in answer["error"]) == (errno.EPERM, True)
        answer = await theirs.ask("pid", id="00000002", pid=os.getpid())
        assert (answer["errno"], "is not of uid 65534" in answer["error"]) == (errno.EPERM, True)
        assert not house.passed_on
        assert [each.id for each in house.programs.visible_to(NOBODY)] == ["00000002"]
        for each in (ours, passed, mine.connection, theirs.connection):
            each.close()

    run(tmp_path, scenario)


# ---- floods


def test_a_launcher_that_never_reads_is_listened_to_no_more_and_then_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers, "READ_WITHIN_S", 0.5)

    async def scenario(house):
        flood, other = house.launcher(), house.launcher()
        await flood.start()
        num_sent = 0
        with trio.move_on_after(20) as patience:
            try:
                while True:
                    await flood.send({"n": num_sent, "do": "x" * 50})
                    num_sent += 1
            except ConnectionError:
                pass
        assert not patience.cancelled_caught, "it is dropped"
        assert num_sent < 4 * MAX_WAITING_BYTES // 64
        assert (await other.start("00000002"))["ok"]
        other.connection.close()
        flood.connection.close()

    run(tmp_path, scenario)


def test_while_one_floods_others_are_answered(tmp_path):
    async def scenario(house):
        flood, other = house.launcher(), house.launcher()

        async def read():
            while await flood.receive() is not None:
                pass

        async def write():
            while True:
                await flood.send({"n": 1, "do": "nothing"})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(write)
            for number in range(200):
                with trio.fail_after(5):
                    assert (await other.start(f"{number:08x}"))["ok"]
            nursery.cancel_scope.cancel()
        other.connection.close()
        flood.connection.close()

    run(tmp_path, scenario)


def test_one_user_s_launchers_leave_room_for_those_of_others(tmp_path):
    async def scenario(house):
        many = [house.launcher() for _ in range(MAX_LAUNCHERS // 2)]
        for index, each in enumerate(many):
            assert (await each.start(f"{index:08x}"))["ok"]
        refused = house.launcher()
        assert await refused.receive() is None
        for each in (*many, refused):
            each.connection.close()
        await trio.testing.wait_all_tasks_blocked()

    run(tmp_path, scenario)


def test_questions_that_a_launcher_does_not_answer_are_bounded(tmp_path):
    async def scenario(house):
        launcher = house.launcher()
        await launcher.start()
        link = house.programs.living[ID].link
        async with trio.open_nursery() as nursery:
            asked = 0

            async def ask():
                nonlocal asked
                with pytest.raises(OSError, match="launcher") as failed:
                    await link.ask({"do": "wait", "id": ID})
                asked += failed.value.errno == errno.EHOSTDOWN

            async def read():
                while await launcher.receive() is not None:
                    pass

            nursery.start_soon(read)
            for _ in range(MAX_ASKED + 10):
                nursery.start_soon(ask)
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked(0.05)
            launcher.connection.shutdown(socket.SHUT_RDWR)
        assert asked == MAX_ASKED
        launcher.connection.close()

    run(tmp_path, scenario)


def test_answers_that_nobody_waits_for_are_dropped(tmp_path):
    async def scenario(house):
        launcher = house.launcher()
        for number in (0, -1, 1, 1 << 60):
            await launcher.send({"d": number, "ok": True})
        assert (await launcher.start())["ok"]
        launcher.connection.close()

    run(tmp_path, scenario)


def test_an_id_that_is_taken_is_not_started_again_nor_taken_from_a_launcher_that_is_there(tmp_path):
    async def scenario(house):
        launcher, other = house.launcher(), house.launcher()
        await launcher.start()
        assert (await launcher.start())["errno"] == errno.EEXIST
        assert (await other.start(again=True))["errno"] == errno.EEXIST
        launcher.connection.close()
        await trio.testing.wait_all_tasks_blocked()
        assert (await other.start(again=True))["ok"]
        assert house.programs.admission.num_refused == 0
        other.connection.close()

    run(tmp_path, scenario)
