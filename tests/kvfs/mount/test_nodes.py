"""The nodes of one inode, each looked up and forgotten for itself."""

from __future__ import annotations

import stat

import pytest

from kvfs.mount.nodes import Nodes
from kvfs.names.inode import Inode
from kvfs.names.tree import Tree
from kvfs.pages.accounts import Accounts
from kvfs.pages.holdings import WEIGHTS, Holdings, Kind
from libsym.errors import OverQuota


@pytest.fixture
def tree() -> Tree:
    return Tree(Accounts(0, 1), 0, 0, lambda _inode: None)


def known(nodes: Nodes, inode: Inode, node: int, count: int) -> None:
    for _ in range(count):
        nodes.looked_up(node, inode)


def test_a_node_is_forgotten_with_its_own_last_lookup_whatever_is_left_of_the_others(tree: Tree) -> None:
    nodes = Nodes(tree)
    inode = tree.make(tree.root, b"a.kv", stat.S_IFREG, mode=0o600, uid=0, gid=0)
    newer = nodes.new_number()
    known(nodes, inode, inode.number, 3)
    known(nodes, inode, newer, 2)
    assert not nodes.forget(inode.number, 2)
    assert nodes.forget(inode.number, 1)
    assert not nodes.forget(newer, 1)
    assert nodes.inode(newer) is inode
    assert nodes.forget(newer, 1)
    assert len(nodes) == 0
    assert inode.lookups == 0


def test_the_order_in_which_nodes_are_forgotten_does_not_matter(tree: Tree) -> None:
    nodes = Nodes(tree)
    inode = tree.make(tree.root, b"a.kv", stat.S_IFREG, mode=0o600, uid=0, gid=0)
    newer = nodes.new_number()
    known(nodes, inode, newer, 1)
    known(nodes, inode, inode.number, 1)
    assert nodes.forget(newer, 1)
    assert nodes.forget(inode.number, 1)
    assert inode.lookups == 0


def test_a_reader_who_keeps_the_kernel_from_forgetting_pays_for_each_version_and_may_look_at_those_he_has(
    tree: Tree,
) -> None:
    reader = Holdings(limit_bytes=WEIGHTS[Kind.VERSION])
    nodes = Nodes(tree, lambda: reader)
    inode = tree.make(tree.root, b"a.kv", stat.S_IFREG, mode=0o600, uid=0, gid=0)
    first, second = nodes.new_number(), nodes.new_number()
    known(nodes, inode, first, 2)
    with pytest.raises(OverQuota):
        nodes.looked_up(second, inode)
    assert (inode.lookups, reader.facts()) == (2, {"versions": 1})
    known(nodes, inode, inode.number, 1)
    assert nodes.forget(first, 2)
    known(nodes, inode, second, 1)
