"""Names, links and permissions, without pages and without a mount."""

import itertools
import os
import random
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

import pytest

from kvfs.names.inode import Credentials, Inode, require_removable
from kvfs.names.tree import RENAME_EXCHANGE, RENAME_NOREPLACE, Tree
from kvfs.names.walk import Paths
from kvfs.pages.accounts import Accounts
from libsym.errors import (
    CrossDevice,
    Exists,
    Invalid,
    IsDirectory,
    NameTooLong,
    NoAccess,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    SymError,
    TooManyLinks,
)

ROOT = Credentials(0, 0)
ANN = Credentials(1000, 100, frozenset({200}))


class Forest:
    """A tree, what it discarded, and a short way to make things."""

    def __init__(self) -> None:
        self.discarded: list[int] = []
        self.tree = Tree(Accounts(0, 1), 0, 0, lambda inode: self.discarded.append(inode.number))
        self.paths = Paths(self.tree, PurePath("/kv"))

    def make(self, path: str, file_type: int = stat.S_IFREG, mode: int = 0o644, uid: int = 0, gid: int = 0) -> Inode:
        head, _, name = path.rpartition("/")
        directory = self.paths.resolve(ROOT, head or ".")
        return self.tree.make(directory, name.encode(), file_type, mode=mode, uid=uid, gid=gid)

    def directory(self, path: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Inode:
        return self.make(path, stat.S_IFDIR, mode, uid, gid)

    def symlink(self, path: str, target: str, uid: int = 0) -> Inode:
        inode = self.make(path, stat.S_IFLNK, 0o777, uid)
        inode.target = os.fsencode(target)
        inode.charge(len(inode.target))
        return inode

    def names(self, path: str = ".") -> list[str]:
        return sorted(os.fsdecode(name) for name in self.paths.resolve(ROOT, path).entries)


class Reader:
    """A reader that takes a directory some names at a time, as the mount does."""

    def __init__(self, forest: Forest) -> None:
        self.order = forest.tree.order(forest.tree.root)
        self.place, self.end = 0, self.order.end
        self.seen: list[bytes] = []

    def read(self, most: int = 10_000) -> list[bytes]:
        found = [each[:2] for each in itertools.islice(self.order.between(self.place, self.end), most)]
        names = [name for _number, name in found]
        self.place = found[-1][0] + 1 if found else self.place
        self.seen += names
        return names


@pytest.fixture
def forest() -> Iterator[Forest]:
    forest = Forest()
    yield forest
    forest.tree.check()


def test_content_lives_while_a_name_or_handle_leads_to_it_and_the_inode_while_the_kernel_knows_it(
    forest: Forest,
) -> None:
    root, tree = forest.tree.root, forest.tree
    inode = forest.make("f")
    tree.link(inode, root, b"g")
    tree.opened(inode)
    inode.lookups += 2
    assert inode.nlink == 2
    tree.unlink(root, b"f")
    tree.unlink(root, b"g")
    tree.forget(inode, 1)
    assert not forest.discarded
    tree.closed(inode)
    assert forest.discarded == [inode.number]
    assert tree.get(inode.number) is inode
    tree.forget(inode, 1)
    with pytest.raises(NotFound):
        tree.get(inode.number)
    assert forest.make("new").number != inode.number, "numbers are never used again"


def test_what_the_kernel_remembers_is_charged_until_it_forgets_and_holds_no_attributes(forest: Forest) -> None:
    tree = forest.tree
    held, replaced, unknown = forest.make("held", uid=7), forest.make("replaced", uid=7), forest.make("unknown", uid=7)
    account = held.account
    assert account is not None
    held.lookups, replaced.lookups = 2, 1
    held.note(b"user.x", bytes(1000))
    tree.link(held, tree.root, b"other")
    tree.unlink(tree.root, b"other")
    assert not tree.lost
    tree.rename(tree.root, b"unknown", tree.root, b"replaced")
    tree.unlink(tree.root, b"held")
    assert tree.lost == [(1, b"replaced"), (1, b"held")], "whoever knows the kernel can tell it"
    assert (account.num_files, held.xattrs, account.other_bytes) == (3, {}, 0)
    tree.check()
    tree.forget(held, 1)
    assert account.num_files == 3
    tree.forget(held, 1)
    tree.forget(replaced, 1)
    assert account.num_files == 1
    tree.unlink(tree.root, b"replaced")
    assert (account.num_files, len(tree.lost), unknown.account) == (0, 2, None)
    tree.check()


def test_renames_replace_exchange_or_do_nothing_and_keep_places_in_the_order_of_a_directory(forest: Forest) -> None:
    root, tree = forest.tree.root, forest.tree
    a, old, c, new = (forest.make(name) for name in ("a", "b", "c", "new"))
    reader = Reader(forest)
    assert reader.read(1) == [b"a"]
    tree.rename(root, b"new", root, b"b")
    assert (forest.discarded, forest.paths.resolve(ROOT, "b")) == ([old.number], new)
    tree.rename(root, b"a", root, b"c", RENAME_EXCHANGE)
    assert [forest.paths.resolve(ROOT, name) for name in ("a", "c")] == [c, a]
    assert reader.read() == [b"b", b"c"]
    assert Reader(forest).read() == [b"a", b"b", b"c"]
    tree.link(new, root, b"d")
    tree.rename(root, b"b", root, b"d")
    assert forest.names() == ["a", "b", "c", "d"], "two names of one file"
    directory, inode = forest.directory("e"), forest.make("e/f")
    tree.rename(directory, b"f", root, b"a", RENAME_EXCHANGE)
    assert [forest.paths.resolve(ROOT, name) for name in ("e/f", "a")] == [c, inode]


def test_rename_refuses_what_makes_no_sense(forest: Forest) -> None:
    root, (a, b) = forest.tree.root, [forest.directory(path) for path in ("a", "a/b")]
    forest.make("f")
    forest.make("a/b/f")
    refused: list[tuple[Inode, bytes, Inode, bytes, int, type[SymError]]] = [
        (root, b"a", b, b"c", 0, Invalid),
        (root, b"a", a, b"c", 0, Invalid),
        (root, b"f", root, b"a", 0, IsDirectory),
        (root, b"a", root, b"f", 0, NotDirectory),
        (a, b"b", root, b"a", 0, NotEmpty),
        (root, b"none", root, b"x", 0, NotFound),
        (root, b".", root, b"x", 0, Invalid),
        (root, b"f", root, b"x" * 256, 0, NameTooLong),
        (root, b"f", b, b"f", RENAME_NOREPLACE, Exists),
        (root, b"a", a, b"b", RENAME_EXCHANGE, Invalid),
        (root, b"a", root, b"none", RENAME_EXCHANGE, NotFound),
    ]
    for source, name, target, new_name, flags, error in refused:
        with pytest.raises(error):
            forest.tree.rename(source, name, target, new_name, flags)
    assert (forest.names(), forest.names("a"), forest.names("a/b")) == (["a", "f"], ["b"], ["f"])


def test_sticky_directories_protect_the_names_of_others(forest: Forest) -> None:
    shared = forest.directory("tmp", 0o1777)
    mine, theirs = forest.make("tmp/mine", uid=1000), forest.make("tmp/theirs", uid=1001)
    require_removable(shared, mine, ANN, "mine")
    with pytest.raises(NotPermitted, match="sticky"):
        require_removable(shared, theirs, ANN, "theirs")
    require_removable(shared, theirs, ROOT, "theirs")
    shared.mode = 0o1755
    with pytest.raises(NoAccess):
        require_removable(shared, mine, ANN, "mine")


def test_paths_are_relative_to_the_mount_or_lie_below_it(forest: Forest) -> None:
    forest.directory("d")
    inode = forest.make("d/f")
    for path in ("d/f", "/kv/d/f", "./d//f", "d/../d/f", "/kv//d/./f"):
        assert forest.paths.resolve(ROOT, path) is inode, path
    for path in ("/etc/passwd", "/", "/kvd/f", "..", "/kv/..", "d/../../kv/d/f"):
        with pytest.raises(CrossDevice):
            forest.paths.resolve(ROOT, path)
    for path, error in (
        ("d/f/", NotDirectory),
        ("d/f/x", NotDirectory),
        ("d/none", NotFound),
        ("", NotFound),
        ("x" * 256, NameTooLong),
        ("d/" * 2100, NameTooLong),
        ("d\0f", Invalid),
        ("\ud800", Invalid),
    ):
        with pytest.raises(error):
            forest.paths.resolve(ROOT, path)


def test_symbolic_links_are_followed_but_not_out_of_the_mount(forest: Forest) -> None:
    forest.directory("d")
    inode = forest.make("d/f")
    forest.symlink("relative", "d/f")
    forest.symlink("absolute", "/kv/d/f")
    forest.symlink("d/up", "../relative")
    forest.symlink("directory", "d/")
    for path in ("relative", "absolute", "d/up", "directory/f", "/kv/directory/up"):
        assert forest.paths.resolve(ROOT, path) is inode, path
    forest.symlink("out", "/etc/passwd")
    forest.symlink("above", "../etc")
    for path in ("out", "above/passwd"):
        with pytest.raises(CrossDevice):
            forest.paths.resolve(ROOT, path)
    forest.symlink("loop", "loop")
    with pytest.raises(TooManyLinks):
        forest.paths.resolve(ROOT, "loop")
    previous = "d/f"
    for i in range(41):
        forest.symlink(f"chain{i}", previous)
        previous = f"chain{i}"
    assert forest.paths.resolve(ROOT, "chain39") is inode
    with pytest.raises(TooManyLinks):
        forest.paths.resolve(ROOT, "chain40")
    assert forest.paths.place(ROOT, "loop").inode is not None, "the last name itself is not followed"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o2770])
