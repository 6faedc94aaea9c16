"""A process of its own that serves a mount, see `main` for its arguments.

Commands come as JSON lines on standard input and are answered on standard output: what a LIP would do through the
gate, done here by hand. The file system's own log goes to standard error.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvfs.fs import FileSystem, OpenKv
from kvfs.mount.session import serve_mount
from kvfs.names.inode import Credentials, Inode
from kvfs.pages.pool import PagePool
from kvfs.pages.table import PageTable
from libsym.errors import NotFound, SymError
from tests.kvfs.fakes import FakeFacts, FakeStore, commit_all

log = logging.getLogger(__name__)


def facts_for(page_bytes: int) -> FakeFacts:
    """A model whose page is that large: 2 layers, 2 heads, float32."""
    return FakeFacts(head_dim=page_bytes // (2 * 2 * 2 * 32 * 4))


class Server:
    """The file system, and handles by number for the commands."""

    def __init__(self, backing_dir: Path, num_pages: int, page_bytes: int) -> None:
        facts = facts_for(page_bytes)
        self.store = FakeStore(facts, num_pages)
        self.fs = FileSystem(PagePool(self.store), facts, backing_dir, os.getuid(), os.getgid())
        self.fs.volume.disk.unwritten.most_bytes = 1 << 20  # as beside a storage
        self.creds = Credentials(os.getuid(), os.getgid())
        self.handles: dict[int, OpenKv] = {}
        self.busy = False
        self.num_busy_looks = 0
        self.num_requests = 0

    def _keep(self, handle: OpenKv) -> int:
        number = len(self.handles) + 1
        self.handles[number] = handle
        return number

    def create(self, path: str | None, mode: int = 0o600) -> int:
        return self._keep(self.fs.kv_create(self.creds, path, mode))

    def open(self, path: str) -> int:
        return self._keep(self.fs.kv_open(self.creds, path, write=True))

    def append(self, handle: int, count: int, first: int = 1) -> None:
        """Append entries with tokens first, first + 1, …, as a step does; their KV holds the token id."""
        opened = self.handles[handle]
        tokens, start = [(first + i) % 1000 for i in range(count)], opened.table.next_position
        reservation = self.fs.reserve(opened, tokens, range(start, start + count))
        for page in reservation.pages_to_zero(count):
            self.store.zero(page)
        for source, target in reservation.copies:
            self.store.copy(source, target)
        for i, token in enumerate(tokens):
            page, slot = divmod(reservation.start + i, 32)
            self.store.entries[reservation.pages[page], :, :, :, slot] = token
        commit_all(reservation)
        self.fs.committed(opened)

    def grow(self, handle: int, count: int) -> None:
        """Append without touching the KV bytes: pages stay uncommitted memory."""
        opened = self.handles[handle]
        commit_all(self.fs.reserve(opened, [1] * count, range(opened.table.length, opened.table.length + count)))
        self.fs.committed(opened)

    @contextmanager
    def _table(self, path: str) -> Iterator[PageTable]:
        handle = self.fs.kv_open(self.creds, path, write=False)
        try:
            yield handle.table
        finally:
            self.fs.kv_close(handle)

    def tokens_of(self, path: str) -> list[int]:
        with self._table(path) as table:
            return table.read()[0].tolist()

    def pages_of(self, path: str) -> list[int]:
        with self._table(path) as table:
            return table.pages.tolist()

    def fork(self, handle: int, path: str | None) -> int:
        return self._keep(self.fs.kv_fork(self.creds, self.handles[handle], path))

    def make_many(self, path: str, count: int) -> None:
        directory = self.fs.volume.tree.child(self.fs.volume.tree.root, path.encode())
        for i in range(count):
            self.fs.volume.make_plain(directory, f"n{i:05}".encode(), 0o644, 0, 0)

    def unmake_many(self, path: str) -> None:
        tree = self.fs.volume.tree
        directory = tree.child(tree.root, path.encode())
        for name in tuple(directory.entries):
            tree.unlink(directory, name)

    def reset(self) -> None:
        for handle in self.handles.values():
            if not handle.closed:
                self.fs.kv_close(handle)

    def stat(self, path: str) -> dict[str, Any]:
        found = self.fs.kv_stat(self.creds, path)
        return {"kind": found.kind, "tokens": found.tokens}

    def set_busy(self, busy: bool) -> None:
        """Set whether the model seems to compute."""
        self.busy = busy

    def is_busy(self) -> bool:
        self.num_busy_looks += self.busy
        return self.busy

    def count_request(self) -> None:
        self.num_requests += 1

    def slow_down(self, page_s: float) -> None:
        """Have a worker take this long for each page that it looks at; 0: full speed."""
        self.store.worker_page_s = page_s
        self.store.num_worker_pages = 0

    def num_lock_waiters(self, path: str) -> int:
        lock = self.fs.volume.locks._locks.get(self._number(path))
        return 0 if lock is None else len(lock.waiting)

    def _number(self, path: str) -> int:
        return self.fs.volume.tree.child(self.fs.volume.tree.root, path.encode()).number

    def number_or_none(self, path: str) -> int | None:
        try:
            return self.fs.find(self.creds, path).number
        except NotFound:
            return None

    def lose(self, path: str) -> None:
        """Have the kernel forget a name, as it does when it needs memory."""
        inode = self.fs.find(self.creds, path)
        self.fs.volume.tree.lost += inode.names
        self.fs.volume.tree.bell.ring()

    def break_model(self) -> None:
        """Plant a defect: from now on asking for the model's name hits an exception that nobody foresaw."""
        image_format = self.fs.volume.image_format
        self._facts, image_format.facts = image_format.facts, Defect()

    def mend_model(self) -> None:
        self.fs.volume.image_format.facts = self._facts

    def clear(self, directory: Inode | None = None) -> None:
        """Remove every name: sooner than through the mount."""
        tree = self.fs.volume.tree
        above = directory or tree.root
        for name, inode in tuple(above.entries.items()):
            if inode.is_directory:
                self.clear(inode)
                tree.rmdir(above, name)
            else:
                tree.unlink(above, name)


