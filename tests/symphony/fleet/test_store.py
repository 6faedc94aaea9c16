"""Pages in a real Mooncake Store: file systems in one process, real connections between them, and a fake decoder."""

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from kvfs.fs import OpenKv
from kvfs.names.inode import Credentials
from libsym.errors import NotSupported
from symphony.fleet import store, store_calls
from symphony.fleet.client import Address, Peers
from symphony.fleet.etcd import Etcd, has_revision, putting
from symphony.fleet.keys import make_keys
from symphony.fleet.link import Copy, contexts
from symphony.fleet.server import PeerServer
from symphony.fleet.store import Store
from symphony.fleet.store_calls import StoreProcess
from tests.symphony.etcd import EtcdServer
from tests.symphony.fleet.machines import USER, Machine
from tests.symphony.mooncake import Master

pytestmark = pytest.mark.slow

LENGTH, NUM_FULL, GIVEN = 100, 3, 64 << 20
OTHER = Credentials(1001, 1001)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    with closing(Etcd([server.url], None)) as client:
        yield client
    server.kill()


@pytest.fixture
def master() -> Iterator[Master]:
    master = Master()
    yield master
    master.kill()


class Reader:
    """A machine that fetches files of `east`, and has a store."""

    def __init__(self, directory: Path, keys: Path, name: str, fleet: str, etcd: Etcd, master: Master, east: Address):
        self.machine = Machine(directory, name)
        self.process = StoreProcess(master.address, "127.0.0.1", GIVEN, self.machine.store.page_bytes)
        self.store = Store(self.machine.fs, etcd, fleet, self.process)
        self._peers = Peers(self.machine.fs, {"east": east}, contexts(keys / "west")[1], self.store)

    @property
    def num_from_peer(self) -> int:
        return self._peers.num_pages_received

    async def fetch(self, creds: Credentials = USER) -> list[float]:
        """Fetch the file, and return its entries. No page of the file stays here."""
        file = await self._peers.fetch(creds, "east", "a.kv", None, 0o600)
        values = self.machine.values(file)
        self.machine.fs.kv_close(file)
        return values

    async def is_ready(self) -> None:
        """Wait until the store answers."""
        await until(lambda: not self.process.trouble)

    async def has_put(self, count: int) -> None:
        """Wait until the pages of a fetch are in the store."""
        await until(lambda: self.store.num_pages_put == count)

    def pages(self, file: OpenKv) -> list[bytes]:
        return [bytes(self.machine.fs.pool.store.view(page)) for page in file.table.pages.tolist()]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a process, which rings no bell here."""
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def refuse(_request: Copy) -> None:
    raise NotSupported("this test has no versions")


@pytest.fixture
def readers(tmp_path: Path, etcd: Etcd, master: Master) -> Callable[..., AbstractAsyncContextManager[list[Any]]]:
    """Machines that fetch the file of `east`, three full pages and a part of one, behind the expected entries."""
    make_keys(tmp_path / "keys", ["east", "west"])
    east = Machine(tmp_path, "east")
    file = east.fs.kv_create(USER, "a.kv", 0o644)
    east.append(file, range(LENGTH))
    expected = east.values(file)
    east.fs.kv_close(file)

    @asynccontextmanager
    async def readers(*names: str) -> AsyncIterator[list[Any]]:
        bound = socket.create_server(("127.0.0.1", 0))
        server = PeerServer(east.fs, contexts(tmp_path / "keys" / "east")[0], bound, lambda: None, refuse)
        address = bound.getsockname()[:2]
        made = [Reader(tmp_path, tmp_path / "keys", name, tmp_path.name, etcd, master, address) for name in names]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            for reader in made:
                nursery.start_soon(reader.store.run)
            for reader in made:
                await reader.is_ready()
            yield [expected, *made]
            nursery.cancel_scope.cancel()
        for reader in made:
            reader.machine.fs.check()

    return readers


def store_process() -> int:
    """Return the pid of the process that calls the store."""
    children = [pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]
    (pid,) = (pid for pid in children if b"store_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(pid)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == store_calls.__name__ and each.levelname == "WARNING"
    ]


async def test_pages_that_one_machine_has_fetched_come_to_another_one_from_the_store(readers):
    async with readers("west", "north") as (expected, west, north):
        assert await west.fetch() == expected
        await west.has_put(NUM_FULL)
        assert await north.fetch() == expected
        assert (west.num_from_peer, north.num_from_peer, north.store.num_pages_got) == (NUM_FULL, 0, NUM_FULL)
        assert north.store.num_pages_put == 0


async def test_a_page_of_one_account_is_no_page_of_another_one(readers):
    async with readers("west", "north") as (expected, west, north):
        await west.fetch(USER)
        await west.has_put(NUM_FULL)
        assert await north.fetch(OTHER) == expected
        assert (north.num_from_peer, north.store.num_pages_got) == (NUM_FULL, 0)


async def test_the_store_sees_neither_contents_nor_digests(readers):
    async with readers("west") as (_, west):
        file = await west._peers.fetch(USER, "east", "a.kv", None, 0o600)
        await west.has_put(NUM_FULL)
        fs, page = west.machine.fs, file.table.pages[:1]
        content, digest = west.pages(file)[0], fs.pool.digests_of(page)
        name, _ = west.store.sealed(USER.uid, digest)
        assert await west.process.call("get", [name, digest.hex()], fs.pool.page_bytes) == [len(content), -704]
        encrypted = bytes(west.process.room[: len(content)])
        assert not any(content[at : at + 16] in encrypted for at in range(0, len(content), 16) if any(content[at:]))


async def test_a_wrong_byte_is_a_miss_and_the_next_fetch_mends_it(readers):
    async with readers("west", "north") as (expected, west, north):
        file = await west._peers.fetch(USER, "east", "a.kv", None, 0o600)
        await west.has_put(NUM_FULL)
        pool = west.machine.fs.pool
        name, _ = west.store.sealed(USER.uid, pool.digests_of(file.table.pages[1:2]))
        assert await west.process.call("get", [name], pool.page_bytes) == [pool.page_bytes]
        west.process.room[5] ^= 1
        assert await west.process.call("put", [name], pool.page_bytes) == [0]
        assert await north.fetch() == expected
        assert (north.num_from_peer, north.store.num_pages_got) == (1, NUM_FULL - 1)
        await north.has_put(1)
        assert await north.fetch() == expected
        assert north.num_from_peer == 1


async def test_a_value_of_another_size_is_a_miss(readers):
    async with readers("west", "north") as (expected, west, north):
        file = await west._peers.fetch(USER, "east", "a.kv", None, 0o600)
        await west.has_put(NUM_FULL)
        pool = west.machine.fs.pool
        name, _ = west.store.sealed(USER.uid, pool.digests_of(file.table.pages[:1]))
        for number, size in enumerate((pool.page_bytes // 2, pool.page_bytes * 2), 1):
            assert await west.process.call("put", [name], size) == [0]
            assert await north.fetch() == expected
            assert north.num_from_peer == number
            await north.has_put(number)


async def test_without_its_master_the_store_has_only_misses_and_the_log_says_so_once(
    readers, master, caplog, monkeypatch
):
    monkeypatch.setattr(store_calls, "RETRY_S", 0.1)
    caplog.set_level("INFO", store_calls.__name__)
    async with readers("west") as (expected, west):
        await west.fetch()
        await west.has_put(NUM_FULL)
        master.kill()
        for _ in range(3):
            assert await west.fetch() == expected
        assert west.num_from_peer == 4 * NUM_FULL
        assert len(warnings(caplog)) == 1
        assert "pages come from peers" in warnings(caplog)[0]
        master.start()  # and has forgotten everything
        await west.is_ready()
        with trio.fail_after(30):
            while not west.store.num_pages_got:  # the master takes no values until the process has registered again
                assert await west.fetch() == expected
                await trio.sleep(0.2)
        assert west.num_from_peer > 4 * NUM_FULL
        assert len(warnings(caplog)) == 1


async def test_a_store_that_hangs_delays_one_fetch_by_the_limit_and_nothing_else(readers, master, monkeypatch):
    monkeypatch.setattr(store_calls, "LIMIT_S", 0.5)
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            began_s = trio.current_time()
            await trio.sleep(0.001)
            longest_s = max(longest_s, trio.current_time() - began_s)

    async with readers("west") as (expected, west):
        async with trio.open_nursery() as nursery:
            os.kill(master.process.pid, signal.SIGSTOP)
            nursery.start_soon(tick)
            began_s = trio.current_time()
            assert await west.fetch() == expected
            first_s, began_s = trio.current_time() - began_s, trio.current_time()
            for _ in range(3):
                assert await west.fetch() == expected
            assert 0.5 <= first_s < 2
            assert trio.current_time() - began_s < 0.5
            nursery.cancel_scope.cancel()
        assert longest_s < 0.4


async def test_a_process_that_dies_during_a_call_is_replaced(readers, caplog, monkeypatch):
    monkeypatch.setattr(store_calls, "RETRY_S", 0.1)
    async with readers("west") as (expected, west):
        child = store_process()
        os.kill(child, signal.SIGSTOP)

        async def kill() -> None:
            await trio.sleep(0.2)  # the fetch waits by now
            os.kill(child, signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            assert await west.fetch() == expected
        await west.is_ready()
        assert len(warnings(caplog)) == 1
        with trio.fail_after(30):
            while not west.store.num_pages_put:  # the master still gives out the memory of the dead process, too
                assert await west.fetch() == expected
                await trio.sleep(0.2)


async def test_pages_that_wait_to_be_put_are_bounded_and_released_at_the_end(readers):
    async with readers("west") as (_, west):
        file = await west._peers.fetch(USER, "east", "a.kv", None, 0o600)
        await west.has_put(NUM_FULL)
        async with west.store._room:  # no put can begin
            for _ in range(store.MAX_OFFERED + 3):
                west.store.offer(file.content, np.arange(NUM_FULL), USER.uid)
            await trio.testing.wait_all_tasks_blocked()
        west.machine.fs.kv_close(file)
    assert west.machine.fs.pool.num_free == west.machine.fs.pool.num_pages


async def test_a_secret_in_etcd_that_is_no_secret_is_not_used(etcd, master, tmp_path, caplog):
    etcd.commit([has_revision("symphony/odd/store", 0)], [putting("symphony/odd/store", b"x" * 100)])
    machine = Machine(tmp_path, "west")
    process = StoreProcess(master.address, "127.0.0.1", GIVEN, machine.store.page_bytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Store(machine.fs, etcd, "odd", process).run)
        await until(lambda: "is no secret" in process.trouble)
        nursery.cancel_scope.cancel()
    assert len(warnings(caplog)) == 1


def test_without_mooncake_a_daemon_says_what_to_install(monkeypatch):
    monkeypatch.setattr(store_calls, "find_spec", lambda _name: None)
    with pytest.raises(NotSupported, match=r"symphony-os\[fleet\]"):
        StoreProcess("127.0.0.1:1", "127.0.0.1", GIVEN, 4096)
