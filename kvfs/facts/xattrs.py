"""Extended attributes: those that users set (`user.*`), and computed attributes of a KV file or a domain (`user.kv.*`).

Computed attributes can't be set, with three exceptions. The owner of a domain can set its quotas and weight: see
`kvfs.names.domains`. The owner of a KV file can set the advice on it: see `kvfs.names.retention`. `move` sets the tier
of a KV file, which may take some time.

Attributes that a user sets are charged to the file's account, like its pages. All functions except `has_away` need
these attributes in memory: see `Xattrs`.

An image that is copied to the mount brings its attributes along, while it is still a plain file (`cp -a`, `tar`) or
just after (`rsync`). Advice is stored with the plain file, and takes effect when the plain file becomes a KV file.
Computed attributes are accepted and ignored.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection

import trio

from kvfs.images.model_facts import ModelFacts
from kvfs.names import retention as advice
from kvfs.names.content import KvFile
from kvfs.names.domains import QUOTA, QUOTA_FILES, WEIGHT
from kvfs.names.inode import ATTRIBUTE_BYTES, MOST_IN_MEMORY, Credentials, Inode, require_owner, shown
from kvfs.names.plain import PlainFile
from kvfs.pages.holdings import Kind
from kvfs.pages.table import PageTable
from kvfs.volume.volume import Volume
from libsym.errors import Busy, Invalid, NotSupported, SymError

MAX_VALUES_BYTES = 128 << 10
"""Limit for the values of a file's attributes, in bytes. This leaves room for other values beside a value of 64 KiB,
the largest in Linux.
"""

MAX_NAMES_BYTES = 63 << 10
"""Limit for the names of a file's attributes, in bytes. listxattr(2) fails (E2BIG) above 64 KiB, computed names
included.
"""

_USER = b"user."
_COMPUTED = b"user.kv."
_QUOTAS = frozenset({QUOTA, QUOTA_FILES})
_ADVICE = frozenset({advice.PINNED, advice.TTL, advice.PRIORITY})

LOST, OTHER_BITS = b"user.kv.lost", b"user.kv.other_bits"
"""Attributes that few files have. LOST is the number of entries that were lost in a crash or because the disk was full.
OTHER_BITS is the number of entries that another instruction set computed.
"""

TIER = b"user.kv.tier"
"""Where a KV file's pages are: `memory`, `disk` (and nowhere in memory), or `mixed`."""

_KV: dict[bytes, Callable[[Inode, KvFile, ModelFacts], str]] = {
    b"user.kv.tokens": lambda _inode, kv, _model: str(kv.table.length),
    b"user.kv.model": lambda _inode, _kv, model: model.name,
    b"user.kv.pages": lambda _inode, kv, _model: str(len(kv.table.pages)),
    b"user.kv.exclusive": lambda inode, kv, _model: str(inode.exclusive_pages(kv.table)),
    b"user.kv.shared": lambda inode, kv, _model: str(len(kv.table.pages) - inode.exclusive_pages(kv.table)),
    b"user.kv.hits": lambda _inode, kv, _model: str(kv.hits),
    b"user.kv.positions": lambda _inode, kv, _model: _positions(kv.table),
}
"""Computed attributes. Counts are of pages, except for `tokens`."""

_TELLING = frozenset({*_KV, LOST, OTHER_BITS})


def has_away(inode: Inode, name: bytes = _USER) -> bool:
    """Return whether only the index has the value of an attribute. Without `name`, return whether this holds for any
    attribute.
    """
    return inode.xattrs.is_away and name.startswith(_USER)


def are_large_with(inode: Inode, value: bytes) -> bool:
    """Return whether a file's attributes with this value would be too large to stay in memory after a commit."""
    return inode.xattrs.sums.num_bytes + len(value) > MOST_IN_MEMORY


