"""Files that a daemon publishes, and events that subscribers get: a fake decoder, and real sockets."""

from __future__ import annotations

import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from kvfs.durable.watched import WatchedJournal
from kvfs.fs import OpenKv
from kvfs.names.content import KvFile
from kvfs.names.inode import Credentials, Inode
from libsym.errors import Exists, SymError
from symphony.fleet.events import Publisher
from tests.symphony.fleet.machines import Machine
from tests.symphony.fleet.routers import Router

ROOT = Credentials(0, 0)
PROMPT = range(100)


class House:
    """A machine that publishes."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/events.sock"
        self.journal = WatchedJournal(lambda: self.machine.fs.volume.tree)
        self.machine = Machine(directory, "east", num_pages=128, changes=self.journal)
        self.machine.fs.volume.tree.root.mode = 0o755
        self.fs = self.machine.fs

    def make(self, path: str, prompt: range = PROMPT, mode: int = 0o644) -> OpenKv:
        """Make a file of root, whose directories are there."""
        file = self.fs.kv_create(ROOT, path, mode)
        self.machine.append(file, prompt)
        return file

    def path(self) -> Path:
        return Path(self.endpoint.removeprefix("ipc://"))

    def publisher(self) -> Publisher:
        return Publisher(self.endpoint, "east", self.fs, self.journal.watch)

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[Router]:
        """Yield a router that knows what was published first."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.publisher().run)
            with closing(Router(self.endpoint)) as router:
                await until(router.read)
                yield router
            nursery.cancel_scope.cancel()