def test_in_a_directory_that_others_may_write_to_no_link_of_others_is_followed(forest: Forest, mode: int) -> None:
    """Nobody is led away: neither by the last name of a path nor on its way, and root is no exception."""
    forest.directory("private", 0o755)
    forest.make("private/f")
    forest.directory("shared", mode, uid=1009)
    for name, uid in (("mine", ANN.uid), ("roots", 0), ("of_the_directory", 1009), ("planted", 4242)):
        forest.symlink(f"shared/{name}", "../private/f", uid)
        forest.symlink(f"shared/{name}_way", "../private", uid)
    caller = replace(ANN, groups=frozenset({0}))  # of the directory's group: it may search
    for name in ("mine", "roots", "of_the_directory"):
        assert forest.paths.resolve(caller, f"shared/{name}") is forest.paths.resolve(caller, f"shared/{name}_way/f")
    for who in (ROOT, caller):
        for path in ("shared/planted", "shared/planted_way/f"):
            with pytest.raises(NoAccess, match="a link of uid 4242 in a directory that others may write to"):
                forest.paths.resolve(who, path)
    assert forest.paths.place(caller, "shared/planted").inode is not None, "the link itself can be removed"


def test_in_a_directory_of_one_user_alone_links_are_followed_whose_they_are(forest: Forest) -> None:
    forest.make("f")
    forest.directory("anns", 0o755, uid=ANN.uid)
    for name, uid in (("link", ANN.uid), ("given", 4242)):
        forest.symlink(f"anns/{name}", "../f", uid)
        assert forest.paths.resolve(ROOT, f"anns/{name}") is forest.paths.resolve(ANN, "f")


