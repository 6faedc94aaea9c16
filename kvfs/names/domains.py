"""Domains: directories with a quota of their own, and with a boundary that pages cross only by a copy of a file.

    mkdir key1; setfattr -n user.kv.quota -v 512M key1        an empty directory becomes a domain
    getfattr -n user.kv.used key1                             bytes that the domain uses
    setfattr -n user.kv.weight -v 2 key1                      share of the domain beside its owner's other domains
    setfattr -x user.kv.quota key1                            an empty domain becomes a directory again

Files in a domain are charged to the domain and to the owner of the domain's directory. If domains are nested, the owner
of the outermost directory is charged: see `kvfs.pages.accounts`. No file can be moved or linked across the boundary.

A weight is stored as an ordinary attribute of the directory, so that records of domains need no field for weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvfs.base.sizes import parse_bytes
from kvfs.names.inode import Inode
from kvfs.names.tree import Tree
from kvfs.pages.accounts import NO_LIMITS, AccountLimits, Accounts
from kvfs.pages.holdings import Kind
from kvfs.pages.weights import DEFAULT_WEIGHT, parse_weight
from libsym.errors import Invalid, NotEmpty, NotPermitted, NotSupported

QUOTA, QUOTA_FILES = b"user.kv.quota", b"user.kv.quota_files"
WEIGHT = b"user.kv.weight"
USED, USED_FILES = b"user.kv.used", b"user.kv.used_files"

MAX_DEPTH = 8
"""The most domains that may be nested. Each charge for a file is made to every domain around the file."""


class Domains:
    """The domains of one tree, controlled by attributes of their directories."""

    def __init__(self, tree: Tree, accounts: Accounts) -> None:
        self._tree = tree
        self._accounts = accounts

    def attributes(self, directory: Inode) -> dict[bytes, bytes]:
        """Return the limits and the usage of a domain as attributes. An inode that is no domain has no such
        attributes.
        """
        domain = directory.domain
        if domain is None:
            return {}
        found = {QUOTA: domain.limits.num_bytes, QUOTA_FILES: domain.limits.num_files}
        found |= {USED: domain.num_bytes, USED_FILES: domain.num_files}
        return {name: str(number).encode() for name, number in found.items() if number is not None}

    def set_limit(self, directory: Inode, name: bytes, value: bytes, uid: int) -> None:
        """Set QUOTA or QUOTA_FILES on behalf of `uid`. The first limit turns an empty directory into a domain."""
        self._require_owner(directory, uid)
        old = NO_LIMITS if directory.domain is None else directory.domain.limits
        limits = _changed(old, name, _parse(name, value))
        if directory.domain is None:
            self.begin(directory, limits)
        else:
            directory.domain.limits = limits
        directory.changed()

    def remove_limit(self, directory: Inode, name: bytes, uid: int) -> None:
        """Remove a limit. An empty directory that loses its last limit stops being a domain. If the directory is not
        empty, its last limit can't be removed.
        """
        self._require_owner(directory, uid)
        domain = directory.domain
        assert domain is not None, "the caller has seen the limit"
        limits = _changed(domain.limits, name, None)
        if limits != NO_LIMITS:
            domain.limits = limits
        else:
            self._require_empty(directory, "stops being a domain")
            directory.changes.of_domain(directory, domain.limits)
            domain.close()
            directory.domain = None
            if WEIGHT in directory.xattrs:
                directory.remove_note(WEIGHT)
        directory.changed()

    def set_weight(self, directory: Inode, value: bytes, uid: int) -> None:
        """Set the weight of a domain on behalf of `uid`."""
        self._require_owner(directory, uid)
        if directory.domain is None:
            raise Invalid(f"{self._tree.path_of(directory)} is no domain: set {QUOTA.decode()} first")
        weight = parse_weight(_text(value))
        text = f"{weight:.12g}".encode()
        self._tree.require_bytes(directory, directory.xattrs.growth(WEIGHT, text))
        self._accounts.weigh(directory.domain, weight)
        directory.note(WEIGHT, text)

    def remove_weight(self, directory: Inode, uid: int) -> None:
        """Reset the domain to the default weight."""
        self._require_owner(directory, uid)
        assert directory.domain is not None, "the caller has seen the weight"
        self._accounts.weigh(directory.domain, DEFAULT_WEIGHT)
        directory.remove_note(WEIGHT)

    def begin(self, directory: Inode, limits: AccountLimits = NO_LIMITS) -> None:
        """Turn an empty directory into a domain."""
        self._require_empty(directory, "becomes a domain")
        if directory.account is None or directory.parent is None:
            raise Invalid("the directory was removed: it can't become a domain")
        if sum(account.is_domain for account in directory.account.chain()) >= MAX_DEPTH:
            raise Invalid(f"{self._tree.path_of(directory)} lies in {MAX_DEPTH} domains: there can't be one more")
        directory.account.holdings.require(Kind.DOMAIN, num_bytes=directory.account.pages.all.nbytes)
        directory.changes.of_domain(directory, None)
        self.restore(directory, limits, directory.xattrs)

    def restore(self, directory: Inode, limits: AccountLimits, noted: Mapping[bytes, bytes]) -> None:
        """Turn a directory into a domain. The directory is empty, or was a domain when the last daemon ended.

        `noted`: the directory's attributes, from memory or from the index.
        """
        assert directory.account is not None
        directory.domain = self._accounts.new_domain(
            directory.account, limits, lambda: f"the domain {self._tree.path_of(directory)}"
        )
        if WEIGHT in noted:
            directory.domain.weight = parse_weight(_text(noted[WEIGHT]))

    def _require_owner(self, directory: Inode, uid: int) -> None:
        path = self._tree.path_of(directory)
        if not directory.is_directory:
            raise NotSupported(f"{path} is no directory: only directories have quotas and weights")
        if uid not in {0, directory.uid}:
            raise NotPermitted(f"{path}: only its owner, uid {directory.uid}, may set its quota or its weight")

    def _require_empty(self, directory: Inode, becomes: str) -> None:
        if directory.entries:
            path = self._tree.path_of(directory)
            raise NotEmpty(f"{path}: only an empty directory {becomes}, this holds {len(directory.entries)} names")


def _changed(limits: AccountLimits, name: bytes, value: int | None) -> AccountLimits:
    return replace(limits, num_bytes=value) if name == QUOTA else replace(limits, num_files=value)


def _text(value: bytes) -> str:
    return value.decode(errors="replace").strip("\0 \n")


def _parse(name: bytes, value: bytes) -> int:
    text = _text(value)
    if name == QUOTA:
        return parse_bytes(text)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Invalid(f"{text!r} is no number of files")
    return int(text)
