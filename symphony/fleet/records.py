"""Records of a fleet's names in etcd.

    names/i/ID            what a file, a directory or a symbolic link is, as JSON
    names/n/PARENT/NAME   ID of the inode of a name; bytes of a name that are no letters or digits are written as %XX
    names/w/ID            machine that may write the file; the record ends with the machine's lease
    names/c/MACHINE       the machine's last change; a daemon knows its own changes by it
    names/d               the last move of a directory: two moves at once could put each directory into the other

All keys begin with `symphony/FLEET/`. The ID of `/kv/fleet` itself is `root`.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from urllib.parse import quote_from_bytes, unquote_to_bytes

from kvfs.names.tree import MAX_NAME_BYTES, is_possible_name

ROOT = "root"
TYPES: Mapping[str, int] = {"dir": stat.S_IFDIR, "file": stat.S_IFREG, "link": stat.S_IFLNK}
_TAG = re.compile(r"[0-9a-f]{0,64}")
_MAX = {"mode": 0o7777, "uid": (1 << 32) - 2, "gid": (1 << 32) - 2}


@dataclass(frozen=True, slots=True)
class NameRecord:
    """Facts about an inode that the machines of a fleet share."""

    type: str
    mode: int
    uid: int
    gid: int
    target: str = ""
    """Target of a symbolic link; bytes are written as in a name."""
    mtime_ns: int = 0
    generation: int = 0
    """Number of the last version that was synced. 0: the file was never synced, and is empty."""
    tag: str = ""
    """Token of the version: see `symphony.fleet.versions`."""
    num_entries: int = 0
    size: int = 0
    """Size of the version's image in bytes. 0: the version is an empty plain file."""
    machines: tuple[str, ...] = ()
    """Machines that had the version on disk when it was synced."""
    identity: dict[str, str] = field(default_factory=dict)
    """Identity of the model."""
    bits: str = ""

    @property
    def file_type(self) -> int:
        return TYPES[self.type]

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def record_of(value: bytes) -> NameRecord | None:
    """Return the record in a value. None: the value is malformed, or of a later version that has other fields."""
    try:
        match json.loads(value):
            case {
                "type": str(kind), "mode": int(mode), "uid": int(uid), "gid": int(gid), "target": str(target),
                "mtime_ns": int(mtime_ns), "generation": int(generation), "tag": str(tag),
                "num_entries": int(num_entries), "size": int(size), "machines": list(machines),
                "identity": dict(identity), "bits": str(bits),
            }:  # fmt: skip
                numbers = {"mode": mode, "uid": uid, "gid": gid}
                counts, texts = (mtime_ns, generation, num_entries, size), (*machines, *identity, *identity.values())
                if (
                    kind in TYPES
                    and _TAG.fullmatch(tag)
                    and target.isascii()
                    and (kind == "file" or not size)
                    and all(0 <= number <= _MAX[name] for name, number in numbers.items())
                    and all(0 <= number < 1 << 63 for number in counts)
                    and all(isinstance(each, str) for each in texts)
                ):
                    return NameRecord(
                        kind, mode, uid, gid, target, mtime_ns, generation, tag, num_entries, size,
                        tuple(machines), identity, bits,
                    )  # fmt: skip
    except (ValueError, RecursionError):
        pass
    return None


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one fleet's records."""

    fleet: str

    @property
    def prefix(self) -> str:
        return f"symphony/{self.fleet}/names/"

    def inode(self, ident: str) -> str:
        return f"{self.prefix}i/{ident}"

    def name(self, parent: str, name: bytes) -> str:
        return f"{self.entries(parent)}{quote_from_bytes(name, safe='')}"

    def entries(self, directory: str) -> str:
        """Return the beginning of the keys of a directory's names."""
        return f"{self.prefix}n/{directory}/"

    def right(self, ident: str) -> str:
        return f"{self.prefix}w/{ident}"

    def change(self, machine: str) -> str:
        return f"{self.prefix}c/{machine}"

    @property
    def moves(self) -> str:
        return f"{self.prefix}d"

    def parts(self, key: str) -> list[str]:
        return key.removeprefix(self.prefix).split("/")


def name_of(text: str) -> bytes | None:
    """Return the name in the last part of a key. None: no file can have it."""
    name = unquote_to_bytes(text)
    return name if len(name) <= MAX_NAME_BYTES and is_possible_name(0, name) else None


def quoted(target: bytes) -> str:
    return quote_from_bytes(target, safe="/")


def unquoted(target: str) -> bytes:
    return unquote_to_bytes(target)