def test_a_place_is_a_name_that_may_not_exist_yet(forest: Forest) -> None:
    forest.directory("d")
    place = forest.paths.place(ROOT, "/kv/d/new")
    assert (place.name, place.inode, place.must_be_directory) == (b"new", None, False)
    assert forest.paths.place(ROOT, "d/").must_be_directory
    for path in (".", "d/..", "/kv", "/kv/", "/", "none/new"):
        with pytest.raises(NotFound if path == "none/new" else (Invalid, CrossDevice)):
            forest.paths.place(ROOT, path)


def descend(forest: Forest, depth: int, name: bytes = b"d") -> Inode:
    directory = forest.tree.root
    for _ in range(depth):
        directory = forest.tree.make(directory, name, stat.S_IFDIR, mode=0o755, uid=0, gid=0)
    return directory


def test_a_path_is_built_when_it_is_shown_and_of_a_deep_inode_its_end_is(forest: Forest) -> None:
    deep, tree = descend(forest, 5000, b"n" * 255), forest.tree
    below = tree.make(deep, b"below", stat.S_IFDIR, mode=0o755, uid=0, gid=0)
    path = tree.path_of(below)
    tree.rename(deep, b"below", deep, b"new")
    assert str(path).startswith("…/nnn")
    assert str(path).endswith("nnn/new")
    assert 3800 < len(str(path).encode()) <= 4096
    wide = tree.make(deep, b"\xff" * 255, stat.S_IFREG, mode=0o644, uid=0, gid=0)
    assert len(str(tree.path_of(wide)).encode()) <= 4096
    forest.directory("s")
    short = forest.tree.make(descend(forest, 5000), b"f", stat.S_IFREG, mode=0o644, uid=0, gid=0)
    assert str(tree.path_of(short)) == "…/" + "d/" * 127 + "f"


