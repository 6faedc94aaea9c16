"""A tree of forked files for event loops: the asynchronous `Tree`."""

from __future__ import annotations

from typing import Self

from libsym.channel.event_loop import run
from libsym.tools.tree import Nodes


class AsyncTree(Nodes):
    """A node of a tree of forked files, `sym.aio.Tree`: see `libsym.Tree`. Its calls are awaited.

    >>> root = sym.aio.Tree(await sym.aio.kv_create())
    >>> children = [await root.fork() for _ in range(2)]
    >>> await children[0].remove()
    >>> [leaf.name for leaf in root.leaves()]
    ['1']
    """

    async def fork(self) -> Self:
        """Fork the node's file in constant time; return the child.

        >>> root = sym.aio.Tree(await sym.aio.kv_create())
        >>> (await root.fork()).parent is root
        True
        """
        return await run(self.kv.channel, self._fork())

    async def remove(self) -> None:
        """Remove the node and all nodes below it, with their files: see `Tree.remove`.

        >>> root = sym.aio.Tree(await sym.aio.kv_create())
        >>> child = await root.fork()
        >>> await root.remove()
        >>> root.children
        []
        """
        await run(self.kv.channel, self._remove())
