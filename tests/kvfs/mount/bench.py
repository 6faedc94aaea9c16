"""Open files over a troubled disk, without a mount, by a clock that the test turns."""

import errno
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio
import trio.testing

from kvfs.fs import FileSystem, OpenKv
from kvfs.mount.eager import Eager
from kvfs.mount.nodes import Nodes
from kvfs.mount.open_files import Handle, OpenFiles
from kvfs.names.inode import Credentials, Inode
from kvfs.pages.pool import PagePool
from libsym.errors import SymError
from tests.kvfs.disks import TroubledDisk
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore
from tests.kvfs.images.hostile import image_of

UID = 1000
DEADLINE_S = 30.0


class Bench:
    """Open files over a troubled disk."""

    def __init__(self, backing: Path, clock: trio.testing.MockClock) -> None:
        facts = FakeFacts()
        self.store = FakeStore(facts, num_pages=64)
        self.trouble = TroubledDisk(DEADLINE_S, threading.current_thread())
        self.fs = FileSystem(PagePool(self.store), facts, backing, 0, 0, self.trouble.disk)
        self.volume = self.fs.volume
        self.files = OpenFiles(self.volume, Eager(), Nodes(self.volume.tree))
        self.clock = clock

    async def open(self, inode: Inode, *, truncate: bool = False) -> Handle:
        return await self.files.open(inode, inode.number, readable=True, writable=True, truncate=truncate)

    async def new(self, name: str, data: bytes = b"") -> Handle:
        handle = await self.open(self.volume.make_plain(self.volume.tree.root, name.encode(), 0o600, UID, UID))
        if data:
            await self.files.write(handle, 0, data)
        return handle

    async def has(self, handle: Handle) -> bytes:
        return bytes(await self.files.read(handle, 0, 1 << 21))

    def append(self, handle: OpenKv, tokens: Sequence[int]) -> None:
        FakeDecoder(self.store).append(handle.table, tokens)
        self.fs.committed(handle)

    def image(self, num_entries: int) -> bytes:
        handle = self.fs.kv_create(Credentials(0, 0), None)
        self.append(handle, range(num_entries))
        image = image_of(handle.table, self.volume.image_format)
        self.fs.kv_close(handle)
        return image

    @property
    def charged(self) -> int:
        return self.fs.pool.accounts.of(UID).other_bytes

    def hang(self, *calls: str, whose: Handle | None = None) -> None:
        self.trouble.stall(*calls, whose="" if whose is None else f"{whose.file.inode.number}.")

    async def hung(self) -> None:
        """A call has begun to hang."""
        await trio.to_thread.run_sync(self.trouble.entered.acquire)

    async def given_up(self, request: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Make a request that the disk does not answer in time."""
        async with trio.open_nursery() as nursery:
            outcome = start(nursery, request, *arguments)
            await self.hung()
            self.turn()
        assert outcome.timed_out

    async def answer(self) -> None:
        """The disk goes on, and all that was left behind has come back."""
        self.trouble.go_on()
        disk = self.files._disk
        while disk._changes or disk._at_work:
            await trio.lowlevel.checkpoint()

    def turn(self, seconds: float = DEADLINE_S) -> None:
        self.clock.jump(seconds)


def on_a_bench(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test on a bench, whose books are right in the end."""

    @functools.wraps(test)
    def run(tmp_path: Path, **given: Any) -> None:
        clock = trio.testing.MockClock()

        async def main() -> None:
            bench = Bench(tmp_path / "backing", clock)
            try:
                await test(bench, **given)
                await bench.answer()
            finally:
                bench.trouble.go_on()
            bench.files.release_all()
            bench.fs.check()
            bench.fs.close()
            assert not list((tmp_path / "backing").iterdir())

        trio.run(main, clock=clock)

    _, *wanted = inspect.signature(test).parameters.values()
    path = inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*wanted, path])  # type: ignore[attr-defined]  # what pytest goes by
    return run


class Outcome:
    """Outcome of a request that was started in the background."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.error: SymError | None = None

    async def run(self, request: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        try:
            with self.scope:
                await request(*arguments)
        except SymError as error:
            self.error = error
        finally:
            self.done.set()

    @property
    def timed_out(self) -> bool:
        return self.error is not None and self.error.errno == errno.ETIMEDOUT


def start(nursery: trio.Nursery, request: Callable[..., Awaitable[object]], *arguments: Any) -> Outcome:
    outcome = Outcome()
    nursery.start_soon(outcome.run, request, *arguments)
    return outcome
