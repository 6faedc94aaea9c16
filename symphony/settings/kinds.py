"""Kinds of values of configuration keys. Each kind can parse a value, from TOML or from the command line."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfs.base.sizes import parse_bytes
from kvfs.pages.weights import MAX_WEIGHT, MIN_WEIGHT, parse_weight
from libsym.errors import Invalid
from symphony.settings.config_file import Key

MAX_SECONDS = 86_400.0
MAX_NUMBER = (1 << 31) - 1
"""Upper bound of whole numbers: the daemon passes them on as 32-bit integers."""
MAX_UID = (1 << 32) - 1
"""First number that is not a uid: `(uid_t) -1`."""


class Unfit(Invalid):
    """Error: a key has an invalid value."""

    def __init__(self, message: str, *key: str) -> None:
        super().__init__(message)
        self.key: Key = key


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of value that a key has."""

    name: str
    """Name of the kind in symphony.toml(5)."""
    parse: Callable[[str, Any], Any]
    """Function that returns the value of a key, from the key and the raw value. Unfit: the value is invalid."""
    option: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for `add_argument`."""
    possible: str = ""
    """Possible values, for the help and the manual. Empty: the text of the key names them."""
    words: tuple[str, ...] = ()
    """Words that shell completion offers."""


def text(metavar: str, *words: str) -> Kind:
    """Return the kind of a string that `loading` checks together with other keys. Shell completion offers `words`."""
    return Kind("string", _string, {"metavar": metavar}, words=words)


def one_of(metavar: str, *words: str, suffix: str = "") -> Kind:
    """Return the kind of a value that is one of `words`. With `suffix`, a file whose name ends in it is valid, too."""
    file = f", nor a file that ends in {suffix}" if suffix else ""

    def parse(key: str, value: Any) -> str:
        if _string(key, value) not in words and not (suffix and value.endswith(suffix)):
            raise Unfit(f"{key} {value!r} is not one of {', '.join(words)}{file}", key)
        return str(value)

    possible = ", ".join(words)
    return Kind("string", parse, {"metavar": metavar}, f"{possible}, or a file{suffix}" if suffix else possible, words)


def path(metavar: str, absolute: Callable[[Path], str | Path] = Path.absolute) -> Kind:
    def parse(key: str, value: Any) -> Path:
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise Unfit(f"{key} is {value!r}: a path needed", key)
        try:
            return Path(absolute(Path(value).expanduser()))
        except RuntimeError as error:  # `~user` of an unknown user
            raise Unfit(f"{key} is {value!r}: {error}", key) from None

    return Kind("path", parse, {"metavar": metavar})


def whole(needed: str, least: int, most: int = MAX_NUMBER) -> Kind:
    """Return the kind of a whole number from `least` to `most`. `needed`: the range in words, for messages."""

    def parse(key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise Unfit(f"{key} is {value!r}: a whole number needed", key)
        if value > MAX_NUMBER:
            raise Unfit(f"{key} is {value}: {MAX_NUMBER:,} is the most", key)
        if not least <= value <= most:
            raise Unfit(f"{key} is {value}: {needed} is needed", key)
        return value

    return Kind("number", parse, {"metavar": "N", "type": int})


def number(name: str, metavar: str, least: float, most: float, needed: str = "") -> Kind:
    """Return the kind of a number from `least` to `most`.
    `name`: "number", or its unit. `needed`: the range in words.
    """

    def parse(key: str, value: Any) -> float:
        found = _number(key, value, name)
        if not least <= found <= most:
            raise Unfit(f"{key} is {value!r}: {needed or f'{least:g} to {most:g}'} is needed", key)
        return found

    return Kind(name, parse, {"metavar": metavar}, "" if needed else f"{least:g} to {most:,g}")


def _string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit(f"{key} is {value!r}: a string needed", key)
    return value


class _Every(argparse.Action):
    """Action that makes a tuple of the values of an option that is given more than once."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, value: Any, _option: object = None) -> None:
        before = getattr(namespace, self.dest)
        every = before if isinstance(before, tuple) else (before,)
        setattr(namespace, self.dest, value if before is None else (*every, value))


def _model(key: str, value: Any) -> str:
    if isinstance(value, tuple):  # the last one counts, as of any option; but two names mean two models
        if len({name for name, is_named, _ in (each.partition("=") for each in value) if is_named}) > 1:
            raise Unfit(f"{key}: a daemon serves one model, and {len(value)} are given: {', '.join(value)}", key)
        value = value[-1]
    if not _string(key, value) or "\0" in value:
        raise Unfit(f"{key} is {value!r}: a name or a path needed", key)
    return str(value)


def _number(key: str, value: Any, unit: str) -> float:
    """Return a number, given as a number of TOML or as a word of the command line."""
    try:
        if not isinstance(value, bool):  # float(True) is 1.0
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise Unfit(f"{key} is {value!r}: a number{'' if unit == 'number' else f' of {unit}'} needed", key)


def _size(key: str, value: Any) -> int:
    try:
        return parse_bytes(str(value))
    except Invalid as error:
        raise Unfit(f"{key}: {error}", key) from None


