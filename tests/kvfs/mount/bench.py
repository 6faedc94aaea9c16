"""Open files over a troubled disk, without a mount, by a clock that the test turns."""

import errno
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

    def __init__(self, backing: Path) -> None:
        facts = FakeFacts()
        self._backing, self._clock = backing, trio.testing.MockClock()
        self.store = FakeStore(facts, num_pages=64)
        self.trouble = TroubledDisk(DEADLINE_S, threading.current_thread())
        self.fs = FileSystem(PagePool(self.store), facts, backing, 0, 0, self.trouble.disk)
        self.volume = self.fs.volume
        self.files = OpenFiles(self.volume, Eager(), Nodes(self.volume.tree))

    def run_test(self, test: Callable[[], Awaitable[None]]) -> None:
        """Run a test, after which the books are right and no backing file is left."""

        async def main() -> None:
            try:
                await test()
                await self.answer()
            finally:
                self.trouble.go_on()
            self.files.release_all()
            self.fs.check()
            self.fs.close()
            assert not list(self._backing.iterdir())

        trio.run(main, clock=self._clock)

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
        self._clock.jump(seconds)


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
