"""A tree of forked files, for a search: each node begins as a fork of its parent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Self

from libsym.arguments import Path, path_text
from libsym.calls.faces import script_of
from libsym.calls.kv import KV, kv_close, kv_fork, kv_remove
from libsym.calls.names import kv_mkdir
from libsym.calls.open_file import channel_of
from libsym.channel.scripts import Script
from libsym.errors import NotFound


class Nodes:
    """A node of a tree: its state and scripts. In `Tree` a thread runs the scripts, in `AsyncTree` a task."""

    def __init__(self, kv: KV, path: Path | None = None) -> None:
        channel_of(kv, type(self).__name__)
        self.kv = kv
        """The node's file. The file is a fork of the parent's file; the root has the file that the program gave."""
        self.parent: Self | None = None
        self.children: list[Self] = []
        self.name = ""
        """Path of the node in the tree: "0.2" is the third fork of the root's first fork. The path of the root is
        empty.
        """
        self._path = None if path is None else path_text(path)
        self._num_forks = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or 'root'}, {len(self.children)} children>"

    @property
    def depth(self) -> int:
        """Number of forks between the root and the node."""
        return len(self.line()) - 1

    def line(self) -> list[Self]:
        """Return the nodes from the root to this node.

        >>> leaf = sym.Tree(sym.kv_create()).fork().fork()
        >>> [node.name for node in leaf.line()]
        ['', '0', '0.0']
        """
        return [*(self.parent.line() if self.parent is not None else ()), self]

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the node and all nodes below it, parents first."""
        yield self
        for child in self.children:
            yield from child

    def leaves(self) -> list[Self]:
        """Return the nodes without children, among this node and all nodes below it.

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
                with suppress(NotFound):  # another process, such as a shell, may have removed the file
                    yield from script_of(kv_remove)(self.kv)
            finally:
                yield from script_of(kv_close)(self.kv)


class Tree(Nodes):
    """A node of a tree of forked files. `Tree(kv)` makes the root.

    >>> root = sym.Tree(sym.kv_create(), "search")
    >>> length = root.kv.write(sym.tokenize("Once"))
    >>> for word in (" upon", " more"):
    ...     child = root.fork()
    ...     length = child.kv.write(sym.tokenize(word))
    >>> [(entry.name, entry.tokens) for entry in sym.kv_list("search")]
    [('0.kv', 9), ('1.kv', 9)]

    `path`: a directory of the mount, made if it is missing, in which the forks get names. So a shell can watch the
    search. Without a path, the forks are anonymous. To keep more data with each node, make a subclass:

        class Thought(sym.Tree):
            score = 0.0
    """

    def fork(self) -> Self:
        """Fork the node's file in constant time; return the child.

        >>> root = sym.Tree(sym.kv_create())
        >>> root.fork().parent is root
        True
        """
        return self.kv.channel.run(self._fork())

    def remove(self) -> None:
        """Remove the node and all nodes below it, with their files. The root keeps its file, which the caller gave.

        >>> root = sym.Tree(sym.kv_create(), "search")
        >>> child = root.fork()
        >>> root.remove()
        >>> root.children, sym.kv_list("search"), root.kv.closed
        ([], [], False)
        """
        self.kv.channel.run(self._remove())
