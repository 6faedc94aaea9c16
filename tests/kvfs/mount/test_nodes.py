"""The nodes of one inode, each looked up and forgotten for itself."""

import stat

import pytest

from kvfs.mount.nodes import Nodes
from kvfs.names.tree import Tree
from kvfs.pages.accounts import Accounts
from kvfs.pages.holdings import WEIGHTS, Holdings, Kind
from libsym.errors import OverQuota


def test_a_node_is_forgotten_with_its_own_last_lookup_whatever_is_left_of_the_others() -> None:
    tree = Tree(Accounts(0, 1), 0, 0, lambda _inode: None)
    nodes, inode = Nodes(tree), tree.make(tree.root, b"a.kv", stat.S_IFREG, mode=0o600, uid=0, gid=0)
    for newer_goes_first in (False, True):
        newer = nodes.new_number()
        for node in (inode.number, newer, inode.number, newer):
            nodes.looked_up(node, inode)
        first, last = (newer, inode.number) if newer_goes_first else (inode.number, newer)
        assert not nodes.forget(first, 1)
        assert nodes.forget(first, 1)
        assert not nodes.forget(last, 1)
        assert nodes.inode(last) is inode
        assert nodes.forget(last, 1)
        assert (len(nodes), inode.lookups) == (0, 0)


def test_a_reader_who_keeps_the_kernel_from_forgetting_pays_for_each_version_and_may_look_at_those_he_has() -> None:
    tree = Tree(Accounts(0, 1), 0, 0, lambda _inode: None)
    reader = Holdings(limit_bytes=WEIGHTS[Kind.VERSION])
    nodes, inode = Nodes(tree, lambda: reader), tree.make(tree.root, b"a", stat.S_IFREG, mode=0o600, uid=0, gid=0)
    first, second = nodes.new_number(), nodes.new_number()
    for _ in range(2):
        nodes.looked_up(first, inode)
    with pytest.raises(OverQuota):
        nodes.looked_up(second, inode)
    assert (inode.lookups, reader.facts()) == (2, {"versions": 1})
    nodes.looked_up(inode.number, inode)
    assert nodes.forget(first, 2)
    nodes.looked_up(second, inode)