def test_a_path_for_people_has_no_odd_characters_and_passes_no_more_directories_than_it_shows(forest: Forest) -> None:
    directory, inode, tree = forest.directory("o"), forest.make("o/f\n"), forest.tree
    assert str(tree.path_of(inode)) == "/o/f?"
    tree.opened(inode)
    tree.unlink(directory, b"f\n")
    assert "unnamed" in str(tree.path_of(inode))
    tree.closed(inode)
    path, get, passed = tree.path_of(descend(forest, 5000)), tree.get, list[int]()
    tree.get = lambda number: passed.append(number) or get(number)  # type: ignore[method-assign,func-returns-value]
    assert str(path)
    assert 0 < len(passed) <= 128


def test_directories_move_in_a_deep_tree_as_elsewhere_and_from_far_away_in_steps(forest: Forest) -> None:
    forest.directory("m")
    forest.directory("m/sub")
    forest.directory("leaf")
    above, tree, root = descend(forest, 4999), forest.tree, forest.tree.root
    deep = tree.make(above, b"d", stat.S_IFDIR, mode=0o755, uid=0, gid=0)
    with pytest.raises(NameTooLong, match="2048 directories away"):
        tree.rename(root, b"m", deep, b"m")
    with pytest.raises(NameTooLong):
        tree.rename(root, b"m", above, b"d", RENAME_EXCHANGE)
    tree.rename(root, b"leaf", deep, b"leaf")
    here = root
    while here is not deep:
        there = here
        for _ in range(2000):
            there = there if there is deep else there.entries[b"d"]
        tree.rename(here, b"m", there, b"m")
        here = there
    moved = deep.entries[b"m"]
    with pytest.raises(Invalid, match="into itself"):
        tree.rename(deep, b"m", moved.entries[b"sub"], b"m")
    with pytest.raises(Invalid):
        tree.rename(deep, b"leaf", deep.entries[b"leaf"], b"leaf")
    tree.rename(deep, b"m", above, b"m")
    tree.rename(above, b"m", deep, b"n")
    tree.rename(deep, b"n", root, b"m")
    assert forest.names() == ["d", "m"]


def test_what_had_many_names_gives_their_memory_back(forest: Forest) -> None:
    directory, tree = forest.directory("d"), forest.tree
    inode = forest.make("d/first")
    for number in range(5000):
        tree.link(inode, directory, b"%d" % number)
    assert sys.getsizeof(inode.names) > 100_000
    for number in range(5000):
        tree.unlink(directory, b"%d" % number)
    assert sys.getsizeof(inode.names) + sys.getsizeof(directory.entries) < 10_000
    assert str(tree.path_of(inode)) == "/d/first"


def test_a_reader_of_a_directory_sees_what_stays_once_and_what_comes_later_never(forest: Forest) -> None:
    dice, tree, root = random.Random(51), forest.tree, forest.tree.root
    stay = [b"stay%d" % number for number in range(300)]
    for number, name in enumerate(stay):
        forest.make(os.fsdecode(name))
        forest.make(f"go{number}")
    readers: list[tuple[Reader, set[bytes]]] = []
    for number in range(3000):
        name = b"go%d" % dice.randrange(400)
        if name in root.entries:
            new_name = b"go%d" % dice.randrange(400)
            if dice.random() < 0.5:
                tree.unlink(root, name)
            else:
                tree.rename(root, name, root, new_name)
        else:
            forest.make(os.fsdecode(name))
        if number % 100 == 0:
            readers.append((Reader(forest), set(root.entries)))
        for reader, _there in readers:
            reader.read(dice.randrange(4))
    assert len(readers) == 30
    for reader, there in readers:
        reader.read()
        seen = reader.seen
        assert [name for name in seen if name.startswith(b"stay")] == stay
        assert len(seen) == len(set(seen))
        assert set(seen) <= there
    assert set(Reader(forest).read()) == set(root.entries)


@pytest.mark.slow
def test_an_order_of_names_gives_memory_back_while_a_reader_goes_on(forest: Forest) -> None:
    tree, root = forest.tree, forest.tree.root
    for number in range(5000):
        forest.make(f"n{number}")
    reader = Reader(forest)
    for number in range(4998):
        tree.unlink(root, b"n%d" % number)
    forest.make("later")
    for number in range(2000):
        forest.make(f"x{number % 3}")
        tree.unlink(root, b"x%d" % (number % 3))
    assert len(reader.order) < 100
    assert (reader.read(), Reader(forest).read()) == ([b"n4998", b"n4999"], [b"n4998", b"n4999", b"later"])
