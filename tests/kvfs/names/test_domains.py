"""Directories with a quota of their own: made, filled, left alone, ended; and connections that see nothing else."""

import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

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
from libsym.errors import CrossDevice, Invalid, NotEmpty, NotFound, NotPermitted, NotSupported, OverQuota, SymError
from tests.kvfs.fakes import BytesSource, FakeDecoder, FakeFacts, FakeStore, listing
from tests.kvfs.images.hostile import image_of

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
        self.volume, self.tree = self.fs.volume, self.fs.volume.tree
        self.tree.root.mode = 0o777
        self.decoder = FakeDecoder(store)
        self._handles: list[OpenKv] = []

    def inode(self, path: str) -> Inode:
        return self.fs._paths.resolve(ROOT, path)

    def place(self, path: str) -> tuple[Inode, bytes]:
        """The directory of a new name, and the name in it."""
        head, _, name = path.rpartition("/")
        return self.inode(head or "."), name.encode()

    def mkdir(self, path: str, who: Credentials = ANN) -> Inode:
        return self.tree.make(*self.place(path), stat.S_IFDIR, mode=0o777, uid=who.uid, gid=who.gid)

    def domain(self, path: str, who: Credentials = ANN, size: str = "16K") -> Inode:
        inode = self.mkdir(path, who)
        self.set(path, "quota", size, who)
        return inode

    def link(self, path: str, target: str = "") -> None:
        link = self.tree.make(*self.place(path), stat.S_IFLNK, mode=0o777, uid=ANN.uid, gid=ANN.gid)
        link.target = target.encode()
        link.charge(len(target))

    def set(self, path: str, name: str, value: str, who: Credentials = ANN) -> None:
        xattrs.put(self.volume, self.inode(path), f"user.kv.{name}".encode(), value.encode(), who.uid)

    def unset(self, path: str, name: str, who: Credentials = ANN) -> None:
        xattrs.remove(self.volume, self.inode(path), f"user.kv.{name}".encode(), who.uid)

    def attributes(self, path: str) -> dict[str, int]:
        inode = self.inode(path)
        names = xattrs.names(self.volume, inode)
        return {name.decode()[8:]: int(xattrs.get(self.volume, inode, name)) for name in names}

    def append(self, handle: OpenKv, count: int) -> None:
        self.decoder.append(handle.table, range(count))
        self.fs.committed(handle)

    def kv(self, path: str | None, count: int, who: Credentials = ANN) -> OpenKv:
        """A new file, which is closed after the test if it is still open then."""
        handle = self.fs.kv_create(who, path)
        self._handles.append(handle)
        if count:
            self.append(handle, count)
        return handle

    def closed(self, path: str, count: int = 0, who: Credentials = ANN) -> None:
        """Make a file, and close it."""
        self.fs.kv_close(self.kv(path, count, who))

    def fork(self, source: OpenKv, path: str | None, who: Credentials = ANN) -> OpenKv:
        self._handles.append(self.fs.kv_fork(who, source, path))
        return self._handles[-1]

    def claimed(self, path: str) -> OpenKv:
        claim = self.fs.kv_open_or_claim(ANN, path, write=False)
        assert isinstance(claim, Claim)
        self._handles.append(self.fs.kv_create_claimed(ANN, claim, 0o600))
        return self._handles[-1]

    def plain(self, path: str, who: Credentials = ANN) -> Inode:
        return self.volume.make_plain(*self.place(path), 0o600, who.uid, who.gid)

    def image(self, handle: OpenKv) -> bytes:
        return image_of(handle.table, self.volume.image_format)

    def fill(self, inode: Inode, data: bytes) -> None:
        with self.volume.charged_for(inode, content(inode), len(data)):
            content(inode).write_at(0, data)

    def resize(self, inode: Inode, size: int) -> None:
        if isinstance(inode.content, PlainFile) and size:
            with self.volume.charged_for(inode, inode.content, size):
                inode.content.resize(size)
        else:
            self.volume.truncate(inode, size)

    def used_bytes(self, who: Credentials) -> int:
        return self.fs.pool.accounts.of(who.uid).num_bytes

    def used(self, who: Credentials) -> tuple[int, int]:
        account = self.fs.pool.accounts.of(who.uid)
        return account.pages.num_above, account.num_files

    def end(self) -> None:
        self.fs.check()
        for handle in self._handles:
            if not handle.closed:
                self.fs.kv_close(handle)
        self.fs.check()


