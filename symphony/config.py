"""What a daemon is told: defaults, then the configuration file, then the command line; checked once, frozen after."""

from __future__ import annotations

import difflib
import os
import pwd
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from decoder.model_config import GPU_PRECISIONS, KV_DTYPE
from kvfs.pages.weights import parse_weight
from kvfs.sizes import parse_bytes
from libsym.channel.socket_path import default_socket
from libsym.errors import Invalid
from scheduler.programs.admission import MAX_AT_ONCE, MAX_PER_MINUTE
from symphony.config_file import ConfigFile, Key, read_config_file


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that `symphony serve` can be told; the keys of symphony.toml are these names."""

    model: str = "smollm2"
    mount: Path = Path("/kv")
    socket: Path = Path("/run/symphony/symphony.sock")
    state: Path = Path("/var/lib/symphony")
    kv_memory: int | None = None
    """Bytes of pages in host memory, committed as they are used; None: a quarter of what is free (with a GPU, as much
    more as its own pages take)."""
    policy: str = "cost"
    """Which files' pages go to disk first where memory is short: cost, lru, ttl, idle, or a file of Python; none:
    new pages that memory has no room for are refused."""
    grace_ms: float = 100.0
    """Milliseconds that programs that listen have to make room by themselves, before pages of theirs go; 0: none."""
    pin_share: float = 0.5
    """Of memory that may be pinned by advice; each user may have half of that."""
    device: str = "cpu"
    """What computes: cpu or cuda."""
    precision: str = "bf16"
    """Of the arithmetic: float32, bf16, int8 or int4; on a GPU float32, bf16 or float16."""
    gpu_memory: int | None = None
    """Bytes of the GPU for weights, workspace and pages; None: nine tenths of what is free."""
    kv_dtype: str | None = None
    """What a GPU keeps KV in: fp8, or the precision; None: the precision."""
    invariant: bool = True
    """On a GPU: the same call gives the same bits in any batch."""
    threads: int | None = None
    """Of the CPU decoder; None: the cores that this process is given."""
    disk: int | None = None
    """Bytes that pages and plain files may take below `state`, those that are not in memory among them; None: what the
    file system has."""
    disk_timeout: float = 30.0
    """Seconds after which who waits for the disk is told that it does not answer."""
    drain: float = 30.0
    """Seconds that a daemon that is told to end has to write what is not on disk yet."""
    step_ms: float = 20.0
    """Milliseconds that a step may take for the sake of prefills: the delay that those who decode are promised."""
    same_bits: bool = False
    """Files that another instruction set computed in part are not opened."""
    quota: int | None = None
    """Bytes of pages and plain files that each user may hold, but root and whoever runs the daemon; None: no limit."""
    quota_files: int | None = None
    """Files, directories, links, … that each of them may have."""
    quota_memory: int | None = None
    """Bytes of the daemon's memory, beside pages, that each of them may fill with files, handles, waiting calls, …;
    None: a quarter of what is free at the start and is not for pages."""
    weight: Mapping[int, float] = field(default_factory=dict)
    """Of users, by uid: how much of the steps each gets beside others; 1 for all who are not named."""
    programs: int = MAX_AT_ONCE
    """That launchers may have started of each user, at once."""
    starts: int = MAX_PER_MINUTE
    """Of programs of each user, in a minute."""
    metrics_port: int | None = None
    """TCP port of this machine alone, where /metrics is told in Prometheus' format; 0: any that is free; None: none."""
    allow_other: bool | None = None
    """Other users may use the mount (the mode bits decide about what); None: when root starts the daemon, or mounts for
    it."""
    open: bool = False
    """Every user may make files at the root of the mount, as with a mount helper; until somebody changes its mode."""
    mount_helper: Path | None = None
    """The socket of the helper that mounts for a daemon without rights; None: the daemon mounts by itself."""
    watchdog: float = 60.0
    """Seconds that a step may take before the service manager's watchdog is not fed any more."""
    log: str = "auto"
    """What its lines are: text, json, journal; auto: journal where standard error is the journal's, else text."""
    verbose: bool = False
    """Log connections and files, too, and leave out no line."""


NO_POLICY = "none"
POLICIES = "cost", "lru", "ttl", "idle", NO_POLICY
"""Those of `kvfs.tiers.loading`, which brings numpy, that commands start without."""
LOGS = "auto", "text", "json", "journal"
MAX_SECONDS = 86_400.0
MIN_STEP_MS, MAX_STEP_MS = 0.1, 60_000.0
MAX_GRACE_MS = 60_000.0
MAX_PORT = 65_535
MAX_NUMBER = (1 << 31) - 1
"""Of what is counted: more does not fit what it is told to."""
MAX_UID = (1 << 32) - 1
"""Which is nobody's."""

