"""Random programs over a real mount and the calls of LIPs agree with plain Python lists at every step."""

import inspect
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvfs.images.format import ImageFormat
from kvfs.pages.pool import pages_for
from tests.kvfs.fakes import FakeStore
from tests.kvfs.images.hostile import forge
from tests.kvfs.mount_server import facts_for
from tests.kvfs.mounted import NUM_PAGES, PAGE_BYTES, Mount, mounted, needs_mount

pytestmark = needs_mount

NAMES = st.sampled_from(["a.kv", "b.kv", "c.kv", "d/a.kv", "d/b.kv", "d/e/c.kv"])
COUNTS = st.sampled_from([1, 2, 31, 32, 33, 65])
MODES = st.sampled_from([0o600, 0o644, 0o640, 0o400])
FACTS = facts_for(PAGE_BYTES)
FORMAT = ImageFormat(FACTS)


@dataclass(eq=False)
class Content:
    """A version of a file: O_TRUNC replaces it as a whole, all other changes grow and cut it in place."""

    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class File:
    content: Content | None
    """None: an empty plain file."""
    mode: int
    names: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Reader:
    """An open descriptor: it goes on seeing one image, until the file is emptied (then, as anywhere, it sees that)."""

    fd: int
    file: File
    image: bytes | None

    def check_and_close(self) -> None:
        if self.image is not None:
            assert os.pread(self.fd, len(self.image) + 1, 0) == self.image
        os.close(self.fd)


@dataclass(eq=False)
class Handle:
    """A LIP's: of one version, whatever becomes of the names."""

    number: int
    content: Content


