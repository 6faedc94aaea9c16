"""Programs that hear that room runs short, of which files, and for how long others wait for him."""

import errno
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.fs import FileSystem, OpenKv
from kvfs.names.inode import Credentials
from kvfs.pages.accounts import AccountLimits
from kvfs.pages.pool import PagePool
from libsym.abi import Op, PressureKind
from libsym.channel.server import Request
from libsym.errors import Invalid, WouldBlock
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.pressure import LEAST_S, NO_GRACE_S, Pressing
from tests.kvfs.fakes import FakeFacts, FakeStore, commit_all
from tests.scheduler.bench import Answers

ANN, BOB = 1000, 1001
MEMORY, QUOTA = PressureKind.MEMORY, PressureKind.QUOTA
GRACE_S = 0.2


@dataclass
class Listening:
    """A request to be told."""

    lip: Lip
    number: int

    @property
    def told(self) -> tuple[tuple[int, ...], list[dict[str, Any]]] | int | None:
        """Kind, bytes, grace and the files; or an errno; None: nothing yet."""
        answers: Any = self.lip.channel
        if self.number not in answers.over:
            return None
        args, payload, error = answers.replies[self.number][-1]
        return (tuple(args), json.loads(payload)) if error is None else int(error.errno)

    @property
    def event(self) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
        assert isinstance(self.told, tuple), self.told
        return self.told

    @property
    def paths(self) -> list[str | None]:
        return [file["path"] for file in self.event[1]]