COMMANDS: dict[str, Callable[..., Any]] = {
    "close": lambda self, handle: self.fs.kv_close(self.handles[handle]),
    "truncate": lambda self, handle, count: self.fs.kv_truncate(self.handles[handle], count),
    "remove": lambda self, path: self.fs.kv_remove(self.creds, path),
    "rename": lambda self, old, new: self.fs.kv_rename(self.creds, old, new),
    "chmod": lambda self, path, mode: self.fs.kv_chmod(self.creds, path, mode),
    "num_requests": lambda self: self.num_requests,
    "numbers": lambda self, paths: [self.number_or_none(path) for path in paths],
    "num_inodes": lambda self: len(self.fs.volume.tree),
    "tokens": lambda self, handle: self.handles[handle].table.read()[0].tolist(),
    "mountpoint": lambda self: str(self.fs.mountpoint),
    "all_free": lambda self: self.fs.pool.num_free == self.fs.pool.num_pages,
    "free": lambda self: self.fs.pool.num_free,
    "check": lambda self: self.fs.check(),
    "num_paced": lambda self: self.num_busy_looks,
    "num_worker_pages": lambda self: self.store.num_worker_pages,
    "num_locks": lambda self: len(self.fs.volume.locks),  # files with a lock, held or waited for
    "unlock": lambda self, path, owner: self.fs.volume.locks.release(self._number(path), owner),
    "lock": lambda self, path, owner: self.fs.volume.locks.acquire_nowait(self._number(path), owner, exclusive=True),
}
"""Commands of one line each; the methods of `Server` are the others."""


class Defect:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"planted for {name}")


async def _commands(server: Server, cancel: trio.CancelScope) -> None:
    lines = trio.lowlevel.FdStream(0)
    rest = b""
    async for data in lines:
        *complete, rest = (rest + data).split(b"\n")
        for line in complete:
            name, *arguments = json.loads(line)
            try:
                command = partial(COMMANDS[name], server) if name in COMMANDS else getattr(server, name)
                answer = {"result": command(*arguments)}
            except SymError as error:
                answer = {"error": str(error), "errno": error.errno}
            except Exception as error:
                log.exception("command %s", name)
                answer = {"error": repr(error), "errno": 0}
            print(json.dumps(answer), flush=True)
    cancel.cancel()  # standard input is closed: the end


async def main(mountpoint: str, backing_dir: str, num_pages: str, page_bytes: str, allow_other: str) -> None:
    """Serve until standard input is closed."""
    server = Server(Path(backing_dir), int(num_pages), int(page_bytes))
    others = allow_other == "1"
    serve = partial(
        serve_mount,
        server.fs,
        Path(mountpoint),
        allow_other=others,
        is_busy=server.is_busy,
        catch_up=server.count_request,
    )
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(serve)
        except SymError as error:
            print(json.dumps({"error": str(error), "errno": error.errno}), flush=True)
            nursery.cancel_scope.cancel()
            return
        print(json.dumps({"result": "mounted"}), flush=True)
        await _commands(server, nursery.cancel_scope)
    server.fs.close()
    server.fs.check()  # everything the mount held was given back
    print(json.dumps({"result": "unmounted"}), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    *arguments, uid = sys.argv[1:]
    if int(uid) != os.getuid():  # only now: the interpreter may lie where that user can't read
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    trio.run(partial(main, *arguments))
