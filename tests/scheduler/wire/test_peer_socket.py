"""Sockets of other users: descriptors that take long to close, and connections with flags of their choice."""

import ctypes
import os
import socket
import threading
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from libsym.channel.handshake import GREETING, welcome
from scheduler.doors.listener import bind
from scheduler.wire import peer_socket
from scheduler.wire.peer_socket import THREADS_PER_UID, close_listening
from tests.scheduler.doors.houses import ID, House, Talk
from tests.scheduler.weapons import HUNG_S, HungMount, eventually, kernel_can_refuse, lingering

OTHER_UID = 65534
NO_OPTION = 9999
"""An option that no kernel has."""
NUM_PACKETS = 40
SYS_SETRESUID = 117


needs_the_option = pytest.mark.skipif(not kernel_can_refuse(), reason="NO REFUSAL TESTED: it needs Linux 6.16")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NO OTHER USER TESTED: it needs root")


@pytest.fixture
def older_kernel(monkeypatch):
    monkeypatch.setattr(peer_socket, "SO_PASSRIGHTS", NO_OPTION)


@pytest.fixture
def hung_mount():
    if not Path("/dev/fuse").exists():
        pytest.skip("NO HUNG FILE TESTED: there is no /dev/fuse")
    directory = Path(os.environ.get("TMPDIR", "/tmp")) / f"hung-{os.getpid()}"
    directory.mkdir(mode=0o755)
    mount = HungMount(directory)
    yield mount
    mount.let_go()
    directory.rmdir()


@contextmanager
def as_uid(uid):
    """Change the uid of this thread alone. The C library would wait for all threads, some of which hang."""
    assert _become(uid) == 0
    try:
        yield
    finally:
        assert _become(0) == 0


def _become(uid):
    return ctypes.CDLL(None).syscall(SYS_SETRESUID, -1, uid, -1)


class Attacked(House):
    """Nothing that is tried holds anybody up."""

    def client(self, path=None, kind=socket.SOCK_STREAM, greeting=b"", uid=0):
        with as_uid(uid) if uid else ExitStack():
            connection = super().client(path, kind, greeting)
        connection.setblocking(True)
        return connection

    def attacker(self, door):
        """A connection of another uid, if there can be one."""
        uid = OTHER_UID if os.geteuid() == 0 else 0
        if door == "calls":
            return self.client(uid=uid)
        return self.client(self.for_launchers, socket.SOCK_SEQPACKET, uid=uid)

    def run_test(self, scenario):
        async def main():
            await scenario()
            await self.still_serves()

        super().run_test(main)

    async def still_serves(self):
        """Another client is served by now."""
        with trio.fail_after(HUNG_S):
            client, launcher = self.client(greeting=GREETING), self.launcher()
            assert await self.answer(client) == welcome()
            assert "is no program" in (await launcher.ask("limit", id="0000000f"))["error"]
            launcher.connection.close()
            client.close()

    async def ended(self):
        await super().ended()
        await trio.testing.wait_all_tasks_blocked()  # closes have their threads
        await eventually(self.has_no_busy_thread)

    def has_no_busy_thread(self):
        """Return whether no thread may still start a receiver: its exec would flush files that the next test opens."""
        return not any(each.borrowed_tokens for each in self.threads._limiters.values())


@pytest.fixture
def house(tmp_path):
    return Attacked(tmp_path)


@pytest.fixture
def weapon():
    """Makes weapons."""
    with lingering() as make:
        yield make


def send(connection, fds, data=b"x"):
    """Send a packet with descriptors, and keep none of them."""
    try:
        socket.send_fds(connection, [data], fds, socket.MSG_DONTWAIT)
    except OSError:
        threading.Thread(target=close_all, args=(fds,), daemon=True).start()  # these closes are the last
        raise
    close_all(fds)


def fill(connection):
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(4096))


def close_all(fds):
    for fd in fds:
        os.close(fd)


def states_of_threads():
    return [each.read_text().rpartition(")")[2].split()[0] for each in Path("/proc/self/task").glob("*/stat")]


# ---- descriptors


@needs_the_option
def test_the_kernel_refuses_descriptors_from_the_first_moment_on(tmp_path):
    with bind(tmp_path / "socket") as listening, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "socket"))
        with pytest.raises(PermissionError):
            send(client, [os.dup(0)])
        with listening.accept()[0], pytest.raises(PermissionError):
            send(client, [os.dup(0)])


DOORS = pytest.mark.parametrize("door", ["calls", "launchers"])


