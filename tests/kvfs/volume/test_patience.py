"""Files that the kernel is about to forget: who waits for that, and for how long."""

import stat
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.fs import FileSystem
from kvfs.names.inode import Inode
from kvfs.names.tree import Tree
from kvfs.pages.accounts import NAME_BYTES, Account, AccountLimits, Accounts, StillCharged
from kvfs.volume.patience import PATIENCE_S, REST, when_forgotten
from libsym.errors import OverQuota
from tests.kvfs.core.model import FREE_NAMES

UID, OTHER = 7, 8


class House:
    """A tree whose users have limits."""

    def __init__(self) -> None:
        self._accounts = Accounts(0, 1)
        self.tree = Tree(self._accounts, 0, 0, lambda _inode: None)

    def run_test(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))

    def limit(self, **limits: int) -> None:
        self._accounts.limit(AccountLimits(**limits))

    def make(self, name: str, uid: int = UID) -> Inode:
        return self.tree.make(self.tree.root, name.encode(), stat.S_IFREG, mode=0o644, uid=uid, gid=0)

    def remove(self, inode: Inode, name: str) -> None:
        """The kernel remembers it still."""
        inode.lookups = 1
        self.tree.unlink(self.tree.root, name.encode())

    async def waited_s(self) -> float:
        """How long a call waits in vain for a name."""
        began_s = trio.current_time()
        with pytest.raises(StillCharged):
            await when_forgotten(self.attempt)
        return trio.current_time() - began_s

    async def attempt(self) -> None:
        self.make("new")


def payer(inode: Inode) -> Account:
    assert inode.account is not None
    return inode.account


def refused(call: Callable[..., object], *arguments: object) -> type[OverQuota]:
    with pytest.raises(OverQuota) as caught:
        call(*arguments)
    return type(caught.value)


@pytest.fixture
def house() -> House:
    return House()


def test_a_call_that_would_lack_room_anyway_and_another_user_wait_for_nobody(house: House) -> None:
    house.limit(num_files=2)
    held, kept = house.make("held"), house.make("kept")
    others = house.make("a", OTHER), house.make("b", OTHER)
    assert refused(house.make, "new") is OverQuota
    house.remove(held, "held")
    assert refused(house.make, "new") is StillCharged
    assert refused(payer(held).require_files, 2) is OverQuota
    assert refused(house.make, "new", OTHER) is OverQuota
    house.tree.opened(held)
    house.tree.closed(held)
    house.tree.forget(held, 1)
    house.make("new")
    assert refused(house.make, "newer") is OverQuota, "nothing lingers any more"
    assert kept.names
    assert all(each.names for each in others)


def test_bytes_of_names_and_links_are_waited_for_alike(house: House) -> None:
    house.limit(num_bytes=NAME_BYTES + 1000)
    for number in range(FREE_NAMES):
        house.make(str(number))
    link = house.tree.make(
        house.tree.root, b"link", stat.S_IFLNK, mode=0o777, uid=UID, gid=0, target=bytes(b"x" * 1000)
    )
    assert refused(payer(link).require_bytes, 1) is OverQuota
    house.remove(link, "link")
    assert refused(payer(link).require_bytes, 1000 + NAME_BYTES) is StillCharged
    assert refused(payer(link).require_bytes, 1001 + NAME_BYTES) is OverQuota


def test_a_domain_takes_its_lingering_files_along_to_another_owner() -> None:
    accounts = Accounts(0, 1)
    old, new = accounts.of(UID), accounts.of(OTHER)
    domain = accounts.new_domain(old, AccountLimits(), lambda: "a domain")
    domain.charge_files()
    domain.linger(100)
    new.adopt(domain)
    domain.forgotten(100)
    assert [(each.num_lingering, each.lingering_bytes) for each in (old, new, domain)] == [(0, 0)] * 3


def test_a_removed_file_lingers_while_nobody_has_it_open_and_for_who_pays_for_it(fs: FileSystem) -> None:
    tree, accounts = fs.volume.tree, fs.pool.accounts

    def linger() -> list[int]:
        fs.check()
        return [accounts.of(uid).num_lingering for uid in (UID, OTHER)]

    removed = tree.make(tree.root, b"x", stat.S_IFLNK, mode=0o777, uid=UID, gid=0, target=b"y")
    removed.lookups = 1
    tree.unlink(tree.root, b"x")
    assert linger() == [1, 0]
    tree.opened(removed)
    assert linger() == [0, 0], "by a descriptor that was of O_PATH"
    tree.closed(removed)
    assert linger() == [1, 0]
    fs.volume.change_owner(removed, OTHER)
    assert linger() == [0, 1]
    payer(removed).num_lingering += 1
    with pytest.raises(AssertionError, match="uid 8 is charged num_lingering 2, has 1"):
        fs.check()
    payer(removed).num_lingering -= 1
    tree.forget(removed, 1)
    assert linger() == [0, 0]


async def test_each_file_that_the_kernel_forgets_lets_one_attempt_be_made_for_a_bounded_time(house: House) -> None:
    house.limit(num_files=3)
    held = [house.make(name) for name in "abc"]
    for inode, name in zip(held, "abc", strict=True):
        house.remove(inode, name)
    attempts, made = list[int](), list[int]()

    async def maker(number: int) -> None:
        async def attempt() -> None:
            attempts.append(number)
            house.make(str(number))

        await when_forgotten(attempt)
        made.append(number)

    assert await house.waited_s() == pytest.approx(PATIENCE_S)
    await trio.sleep(REST * PATIENCE_S)
    async with trio.open_nursery() as nursery:
        for number in (1, 2):
            nursery.start_soon(maker, number)
            await trio.testing.wait_all_tasks_blocked()
        for number in (1, 2):
            house.tree.forget(held.pop(), 1)
            await trio.testing.wait_all_tasks_blocked()
            assert made[-1] == number
    assert attempts == [1, 2, 1, 2]
    assert not payer(house.tree.root).waiting


@pytest.mark.slow
async def test_calls_that_wait_in_vain_do_so_for_a_small_part_of_the_time(house: House) -> None:
    """Others' calls wait for them where the directory is the same."""
    house.limit(num_files=1)
    house.remove(house.make("held"), "held")
    most_s = PATIENCE_S * REST / (REST - 1)  # a little comes back while they wait
    assert sum([await house.waited_s() for _ in range(20)]) == pytest.approx(most_s)
    await trio.sleep(REST * PATIENCE_S / 2)
    assert sum([await house.waited_s() for _ in range(20)]) == pytest.approx(most_s / 2)