def has_memory(inode: Inode, name: bytes, value: bytes) -> bool:
    """Return whether the file's user has memory left for an attribute. Otherwise a commit has to move attributes to
    disk.
    """
    num_bytes = inode.xattrs.memory_growth(ATTRIBUTE_BYTES + len(name) + len(value))
    return inode.account is None or inode.account.holdings.has_room(Kind.FILE, 0, num_bytes)


def get(volume: Volume, inode: Inode, name: bytes) -> bytes:
    """Return the value of an attribute `user.*`. ENODATA: the attribute does not exist."""
    if isinstance(inode.content, KvFile) and name in _KV:
        return _KV[name](inode, inode.content, volume.model_of(inode.content)).encode()
    found = inode.xattrs.get(name, _own(volume, inode).get(name))
    if found is None:
        raise _no_data(name)
    return found


def has(volume: Volume, inode: Inode, name: bytes) -> bool:
    """Return whether `names` contains this name."""
    return name in inode.xattrs or name in _computed(inode) or name in _own(volume, inode)


def names(volume: Volume, inode: Inode) -> list[bytes]:
    """Return every name that `get` has a value for."""
    return [*sorted(inode.xattrs), *_computed(inode), *_own(volume, inode)]


def _computed(inode: Inode) -> Collection[bytes]:
    return _KV if isinstance(inode.content, KvFile) else ()


def _own(volume: Volume, inode: Inode) -> dict[bytes, bytes]:
    """Return the attributes that the owner of a KV file or a domain may change."""
    kv = inode.content
    if isinstance(kv, KvFile):
        ending = {LOST: kv.lost, OTHER_BITS: kv.num_other_bits(volume.bits)}
        tier = {TIER: volume.pager_of(kv.table).tier_of(kv.table).encode()}
        return tier | advice.attributes(inode.advice) | {name: b"%d" % count for name, count in ending.items() if count}
    if isinstance(kv, PlainFile):  # advice takes effect when the file becomes a KV file
        none = advice.attributes(advice.NO_ADVICE)
        return {name: value for name, value in advice.attributes(inode.advice).items() if value != none[name]}
    return volume.domains.attributes(inode)


def put(volume: Volume, inode: Inode, name: bytes, value: bytes, uid: int) -> None:
    """Set an attribute of the user's own; or, on behalf of `uid`, a domain's quota or weight, or advice on a file."""
    if name in _TELLING and _is_arriving(inode):
        return
    shared = volume.tree.agreement
    if shared is not None and shared.knows(inode) and inode is not shared.root and name not in _ADVICE:
        raise NotSupported(f"{shown(name)}: files of the fleet have no attributes of users, and no domains")
    if name in _QUOTAS:
        volume.domains.set_limit(inode, name, value, uid)
        return
    if name == WEIGHT:
        volume.domains.set_weight(inode, value, uid)
        return
    if name in _ADVICE:
        _require_advisable(volume, inode, uid)
        volume.advise(inode, advice.from_attribute(inode.advice, name, value))
        return
    _require_settable(name)
    sums, old = inode.xattrs.sums, inode.xattrs.get(name)
    # listxattr(2) ends each name with a NUL.
    if old is None and sums.name_bytes + len(name) + sums.number + 1 > MAX_NAMES_BYTES:
        raise SymError(f"{shown(name)}: a file may have {MAX_NAMES_BYTES} bytes of attributes' names", errno.ENOSPC)
    if sums.value_bytes + len(value) - len(old or b"") > MAX_VALUES_BYTES:
        raise SymError(f"{shown(name)}: a file may have {MAX_VALUES_BYTES} bytes of attributes", errno.ENOSPC)
    volume.tree.require_bytes(inode, inode.xattrs.growth(name, value))
    inode.note(name, value)


