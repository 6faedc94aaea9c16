"""Keys of clients: the keys of a file that holds only their digests, or the one key of a gateway without such a file.

Each key of the file is a tenant with its own domain, quota and rates. Each line is a key:
`NAME sha256:DIGEST [quota=2G] [rate=60] [tokens=100000] [concurrent=8]`. Rates are per minute. Blank lines and text
after a # are ignored. The file is read again when it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lips.gateway.admission import NO_LIMITS, TenantLimits
from lips.gateway.tenants import DEFAULT_QUOTA_BYTES, LOCAL

log = logging.getLogger(__name__)
_PREFIX = "sk-sym-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
VARIABLE = "SYMPHONY_API_KEY"
_ONE_KEY = re.compile(r"[!-~]{16,512}")


class KeyFileError(ValueError):
    """The file of keys, or a key in it, cannot be used; the message says which line, and why."""


@dataclass(frozen=True, slots=True)
class Key:
    """The digest of a tenant's key, with the tenant's quota and limits."""

    name: str
    digest: bytes
    quota_bytes: int | None = DEFAULT_QUOTA_BYTES
    """Quota of the tenant's domain. None: the tenant has no domain."""
    limits: TenantLimits = NO_LIMITS


def new_key(name: str) -> tuple[str, str]:
    """Return a new random key, and its line for the file of keys."""
    _checked_name(name)
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, f"{name} sha256:{_digest(key).hex()}"


def _digest(key: str) -> bytes:
    # Keys are long and random, so a plain hash is as safe as a slow one.
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class Keys(ABC):
    """The set of keys that a gateway accepts."""

    @abstractmethod
    def known(self) -> list[Key]:
        """Return the current keys."""

    def find(self, presented: str) -> Key | None:
        """Return the key that a client presents. The time of the search reveals nothing about similar keys."""
        digest, found = _digest(presented), None
        for key in self.known():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def prove(self, challenge: str, proof: str) -> str | None:
        """Return the gateway's proof that it knows a key. None: the page has not proved that it knows the key.

        The page gives its own proof first. Else an attacker could collect proofs, and use them after taking the
        gateway's port.
        """
        found = None
        for key in self.known():
            if hmac.compare_digest(_proof(key, "page", challenge).encode(), proof.encode(errors="replace")):
                found = _proof(key, "gateway", challenge)
        return found


def _proof(key: Key, side: str, challenge: str) -> str:
    return hmac.new(key.digest, f"{side} {challenge}".encode(errors="replace"), "sha256").hexdigest()


class OneKey(Keys):
    """The one key of a gateway without a file of keys; its tenant is `local`."""

    def __init__(self, text: str, where: str) -> None:
        if not _ONE_KEY.fullmatch(text):
            raise KeyFileError(f"{where}: a key of 16 to 512 ASCII characters without blanks is expected")
        self.text = text
        self.where = where
        self.key = Key(LOCAL, _digest(text), None)

    def known(self) -> list[Key]:
        return [self.key]


def one_key(path: Path | None) -> OneKey:
    """Return the key from a file, else from the environment, else from the gateway's own file, made at first use."""
    if path is not None:
        return OneKey(_read(path, os.O_CLOEXEC), str(path))
    if VARIABLE in os.environ:
        return OneKey(os.environ[VARIABLE], VARIABLE)
    path = _kept_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _keep(path, _PREFIX + secrets.token_urlsafe(32))
        return OneKey(_read(path, os.O_CLOEXEC | os.O_NOFOLLOW), str(path))
    except OSError as error:
        raise KeyFileError(f"no key is kept in {path} ({error.strerror}): set {VARIABLE}, or give --key-file") from None


def _kept_path() -> Path:
    """Return the path of the gateway's own key: in the unit's StateDirectory, else in the account's state directory."""
    if of_unit := os.environ.get("STATE_DIRECTORY"):
        return Path(of_unit.partition(":")[0], "gateway.key")
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state, "symphony", "gateway.key")


def _keep(path: Path, text: str) -> None:
    """Write the file atomically. If two gateways start at the same time, the key of the first gateway stays."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            path.hardlink_to(new)
    finally:
        new.unlink(missing_ok=True)


def _read(path: Path, flags: int) -> str:
    with open(path, "rb", opener=lambda name, how: os.open(name, how | flags)) as file:
        about = os.fstat(file.fileno())
        _check_is_private(about, path)
        return file.read(1 << 10).decode(errors="replace").strip()


def _check_is_private(about: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise KeyFileError(f"{path} is no regular file")
    if stat.S_IMODE(about.st_mode) & 0o077:
        raise KeyFileError(f"{path} can be read or written by others: chmod 600 {path}")
    if about.st_uid not in {0, os.geteuid()}:
        raise KeyFileError(f"{path} belongs to uid {about.st_uid}, who knows the key in it")


class KeyFile(Keys):
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at: tuple[int, int, int] = (0, 0, 0)
        self._keys: list[Key] = []
        self._complaint = ""
        self.refresh()

    def known(self) -> list[Key]:
        """Return the keys. If the file has a fault, log it once and keep the previous keys."""
        try:
            self.refresh()
            complaint = ""
        except (KeyFileError, OSError) as error:
            complaint = str(error)
            if complaint != self._complaint:
                log.warning("%s; the keys from before stay", complaint)
        self._complaint = complaint
        return self._keys

    def refresh(self) -> None:
        """Read the file if it has changed since the last reading."""
        with self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            read_at = about.st_mtime_ns, about.st_size, about.st_ino
            if read_at == self._read_at:
                return
            _check_is_private(about, self._path)
            self._keys = parse(file.read().decode(errors="replace"), str(self._path))
            self._read_at = read_at


def parse(text: str, where: str) -> list[Key]:
    """Return the keys in the text of a file. KeyFileError: a line is not a key; the error names the line."""
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
    limits = TenantLimits(
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