_TYPES: dict[str, type] = {
    "model": str,
    "device": str,
    "precision": str,
    "kv_dtype": str,
    "policy": str,
    "threads": int,
    "quota_files": int,
    "programs": int,
    "starts": int,
    "metrics_port": int,
    "allow_other": bool,
    "open": bool,
    "same_bits": bool,
    "invariant": bool,
    "log": str,
    "verbose": bool,
}
_RANGES = {
    "step_ms": ("a number of milliseconds", MIN_STEP_MS, MAX_STEP_MS),
    "grace_ms": ("a number of milliseconds", 0.0, MAX_GRACE_MS),
    "pin_share": ("a number", 0.0, 1.0),
}
_KINDS = {str: "a string", int: "a whole number", bool: "true or false"}

_OF_UNIT = {"mount": "SYMPHONY_MOUNT", "state": "SYMPHONY_STATE", "mount_helper": "SYMPHONY_MOUNT_HELPER"}
"""Variables by which a unit says what it has prepared; that of the socket is for programs, too."""


class Unfit(Invalid):
    """A key has a value that it can't have."""

    def __init__(self, message: str, *key: str) -> None:
        super().__init__(message)
        self.key: Key = key


def defaults() -> Config:
    """The defaults of this user, and of the unit that this is started by."""
    config = Config(socket=default_socket())
    if os.geteuid() != 0:
        home = Path.home()
        state = Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "symphony"
        config = replace(config, mount=home / "kv", state=state)
    given = {key: os.environ.get(name) for key, name in _OF_UNIT.items()}
    return replace(config, **{key: _value(key, value) for key, value in given.items() if value})


def default_file() -> Path | None:
    """What is read when nobody names a file: symphony.toml where the service manager says that configuration is."""
    directory = os.environ.get("CONFIGURATION_DIRECTORY")
    path = Path(directory) / "symphony.toml" if directory else None
    return path if path is not None and path.exists() else None