def refused(error: type[Exception], message: str | None, call: Callable[..., object], *args: Any, **named: Any) -> None:
    with pytest.raises(error, match=message):
        call(*args, **named)


def content(inode: Inode) -> PlainFile:
    assert isinstance(inode.content, PlainFile)
    return inode.content


@pytest.fixture
def house(store: FakeStore, facts: FakeFacts, tmp_path: Path) -> Iterator[House]:
    house = House(store, facts, tmp_path / "backing")
    yield house
    house.end()


def test_a_quota_makes_an_empty_directory_a_domain_and_says_what_is_used(house: House) -> None:
    house.mkdir("d")
    assert house.attributes("d") == {}
    house.set("d", "quota", "0.5M")
    house.set("d", "quota_files", "7")
    house.closed("d/a.kv", 40)
    assert house.attributes("d") == {"quota": 1 << 19, "quota_files": 7, "used": 2 * PAGE, "used_files": 1}
    house.set("d", "quota", "4096")  # less than it has: it gets no more, and keeps what it has
    handle = house.fs.kv_open(ANN, "d/a.kv", write=True)
    message = "the domain /d is at its quota of 4096 bytes"
    refused(OverQuota, message, house.fs.reserve, handle, range(32), range(32))
    house.append(handle, 3)
    house.fs.kv_remove(ANN, "d/a.kv")
    assert house.attributes("d")["used_files"] == 1, "open, so it is charged"
    house.fs.kv_close(handle)
    assert house.attributes("d") == {"quota": 4096, "quota_files": 7, "used": 0, "used_files": 0}
    house.unset("d", "quota")
    house.unset("d", "quota_files")
    assert house.attributes("d") == {}


def test_a_domain_has_a_weight_of_its_own_that_its_owner_sets_and_that_goes_with_it(house: House) -> None:
    directory = house.mkdir("d")
    house.closed("a.kv", 1)
    refused(Invalid, "is no domain", house.set, "d", "weight", "2")
    refused(NotSupported, "only directories", house.set, "a.kv", "weight", "2")
    house.set("d", "quota", "16K")
    assert directory.domain is not None
    assert directory.domain.weight == 1
    for text, weight in (("2.50", 2.5), ("0.01", 0.01), ("100\n", 100)):
        house.set("d", "weight", text)
        assert directory.domain.weight == weight
        assert xattrs.get(house.volume, directory, b"user.kv.weight") == f"{weight:g}".encode()
        assert xattrs.names(house.volume, directory).count(b"user.kv.weight") == 1
    refused(NotPermitted, "weight", house.set, "d", "weight", "3", BOB)
    refused(NotPermitted, "weight", house.unset, "d", "weight", BOB)
    house.set("d", "quota", "32K")
    assert directory.domain.weight == 100, "another quota is another thing"
    house.unset("d", "weight")
    assert directory.domain.weight == 1
    refused(SymError, "no attribute", house.unset, "d", "weight")
    for none in ("0", "0.009", "100.1", "-1", "1e1", "nan", "inf", "", "1,5", "\u0663", "9" * 40):
        refused(Invalid, "weight", house.set, "d", "weight", none)
    assert house.attributes("d").keys() == {"quota", "used", "used_files"}
    house.set("d", "weight", "2")
    house.unset("d", "quota")
    assert house.attributes("d") == {}
    house.set("d", "quota", "16K")
    assert directory.domain.weight == 1