def _truth(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unfit(f"{key} is {value!r}: true or false needed", key)
    return value


def _weights(key: str, given: Any) -> dict[int, float]:
    """Return weights by uid.
    `given`: a table with `alice = 2` from the file, or words `alice=2` of the command line.
    """
    if isinstance(given, Mapping):
        pairs = [(user, weight) for user, weight in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [_pair(key, each) for each in given]
    else:
        raise Unfit(f"{key} is {given!r}: a table of users and numbers needed", key)
    return {_uid(key, user): _weight(key, user, weight) for user, weight in pairs}


def _weight(key: str, user: str, weight: object) -> float:
    try:
        return parse_weight(str(weight))
    except Invalid as error:
        raise Unfit(f"{key} of {user}: {error}", key, user) from None


def _pair(key: str, given: object) -> tuple[str, str]:
    user, equals, weight = str(given).partition("=")
    if not equals:
        raise Unfit(f"{key} is {given!r}: write USER=N", key)
    return user, weight


def _uid(key: str, user: str) -> int:
    if user.isascii() and user.isdigit() and len(user) <= len(str(MAX_UID)) and int(user) < MAX_UID:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise Unfit(f"{key} of {user!r}: there is no such user, and it is no uid", key, user) from None


MACHINE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""Name of a machine or a fleet. Certificates, keys of etcd and file names may contain it."""
_HOST = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")


def address(value: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; an IPv6 address is in brackets. ValueError: the value is malformed."""
    host, _, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif not _HOST.fullmatch(host):
        raise ValueError(value)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise ValueError(value)
    return host, int(port)


def _address(key: str, value: Any) -> str:
    try:
        address(_string(key, value))
    except ValueError:
        raise Unfit(f"{key} is {value!r}: write HOST:PORT", key) from None
    return str(value)


def _peers(key: str, given: Any) -> tuple[str, ...]:
    """Check a list of `NAME=HOST:PORT`."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise Unfit(f"{key} is {given!r}: a list needed", key)
    names = list[str]()
    for each in given:
        name, _, where = _string(key, each).partition("=")
        try:
            address(where)
        except ValueError:
            name = ""
        if not _HOST.fullmatch(name) or name.lower() in names:
            raise Unfit(f"{key} has {each!r}: write NAME=HOST:PORT, each name once", key)
        names.append(name.lower())
    return tuple(given)


def _name(key: str, value: Any) -> str:
    if not MACHINE_NAME.fullmatch(_string(key, value)):
        raise Unfit(f"{key} is {value!r}: small letters, digits and dashes are needed, a letter first", key)
    return str(value)


def _endpoints(key: str, given: Any) -> tuple[str, ...]:
    """Check a list of URLs. Only https may leave the machine: who writes to etcd commands the fleet."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise Unfit(f"{key} is {given!r}: a list needed", key)
    for each in given:
        scheme, _, where = _string(key, each).partition("://")
        try:
            host, _ = address(where)
        except ValueError:
            scheme = ""
        if scheme not in ("http", "https"):
            raise Unfit(f"{key} has {each!r}: write https://HOST:PORT", key)
        if scheme == "http" and not _is_loopback(host):
            raise Unfit(f"{key} has {each!r}: http is for this machine (127.0.0.1), write https://{where}", key)
    return tuple(given)


def _events(key: str, value: Any) -> str:
    """Check an endpoint of ZeroMQ at which the daemon can listen."""
    transport, _, where = _string(key, value).partition("://")
    try:
        if transport == "tcp":
            ipaddress.ip_address(address(where)[0])
        elif transport != "ipc" or not where.startswith("/") or "\0" in where:
            raise ValueError(where)  # noqa: TRY301 - the same answer as for an address
    except ValueError:
        raise Unfit(f"{key} is {value!r}: write ipc:///PATH or tcp://IP-ADDRESS:PORT", key) from None
    return str(value)


def is_any_address(where: str) -> bool:
    """Return whether HOST:PORT stands for all addresses of this machine, so that no other machine can use it."""
    host, _ = address(where)
    return host in {"0.0.0.0", "::"}  # noqa: S104 - nothing is bound here


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


MODEL = Kind("string", _model, {"action": _Every})
PATH = path("PATH")
DIRECTORY = path("DIR")
CACHE = Kind("path", lambda key, value: None if value == "" else DIRECTORY.parse(key, value), DIRECTORY.option)
MOUNT = path("DIR", os.path.realpath)  # Path.resolve fails on a stale mount
SIZE = Kind("size", _size, {"metavar": "SIZE"})
SECONDS = number("seconds", "SECONDS", math.ulp(0.0), MAX_SECONDS, "more than 0 and at most a day")
TRUTH = Kind("true or false", _truth, {"action": argparse.BooleanOptionalAction})
FLAG = Kind("true or false", _truth, {"action": "store_true", "default": None})
WEIGHTS = Kind("table", _weights, {"metavar": "USER=N", "action": "append"}, f"{MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
ADDRESS = Kind("string", _address, {"metavar": "HOST:PORT"})
PEERS = Kind("list", _peers, {"metavar": "NAME=HOST:PORT", "action": "append"})
ENDPOINTS = Kind("list", _endpoints, {"metavar": "URL", "action": "append"})
EVENTS = Kind("string", _events, {"metavar": "ENDPOINT"})
NAME = Kind("string", _name, {"metavar": "NAME"})
ANY_NUMBER = whole("0 (none may be started) or more", 0)
PORT = whole("1 to 65535, or 0 for any that is free,", 0, 65_535)
