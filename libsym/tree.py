"""A tree of forked files, as a search makes one: each node goes on where its parent stood."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Self

from libsym.arguments import Path, path_text
from libsym.channel.scripts import Script
from libsym.errors import NotFound
from libsym.faces import script_of
from libsym.kv import KV, kv_close, kv_fork, kv_remove
from libsym.names import kv_mkdir
from libsym.open_file import channel_of


class Nodes:
    """What the two faces of a tree share: `Tree` waits with the thread, `AsyncTree` with the task."""

    def __init__(self, kv: KV, path: Path | None = None) -> None:
        channel_of(kv, type(self).__name__)
        self.kv = kv
        """The node's file. That of the root is as it was given, the others are forks."""
        self.parent: Self | None = None
        self.children: list[Self] = []
        self.name = ""
        """Its place: "0.2" is the third fork of the root's first. The root has none."""
        self._path = None if path is None else path_text(path)
        self._num_forks = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or 'root'}, {len(self.children)} children>"

    @property
    def depth(self) -> int:
        """How far below the root it is."""
        return len(self.line()) - 1

    def line(self) -> list[Self]:
        """The nodes from the root to this one.

        >>> leaf = sym.Tree(sym.kv_create()).fork().fork()
        >>> [node.name for node in leaf.line()]
        ['', '0', '0.0']
        """
        return [*(self.parent.line() if self.parent is not None else ()), self]

    def __iter__(self) -> Iterator[Self]:
        """The node and all below it, each before those that were forked from it."""
        yield self
        for child in self.children:
            yield from child

    def leaves(self) -> list[Self]:
        """The nodes below, this one too, that nothing was forked from.

        >>> root = sym.Tree(sym.kv_create())
        >>> first, second = root.fork(), root.fork()
        >>> [leaf.name for leaf in root.leaves()]
        ['0', '1']
        """
        return [node for node in self if not node.children]

    def _fork(self) -> Script[Self]:
        number, self._num_forks = self._num_forks, self._num_forks + 1
        name, path = f"{self.name}.{number}".lstrip("."), None
        if self._path is not None:
            yield from script_of(kv_mkdir)(self._path, parents=True)
            path = f"{self._path}/{name}.kv"
        child = type(self)((yield from script_of(kv_fork)(self.kv, path)), self._path)
        child.parent, child.name = self, name
        self.children.append(child)
        return child

    def _remove(self) -> Script[None]:
        for child in list(self.children):
            yield from child._remove()  # noqa: SLF001 - of the same class
        if self.parent is not None:
            self.parent.children = [child for child in self.parent.children if child is not self]
            try:
                with suppress(NotFound):  # a shell was faster
                    yield from script_of(kv_remove)(self.kv)
            finally:
                yield from script_of(kv_close)(self.kv)


class Tree(Nodes):
    """A node of a tree of forked files; the first one is its root.

    >>> root = sym.Tree(sym.kv_create(), "search")
    >>> length = root.kv.write(sym.tokenize("Once"))
    >>> for word in (" upon", " more"):
    ...     child = root.fork()
    ...     length = child.kv.write(sym.tokenize(word))
    >>> [(entry.name, entry.tokens) for entry in sym.kv_list("search")]
    [('0.kv', 9), ('1.kv', 9)]

    `path`: a directory of the mount, made if need be, in which the forks have names: a shell sees the search. Without
    it they are anonymous. A program that keeps more with each node makes a class of its own of it:

        class Thought(sym.Tree):
            score = 0.0
    """

    def fork(self) -> Self:
        """A child that goes on from here, in constant time.

        >>> root = sym.Tree(sym.kv_create())
        >>> root.fork().parent is root
        True
        """
        return self.kv.channel.run(self._fork())

    def remove(self) -> None:
        """Removes the node and all below it, names and files. The root's own file stays: it was given.

        >>> root = sym.Tree(sym.kv_create(), "search")
        >>> child = root.fork()
        >>> root.remove()
        >>> root.children, sym.kv_list("search"), root.kv.closed
        ([], [], False)
        """
        self.kv.channel.run(self._remove())