def remove(volume: Volume, inode: Inode, name: bytes, uid: int) -> None:
    """Remove an attribute of the user's own; or, on behalf of `uid`, a domain's quota or weight, or advice on a
    file.
    """
    if name in _TELLING | {TIER} and isinstance(inode.content, KvFile) and _is_arriving(inode):
        return
    if name in _QUOTAS and name in volume.domains.attributes(inode):
        volume.domains.remove_limit(inode, name, uid)
        return
    if name == WEIGHT and name in inode.xattrs and inode.domain is not None:
        volume.domains.remove_weight(inode, uid)
        return
    if name in _ADVICE and isinstance(inode.content, KvFile | PlainFile):
        if name not in _own(volume, inode):
            raise _no_data(name)
        _require_advisable(volume, inode, uid)
        volume.advise(inode, advice.without_attribute(inode.advice, name))
        return
    if name == LOST and isinstance(inode.content, KvFile) and inode.content.lost:
        require_owner(inode, Credentials(uid, 0), volume.tree.path_of(inode))
        inode.content.lost = 0
        inode.changed()
        return
    if name not in _QUOTAS | _ADVICE | {WEIGHT}:
        _require_settable(name)
    if name not in inode.xattrs:
        raise _no_data(name)
    volume.tree.require_bytes(inode, inode.xattrs.growth(name, b""))
    inode.remove_note(name)


async def move(volume: Volume, inode: Inode, value: bytes, uid: int, patience_s: float) -> None:
    """Set TIER on behalf of `uid`. Return when all pages of a KV file are on disk alone, or in memory.

    NoSpace: memory or disk has no room. Busy: a call has been computing with the file for `patience_s`.
    """
    wanted, path = value.decode(errors="replace").strip("\0 \n"), volume.tree.path_of(inode)
    kv = inode.content
    if _is_arriving(inode) and (wanted == "mixed" or isinstance(kv, PlainFile)):
        return
    if not isinstance(kv, KvFile):
        raise NotSupported(f"{path} is no KV file: only their pages go from memory to disk and back")
    require_owner(inode, Credentials(uid, 0), path)
    pager = volume.pager_of(kv.table)
    moves = {"disk": pager.put_on_disk, "memory": pager.put_in_memory}
    if wanted not in moves:
        raise Invalid(f"{path}: user.kv.tier can be set to memory or disk, not {wanted!r}")
    if wanted == "memory":
        volume.require_usable(kv, path)
    if wanted == "disk" and inode.advice.is_pinned:
        raise Busy(f"{path} is pinned: unpin it before it goes to disk, setfattr -n user.kv.pinned -v 0")
    with trio.move_on_after(patience_s) as scope:
        await moves[wanted](kv.table)
    if scope.cancelled_caught:
        raise Busy(f"{path}: it could not go to {wanted} for {patience_s:g} s; something computes with it")


def _require_advisable(volume: Volume, inode: Inode, uid: int) -> None:
    path = volume.tree.path_of(inode)
    if not isinstance(inode.content, KvFile | PlainFile):
        raise NotSupported(f"{path} is no file: there is no advice on it")
    require_owner(inode, Credentials(uid, 0), path)


def _is_arriving(inode: Inode) -> bool:
    """Return whether a file may be an image that is being copied here: a plain file, or a KV file that no program has
    used yet.
    """
    return isinstance(inode.content, PlainFile) or (isinstance(inode.content, KvFile) and inode.content.is_arriving)


def _require_settable(name: bytes) -> None:
    if name.startswith(_COMPUTED):
        raise NotSupported(f"{shown(name)} is computed: it can't be set")
    if not name.startswith(_USER):
        raise NotSupported(f"{shown(name)}: only attributes user.* are kept here")
    if name == _USER:
        raise Invalid("user.: an attribute's name needs something behind the dot")


def _positions(table: PageTable) -> str:
    """Return the smallest and the largest position, as text. Empty for an empty file."""
    _tokens, positions = table.read()
    return f"{positions.min()}-{positions.max()}" if positions.size else ""


def _no_data(name: bytes) -> SymError:
    return SymError(f"there is no attribute {shown(name)}", errno.ENODATA)