def test_only_the_owner_of_an_empty_directory_makes_or_ends_a_domain(house: House) -> None:
    house.mkdir("d")
    refused(NotPermitted, None, house.set, "d", "quota", "1M", BOB)
    handle = house.kv("d/a.kv", 1)
    refused(NotEmpty, None, house.set, "d", "quota", "1M")
    refused(NotSupported, None, house.set, "d/a.kv", "quota", "1M")
    house.fs.kv_remove(ANN, "d/a.kv")
    house.set("d", "quota", "1M", ROOT)
    house.fs.kv_close(handle)
    for name, value in (("quota", "much"), ("quota", "-1"), ("quota_files", "1.5"), ("quota_files", "9" * 30)):
        refused(Invalid, "is no ", house.set, "d", name, value)
    refused(NotSupported, None, house.set, "d", "used", "0")
    house.closed("d/a.kv", 1)
    refused(NotEmpty, None, house.unset, "d", "quota")
    refused(SymError, "no attribute", house.unset, "d", "quota_files")
    refused(NotPermitted, None, house.unset, "d", "quota", BOB)
    assert house.attributes("d")["quota"] == 1 << 20


def test_each_hard_link_after_the_first_counts_as_a_file_of_its_owner(house: House) -> None:
    account, root = house.fs.pool.accounts.of(1000), house.tree.root
    file = house.plain("f")
    for number in range(11):
        house.tree.link(file, root, b"%d" % number)
    assert account.num_files == 12
    refused(OverQuota, "uid 1000 is at its quota of 12 files", house.tree.link, file, root, b"more")
    house.tree.rename(root, b"f", root, b"g")
    house.tree.rename(root, b"1", root, b"2")  # names of one file: nothing happens
    house.tree.rename(root, b"1", root, b"g", RENAME_EXCHANGE)
    house.fs.check()
    assert account.num_files == 12
    refused(OverQuota, None, house.plain, "more")
    house.plain("bobs", BOB)
    house.tree.rename(root, b"bobs", root, b"3")
    assert account.num_files == 11
    house.volume.change_owner(file, 0)
    assert (account.num_files, house.fs.pool.accounts.of(0).num_files) == (0, 12)
    for name in list(root.entries):
        house.tree.unlink(root, name)


def test_no_name_crosses_the_boundary_of_a_domain(house: House) -> None:
    tree = house.tree
    for path in ("d", "e"):
        house.domain(path)
    for path in ("d/sub", "f"):
        house.mkdir(path)
    for path in ("d/in.kv", "e/in.kv", "out.kv"):
        house.closed(path, 1)
    for old, new in (("d/in.kv", "in.kv"), ("out.kv", "d/out.kv"), ("d/in.kv", "e/x.kv"), ("f", "d/f"), ("d", "e/d")):
        refused(CrossDevice, "another domain", house.fs.kv_rename, ANN, old, new)
    refused(CrossDevice, None, tree.link, house.inode("out.kv"), house.inode("d/sub"), b"x")
    refused(CrossDevice, None, tree.link, house.inode("d/in.kv"), tree.root, b"x")
    refused(CrossDevice, None, tree.rename, tree.root, b"out.kv", house.inode("d"), b"in.kv", RENAME_EXCHANGE)
    used = house.attributes("d"), house.used(ANN)
    house.fs.kv_rename(ANN, "d/in.kv", "d/sub/in.kv")
    house.fs.kv_rename(ANN, "d", "f/d")
    assert (house.attributes("f/d"), house.used(ANN)) == used
    tree.link(house.inode("f/d/sub/in.kv"), house.inode("f/d"), b"again")