def load(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """The configuration of `path` with the command line's words (those that are not None) over it."""
    return overlaid(None if path is None else read_config_file(path), overrides)


def overlaid(file: ConfigFile | None, overrides: Mapping[str, Any]) -> Config:
    """The same of a file that was read. Invalid: what is wrong first, with its place."""
    problems = list[Unfit]()
    config = defaults()
    if file is not None:
        config = replace(config, **_checked(file, problems))
    if problems:
        raise Invalid(placed(problems[0], file))
    told = {key: _value(key, value) for key, value in overrides.items() if value is not None}
    if "weight" in told:
        told["weight"] = {**config.weight, **told["weight"]}
    config = replace(config, **told)
    for problem in _misfits(config):
        raise Invalid(placed(problem, file, told))
    return config


def problems_of(file: ConfigFile) -> list[Unfit]:
    """Everything that is wrong in a file, in the order of its lines."""
    problems = list[Unfit]()
    values = _checked(file, problems)
    problems += _misfits(replace(defaults(), **values))
    return sorted(problems, key=lambda problem: file.line_of(problem.key))


def placed(problem: Unfit, file: ConfigFile | None, told: Mapping[str, Any] | None = None) -> str:
    """What is wrong, and where: in the file, unless the command line (`told`) says something else."""
    is_of_file = file is not None and problem.key[0] in file.values and problem.key[0] not in (told or {})
    return f"{file.place_of(problem.key)}: {problem}" if is_of_file and file is not None else str(problem)


def _checked(file: ConfigFile, problems: list[Unfit]) -> dict[str, Any]:
    """The values that are all right; the others are put to the problems."""
    known, values = {field.name for field in fields(Config)}, dict[str, Any]()
    for key, value in file.values.items():
        try:
            if key not in known:
                problems.append(Unfit(f"unknown key {key!r}{_meant(key, known)}", key))
            elif key == "weight" and isinstance(value, Mapping):
                values[key] = _checked_weights(value, problems)
            else:
                values[key] = _value(key, value)
        except Unfit as problem:
            problems.append(problem)
    return values


def _checked_weights(given: Mapping[str, Any], problems: list[Unfit]) -> dict[int, float]:
    """Those that are all right, of each user one; the others are put to the problems."""
    found = dict[int, float]()
    for user, weight in given.items():
        try:
            ((uid, number),) = _weights({user: weight}).items()
            if uid in found:
                raise Unfit(f"weight of {user}: uid {uid} has one already", "weight", user)  # noqa: TRY301 - it is one
            found[uid] = number
        except Unfit as problem:
            problems.append(problem)
    return found


def _meant(key: str, known: set[str]) -> str:
    """What was probably meant, or all that there is."""
    near = difflib.get_close_matches(key.replace("-", "_").lower(), known, 1)
    return f": {near[0]}?" if near else f" (known: {', '.join(sorted(known))})"


def _misfits(config: Config) -> Iterator[Unfit]:
    """What is wrong with values of the right kind, and with some beside each other."""
    yield from _misfits_of_device(config)
    if not config.model or "\0" in config.model:
        yield Unfit(f"model is {config.model!r}: a name or a path needed", "model")
    for key in ("threads", "quota_files"):
        if (value := getattr(config, key)) is not None and value < 1:
            yield Unfit(f"{key} is {value}: at least 1 is needed", key)
    if config.metrics_port is not None and not 0 <= config.metrics_port <= MAX_PORT:
        message = f"metrics_port is {config.metrics_port}: 1 to {MAX_PORT}, or 0 for any that is free, is needed"
        yield Unfit(message, "metrics_port")
    for key in ("programs", "starts"):
        if getattr(config, key) < 0:
            yield Unfit(f"{key} is {getattr(config, key)}: 0 (none may be started) or more is needed", key)
    if config.policy not in POLICIES and not config.policy.endswith(".py"):
        message = f"policy {config.policy!r} is not one of {', '.join(POLICIES)}, nor a file that ends in .py"
        yield Unfit(message, "policy")
    if config.log not in LOGS:
        yield Unfit(f"log {config.log!r} is not one of {', '.join(LOGS)}", "log")
    if config.mount_helper is not None and config.allow_other is False:
        message = "allow_other is false, and a mount helper mounts for all users: leave it out"
        yield Unfit(message, "allow_other")


def _misfits_of_device(config: Config) -> Iterator[Unfit]:
    if config.device not in ("cpu", "cuda"):
        yield Unfit(f"device {config.device!r} is not one of cpu, cuda", "device")
        return
    precisions = GPU_PRECISIONS if config.device == "cuda" else KV_DTYPE
    if config.precision not in precisions:
        where = " on a GPU" if config.device == "cuda" else ""
        yield Unfit(f"precision {config.precision!r} is not one of {', '.join(precisions)}{where}", "precision")
    elif config.kv_dtype not in (None, config.precision, "fp8"):
        message = f"kv_dtype {config.kv_dtype!r} is not one of {config.precision} (the precision), fp8"
        yield Unfit(message, "kv_dtype")
    if config.device == "cpu":
        for key in ("gpu_memory", "kv_dtype"):
            if getattr(config, key) is not None:
                yield Unfit(f"{key} is for --device cuda", key)
        if not config.invariant:
            message = "--no-invariant is for --device cuda: a CPU's bits never depend on the batch"
            yield Unfit(message, "invariant")


def _value(key: str, value: Any) -> Any:
    """Unfit: it is of the wrong kind."""
    if isinstance(value, str | Path) and any("\ud800" <= each <= "\udfff" for each in str(value)):
        raise Unfit(f"{key} is {str(value)!r}: a text in UTF-8 needed", key)  # logs and status files have it, too
    if key in ("mount", "socket", "state", "mount_helper"):
        return _path(key, value)
    if key in ("kv_memory", "gpu_memory", "disk", "quota", "quota_memory"):
        return _size(key, value)
    if key in ("disk_timeout", "drain", "watchdog"):
        return _seconds(key, value)
    if key in _RANGES:
        return _within(key, value, *_RANGES[key])
    if key == "weight":
        return _weights(value)
    expected = _TYPES[key]
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise Unfit(f"{key} is {value!r}: {_KINDS[expected]} needed", key)
    if isinstance(value, int) and value > MAX_NUMBER:
        raise Unfit(f"{key} is {value}: {MAX_NUMBER:,} is the most", key)
    return value


def _path(key: str, value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise Unfit(f"{key} is {value!r}: a path needed", key)
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # of a user that there is not
        raise Unfit(f"{key} is {value!r}: {error}", key) from None
    return Path(os.path.realpath(path)) if key == "mount" else path.absolute()  # Path.resolve fails on a stale mount


def _size(key: str, value: Any) -> int:
    try:
        return parse_bytes(str(value))
    except Invalid as error:
        raise Unfit(f"{key}: {error}", key) from None


def _weights(given: Any) -> dict[int, float]:
    """By uid: of `alice = 2` in the file's table, or of the command line's `alice=2`."""
    if isinstance(given, Mapping):
        pairs = [(user, weight) for user, weight in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [_pair(each) for each in given]
    else:
        raise Unfit(f"weight is {given!r}: a table of users and numbers needed", "weight")
    return {_uid(user): _weight(user, weight) for user, weight in pairs}


def _weight(user: str, weight: object) -> float:
    try:
        return parse_weight(str(weight))
    except Invalid as error:
        raise Unfit(f"weight of {user}: {error}", "weight", user) from None


def _pair(given: object) -> tuple[str, str]:
    user, equals, weight = str(given).partition("=")
    if not equals:
        raise Unfit(f"weight is {given!r}: write USER=N", "weight")
    return user, weight


def _uid(user: str) -> int:
    if user.isascii() and user.isdigit() and int(user) < MAX_UID:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        message = f"weight of {user!r}: there is no such user, and it is no uid"
        raise Unfit(message, "weight", user) from None


def _seconds(key: str, value: Any) -> float:
    found = _number(key, value, "a number of seconds")
    if not 0 < found < MAX_SECONDS:
        raise Unfit(f"{key} is {value!r}: more than 0 and at most a day is needed", key)
    return found


def _within(key: str, value: Any, what: str, least: float, most: float) -> float:
    found = _number(key, value, what)
    if not least <= found <= most:
        raise Unfit(f"{key} is {value!r}: {least:g} to {most:g} is needed", key)
    return found


def _number(key: str, value: Any, what: str) -> float:
    """Of the file's numbers, or of the command line's words."""
    try:
        if not isinstance(value, bool):  # which Python has as 0 and 1
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise Unfit(f"{key} is {value!r}: {what} needed", key)
