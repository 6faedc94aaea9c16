"""Keys, from a file that knows their digests alone: each is a tenant with a domain, a quota and rates of its own.

A line a key: `NAME sha256:DIGEST [quota=2G] [rate=60] [tokens=100000] [concurrent=8]`; rates are by the minute. Blank
lines and those that begin with # say nothing. The file is read again when it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from lips.gateway.admission import NO_LIMITS, Limits
from lips.gateway.tenants import DEFAULT_QUOTA_BYTES, LOCAL

log = logging.getLogger(__name__)
_PREFIX = "sk-sym-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class KeyFileError(ValueError):
    """The file can't be used; the message says which line, and why."""


@dataclass(frozen=True, slots=True)
class Key:
    """What the file says of one."""

    name: str
    digest: bytes
    quota_bytes: int = DEFAULT_QUOTA_BYTES
    limits: Limits = NO_LIMITS


def new_key(name: str) -> tuple[str, str]:
    """A key that nobody has, and its line of the file."""
    _checked_name(name)
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, f"{name} sha256:{_digest(key).hex()}"


def _digest(key: str) -> bytes:
    # Keys are random and long, so that a plain hash tells as little as a slow one would.
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class Keys:
    """Of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at: tuple[int, int, int] = (0, 0, 0)
        self._keys: list[Key] = []
        self._complaint = ""
        self.refresh()

    def find(self, presented: str) -> Key | None:
        """The key that was presented; None: it is none of them. How long it takes tells nothing of which is close."""
        self._refresh_if_it_can_be()
        digest, found = _digest(presented), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def _refresh_if_it_can_be(self) -> None:
        """With a file that has a fault the keys from before stay. The log has the fault once."""
        try:
            self.refresh()
            complaint = ""
        except (KeyFileError, OSError) as error:
            complaint = str(error)
            if complaint != self._complaint:
                log.warning("%s; the keys from before stay", complaint)
        self._complaint = complaint

    def refresh(self) -> None:
        """Read the file, if it has changed since."""
        with self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            read_at = about.st_mtime_ns, about.st_size, about.st_ino
            if read_at == self._read_at:
                return
            if stat.S_IMODE(about.st_mode) & 0o077:
                raise KeyFileError(f"{self._path} can be read or written by others: chmod 600 {self._path}")
            self._keys = parse(file.read().decode(errors="replace"), str(self._path))
            self._read_at = read_at


def parse(text: str, where: str) -> list[Key]:
    """The keys of a file; KeyFileError names the line that is none."""
    found: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            found.append(_key(words, found))
        except KeyFileError as error:
            raise KeyFileError(f"{where}, line {number}: {error}") from None
    return found


def _key(words: list[str], above: list[Key]) -> Key:
    name = _checked_name(words[0])
    kind, _, digest = words[1].partition(":") if len(words) > 1 else ("", "", "")
    if kind != "sha256" or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise KeyFileError(
            "sha256: and 64 hexadecimal digits are expected behind the name (gateway --new-key makes a line)"
        )
    options: dict[str, float] = {}
    for word in words[2:]:
        option, _, value = word.partition("=")
        if option not in {"quota", "rate", "tokens", "concurrent"} or option in options:
            raise KeyFileError(f"{word}: quota=, rate=, tokens= and concurrent= are known, each once")
        options[option] = _bytes(value) if option == "quota" else _positive(word, value)
    limits = Limits(
        options.get("rate"), options.get("tokens"), int(options["concurrent"]) if "concurrent" in options else None
    )
    key = Key(name, bytes.fromhex(digest), int(options.get("quota", DEFAULT_QUOTA_BYTES)), limits)
    if key.name in {each.name for each in above}:
        raise KeyFileError(f"there is a key {key.name} above")
    if key.digest in {each.digest for each in above}:
        raise KeyFileError("this digest is that of a key above")
    return key


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == LOCAL:
        raise KeyFileError(f"{name[:64]!r} is no name of a key: letters, digits, _ . - and not {LOCAL}")
    return name


def _positive(word: str, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 1 << 53:
        raise KeyFileError(f"{word}: a whole number above 0 is expected")
    return int(value)


def _bytes(value: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12})([KMGT]?)", value)
    if match is None or not int(match[1]):
        raise KeyFileError(f"quota={value}: bytes are expected, as 512M or 2G")
    return int(match[1]) * _UNITS[match[2]]