async def until(found: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not found():  # noqa: ASYNC110 - what a subscriber knows has no event
            await trio.sleep(0.01)


async def known(router: Router, num: int, prompt: Sequence[int] = PROMPT) -> None:
    """Wait until the router knows so many tokens of a prompt."""
    await until(lambda: router.read() and router.num_known(prompt) == num)


@pytest.fixture
def house(tmp_path, monkeypatch) -> House:
    monkeypatch.setattr("symphony.fleet.events.PAUSE_S", 0.01)
    return House(tmp_path)


async def test_files_that_are_there_at_the_start_are_known_to_the_first_subscriber(house):
    house.make("a.kv")
    async with house.publishing() as router:
        await known(router, 96)
        assert router.topics == {"kv@east@fake"}


async def test_a_file_that_grows_and_is_cut_and_goes_is_followed(house):
    async with house.publishing() as router:
        file = house.make("a.kv")
        await known(router, 96)
        house.machine.append(file, range(100, 140))
        await known(router, 128, range(140))
        house.fs.kv_truncate(file, 50)
        await known(router, 32, range(140))
        house.machine.append(file, range(200, 214))
        await known(router, 64, [*range(50), *range(200, 214)])
        house.fs.kv_remove(ROOT, "a.kv")
        await until(lambda: router.read() and not router.blocks)
        assert file.table.length == 64  # a handle still has it


async def test_only_files_that_every_user_can_read_are_published(house):
    house.make("mine.kv", range(500, 600), 0o640)
    house.fs.kv_mkdir(ROOT, "closed", 0o750)
    house.make("closed/b.kv", range(600, 700))
    anonymous = house.fs.kv_create(ROOT, None, 0o644)
    house.machine.append(anonymous, range(700, 800))
    async with house.publishing() as router:
        house.make("a.kv")
        await known(router, 96)
        assert len(router.blocks) == 3


async def test_modes_of_a_file_and_of_the_directories_above_it_open_and_close_it(house):
    for path in ("over", "over/under"):
        house.fs.kv_mkdir(ROOT, path, 0o755)
    house.make("over/under/a.kv")
    async with house.publishing() as router:
        for path, closed, opened in [
            ("over/under/a.kv", 0o640, 0o644),
            ("over/under", 0o700, 0o711),
            ("over", 0, 0o755),
        ]:
            await known(router, 96)
            house.fs.kv_chmod(ROOT, path, closed)
            await until(lambda: router.read() and not router.blocks)
            house.fs.kv_chmod(ROOT, path, opened)
        await known(router, 96)


async def test_a_directory_that_moves_into_a_closed_one_takes_its_files_with_it(house):
    house.fs.kv_mkdir(ROOT, "closed", 0o700)
    house.fs.kv_mkdir(ROOT, "open", 0o755)
    house.make("open/a.kv")
    async with house.publishing() as router:
        await known(router, 96)
        house.fs.kv_rename(ROOT, "open", "closed/open")
        await until(lambda: router.read() and not router.blocks)
        house.fs.kv_rename(ROOT, "closed/open/a.kv", "a.kv")
        await known(router, 96)


async def test_a_fork_costs_no_event_and_keeps_the_blocks_when_the_first_file_goes(house):
    file = house.make("a.kv")
    async with house.publishing() as router:
        await known(router, 96)
        house.fs.kv_fork(ROOT, file, "b.kv", 0o644)
        house.fs.kv_remove(ROOT, "a.kv")
        house.make("c.kv", range(300, 340))
        await known(router, 32, range(300, 340))
        assert router.num_known(PROMPT) == 96
        assert "BlockRemoved" not in router.names


async def test_entries_that_are_not_at_their_own_positions_are_no_part_of_a_prompt(house):
    file = house.fs.kv_create(ROOT, "a.kv", 0o644)
    house.machine.append(file, range(40))
    reservation = house.fs.reserve(file, range(40, 100), range(70, 130))
    house.machine.decoder.step(reservation)
    reservation.commit_first(reservation.tokens)
    house.fs.committed(file)
    async with house.publishing() as router:
        await known(router, 32)


async def test_many_files_and_long_files_take_several_turns(house, monkeypatch):
    monkeypatch.setattr("symphony.fleet.events.PAGES_A_TURN", 2)
    for number in range(100):
        house.make(f"{number}.kv", range(number, number + 32))
    async with house.publishing() as router:
        await until(lambda: router.read() and len(router.blocks) == 100)
        house.make("long.kv", range(500, 900))
        await known(router, 384, range(500, 900))


def change_something(house: House, random: Random) -> None:
    """Make, change, move or remove a file or a directory; a change that the file system refuses changes nothing."""
    fs, modes = house.fs, (0o755, 0o644, 0o711, 0o700, 0o600)
    path, other = ("/".join(random.choices("abc", k=random.randint(1, 3))) for _ in range(2))
    match random.randrange(7):
        case 0:
            fs.kv_mkdir(ROOT, path, random.choice(modes))
        case 1 | 2:
            house.make(path, range(random.randrange(3), 40 * random.randint(1, 3)), random.choice(modes))
        case 3:
            fs.kv_chmod(ROOT, path, random.choice(modes))
        case 4:
            fs.kv_rename(ROOT, path, other)
        case 5:
            fs.kv_remove(ROOT, path)
        case 6:
            file = fs.kv_open(ROOT, path, write=True)
            fs.kv_truncate(file, random.randrange(file.table.length + 1))
            house.machine.append(file, range(file.table.length, file.table.length + 30))
            fs.kv_close(file)


def public_prefixes(directory: Inode) -> Iterator[tuple[int, ...]]:
    """Yield the beginnings, of whole pages, of all files that every user can read."""
    for inode in directory.entries.values() if directory.mode & 1 else ():
        if inode.is_directory:
            yield from public_prefixes(inode)
        elif inode.mode & 4:
            assert isinstance(inode.content, KvFile)
            tokens = inode.content.table.read()[0].tolist()
            yield from (tuple(tokens[:stop]) for stop in range(32, len(tokens) + 1, 32))


def knows_only(router: Router, prefixes: set[tuple[int, ...]]) -> bool:
    router.read()
    return len(router.blocks) == len(prefixes) and all(router.num_known(each) == len(each) for each in prefixes)


async def test_after_random_changes_a_subscriber_knows_what_every_user_can_read(house):
    random, num_refused = Random(7), 0
    async with house.publishing() as router:
        for number in range(600):
            try:
                change_something(house, random)
            except SymError:
                num_refused += 1
            if number % 20 == 0:
                prefixes = {*public_prefixes(house.fs.volume.tree.root)}
                await until(partial(knows_only, router, prefixes))
        assert num_refused < 500
        assert {"BlockStored", "BlockRemoved"} <= {*router.names}


async def test_a_late_subscriber_learns_all_blocks_and_the_others_still_know_them(house):
    house.make("a.kv")
    async with house.publishing() as router:
        await known(router, 96)
        with closing(Router(house.endpoint)) as late:
            await known(late, 96)
        house.make("b.kv", range(300, 340))
        await known(router, 32, range(300, 340))
        assert router.num_known(PROMPT) == 96
        assert router.num_lost == 0


@pytest.mark.slow
async def test_a_subscriber_that_does_not_read_delays_nobody_and_knows_all_after_a_new_subscription(house, monkeypatch):
    monkeypatch.setattr("symphony.fleet.events.MAX_WAITING", 2)
    monkeypatch.setattr("symphony.fleet.events.PAUSE_S", 0)
    large = house.make("large.kv", range(3200))
    async with house.publishing() as router:
        await known(router, 3200, range(3200))
        with closing(Router(house.endpoint, high_water=1)) as slow:
            await until(slow.read)
            for _ in range(40):  # 11 kB each: more than all buffers on the way hold
                house.fs.kv_chmod(ROOT, "large.kv", 0o600)
                await until(lambda: router.read() and not router.blocks)
                house.fs.kv_chmod(ROOT, "large.kv", 0o644)
                await until(lambda: router.read() and router.blocks)
            for num_pages in range(99, 0, -1):
                house.fs.kv_truncate(large, 32 * num_pages)
                await until(lambda: router.read() and len(router.blocks) == num_pages)  # noqa: B023 - awaited here
                slow.read()
                if slow.num_lost:
                    break
            assert slow.num_lost > 0
            slow.subscribe_again()
            await until(lambda: slow.read() and slow.blocks == router.blocks)


FLOOD = r"""
import socket, sys
flood = socket.socket(socket.AF_UNIX)
flood.connect(sys.argv[1])
flood.sendall(b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48))  # the greeting of ZMTP 3.0
flood.recv(64, socket.MSG_WAITALL)
flood.sendall(b"\4\x19\5READY\x0bSocket-Type\0\0\0\3SUB")
flood.recv(1)
for _ in range(200):
    flood.sendall(b"\0\4\1kv@" * 10_000)
"""
"""A program that subscribes two million times."""


@pytest.mark.slow
async def test_a_subscriber_that_subscribes_all_the_time_does_not_delay_the_daemon(house):
    house.make("a.kv")
    longest_s = 0.0
    async with house.publishing() as router, trio.open_nursery() as nursery:
        flood = await nursery.start(trio.run_process, [sys.executable, "-c", FLOOD, house.path()])
        while flood.poll() is None:
            before_s = trio.current_time()
            await trio.sleep(0.01)
            longest_s = max(longest_s, trio.current_time() - before_s)
        assert longest_s < 2
        house.make("b.kv", range(300, 340))
        await known(router, 32, range(300, 340))


async def test_a_socket_is_for_the_daemons_user_and_goes_with_the_daemon(house):
    path = house.path()
    async with house.publishing():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(SymError, match=r"already listens on .*choose another fleet_events"):
            house.publisher()
    assert not path.exists()


def test_a_file_at_the_path_is_refused_and_stays(house):
    path = house.path()
    path.write_text("mine")
    with pytest.raises(Exists, match="is no socket: choose another fleet_events"):
        house.publisher()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["nowhere/events.sock", "e" * 120])
def test_a_path_that_is_impossible_is_refused_in_words(house, name):
    house.endpoint = f"ipc://{house.path().parent}/{name}"
    with pytest.raises(SymError, match=r"can't publish events at ipc:.*(No such file|too long).*; choose another"):
        house.publisher()


def test_an_address_that_is_in_use_is_refused_in_words(house):
    with socket.create_server(("127.0.0.1", 0)) as other:
        house.endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(SymError, match=r"can't publish events at tcp://.*Address already in use"):
            house.publisher()
