"""Nodes: the kernel's inodes. A KV file has one node for each version that is being read.

The kernel has one page cache and one size for an inode. A reader of a KV file sees the file as it was at the open. A
reader that opens the file later may see a newer version. So while handles read one version, a lookup of a newer version
is answered with another *node*: a separate number for the kernel, with the same `st_ino` in `stat`. Instead, readers of
the newer version could bypass the page cache. But then `stat` would show the older version's size, the newer version
could not be mapped, and sendfile(2), which always uses the page cache, would mix the two versions.

A version that no handle reads has the inode's own number as its node.

The kernel keeps fcntl locks separately for each node. So two processes that have different versions of a file open do
not exclude each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvfs.names.inode import Inode
from kvfs.names.tree import Tree
from kvfs.pages.holdings import Holdings, Kind

_FIRST_ALIAS = 1 << 61
"""Lowest number of a version's node. Inodes are numbered from 1; control files have higher numbers."""


@dataclass(slots=True)
class _Alias:
    inode: Inode
    payer: Holdings
    lookups: int = 0


class Nodes:
    """The nodes that the kernel knows, each with the number of lookups that the kernel has not forgotten."""

    def __init__(self, tree: Tree, payer: Callable[[], Holdings] = Holdings) -> None:
        """`payer` returns the holdings of the user whose lookup is being answered."""
        self._tree = tree
        self._payer = payer
        self._aliases: dict[int, _Alias] = {}
        self._aliased: Counter[int] = Counter()  # lookups of the aliases of each inode
        self._next = _FIRST_ALIAS

    def __len__(self) -> int:
        """Number of nodes whose number differs from the number of their inode."""
        return len(self._aliases)

    def new_number(self) -> int:
        """Return an unused number for the node of another version of a file."""
        self._next += 1
        return self._next

    def inode(self, node: int) -> Inode:
        """Return the inode that a node belongs to."""
        if node < _FIRST_ALIAS:
            return self._tree.get(node)
        alias = self._aliases.get(node)
        return self._tree.get(node) if alias is None else alias.inode  # the tree raises the error

    def looked_up(self, node: int, inode: Inode) -> None:
        """Count a lookup of a node by the kernel. Raise OverQuota if the node is new and its user has too many
        nodes.
        """
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
        """Subtract lookups that the kernel has forgotten. Return whether the kernel has forgotten the node."""
        inode = self.inode(node)
        if node < _FIRST_ALIAS:
            known = inode.lookups - self._aliased.get(inode.number, 0) - num_lookups
        else:
            known = self._forget_alias(node, num_lookups)
        self._tree.forget(inode, num_lookups)
        return not known

    def _forget_alias(self, node: int, num_lookups: int) -> int:
        """Subtract lookups of an alias. Return the number of lookups that are left."""
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
