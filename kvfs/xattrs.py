"""Extended attributes: what a user noted (`user.*`), and what a KV file says of itself (`user.kv.*`, computed)."""

from __future__ import annotations

import errno
from collections.abc import Callable

from kvfs.content import KvFile
from kvfs.inode import Inode, shown
from kvfs.protocols import ModelFacts
from kvfs.table import PageTable
from libsym.errors import NotSupported, SymError

MAX_VALUE_BYTES = 64 << 10
"""Linux's own limit for a value; also for all values of a file together, which Linux leaves to each file system."""

_USER = b"user."
_COMPUTED = b"user.kv."

_KV: dict[bytes, Callable[[PageTable, ModelFacts], str]] = {
    b"user.kv.tokens": lambda table, _model: str(table.length),
    b"user.kv.model": lambda _table, model: model.name,
    b"user.kv.pages": lambda table, _model: str(len(table.pages)),
    b"user.kv.exclusive": lambda table, _model: str(table.exclusive_pages),
    b"user.kv.shared": lambda table, _model: str(table.shared_pages),
    b"user.kv.positions": lambda table, _model: _positions(table),
}
"""Counts are of pages, except `tokens`."""


def get(inode: Inode, name: bytes, model: ModelFacts) -> bytes:
    """The value, or ENODATA; EOPNOTSUPP for `system.*`, so that `cp -a` does not take ACLs to be kept here."""
    if name.startswith(b"system."):
        raise NotSupported(f"{shown(name)}: attributes of this kind are not kept here")
    if isinstance(inode.content, KvFile) and name in _KV:
        return _KV[name](inode.content.table, model).encode()
    if name in inode.xattrs:
        return inode.xattrs[name]
    raise _no_data(name)


def names(inode: Inode) -> list[bytes]:
    """Every name that `get` answers."""
    return [*sorted(inode.xattrs), *(_KV if isinstance(inode.content, KvFile) else ())]


def put(inode: Inode, name: bytes, value: bytes) -> None:
    """Set an attribute of the user's own."""
    _require_settable(name)
    others = sum(len(kept) for key, kept in inode.xattrs.items() if key != name)
    if others + len(value) > MAX_VALUE_BYTES:
        raise SymError(f"{shown(name)}: a file may have {MAX_VALUE_BYTES} bytes of attributes", errno.ENOSPC)
    inode.xattrs[name] = value
    inode.changed()


def remove(inode: Inode, name: bytes) -> None:
    """Remove an attribute of the user's own."""
    _require_settable(name)
    if name not in inode.xattrs:
        raise _no_data(name)
    del inode.xattrs[name]
    inode.changed()


def _require_settable(name: bytes) -> None:
    if name.startswith(_COMPUTED):
        raise NotSupported(f"{shown(name)} is computed: it can't be set")
    if not name.startswith(_USER):
        raise NotSupported(f"{shown(name)}: only attributes user.* are kept here")


def _positions(table: PageTable) -> str:
    """The smallest and the largest position; nothing for an empty file."""
    _tokens, positions = table.read()
    return f"{positions.min()}-{positions.max()}" if positions.size else ""


def _no_data(name: bytes) -> SymError:
    return SymError(f"there is no attribute {shown(name)}", errno.ENODATA)