@pytest.mark.parametrize("there_is_room", [True, False])
def test_a_file_that_changes_hands_while_it_is_imported_is_its_new_owners(house: House, there_is_room: bool) -> None:
    volume = house.volume
    house.kv("b.kv", 32 if there_is_room else 7 * 32, BOB)
    image = BytesSource(house.image(house.kv("a.kv", 64)))
    inode = house.plain("in.kv")
    incoming = volume.begin_import(parse_header(volume.image_format, image), inode)
    incoming.load(image)
    volume.change_owner(inode, BOB.uid)
    if there_is_room:
        volume.finish_import(incoming, inode)
        assert house.used(BOB) == (3, 2)
    else:
        refused(OverQuota, "uid 1001", volume.finish_import, incoming, inode)
    assert inode.kind == ("kv" if there_is_room else "file")
    assert house.used(ANN) == (2, 1)


def test_chown_of_a_domain_moves_all_that_is_in_it_and_inside_it_moves_nothing(house: House) -> None:
    directory = house.domain("d", size="1M")
    handle, other = house.kv("d/a.kv", 4 * 32), house.kv("b.kv", 5 * 32, BOB)
    house.domain("d/inner", size="1M")
    inner = house.fork(handle, "d/inner/a.kv")
    assert house.used(ANN) == (4, 4)
    for path in ("d/a.kv", "d/inner"):
        house.volume.change_owner(house.inode(path), BOB.uid)
    assert (house.used(ANN), house.used(BOB)) == ((4, 4), (5, 1))
    refused(OverQuota, None, house.volume.change_owner, directory, BOB.uid)
    assert (house.used(ANN), house.used(BOB)) == ((4, 4), (5, 1))
    house.fs.check()
    house.fs.kv_truncate(other, 0)
    house.volume.change_owner(directory, BOB.uid)
    assert (house.used(ANN), house.used(BOB)) == ((0, 0), (4, 5))
    house.append(inner, 32)
    assert house.used(BOB) == (5, 5)


def test_domains_in_domains_are_charged_with_all_around_them(house: House) -> None:
    house.domain("d", size="12K")
    house.domain("d/e", BOB, size="1M")
    handle = house.kv("d/e/a.kv", 64, BOB)
    assert [house.attributes(path)["used"] for path in ("d", "d/e")] == [2 * PAGE, 2 * PAGE]
    assert (house.used(ANN)[0], house.used(BOB)) == (2, (0, 0))
    refused(OverQuota, "the domain /d is", house.fs.reserve, handle, range(64), range(64))
    refused(CrossDevice, None, house.fs.kv_rename, BOB, "d/e/a.kv", "d/a.kv")
    path = "d/e"
    for _ in range(MAX_DEPTH - 2):
        path += "/x"
        house.domain(path, ROOT)
    refused(Invalid, "can't be one more", house.domain, path + "/x", ROOT)


def test_a_claimed_file_is_charged_to_the_domain_that_it_gets_its_name_in(house: House) -> None:
    house.domain("d", size="8K")
    handle = house.claimed("d/a.kv")
    house.append(handle, 64)
    refused(OverQuota, "the domain", house.fs.reserve, handle, [1], [1])
    used = house.attributes("d")
    house.fs.kv_name(ANN, handle, write=False)
    assert house.attributes("d") == used
    house.mkdir("e")
    late = house.claimed("e/a.kv")
    house.set("e", "quota", "1M")
    refused(CrossDevice, "part of another domain", house.fs.kv_name, ANN, late, write=False)


# Confined connections


@pytest.fixture
def confined(house: House) -> Credentials:
    house.mkdir("home")
    house.domain("home/d", size="12K")
    house.closed("out.kv", 1)
    house.fs.kv_chmod(ANN, "out.kv", 0o644)
    return house.fs.confine(ANN, "home/d")


