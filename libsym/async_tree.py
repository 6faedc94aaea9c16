"""A tree of forked files for event loops: the twin of `Tree`."""

from __future__ import annotations

from typing import Self

from libsym.channel.event_loop import run
from libsym.tree import Nodes


class AsyncTree(Nodes):
    """As `libsym.Tree`, whose calls are awaited: `sym.aio.Tree`.

    >>> root = sym.aio.Tree(await sym.aio.kv_create())
    >>> children = [await root.fork() for _ in range(2)]
    >>> await children[0].remove()
    >>> [leaf.name for leaf in root.leaves()]
    ['1']
    """

    async def fork(self) -> Self:
        """As `Tree.fork`.

        >>> root = sym.aio.Tree(await sym.aio.kv_create())
        >>> (await root.fork()).parent is root
        True
        """
        return await run(self.kv.channel, self._fork())

    async def remove(self) -> None:
        """As `Tree.remove`.

        >>> root = sym.aio.Tree(await sym.aio.kv_create())
        >>> child = await root.fork()
        >>> await root.remove()
        >>> root.children
        []
        """
        await run(self.kv.channel, self._remove())