class House:
    """A file system, programs of it, and the messages that they get."""

    def __init__(self, fs: FileSystem) -> None:
        self.fs = fs
        self.pressing = Pressing(fs)
        self.pressing.grace_s = GRACE_S
        self._next_request = 0

    def run_test(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main` while alarms go off; time passes when all tasks wait for it."""

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.fs.volume.alarms.run)
                await main()
                nursery.cancel_scope.cancel()

        trio.run(both, clock=trio.testing.MockClock(autojump_threshold=0))

    def lip(self, uid: int = ANN, root: str | None = None) -> Lip:
        creds = Credentials(uid, uid)
        if root is not None:
            creds = self.fs.confine(creds, root)
        answers: Any = Answers()
        return Lip(4711, creds, answers)

    def file(self, lip: Lip, path: str | None, num_pages: int = 2) -> OpenKv:
        file = self.fs.kv_create(lip.credentials, path)
        commit_all(self.fs.reserve(file, range(32 * num_pages), range(32 * num_pages)))
        return file

    def listen(self, lip: Lip, timeout_ms: int = -1) -> Listening:
        self._next_request += 1
        request = Request(Op.KV_PRESSURE, 0, self._next_request, 0, (timeout_ms, 0, 0, 0), b"")
        self.pressing.pressure(SystemCall(lip, request))
        return Listening(lip, self._next_request)

    def tell(self, *files: OpenKv, num_pages: int = 1) -> float:
        return self.pressing.tell([file.table for file in files], num_pages)


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[FileSystem]:
    """A file system whose root everybody may write to; its books are checked afterwards."""
    facts = FakeFacts()
    fs = FileSystem(PagePool(FakeStore(facts, num_pages=64)), facts, tmp_path / "files", 0, 0)
    fs.volume.tree.root.mode = 0o777
    yield fs
    fs.check()


@pytest.fixture
def house(fs: FileSystem) -> House:
    return House(fs)


async def test_who_listens_is_told_what_would_go_and_has_a_grace(house):
    lip = house.lip()
    old, new = house.file(lip, "old.kv", 3), house.file(lip, "new.kv", 2)
    number = house.listen(lip)
    assert number.told is None
    assert house.tell(old, new, num_pages=4) == GRACE_S
    found = number.event
    page_bytes = house.fs.pool.page_bytes
    assert found[0] == (MEMORY, 4 * page_bytes, round(GRACE_S * 1000))
    assert [(file["path"], file["tokens"], file["memory_bytes"], file["freed_bytes"]) for file in found[1]] == [
        ("old.kv", 96, 3 * page_bytes, 3 * page_bytes),
        ("new.kv", 64, 2 * page_bytes, 2 * page_bytes),
    ]


async def test_nobody_waits_where_nobody_listens_or_without_a_grace(house):
    lip = house.lip()
    assert house.tell(house.file(lip, "a.kv")) == 0
    with pytest.raises(WouldBlock, match="there is room"):
        house.listen(lip, 0)
    with pytest.raises(Invalid):
        house.listen(lip, -2)
    house.pressing.grace_s = 0
    number = house.listen(lip)
    assert house.tell(house.file(lip, "b.kv")) == 0
    assert number.told is not None


async def test_no_user_hears_of_another_ones_files(house):
    ann, bob, root = house.lip(ANN), house.lip(BOB), house.lip(0)
    hers, his = house.file(ann, "hers.kv"), house.file(bob, "his.kv")
    of_ann, of_bob, of_root = [house.listen(lip) for lip in (ann, bob, root)]
    assert house.tell(hers) == GRACE_S
    assert (of_bob.told, of_root.told) == (None, None)
    assert of_ann.paths == ["hers.kv"]
    house.tell(hers, his)
    assert of_bob.paths == ["his.kv"]
    assert of_root.told is None


async def test_a_confined_connection_hears_of_its_domain_alone_by_paths_within_it(house):
    free = house.lip()
    house.fs.kv_mkdir(free.credentials, "key", 0o700)
    directory = house.fs.find(free.credentials, "key")
    house.fs.volume.domains.set_limit(directory, b"user.kv.quota", b"1G", ANN)
    confined = house.lip(root="key")
    outside, inside = house.file(free, "outside.kv"), house.file(free, "key/inside.kv")
    first, second = house.listen(free), house.listen(confined)
    house.tell(outside, inside)
    assert first.paths == ["outside.kv", "key/inside.kv"]
    assert second.paths == ["inside.kv"]


async def test_each_connection_is_told_once_of_each_event_by_all_its_calls(house):
    lip, other = house.lip(), house.lip()
    file = house.file(lip, "a.kv")
    calls = [house.listen(each) for each in (lip, lip, other)]
    house.tell(file)
    assert all(call.told is not None for call in calls)
    again = house.listen(lip)
    assert again.told is None, "it knows"
    assert house.tell(file) == GRACE_S, "what is left of the same one"
    assert again.told is None


async def test_who_comes_during_an_event_is_told_at_once_and_after_it_waits(house):
    lip, late, later = house.lip(), house.lip(), house.lip()
    file = house.file(lip, "a.kv")
    house.listen(lip)
    house.tell(file)
    await trio.sleep(GRACE_S / 4)
    number = house.listen(late)
    found = number.event
    assert found[0][2] == round(GRACE_S * 750), "what is left of the grace"
    await trio.sleep(GRACE_S)
    assert house.listen(later).told is None


async def test_events_of_an_account_keep_a_distance(house):
    house.pressing.grace_s = 0.01
    lip = house.lip()
    file = house.file(lip, "a.kv")
    house.listen(lip)
    assert house.tell(file) == 0.01
    number = house.listen(lip)
    await trio.sleep(LEAST_S / 2)
    assert house.tell(file) == 0, "the grace of the last event is over"
    assert number.told is None
    file = house.file(lip, "b.kv")
    await trio.sleep(LEAST_S)
    house.tell(file)
    assert number.told is not None


async def test_an_account_that_does_nothing_has_no_grace_for_a_while_but_is_told(house):
    lip = house.lip()
    file = house.file(lip, "a.kv")
    house.listen(lip)
    assert house.tell(file) == GRACE_S
    await trio.sleep(GRACE_S)
    number = house.listen(lip)
    assert house.tell(file) == 0
    assert number.told is not None
    await trio.sleep(NO_GRACE_S)
    house.listen(lip)
    assert house.tell(file) == GRACE_S


@pytest.mark.parametrize("what", ["remove", "truncate", "cold"])
async def test_who_reacts_is_waited_for_again(house, what):
    lip = house.lip()
    file, other = house.file(lip, "a.kv", 4), house.file(lip, "b.kv")
    house.listen(lip)
    assert house.tell(file, other) == GRACE_S
    if what == "remove":
        house.fs.kv_remove(lip.credentials, "a.kv")
        house.fs.kv_close(file)
    elif what == "truncate":
        house.fs.kv_truncate(file, 32)
    else:
        house.fs.volume.pager.residents.is_cold[file.table.row] = True
    await trio.sleep(GRACE_S)
    house.listen(lip)
    assert house.tell(other) == GRACE_S


async def test_between_two_calls_of_a_loop_an_account_still_listens(house):
    lip = house.lip()
    file = house.file(lip, "a.kv")
    house.listen(lip)
    house.tell(file)
    house.fs.kv_truncate(file, 32)  # it reacts, and is not back yet when the next one comes
    await trio.sleep(GRACE_S + LEAST_S)
    assert house.tell(file) == GRACE_S
    assert house.listen(lip).told is not None
    await trio.sleep(10)
    assert house.tell(file) == 0


async def test_a_wait_ends_with_its_time_and_with_cancel(house):
    lip = house.lip()
    timed, cancelled = house.listen(lip, 100), house.listen(lip)
    lip.calls[cancelled.number].cancel()
    assert cancelled.told == errno.ECANCELED
    await trio.sleep(0.2)
    assert timed.told == errno.EWOULDBLOCK
    assert lip.num_later == 0
    file, cancelled = house.file(lip, "a.kv"), house.listen(lip)
    house.tell(file)
    lip.calls[cancelled.number].cancel()
    assert house.listen(lip).told is not None, "what was cancelled behind its answer is told again"


async def test_a_program_that_has_gone_is_told_nothing_and_leaves_nothing(house):
    lip, other = house.lip(), house.lip(BOB)
    file = house.file(lip, "a.kv")
    house.listen(lip)
    house.listen(other)
    house.tell(file)
    house.listen(lip)
    house.pressing.leave(lip)
    await trio.sleep(LEAST_S + GRACE_S)
    assert house.tell(file) == 0
    house.pressing.leave(other)
    assert not any(account.core.is_watched for account in house.fs.pool.accounts)


@pytest.fixture
def narrow(fs: FileSystem) -> House:
    """A house in which each user may have 20 pages."""
    fs.pool.accounts.limit(AccountLimits(20 * fs.pool.page_bytes))
    return House(fs)


async def test_nine_tenths_of_a_quota_are_told_and_each_further_hundredth(narrow):
    lip, other = narrow.lip(), narrow.lip(BOB)
    small = narrow.file(lip, "small.kv", 2)
    number, of_other = narrow.listen(lip), narrow.listen(other)
    narrow.file(lip, "large.kv", 15)
    await trio.sleep(1)
    assert number.told is None
    narrow.file(lip, "more.kv", 1)
    await trio.sleep(0.01)
    found = number.event
    assert found[0] == (QUOTA, 0, 0)
    assert {file["path"] for file in found[1]} == {"small.kv", "large.kv", "more.kv"}
    number = narrow.listen(lip)
    await trio.sleep(1)
    assert number.told is None
    narrow.file(lip, "again.kv", 1)
    await trio.sleep(0.2)
    found = number.event
    assert found[0] == (QUOTA, narrow.fs.pool.page_bytes, 0)
    narrow.fs.kv_remove(lip.credentials, "again.kv")
    narrow.fs.kv_truncate(small, 0)
    assert of_other.told is None


async def test_who_begins_to_listen_with_a_quota_that_is_nearly_full_is_told_at_once_and_once(narrow):
    lip = narrow.lip()
    narrow.file(lip, "large.kv", 19)
    number = narrow.listen(lip, 0)
    found = number.event
    assert found[0][:2] == (QUOTA, narrow.fs.pool.page_bytes)
    with pytest.raises(WouldBlock):
        narrow.listen(lip, 0)


async def test_it_is_told_again_after_there_was_room(narrow):
    lip = narrow.lip()
    narrow.file(lip, "large.kv", 10)
    narrow.file(lip, "a.kv", 9)
    narrow.listen(lip)
    for path in ("b.kv", "c.kv"):
        narrow.fs.kv_close(narrow.fs.kv_open(lip.credentials, "large.kv", write=False))
        number = narrow.listen(lip)
        assert number.told is None
        last = "a.kv" if path == "b.kv" else "b.kv"
        file = narrow.fs.kv_open(lip.credentials, last, write=True)
        narrow.fs.kv_remove(lip.credentials, last)
        narrow.fs.kv_truncate(file, 0)
        await trio.sleep(0.2)
        narrow.file(lip, path, 9)
        await trio.sleep(0.2)
        assert number.told is not None
