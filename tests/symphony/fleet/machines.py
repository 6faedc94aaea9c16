"""File systems of several machines in one process, with a fake decoder."""

from pathlib import Path

from kvfs.fs import FileSystem, OpenKv
from kvfs.names.inode import NOT_KEPT, Changes, Credentials
from kvfs.pages.accounts import AccountLimits, Accounts
from kvfs.pages.pool import PagePool
from tests.kvfs.fakes import FakeDecoder, FakeFacts, FakeStore, commit_all

USER = Credentials(1000, 1000)


class Machine:
    """A file system with its memory, as a daemon has it."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        bits: str = "",
        model: str = "fake",
        quota: int | None = None,
        num_pages: int = 16,
        changes: Changes = NOT_KEPT,
    ):
        facts = (
            FakeFacts(name=model) if model == "fake" else FakeFacts(identity=dict.fromkeys(FakeFacts().identity, model))
        )
        self.name = name
        self.store = FakeStore(facts, num_pages)
        accounts = Accounts(num_pages, self.store.page_bytes, AccountLimits(quota, None, None)) if quota else None
        pool = PagePool(self.store) if accounts is None else PagePool(self.store, accounts)
        self.fs = FileSystem(pool, facts, directory / f"{name}.backing", 0, 0, bits=bits, changes=changes)
        self.fs.volume.tree.root.mode = 0o777
        self.decoder = FakeDecoder(self.store)

    def append(self, file: OpenKv, tokens: range) -> None:
        begin = file.table.next_position
        reservation = self.fs.reserve(file, tokens, range(begin, begin + len(tokens)))
        self.decoder.step(reservation)
        commit_all(reservation)
        self.fs.committed(file)

    def values(self, file: OpenKv) -> list[float]:
        frames = self.fs.pool.store.of[file.table.pages]
        return self.decoder.entries(frames, file.table.length).tolist()