@DOORS
@pytest.mark.usefixtures("older_kernel")
async def test_many_lingering_sockets_hold_up_nobody(house, weapon, door):
    attacker = house.attacker(door)
    for _ in range(NUM_PACKETS):
        await trio.lowlevel.wait_writable(attacker)
        try:
            send(attacker, [weapon()])
        except ConnectionError:  # what was sent is no greeting
            attacker = house.attacker(door)
    attacker.close()


@DOORS
@pytest.mark.usefixtures("older_kernel")
async def test_packets_that_nobody_has_read_hold_up_nobody_when_their_connection_ends(house, weapon, door):
    attacker = house.attacker(door)
    if door == "calls":
        attacker.send(GREETING)
        assert await house.answer(attacker) == welcome()
    else:
        attacker.send(b"no request")
    with suppress(ConnectionError):  # it has ended already
        send(attacker, [weapon()])
        send(attacker, [weapon(), weapon()])
    attacker.close()


@DOORS
@pytest.mark.usefixtures("older_kernel")
async def test_packets_of_connections_that_wait_hold_up_no_end_of_the_daemon(tmp_path, weapon, door):
    kind = socket.SOCK_STREAM if door == "calls" else socket.SOCK_SEQPACKET
    listening = trio.socket.from_stdlib_socket(bind(tmp_path / "socket", kind))
    with socket.socket(socket.AF_UNIX, kind) as attacker:
        attacker.connect(str(tmp_path / "socket"))
        send(attacker, [weapon()])
    close_listening(listening)  # a close that is waited for takes until the test is hung


@pytest.mark.slow
@needs_root
@DOORS
@pytest.mark.usefixtures("older_kernel")
async def test_files_of_a_hung_mount_hold_up_their_sender_alone(house, door, hung_mount):
    for _ in range(THREADS_PER_UID + 2):
        hung_mount.send_by(house.attacker(door))
    await eventually(lambda: hung_mount.num_hung() == THREADS_PER_UID)
    assert "D" not in states_of_threads(), "no signal ends such a thread, nor the daemon with it"
    await house.still_serves()
    unheard = Talk(house.attacker("launchers"))
    await unheard.send({"n": 1, "do": "limit", "id": ID}, [0])
    with trio.move_on_after(0.3) as patience:
        await unheard.receive()
    assert patience.cancelled_caught, "who has used up his threads is not read"
    assert hung_mount.num_hung() == THREADS_PER_UID
    hung_mount.let_go()
    assert (await unheard.receive())["error"]


@pytest.mark.slow
@needs_root
@pytest.mark.usefixtures("older_kernel")
async def test_one_whose_threads_hang_leaves_no_descriptors_by_connections_without_any(house, hung_mount):
    for _ in range(THREADS_PER_UID + 1):
        hung_mount.send_by(house.attacker("launchers"))
    await eventually(lambda: hung_mount.num_hung() == THREADS_PER_UID)
    before = house.num_open
    for _ in range(50):
        for packets in ([], [b"x"], [b"", b"x"]):
            with house.attacker("launchers") as attacker, suppress(ConnectionError):  # the first ends it
                for packet in packets:
                    attacker.send(packet)
    await house.still_serves()  # behind those, which have been accepted by now
    await eventually(lambda: house.num_open <= before)
    hung_mount.let_go()


async def test_what_is_sent_is_closed(house, older_kernel):
    before = house.num_open
    for door in ("calls", "launchers"):
        attacker = house.attacker(door)
        for _ in range(5):
            send(attacker, [os.dup(0) for _ in range(100)])
        attacker.close()
    await eventually(lambda: house.num_open <= before)


# ---- flags that another process sets


@asynccontextmanager
async def passed_on(house):
    """The launcher's copy of a connection that the daemon serves, and the program's end."""
    launcher = house.launcher()
    await launcher.start()
    program, copy = socket.socketpair()
    with program, copy:
        yield launcher, copy, program
    await launcher.ask("end", id=ID, status=0, reason="exit")
    launcher.connection.close()


@pytest.mark.parametrize("is_full", [False, True], ids=["to read", "to write"])
async def test_a_connection_made_blocking_by_its_launcher_blocks_nobody(house, is_full):
    async with passed_on(house) as (launcher, copy, program):
        if is_full:
            fill(copy)
        assert (await launcher.ask("connect", [copy.fileno()], id=ID))["ok"]
        copy.setblocking(True)
        program.send(GREETING if is_full else GREETING[:1])
        await house.still_serves()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
async def test_a_peer_that_closes_without_reading_its_answer_ends_its_own_connection_alone(older_kernel, kind):
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with peer_socket.PeerSocket(trio.socket.from_stdlib_socket(ours), peer_socket.Threads()) as peer:
        peer.socket.send(b"an answer that nobody reads")
        theirs.close()