def image_of(tokens: list[int]) -> bytes:
    """The image that these entries must have, made here without the file system."""
    store = FakeStore(FACTS, max(1, pages_for(len(tokens))))
    for index, token in enumerate(tokens):
        store.entries[index // 32, :, :, :, index % 32] = token
    return forge(FORMAT, tokens, pages=b"".join(bytes(store.view(page)) for page in range(pages_for(len(tokens)))))


Data: TypeAlias = st.DataObject


def when(what: str, **strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """A rule for when the machine has some of these: it gets one of them."""

    def decorated(function: Callable[..., None]) -> Any:
        wants_data = "data" in inspect.signature(function).parameters

        def act(self: Any, data: Data, **given: Any) -> None:
            one = data.draw(st.sampled_from(sorted(getattr(self, what)) if "names" in what else getattr(self, what)))
            function(self, one, **({"data": data} if wants_data else {}), **given)

        act.__name__ = function.__name__
        return precondition(lambda self: getattr(self, what))(rule(data=st.data(), **strategies)(act))

    return decorated


class Machine(RuleBasedStateMachine):
    """The mount on one side, `self.names` and what hangs on it on the other."""

    mount: Mount

    def __init__(self) -> None:
        super().__init__()
        self.mount.empty()
        (self.mount.path / "d/e").mkdir(parents=True)
        self.names: dict[str, File] = {}
        self.handles: list[Handle] = []
        self.readers: list[Reader] = []
        self.serial = 0

    def teardown(self) -> None:
        while self.readers:
            self.readers.pop().check_and_close()
        self.mount.empty()
        assert self.mount.all_free(), "pages leak"

    # What exists

    def path(self, name: str) -> Path:
        return self.mount.path / name

    @property
    def kv_names(self) -> list[str]:
        return sorted(name for name, file in self.names.items() if file.content is not None)

    def content(self, name: str) -> Content:
        content = self.names[name].content
        assert content is not None
        return content

    def has_room(self, count: int) -> bool:
        return sum(len(each.content.tokens) for each in self.handles) + count <= 32 * NUM_PAGES // 4

    def keep(self, number: int, content: Content) -> None:
        self.handles.append(Handle(number, content))

    def bind(self, name: str, file: File) -> None:
        self.names[name] = file
        file.names.add(name)

    def emptied(self, file: File) -> None:
        file.content = None
        for reader in self.readers:
            if reader.file is file:
                reader.image = None

    def unbind(self, name: str) -> None:
        self.names.pop(name).names.discard(name)

    # LIPs

    @rule(name=NAMES, mode=MODES)
    def create(self, name: str, mode: int) -> None:
        if name not in self.names:
            content = Content()
            self.keep(self.mount.call("create", name, mode), content)
            self.bind(name, File(content, mode))

    @rule()
    def create_anonymous(self) -> None:
        self.keep(self.mount.call("create", None), Content())

    @when("kv_names")
    def open(self, name: str) -> None:
        self.keep(self.mount.call("open", name), self.content(name))

    @when("handles", count=COUNTS)
    def append(self, handle: Handle, count: int) -> None:
        if not self.has_room(count):
            return
        self.serial += 101
        first = self.serial % 900 + 1
        self.mount.call("append", handle.number, count, first)
        handle.content.tokens += [(first + index) % 1000 for index in range(count)]

    @when("handles", name=NAMES)
    def fork(self, handle: Handle, name: str) -> None:
        if name not in self.names:
            content = Content(list(handle.content.tokens))
            self.keep(self.mount.call("fork", handle.number, name), content)
            self.bind(name, File(content, 0o600))

    @when("handles")
    def kv_truncate(self, handle: Handle, data: Data) -> None:
        count = data.draw(st.integers(0, len(handle.content.tokens)))
        self.mount.call("truncate", handle.number, count)
        del handle.content.tokens[count:]

    @when("handles")
    def kv_close(self, handle: Handle) -> None:
        self.handles.remove(handle)
        self.mount.call("close", handle.number)

    # A shell

    @when("kv_names", name=NAMES, by_bytes=st.booleans())
    def cp(self, source: str, name: str, *, by_bytes: bool) -> None:
        """A fork by copy_file_range, or an import of what was read: the same file in the end."""
        target = self.names.get(name)
        if target is self.names[source]:
            return
        if by_bytes:
            shutil.copyfile(self.path(source), self.mount.outside / "copy")
            shutil.copyfile(self.mount.outside / "copy", self.path(name))
        else:
            self.mount.sh(f"cp -T {source} {name}")
        if target is None:
            target = File(None, self.path(name).stat().st_mode & 0o7777)
            self.bind(name, target)
        self.emptied(target)
        target.content = Content(list(self.content(source).tokens))

    @when("kv_names", spare=st.integers(0, 7))
    def truncate(self, name: str, data: Data, spare: int) -> None:
        tokens = self.content(name).tokens
        count = data.draw(st.integers(0, len(tokens)))
        os.truncate(self.path(name), min(FORMAT.image_bytes(count) + spare, FORMAT.image_bytes(len(tokens))))
        del tokens[count:]

    @when("names")
    def empty_it(self, name: str) -> None:
        os.truncate(self.path(name), 0)
        self.emptied(self.names[name])

    @when("names", name=NAMES)
    def rename(self, source: str, name: str) -> None:
        self.path(source).rename(self.path(name))
        moved, replaced = self.names[source], self.names.get(name)
        if replaced is moved:
            return
        if replaced is not None:
            self.unbind(name)
        self.unbind(source)
        self.bind(name, moved)

    @when("names", name=NAMES)
    def link(self, source: str, name: str) -> None:
        if name not in self.names:
            self.path(name).hardlink_to(self.path(source))
            self.bind(name, self.names[source])

    @when("names")
    def unlink(self, name: str) -> None:
        self.path(name).unlink()
        self.unbind(name)

    @when("names", mode=MODES)
    def chmod(self, name: str, mode: int) -> None:
        self.path(name).chmod(mode)
        self.names[name].mode = mode

    @when("kv_names")
    def open_to_read(self, name: str) -> None:
        """Open a file to read; the reader keeps this content, whatever happens to the file and its names."""
        file = self.names[name]
        fd = os.open(self.path(name), os.O_RDONLY)
        self.readers.append(Reader(fd, file, image_of(self.content(name).tokens)))

    @when("readers")
    def read_and_close(self, reader: Reader) -> None:
        self.readers.remove(reader)
        reader.check_and_close()

    # The comparison

    @invariant()
    def names_and_attributes_agree(self) -> None:
        found = {
            str(path.relative_to(self.mount.path)): path.stat()
            for path in self.mount.path.rglob("*")
            if not path.is_dir()
        }
        assert sorted(found) == sorted(self.names)
        for name, status in found.items():
            file = self.names[name]
            assert (status.st_mode & 0o7777, status.st_nlink) == (file.mode, len(file.names))
            if file.content is not None:
                assert status.st_size == FORMAT.image_bytes(len(file.content.tokens))
            assert {status.st_ino} == {found[other].st_ino for other in file.names}

    @invariant()
    def tokens_agree(self) -> None:
        for handle in self.handles:
            assert self.mount.call("tokens", handle.number) == handle.content.tokens

    @invariant()
    def books_are_right(self) -> None:
        self.mount.call("check")

    @when("kv_names")
    def images_agree(self, name: str) -> None:
        """Read by whoever trusts the size, and by the page cache: whatever older readers hold."""
        image = image_of(self.content(name).tokens)
        assert self.path(name).read_bytes() == image
        shutil.copyfile(self.path(name), self.mount.outside / "copy")  # by sendfile(2)
        assert (self.mount.outside / "copy").read_bytes() == image
        with self.path(name).open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            assert mapped[:] == image


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[Machine]]:
    """A machine on a mount of its own. The books are checked at every step, so they should hold little."""

    class Bound(Machine):
        pass

    with mounted(tmp_path) as Bound.mount:
        yield Bound


@pytest.mark.slow
def test_random_programs_agree_with_plain_lists(machine: type[Machine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=7,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking a program on a real mount takes longer than reading it
            suppress_health_check=list(HealthCheck),
        ),
    )
