"""Directories with a quota of their own: made, filled, left alone, ended; and connections that see nothing else."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath

import pytest

from kvfs.facts import xattrs
from kvfs.fs import Claim, FileSystem, OpenKv
from kvfs.images.header import parse_header
from kvfs.names.domains import MAX_DEPTH
from kvfs.names.inode import Inode
from kvfs.names.plain import PlainFile
from kvfs.names.tree import RENAME_EXCHANGE, Credentials
from kvfs.pages.accounts import AccountLimits, Accounts
from kvfs.pages.pool import PagePool
from libsym.errors import (
    CrossDevice,
    Invalid,
    NotEmpty,
    NotFound,
    NotPermitted,
    NotSupported,
    OverQuota,
    SymError,
)
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeFacts, FakeStore, listing

ROOT = Credentials(0, 0)
ANN = Credentials(1000, 1000)
BOB = Credentials(1001, 1001)
PAGE = 4096


class House:
    """A file system in which each user may hold 8 pages and 12 files."""

    def __init__(self, store: FakeStore, facts: FakeFacts, path: Path) -> None:
        accounts = Accounts(store.num_pages, store.page_bytes, AccountLimits(8 * store.page_bytes, 12))
        self.fs = FileSystem(PagePool(store, accounts), facts, path, 0, 0)
        self.fs.mountpoint = PurePath("/kv")
        self.tree = self.fs.volume.tree
        self.tree.root.mode = 0o777
        self.decoder = FakeDecoder(store)

    def inode(self, path: str) -> Inode:
        return self.fs._paths.resolve(ROOT, path)

    def mkdir(self, path: str, who: Credentials = ANN, mode: int = 0o777) -> Inode:
        head, _, name = path.rpartition("/")
        directory = self.inode(head or ".")
        return self.tree.make(directory, name.encode(), stat.S_IFDIR, mode=mode, uid=who.uid, gid=who.gid)

    def domain(self, path: str, who: Credentials = ANN, size: str = "16K") -> Inode:
        inode = self.mkdir(path, who)
        self.set(path, "quota", size, who)
        return inode

    def set(self, path: str, name: str, value: str, who: Credentials = ANN) -> None:
        xattrs.put(self.fs.volume, self.inode(path), f"user.kv.{name}".encode(), value.encode(), who.uid)

    def unset(self, path: str, name: str, who: Credentials = ANN) -> None:
        xattrs.remove(self.fs.volume, self.inode(path), f"user.kv.{name}".encode(), who.uid)

    def attributes(self, path: str) -> dict[str, int]:
        inode = self.inode(path)
        names = xattrs.names(self.fs.volume, inode)
        return {name.decode()[8:]: int(xattrs.get(self.fs.volume, inode, name)) for name in names}

    def append(self, handle: OpenKv, count: int) -> None:
        self.decoder.append(handle.table, range(count))
        self.fs.committed(handle)

    def kv(self, path: str | None, count: int, who: Credentials = ANN) -> OpenKv:
        handle = self.fs.kv_create(who, path)
        self.append(handle, count)
        return handle

    def plain(self, path: str, who: Credentials = ANN) -> Inode:
        head, _, name = path.rpartition("/")
        return self.fs.volume.make_plain(self.inode(head or "."), name.encode(), 0o600, who.uid, who.gid)

    def image(self, handle: OpenKv) -> bytes:
        snapshot = self.fs.volume.open_snapshot(handle.content)
        image = bytes(snapshot.read(0, snapshot.size))
        self.fs.volume.close_snapshot(snapshot)
        return image

    def fill(self, inode: Inode, data: bytes) -> None:
        assert isinstance(inode.content, PlainFile)
        with self.fs.volume.charged_for(inode, inode.content, len(data)):
            inode.content.write_at(0, data)

    def resize(self, inode: Inode, size: int) -> None:
        content = inode.content
        if isinstance(content, PlainFile) and size:
            with self.fs.volume.charged_for(inode, content, size):
                content.resize(size)
        else:
            self.fs.volume.truncate(inode, size)

    def used_bytes(self, who: Credentials) -> int:
        return self.fs.pool.accounts.of(who.uid).num_bytes

    def used(self, who: Credentials) -> tuple[int, int]:
        account = self.fs.pool.accounts.of(who.uid)
        return account.pages.num_above, account.num_files


@pytest.fixture
def house(store: FakeStore, facts: FakeFacts, tmp_path: Path) -> Iterator[House]:
    house = House(store, facts, tmp_path / "backing")
    yield house
    house.fs.check()


def test_a_quota_makes_an_empty_directory_a_domain_and_says_what_is_used(house: House) -> None:
    house.mkdir("d")
    assert house.attributes("d") == {}
    house.set("d", "quota", "0.5M")
    house.set("d", "quota_files", "7")
    house.fs.kv_close(house.kv("d/a.kv", 40))
    assert house.attributes("d") == {"quota": 1 << 19, "quota_files": 7, "used": 2 * PAGE, "used_files": 1}
    house.set("d", "quota", "4096")  # less than it has: it gets no more, and keeps what it has
    handle = house.fs.kv_open(ANN, "d/a.kv", write=True)
    with pytest.raises(OverQuota, match="the domain /d is at its quota of 4096 bytes"):
        house.fs.reserve(handle, range(32), range(32))
    house.append(handle, 3)
    house.fs.kv_remove(ANN, "d/a.kv")
    assert house.attributes("d")["used_files"] == 1, "open, so it is charged"
    house.fs.kv_close(handle)
    assert house.attributes("d") == {"quota": 4096, "quota_files": 7, "used": 0, "used_files": 0}
    house.unset("d", "quota")
    house.unset("d", "quota_files")
    assert house.attributes("d") == {}


def test_a_domain_has_a_weight_of_its_own_that_its_owner_sets(house: House) -> None:
    house.domain("d")
    directory = house.inode("d")
    assert directory.domain is not None
    assert directory.domain.weight == 1
    assert b"user.kv.weight" not in xattrs.names(house.fs.volume, directory)
    for text, weight in (("2.50", 2.5), ("0.01", 0.01), ("100\n", 100)):
        house.set("d", "weight", text)
        assert directory.domain.weight == weight
        assert xattrs.get(house.fs.volume, directory, b"user.kv.weight") == f"{weight:g}".encode()
        assert xattrs.names(house.fs.volume, directory).count(b"user.kv.weight") == 1
    with pytest.raises(NotPermitted, match="weight"):
        house.set("d", "weight", "3", BOB)
    with pytest.raises(NotPermitted, match="weight"):
        house.unset("d", "weight", BOB)
    assert directory.domain.weight == 100
    house.set("d", "quota", "32K")
    assert directory.domain.weight == 100, "another quota is another thing"
    house.unset("d", "weight")
    assert directory.domain.weight == 1
    with pytest.raises(SymError, match="no attribute"):
        house.unset("d", "weight")


@pytest.mark.parametrize("text", ["0", "0.009", "100.1", "-1", "1e1", "nan", "inf", "", "1,5", "\u0663", "9" * 40])
def test_a_weight_that_is_none_is_refused(house: House, text: str) -> None:
    house.domain("d")
    with pytest.raises(Invalid, match="weight"):
        house.set("d", "weight", text)
    assert house.attributes("d").keys() == {"quota", "used", "used_files"}


def test_only_a_domain_has_a_weight_and_it_goes_with_the_domain(house: House) -> None:
    house.mkdir("d")
    with pytest.raises(Invalid, match="is no domain"):
        house.set("d", "weight", "2")
    house.fs.kv_close(house.kv("a.kv", 1))
    with pytest.raises(NotSupported, match="only directories"):
        house.set("a.kv", "weight", "2")
    house.set("d", "quota", "16K")
    house.set("d", "weight", "2")
    house.unset("d", "quota")
    assert house.attributes("d") == {}
    house.set("d", "quota", "16K")
    domain = house.inode("d").domain
    assert domain is not None
    assert domain.weight == 1


def test_only_the_owner_of_an_empty_directory_makes_or_ends_a_domain(house: House) -> None:
    house.mkdir("d")
    with pytest.raises(NotPermitted):
        house.set("d", "quota", "1M", BOB)
    handle = house.kv("d/a.kv", 1)
    with pytest.raises(NotEmpty):
        house.set("d", "quota", "1M")
    with pytest.raises(NotSupported):
        house.set("d/a.kv", "quota", "1M")
    house.fs.kv_remove(ANN, "d/a.kv")
    house.set("d", "quota", "1M", ROOT)
    house.fs.kv_close(handle)
    for name, value in (("quota", "much"), ("quota", "-1"), ("quota_files", "1.5"), ("quota_files", "9" * 30)):
        with pytest.raises(Invalid, match="is no "):
            house.set("d", name, value)
    with pytest.raises(NotSupported):
        house.set("d", "used", "0")
    handle = house.kv("d/a.kv", 1)
    with pytest.raises(NotEmpty):
        house.unset("d", "quota")
    with pytest.raises(SymError, match="no attribute"):
        house.unset("d", "quota_files")
    with pytest.raises(NotPermitted):
        house.unset("d", "quota", BOB)
    assert house.attributes("d")["quota"] == 1 << 20
    house.fs.kv_close(handle)


def test_a_domain_is_a_part_of_its_owners_quota_whoever_fills_it(house: House) -> None:
    house.domain("d", size="5K")  # room for one page
    handles = [house.kv("d/bobs.kv", 32, BOB), house.kv("anns.kv", 7 * 32)]
    assert (house.used(ANN), house.used(BOB)) == ((8, 3), (0, 0))
    for handle in handles:
        with pytest.raises(OverQuota):
            house.fs.reserve(handle, [1], [0])
    house.set("d", "quota", "1G")
    with pytest.raises(OverQuota, match="uid 1000"):
        house.fs.reserve(handles[0], [1], [0])
    house.fs.kv_truncate(handles[1], 0)
    house.append(handles[0], 32)
    house.fs.check()
    for handle in handles:
        house.fs.kv_close(handle)


def test_files_of_every_kind_count(house: House) -> None:
    house.domain("d")
    house.set("d", "quota_files", "4")
    house.mkdir("d/sub")
    house.fs.volume.make_plain(house.inode("d/sub"), b"plain", 0o600, 1000, 1000)
    house.tree.make(house.inode("d"), b"link", stat.S_IFLNK, mode=0o777, uid=1000, gid=1000)
    handle = house.kv("d/a.kv", 1)
    for path in ("d/b.kv", "d/sub/b.kv"):
        with pytest.raises(OverQuota, match="at its quota of 4 files"):
            house.fs.kv_create(ANN, path)
        with pytest.raises(OverQuota):
            house.fs.kv_fork(ANN, handle, path)
        assert house.fs.pool.refcount[: house.fs.pool.num_pages].sum() == 1
    with pytest.raises(OverQuota):
        house.tree.link(handle.inode, house.inode("d/sub"), b"hard")
    house.fs.kv_remove(ANN, "d/link")
    house.fs.kv_close(house.fs.kv_create(ANN, "d/b.kv"))
    house.fs.kv_close(handle)


def test_a_user_is_at_his_limit_of_files_at_once_and_well_again_after_rm(house: House) -> None:
    for index in range(12):
        house.fs.kv_close(house.fs.kv_create(ANN, f"{index}.kv"))
    for path in ("more.kv", None):
        with pytest.raises(OverQuota, match="uid 1000 is at its quota of 12 files"):
            house.fs.kv_create(ANN, path)
    house.fs.kv_close(house.fs.kv_create(BOB, "bobs.kv"))
    house.fs.kv_remove(ANN, "3.kv")
    house.fs.kv_close(house.fs.kv_create(ANN, None))


def test_each_hard_link_after_the_first_counts_as_a_file_of_its_owner(house: House) -> None:
    account, root = house.fs.pool.accounts.of(1000), house.tree.root
    file = house.plain("f")
    for number in range(11):
        house.tree.link(file, root, b"%d" % number)
    assert account.num_files == 12
    with pytest.raises(OverQuota, match="uid 1000 is at its quota of 12 files"):
        house.tree.link(file, root, b"more")
    house.tree.rename(root, b"f", root, b"g")
    house.tree.rename(root, b"1", root, b"2")  # names of one file: nothing happens
    house.tree.rename(root, b"1", root, b"g", RENAME_EXCHANGE)
    house.fs.check()
    assert account.num_files == 12
    with pytest.raises(OverQuota):
        house.plain("more")
    house.plain("bobs", BOB)
    house.tree.rename(root, b"bobs", root, b"3")
    assert account.num_files == 11
    house.fs.volume.change_owner(file, 0)
    assert (account.num_files, house.fs.pool.accounts.of(0).num_files) == (0, 12)
    for name in list(root.entries):
        house.tree.unlink(root, name)
    house.fs.check()


def test_a_rename_moves_no_charge_whatever_lies_below(house: House) -> None:
    house.domain("d")
    for path in ("d/a", "d/a/b", "d/c", "e", "e/f"):
        house.mkdir(path)
    house.fs.kv_close(house.kv("d/a/b/x.kv", 40))
    used = house.attributes("d"), house.used(ANN)
    house.fs.kv_rename(ANN, "d/a", "d/c/a")
    house.fs.kv_rename(ANN, "d", "e/f/d")
    house.fs.check()
    assert (house.attributes("e/f/d"), house.used(ANN)) == used
    assert house.inode("e/f/d/c/a/b/x.kv").account is house.inode("e/f/d").domain
    house.fs.kv_close(house.kv("e/f/d/c/a/y.kv", 1))
    assert house.attributes("e/f/d")["used"] == used[0]["used"] + PAGE


def test_no_name_crosses_the_boundary_of_a_domain(house: House) -> None:
    house.domain("d")
    house.domain("e")
    house.mkdir("d/sub")
    house.mkdir("f")
    for path in ("d/in.kv", "e/in.kv", "out.kv"):
        house.fs.kv_close(house.kv(path, 1))
    for old, new in (("d/in.kv", "in.kv"), ("out.kv", "d/out.kv"), ("d/in.kv", "e/x.kv"), ("f", "d/f"), ("d", "e/d")):
        with pytest.raises(CrossDevice, match="another domain"):
            house.fs.kv_rename(ANN, old, new)
    with pytest.raises(CrossDevice):
        house.tree.link(house.inode("out.kv"), house.inode("d/sub"), b"x")
    with pytest.raises(CrossDevice):
        house.tree.link(house.inode("d/in.kv"), house.tree.root, b"x")
    with pytest.raises(CrossDevice):
        house.tree.rename(house.tree.root, b"out.kv", house.inode("d"), b"in.kv", RENAME_EXCHANGE)
    house.fs.kv_rename(ANN, "d/in.kv", "d/sub/in.kv")
    house.fs.kv_rename(ANN, "d", "f/d")
    house.tree.link(house.inode("f/d/sub/in.kv"), house.inode("f/d"), b"again")
    house.fs.check()


def test_a_fork_across_the_boundary_shares_pages_and_charges_both(house: House) -> None:
    house.domain("d", size="12K")
    out = house.kv("out.kv", 64)
    into = house.fs.kv_fork(ANN, out, "d/in.kv")
    assert house.fs.pool.num_pages - house.fs.pool.num_free == 2
    assert (house.attributes("d")["used"], house.used(ANN)[0]) == (2 * PAGE, 2)
    house.fs.kv_close(out)
    house.fs.kv_remove(ANN, "out.kv")
    assert (house.attributes("d")["used"], house.used(ANN)[0]) == (2 * PAGE, 2)
    house.append(into, 32)
    big = house.kv("big.kv", 4 * 32)
    with pytest.raises(OverQuota, match="the domain /d"):
        house.fs.kv_fork(ANN, big, "d/big.kv")
    with pytest.raises(NotFound):
        house.fs.kv_stat(ANN, "d/big.kv")
    for handle in (into, big):
        house.fs.kv_close(handle)


def test_chown_moves_the_charge_or_changes_nothing(house: House) -> None:
    handle, bobs = house.kv("a.kv", 4 * 32), house.kv("b.kv", 5 * 32, BOB)
    with pytest.raises(OverQuota, match="uid 1001"):
        house.fs.volume.change_owner(house.inode("a.kv"), BOB.uid)
    assert (house.inode("a.kv").uid, house.used(ANN)) == (1000, (4, 1))
    house.fs.kv_truncate(bobs, 1)
    house.fs.volume.change_owner(house.inode("a.kv"), BOB.uid)
    assert (house.inode("a.kv").uid, house.used(ANN), house.used(BOB)) == (1001, (0, 0), (5, 2))
    house.fs.check()
    for each in (handle, bobs):
        house.fs.kv_close(each)


@pytest.mark.parametrize("there_is_room", [True, False])
def test_a_file_that_changes_hands_while_it_is_imported_is_its_new_owners(house: House, there_is_room: bool) -> None:
    volume = house.fs.volume
    bobs = house.kv("b.kv", 32 if there_is_room else 7 * 32, BOB)
    handle = house.kv("a.kv", 64)
    image = BytesSource(house.image(handle))
    inode = volume.make_plain(house.tree.root, b"in.kv", 0o600, ANN.uid, ANN.gid)
    incoming = volume.begin_import(parse_header(volume.image_format, image), inode)
    incoming.load(image)
    volume.change_owner(inode, BOB.uid)
    if there_is_room:
        volume.finish_import(incoming, inode)
        assert house.used(BOB) == (3, 2)
        assert inode.kind == "kv"
    else:
        with pytest.raises(OverQuota, match="uid 1001"):
            volume.finish_import(incoming, inode)
        assert inode.kind == "file"
    assert house.used(ANN) == (2, 1)
    for each in (handle, bobs):
        house.fs.kv_close(each)


def test_chown_of_a_domain_moves_all_that_is_in_it_and_inside_it_moves_nothing(house: House) -> None:
    house.domain("d", size="1M")
    handle, other = house.kv("d/a.kv", 4 * 32), house.kv("b.kv", 5 * 32, BOB)
    house.domain("d/inner", size="1M")
    inner = house.fs.kv_fork(ANN, handle, "d/inner/a.kv")
    assert house.used(ANN) == (4, 4)
    house.fs.volume.change_owner(house.inode("d/a.kv"), BOB.uid)
    house.fs.volume.change_owner(house.inode("d/inner"), BOB.uid)
    assert (house.used(ANN), house.used(BOB)) == ((4, 4), (5, 1))
    with pytest.raises(OverQuota):
        house.fs.volume.change_owner(house.inode("d"), BOB.uid)
    assert (house.used(ANN), house.used(BOB)) == ((4, 4), (5, 1))
    house.fs.check()
    house.fs.kv_truncate(other, 0)
    house.fs.volume.change_owner(house.inode("d"), BOB.uid)
    assert (house.used(ANN), house.used(BOB)) == ((0, 0), (4, 5))
    house.append(inner, 32)
    assert house.used(BOB) == (5, 5)
    for each in (handle, other, inner):
        house.fs.kv_close(each)


def test_domains_in_domains_are_charged_with_all_around_them(house: House) -> None:
    house.domain("d", size="12K")
    house.domain("d/e", BOB, size="1M")
    handle = house.kv("d/e/a.kv", 64, BOB)
    assert [house.attributes(path)["used"] for path in ("d", "d/e")] == [2 * PAGE, 2 * PAGE]
    assert (house.used(ANN)[0], house.used(BOB)) == (2, (0, 0))
    with pytest.raises(OverQuota, match="the domain /d is"):
        house.fs.reserve(handle, range(64), range(64))
    with pytest.raises(CrossDevice):
        house.fs.kv_rename(BOB, "d/e/a.kv", "d/a.kv")
    house.fs.kv_close(handle)
    path = "d/e"
    for _ in range(MAX_DEPTH - 2):
        path += "/x"
        house.domain(path, ROOT)
    with pytest.raises(Invalid, match="can't be one more"):
        house.domain(path + "/x", ROOT)


def test_a_claimed_file_is_charged_to_the_domain_that_it_gets_its_name_in(house: House) -> None:
    house.domain("d", size="8K")
    claim = house.fs.kv_open_or_claim(ANN, "d/a.kv", write=False)
    assert isinstance(claim, Claim)
    handle = house.fs.kv_create_claimed(ANN, claim, 0o600)
    house.append(handle, 64)
    with pytest.raises(OverQuota, match="the domain"):
        house.fs.reserve(handle, [1], [1])
    used = house.attributes("d")
    house.fs.kv_name(ANN, handle, write=False)
    assert house.attributes("d") == used
    house.fs.kv_close(handle)


def test_a_directory_that_has_become_a_domain_meanwhile_takes_no_claimed_file(house: House) -> None:
    house.mkdir("d")
    claim = house.fs.kv_open_or_claim(ANN, "d/a.kv", write=False)
    assert isinstance(claim, Claim)
    handle = house.fs.kv_create_claimed(ANN, claim, 0o600)
    house.set("d", "quota", "1M")
    with pytest.raises(CrossDevice, match="part of another domain"):
        house.fs.kv_name(ANN, handle, write=False)
    house.fs.kv_close(handle)


def test_a_removed_domain_pays_for_what_is_still_open(house: House) -> None:
    house.domain("d", size="8K")
    handle = house.kv("d/a.kv", 32)
    house.fs.kv_remove(ANN, "d/a.kv")
    house.tree.rmdir(house.tree.root, b"d")
    house.append(handle, 32)
    with pytest.raises(OverQuota, match="the domain"):
        house.fs.reserve(handle, [1], [1])
    assert house.used(ANN) == (2, 1)
    house.fs.check()
    house.fs.kv_close(handle)
    assert house.used(ANN) == (0, 0)
    house.mkdir("d")
    assert house.attributes("d") == {}


def test_bytes_left_in_a_page_never_cross_into_or_out_of_a_domain(house: House, store: FakeStore) -> None:
    house.domain("d", size="1M")
    house.domain("e", size="1M")
    marker = 123456.0
    for first, second in ((None, "d/a.kv"), ("d/a.kv", "e/a.kv"), ("e/a.kv", None), ("d/a.kv", "b.kv")):
        before = house.kv(first, 32 * 7)
        store.pages[before.table.pages] = marker
        pages = set(before.table.pages.tolist())
        house.fs.kv_close(before)
        if first:
            house.fs.kv_remove(ANN, first)
        after = house.fs.kv_create(ANN, second)
        reservation = house.fs.reserve(after, range(32 * 7), range(32 * 7))
        assert set(reservation.needed().tolist()) == pages
        house.decoder.step(reservation)
        assert not (store.pages[reservation.needed()] == marker).any()
        reservation.abort()
        house.fs.kv_close(after)
        if second:
            house.fs.kv_remove(ANN, second)


# Confined connections


@pytest.fixture
def confined(house: House) -> Credentials:
    house.mkdir("home")
    house.domain("home/d", size="12K")
    house.fs.kv_close(house.kv("out.kv", 1))
    house.fs.kv_chmod(ANN, "out.kv", 0o644)
    return house.fs.confine(ANN, "home/d")


def test_paths_of_a_confined_connection_begin_at_the_domain_and_stay_below(house: House, confined: Credentials) -> None:
    fs = house.fs
    fs.kv_close(fs.kv_create(confined, "a.kv"))
    assert fs.kv_stat(ANN, "home/d/a.kv").kind == "kv"
    house.mkdir("home/d/sub")
    for path in ("a.kv", "./a.kv", "sub/../a.kv", "/kv/home/d/a.kv", "/kv//home/d/sub/../a.kv"):
        assert fs.kv_stat(confined, path).ino == house.inode("home/d/a.kv").number
    assert {entry.name for entry in listing(fs, confined, "")} == {"a.kv", "sub"}
    assert listing(fs, confined, "/kv/home/d") == listing(fs, confined, ".")
    for path in ("..", "../d/a.kv", "sub/../../d", "/kv/out.kv", "/kv", "/kv/home", "/kv/home/d/../d/a.kv", "/etc"):
        with pytest.raises(CrossDevice):
            fs.kv_stat(confined, path)
    for new in ("../x.kv", "/kv/x.kv", "/kv/home/x.kv"):
        with pytest.raises(CrossDevice):
            fs.kv_create(confined, new)
        with pytest.raises(CrossDevice):
            fs.kv_rename(confined, "a.kv", new)
    fs.kv_rename(confined, "a.kv", "/kv/home/d/sub/b.kv")
    assert fs.find(confined, ".") is house.inode("home/d")
    assert fs.find(confined, "sub/b.kv").kind == "kv"
    fs.kv_remove(confined, "sub/b.kv")


def test_links_out_of_the_domain_do_not_help(house: House, confined: Credentials) -> None:
    for name, target in (
        ("out", "../../out.kv"),
        ("abs", "/kv/out.kv"),
        ("up", ".."),
        ("in", "/kv/home/d/a.kv"),
        ("near", "a.kv"),
    ):
        link = house.tree.make(house.inode("home/d"), name.encode(), stat.S_IFLNK, mode=0o777, uid=1000, gid=1000)
        link.target = target.encode()
        link.charge(len(target))
    house.fs.kv_close(house.fs.kv_create(confined, "a.kv"))
    for path in ("out", "abs", "up/d/a.kv"):
        assert house.fs.kv_stat(ANN, f"home/d/{path}").kind == "kv", "for others they lead there"
        with pytest.raises(CrossDevice):
            house.fs.kv_open(confined, path, write=False)
    for path in ("in", "near"):
        assert house.fs.kv_stat(confined, path).kind == "kv"


def test_anonymous_files_of_a_confined_connection_count_to_the_domain(house: House, confined: Credentials) -> None:
    handle = house.kv(None, 64, confined)
    fork = house.fs.kv_fork(confined, handle, None)
    assert house.attributes("home/d") == {"quota": 12 << 10, "used": 2 * PAGE, "used_files": 2}
    with pytest.raises(OverQuota, match="the domain /home/d"):
        house.fs.reserve(fork, range(64), range(64))
    assert house.fs.account_of(confined).num_bytes == 2 * PAGE
    for each in (handle, fork):
        house.fs.kv_close(each)
    assert house.attributes("home/d")["used"] == 0


def test_only_the_owner_of_a_domain_is_confined_to_it(house: House, confined: Credentials) -> None:
    house.mkdir("plain")
    with pytest.raises(NotPermitted):
        house.fs.confine(BOB, "home/d")
    with pytest.raises(Invalid, match="is no domain"):
        house.fs.confine(ANN, "plain")
    assert house.fs.confine(ROOT, "home/d") == replace(ROOT, root=house.inode("home/d"))


def test_when_the_domain_is_removed_a_confined_connection_finds_and_makes_nothing(
    house: House, confined: Credentials
) -> None:
    handle = house.kv(None, 1, confined)
    house.fs.kv_rename(ANN, "home", "moved")
    house.fs.kv_close(house.fs.kv_create(confined, "/kv/moved/d/a.kv"))  # the domain is a directory, not a path
    house.fs.kv_remove(confined, "a.kv")
    house.tree.rmdir(house.inode("moved"), b"d")
    for path in (None, "a.kv", "/kv/moved/d/a.kv"):
        with pytest.raises(NotFound):
            house.fs.kv_create(confined, path)
        with pytest.raises(NotFound):
            house.fs.kv_fork(confined, handle, path)
    assert listing(house.fs, confined, "") == []
    house.append(handle, 1)
    house.fs.kv_close(handle)


def test_where_the_domain_ended_a_confined_connection_makes_nothing_at_its_owners_expense(
    house: House, confined: Credentials
) -> None:
    handle = house.kv(None, 64, confined)
    house.unset("home/d", "quota")
    for make in (
        lambda: house.fs.kv_create(confined, None),
        lambda: house.fs.kv_create(confined, "a.kv"),
        lambda: house.fs.kv_fork(confined, handle, "a.kv"),
        lambda: house.fs.begin_merge(confined, [handle], "a.kv", 0o600, rebase=True),
    ):
        with pytest.raises(NotFound, match="confined to was removed"):
            make()
    house.fs.kv_close(handle)
    house.set("home/d", "quota", "16K")
    house.fs.kv_close(house.fs.kv_create(confined, "a.kv"))


def test_bytes_of_plain_files_count_to_the_domain_as_pages_do(house: House) -> None:
    house.domain("d", size="16K")
    file = house.plain("d/a")
    house.resize(file, 3 * PAGE)
    assert house.attributes("d")["used"] == house.used_bytes(ANN) == 3 * PAGE
    with pytest.raises(
        OverQuota,
        match=r"12288 are used \(0 pages, 12288 bytes of names, plain files and attributes\), 4097 more are wanted",
    ):
        house.resize(file, 4 * PAGE + 1)
    assert house.fs.volume.size_of(file) == 3 * PAGE
    handle = house.kv("d/a.kv", 32)
    with pytest.raises(
        OverQuota, match=r"\(1 pages, 12288 bytes of names, plain files and attributes\), 4096 more are wanted"
    ):
        house.append(handle, 1)
    house.resize(file, 2 * PAGE)
    house.append(handle, 1)
    house.tree.unlink(house.inode("d"), b"a")
    assert house.attributes("d")["used"] == 2 * PAGE
    house.fs.kv_close(handle)


def test_a_removed_plain_file_is_charged_until_it_is_closed(house: House) -> None:
    house.domain("d", size="16K")
    file = house.plain("d/a")
    house.resize(file, 100)
    house.tree.opened(file)
    house.tree.unlink(house.inode("d"), b"a")
    assert house.attributes("d")["used"] == 100
    house.tree.closed(file)
    assert house.attributes("d")["used"] == 0


def test_a_write_that_falls_short_is_charged_for_what_it_wrote(house: House) -> None:
    file = house.plain("a")
    assert file.content is not None
    with house.fs.volume.charged_for(file, file.content, 5000):
        assert house.used_bytes(ANN) == 5000
        house.fs.check()
        file.content.write_at(0, b"some")
    assert house.used_bytes(ANN) == 4


def test_an_image_is_charged_as_pages_or_as_bytes_never_as_both(house: House) -> None:
    """Four pages may be there, and a file of three and its header: the import needs no room beside it."""
    volume = house.fs.volume
    house.domain("d", size="20K")
    handle = house.kv(None, 3 * 32)
    image = house.image(handle)
    house.fs.kv_close(handle)
    inode = house.plain("d/in.kv")
    house.fill(inode, image)
    plan = parse_header(volume.image_format, inode.content)
    for ending in ("abandoned", "done"):
        assert house.attributes("d")["used"] == len(image)
        incoming = volume.begin_import(plan, inode)
        assert house.attributes("d")["used"] == len(image)
        house.fs.check()
        if ending == "done":
            incoming.load(inode.content)
            volume.finish_import(incoming, inode)
        else:
            volume.abandon_import(incoming, inode)
    assert house.attributes("d")["used"] == house.used_bytes(ANN) == 3 * PAGE
    house.resize(inode, 0)
    assert house.attributes("d")["used"] == 0


@pytest.mark.parametrize("ending", ["abandoned", "done"])
def test_what_an_import_shares_stays_charged_while_it_may_fail(house: House, ending: str) -> None:
    """All of its pages are there already, so it takes none: its bytes must keep the room that they need on failure."""
    volume = house.fs.volume
    house.domain("d", size="32K")
    handle = house.kv("d/a.kv", 3 * 32)
    inode = house.plain("d/in.kv")
    image = house.image(handle)  # the first reader of a page leaves its digest there
    house.fill(inode, image)
    plan = parse_header(volume.image_format, inode.content)
    incoming = volume.begin_import(plan, inode, volume.survey_import(plan, inode)(inode.content))
    assert incoming.num_own_pages == 0
    house.fs.check()
    other = house.plain("d/other")
    with pytest.raises(OverQuota, match="the domain /d is at its quota"):
        house.resize(other, 2 * PAGE)
    if ending == "done":
        incoming.load(inode.content)
        volume.finish_import(incoming, inode)
        assert house.attributes("d")["used"] == 3 * PAGE
    else:
        volume.abandon_import(incoming, inode)
        assert house.attributes("d")["used"] == 3 * PAGE + len(image)
    house.fs.kv_close(handle)


def test_an_image_without_room_for_its_pages_stays_charged_as_a_plain_file(house: House) -> None:
    volume = house.fs.volume
    handle = house.kv(None, 3 * 32, BOB)
    image = BytesSource(house.image(handle))
    house.fs.kv_close(handle)
    inode = house.plain("in.kv")
    house.resize(inode, 100)
    full = house.kv(None, 7 * 32)
    with pytest.raises(OverQuota):
        volume.begin_import(parse_header(volume.image_format, image), inode)
    assert house.used_bytes(ANN) == 7 * PAGE + 100
    house.fs.kv_close(full)


def test_chown_moves_the_bytes_of_a_plain_file_if_there_is_room(house: House) -> None:
    file = house.plain("a")
    house.resize(file, 5 * PAGE)
    house.fs.volume.change_owner(file, BOB.uid)
    assert (house.used_bytes(ANN), house.used_bytes(BOB)) == (0, 5 * PAGE)
    other = house.plain("b")
    house.resize(other, 4 * PAGE)
    with pytest.raises(OverQuota, match="uid 1001"):
        house.fs.volume.change_owner(other, BOB.uid)
    assert (house.used_bytes(ANN), house.used_bytes(BOB)) == (4 * PAGE, 5 * PAGE)


def test_chown_of_a_domain_counts_its_pages_and_bytes_together(house: House) -> None:
    directory = house.domain("d", size="1M")
    house.fs.kv_close(house.kv("d/a.kv", 2 * 32))
    file = house.plain("d/a")
    house.resize(file, 2 * PAGE)
    bobs = house.kv("b.kv", 5 * 32, BOB)
    with pytest.raises(OverQuota, match="uid 1001"):
        house.fs.volume.change_owner(directory, BOB.uid)
    house.resize(file, PAGE)
    house.fs.volume.change_owner(directory, BOB.uid)
    assert (house.used_bytes(ANN), house.used_bytes(BOB)) == (0, 8 * PAGE)
    house.fs.kv_close(bobs)


def test_the_recount_finds_bytes_that_were_charged_to_nobody(house: House) -> None:
    file = house.plain("a")
    assert file.content is not None
    file.content.size = file.content.charged = 10
    with pytest.raises(AssertionError, match="uid 1000 is charged other_bytes 0, has 10"):
        house.fs.check()
    file.content.charged = 0
    with pytest.raises(AssertionError, match="has 10 bytes, 0 are charged"):
        house.fs.check()
    file.content.size = 0


def test_space_in_a_domain_is_what_its_quota_and_those_around_it_leave(house: House) -> None:
    space = house.fs.volume.space_around
    house.domain("d", size="20K")
    house.set("d", "quota_files", "5")
    house.domain("d/inner", size="1M")
    file = house.plain("d/inner/a")
    house.resize(file, 3 * PAGE)
    for path in ("d/inner", "d/inner/a"):
        found = space(house.inode(path))
        assert (found.num_bytes, found.free_bytes) == (1 << 20, (1 << 20) - 3 * PAGE)
        assert (found.available_bytes, found.num_files, found.free_files) == (2 * PAGE, 5, 3)
    house.resize(file, 5 * PAGE)
    house.set("d", "quota", str(4 * PAGE))
    found = space(house.inode("d"))
    assert (found.num_bytes, found.free_bytes, found.available_bytes) == (4 * PAGE, 0, 0)
    everything = space(house.tree.root)
    assert everything.num_bytes == house.fs.statfs().capacity_bytes
    assert everything.available_bytes == everything.free_bytes == house.fs.statfs().free_bytes