def test_paths_of_a_confined_connection_begin_at_the_domain_and_stay_below(house: House, confined: Credentials) -> None:
    fs = house.fs
    house.closed("a.kv", 0, confined)
    house.mkdir("home/d/sub")
    for path in ("a.kv", "./a.kv", "sub/../a.kv", "/kv/home/d/a.kv", "/kv//home/d/sub/../a.kv"):
        assert fs.kv_stat(confined, path).ino == house.inode("home/d/a.kv").number
    assert {entry.name for entry in listing(fs, confined, "")} == {"a.kv", "sub"}
    assert listing(fs, confined, "/kv/home/d") == listing(fs, confined, ".")
    for path in ("..", "../d/a.kv", "sub/../../d", "/kv/out.kv", "/kv", "/kv/home", "/kv/home/d/../d/a.kv", "/etc"):
        refused(CrossDevice, None, fs.kv_stat, confined, path)
    for new in ("../x.kv", "/kv/x.kv", "/kv/home/x.kv"):
        refused(CrossDevice, None, fs.kv_create, confined, new)
        refused(CrossDevice, None, fs.kv_rename, confined, "a.kv", new)
    fs.kv_rename(confined, "a.kv", "/kv/home/d/sub/b.kv")
    assert fs.find(confined, ".") is house.inode("home/d")
    assert fs.find(confined, "sub/b.kv").kind == "kv"
    fs.kv_remove(confined, "sub/b.kv")


def test_links_out_of_the_domain_do_not_help(house: House, confined: Credentials) -> None:
    house.closed("a.kv", 0, confined)
    outside = {"out": "../../out.kv", "abs": "/kv/out.kv", "up": ".."}
    for name, target in {**outside, "in": "/kv/home/d/a.kv", "near": "a.kv"}.items():
        house.link(f"home/d/{name}", target)
    for path in ("out", "abs", "up/d/a.kv"):
        assert house.fs.kv_stat(ANN, f"home/d/{path}").kind == "kv", "for others they lead there"
        refused(CrossDevice, None, house.fs.kv_open, confined, path, write=False)
    for path in ("in", "near"):
        assert house.fs.kv_stat(confined, path).kind == "kv"


def test_only_the_owner_of_a_domain_is_confined_to_it(house: House, confined: Credentials) -> None:
    house.mkdir("plain")
    refused(NotPermitted, None, house.fs.confine, BOB, "home/d")
    refused(Invalid, "is no domain", house.fs.confine, ANN, "plain")
    assert house.fs.confine(ROOT, "home/d") == replace(ROOT, root=house.inode("home/d"))


def test_when_the_domain_is_removed_a_confined_connection_finds_and_makes_nothing(
    house: House, confined: Credentials
) -> None:
    handle = house.kv(None, 1, confined)
    house.fs.kv_rename(ANN, "home", "moved")
    house.closed("/kv/moved/d/a.kv", 0, confined)  # the domain is a directory, not a path
    house.fs.kv_remove(confined, "a.kv")
    house.tree.rmdir(house.inode("moved"), b"d")
    for path in (None, "a.kv", "/kv/moved/d/a.kv"):
        refused(NotFound, None, house.fs.kv_create, confined, path)
        refused(NotFound, None, house.fs.kv_fork, confined, handle, path)
    assert listing(house.fs, confined, "") == []
    house.append(handle, 1)


def test_where_the_domain_ended_a_confined_connection_makes_nothing_at_its_owners_expense(
    house: House, confined: Credentials
) -> None:
    handle = house.kv(None, 64, confined)
    house.unset("home/d", "quota")
    refused(NotFound, "confined to was removed", house.fs.kv_create, confined, None)
    refused(NotFound, "confined to was removed", house.fs.kv_create, confined, "a.kv")
    refused(NotFound, "confined to was removed", house.fs.kv_fork, confined, handle, "a.kv")
    refused(NotFound, "confined to was removed", house.fs.begin_merge, confined, [handle], "a.kv", 0o600, rebase=True)
    house.fs.kv_close(handle)
    house.set("home/d", "quota", "16K")
    house.closed("a.kv", 0, confined)


# Bytes of plain files


