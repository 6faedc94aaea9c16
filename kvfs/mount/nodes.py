"""What the kernel takes for an inode: of a KV file that is being read, one for each version.

The kernel has one page cache and one size for an inode. A reader of a KV file sees the file as it was when it opened
it, and another, who opens it later, a newer version. So while handles read one version, a lookup that should lead to a
newer one is answered with another *node*: a number of its own to the kernel, with the same `st_ino` for everybody
else. The alternative, reading the newer version past the cache, showed it with the older one's size, could not be
mapped, and let sendfile(2), which goes through the cache all the same, mix the two.

The node of a version that nobody reads is the inode's own number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvfs.names.inode import Inode
from kvfs.names.tree import Tree
from kvfs.pages.holdings import Holdings, Kind

_FIRST_ALIAS = 1 << 61
"""Numbers from here on are nodes of versions; the tree counts its inodes from 1, control files begin above."""


@dataclass(slots=True)
class _Alias:
    inode: Inode
    payer: Holdings
    lookups: int = 0


class Nodes:
    """The nodes that the kernel knows, and how many lookups of each it remembers."""

    def __init__(self, tree: Tree, payer: Callable[[], Holdings] = Holdings) -> None:
        """`payer`: of whom it is that looks something up now."""
        self._tree = tree
        self._payer = payer
        self._aliases: dict[int, _Alias] = {}
        self._aliased: Counter[int] = Counter()  # lookups that are of aliases, by inode
        self._next = _FIRST_ALIAS

    def __len__(self) -> int:
        """Nodes beside the inodes' own."""
        return len(self._aliases)

    def new_number(self) -> int:
        """A node for one more version of a file."""
        self._next += 1
        return self._next

    def inode(self, node: int) -> Inode:
        """What a node is one of."""
        if node < _FIRST_ALIAS:
            return self._tree.get(node)
        alias = self._aliases.get(node)
        return self._tree.get(node) if alias is None else alias.inode  # the tree says what is wrong

    def looked_up(self, node: int, inode: Inode) -> None:
        """The kernel is told of a node once more. OverQuota: it is a new one, and the user has too many."""
        if node >= _FIRST_ALIAS:
            alias = self._aliases.get(node)
            if alias is None:
                payer = self._payer()
                payer.hold(Kind.VERSION)
                alias = self._aliases[node] = _Alias(inode, payer)
            alias.lookups += 1
            self._aliased[inode.number] += 1
        inode.lookups += 1

    def forget(self, node: int, num_lookups: int) -> bool:
        """The kernel forgets so many of its lookups; true when it no longer knows the node."""
        inode = self.inode(node)
        if node < _FIRST_ALIAS:
            known = inode.lookups - self._aliased.get(inode.number, 0) - num_lookups
        else:
            known = self._forget_alias(node, num_lookups)
        self._tree.forget(inode, num_lookups)
        return not known

    def _forget_alias(self, node: int, num_lookups: int) -> int:
        """How many lookups of the alias are left."""
        alias = self._aliases[node]
        number = alias.inode.number
        assert alias.lookups >= num_lookups, f"node {node}: more lookups forgotten than made"
        alias.lookups -= num_lookups
        self._aliased[number] -= num_lookups
        if not self._aliased[number]:
            del self._aliased[number]
        if not alias.lookups:
            del self._aliases[node]
            alias.payer.let_go(Kind.VERSION)
        return alias.lookups