def test_bytes_of_plain_files_count_to_the_domain_as_pages_do(house: House) -> None:
    house.domain("d", size="16K")
    file = house.plain("d/a")
    house.resize(file, 3 * PAGE)
    assert house.attributes("d")["used"] == house.used_bytes(ANN) == 3 * PAGE
    used = r"\({} pages, 12288 bytes of names, plain files and attributes\), {} more are wanted"
    refused(OverQuota, "12288 are used " + used.format(0, 4097), house.resize, file, 4 * PAGE + 1)
    assert house.volume.size_of(file) == 3 * PAGE
    handle = house.kv("d/a.kv", 32)
    refused(OverQuota, used.format(1, 4096), house.append, handle, 1)
    house.resize(file, 2 * PAGE)
    house.append(handle, 1)
    house.tree.opened(file)
    house.tree.unlink(house.inode("d"), b"a")
    assert house.attributes("d")["used"] == 4 * PAGE, "charged until it is closed"
    house.tree.closed(file)
    assert house.attributes("d")["used"] == 2 * PAGE


def test_a_write_that_falls_short_is_charged_for_what_it_wrote(house: House) -> None:
    file = house.plain("a")
    with house.volume.charged_for(file, content(file), 5000):
        assert house.used_bytes(ANN) == 5000
        house.fs.check()
        content(file).write_at(0, b"some")
    assert house.used_bytes(ANN) == 4


@pytest.mark.parametrize("ending", ["abandoned", "done"])
def test_what_an_import_shares_stays_charged_while_it_may_fail(house: House, ending: str) -> None:
    """All of its pages are there already, so it takes none: its bytes must keep the room that they need on failure."""
    volume = house.volume
    house.domain("d", size="32K")
    image = house.image(house.kv("d/a.kv", 3 * 32))  # the first reader of a page leaves its digest there
    inode, other = house.plain("d/in.kv"), house.plain("d/other")
    house.fill(inode, image)
    plan = parse_header(volume.image_format, content(inode))
    incoming = volume.begin_import(plan, inode, volume.survey_import(plan, inode)(content(inode)))
    assert incoming.num_own_pages == 0
    house.fs.check()
    refused(OverQuota, "the domain /d is at its quota", house.resize, other, 2 * PAGE)
    if ending == "done":
        incoming.load(content(inode))
        volume.finish_import(incoming, inode)
    else:
        volume.abandon_import(incoming, inode)
    assert house.attributes("d")["used"] == 3 * PAGE + (len(image) if ending == "abandoned" else 0)


def test_an_image_without_room_for_its_pages_stays_charged_as_a_plain_file(house: House) -> None:
    volume = house.volume
    handle = house.kv(None, 3 * 32, BOB)
    image = BytesSource(house.image(handle))
    house.fs.kv_close(handle)
    inode = house.plain("in.kv")
    house.resize(inode, 100)
    house.kv(None, 7 * 32)
    refused(OverQuota, None, volume.begin_import, parse_header(volume.image_format, image), inode)
    assert house.used_bytes(ANN) == 7 * PAGE + 100


def test_chown_of_a_domain_counts_its_pages_and_bytes_together(house: House) -> None:
    directory = house.domain("d", size="1M")
    house.closed("d/a.kv", 2 * 32)
    file = house.plain("d/a")
    house.resize(file, 2 * PAGE)
    house.kv("b.kv", 5 * 32, BOB)
    refused(OverQuota, "uid 1001", house.volume.change_owner, directory, BOB.uid)
    house.resize(file, PAGE)
    house.volume.change_owner(directory, BOB.uid)
    assert (house.used_bytes(ANN), house.used_bytes(BOB)) == (0, 8 * PAGE)


def test_the_recount_finds_bytes_that_were_charged_to_nobody(house: House) -> None:
    file = content(house.plain("a"))
    file.size = 10
    for charged, told in ((10, "uid 1000 is charged other_bytes 0, has 10"), (0, "has 10 bytes, 0 are charged")):
        file.charged = charged
        refused(AssertionError, told, house.fs.check)
    file.size = 0


def test_space_in_a_domain_is_what_its_quota_and_those_around_it_leave(house: House) -> None:
    space = house.volume.space_around
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
