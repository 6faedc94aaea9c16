"""What a daemon is told: defaults, then the configuration file, then the command line; checked once, frozen after."""

from __future__ import annotations

import os
import pwd
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from decoder.model_config import GPU_PRECISIONS, KV_DTYPE
from kvfs.pages.weights import parse_weight
from kvfs.sizes import parse_bytes
from libsym.channel.socket_path import default_socket
from libsym.errors import Invalid, NotFound
from scheduler.programs.admission import MAX_AT_ONCE, MAX_PER_MINUTE


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that `symphony serve` can be told; the keys of symphony.toml are these names."""

    model: str = "smollm2"
    mount: Path = Path("/kv")
    socket: Path = Path("/run/symphony/symphony.sock")
    state: Path = Path("/var/lib/symphony")
    kv_memory: int | None = None
    """Bytes of the page pool in host memory, committed as pages are used; None: a quarter of what is free (with a GPU,
    as much more as its own pages take)."""
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
    """Bytes that pages and plain files may take below `state`; None: what the file system has."""
    disk_timeout: float = 30.0
    """Seconds after which who waits for the disk is told that it does not answer."""
    step_ms: float = 20.0
    """Milliseconds that a step may take for the sake of prefills: the delay that those who decode are promised."""
    same_bits: bool = False
    """Files that another instruction set computed in part are not opened."""
    quota: int | None = None
    """Bytes of pages and plain files that each user may hold, but root and whoever runs the daemon; None: no limit."""
    quota_files: int | None = None
    """Files, directories, links, … that each of them may have."""
    weight: Mapping[int, float] = field(default_factory=dict)
    """Of users, by uid: how much of the steps each gets beside others; 1 for all who are not named."""
    programs: int = MAX_AT_ONCE
    """That launchers may have started of each user, at once."""
    starts: int = MAX_PER_MINUTE
    """Of programs of each user, in a minute."""
    metrics_port: int | None = None
    """TCP port of this machine alone, where /metrics is told in Prometheus' format; 0: any that is free; None: none."""
    allow_other: bool | None = None
    """Other users may use the mount (the mode bits decide about what); None: when root starts the daemon."""


MAX_SECONDS = 86_400.0
MIN_STEP_MS, MAX_STEP_MS = 0.1, 60_000.0
MAX_PORT = 65_535
MAX_UID = (1 << 32) - 1
"""Which is nobody's."""

_TYPES: dict[str, type] = {
    "model": str,
    "device": str,
    "precision": str,
    "kv_dtype": str,
    "threads": int,
    "quota_files": int,
    "programs": int,
    "starts": int,
    "metrics_port": int,
    "allow_other": bool,
    "same_bits": bool,
    "invariant": bool,
}


def defaults() -> Config:
    """The defaults of this user."""
    if os.geteuid() == 0:
        return Config(socket=default_socket())
    home = Path.home()
    state = Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "symphony"
    return Config(mount=home / "kv", socket=default_socket(), state=state)


def load(path: Path | None, overrides: dict[str, Any]) -> Config:
    """The configuration of `path` with the command line's words (those that are not None) over it."""
    config = defaults()
    if path is not None:
        config = replace(config, **_read(path))
    told = {key: _value(key, value) for key, value in overrides.items() if value is not None}
    if "weight" in told:
        told["weight"] = {**config.weight, **told["weight"]}
    config = replace(config, **told)
    _check_device(config)
    if config.threads is not None and config.threads < 1:
        raise Invalid(f"threads is {config.threads}: at least 1 is needed")
    if config.quota_files is not None and config.quota_files < 1:
        raise Invalid(f"quota_files is {config.quota_files}: at least 1 is needed")
    if config.metrics_port is not None and not 0 <= config.metrics_port <= MAX_PORT:
        raise Invalid(f"metrics_port is {config.metrics_port}: 1 to {MAX_PORT}, or 0 for any that is free, is needed")
    for key in ("programs", "starts"):
        if getattr(config, key) < 0:
            raise Invalid(f"{key} is {getattr(config, key)}: 0 (none may be started) or more is needed")
    return config


def _check_device(config: Config) -> None:
    if config.device not in ("cpu", "cuda"):
        raise Invalid(f"device {config.device!r} is not one of cpu, cuda")
    precisions = GPU_PRECISIONS if config.device == "cuda" else KV_DTYPE
    if config.precision not in precisions:
        where = " on a GPU" if config.device == "cuda" else ""
        raise Invalid(f"precision {config.precision!r} is not one of {', '.join(precisions)}{where}")
    if config.kv_dtype is not None and config.kv_dtype not in (config.precision, "fp8"):
        raise Invalid(f"kv_dtype {config.kv_dtype!r} is not one of {config.precision} (the precision), fp8")
    if config.device == "cpu":
        for key in ("gpu_memory", "kv_dtype"):
            if getattr(config, key) is not None:
                raise Invalid(f"{key} is for --device cuda")
        if not config.invariant:
            raise Invalid("--no-invariant is for --device cuda: a CPU's bits never depend on the batch")


def _read(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"no configuration file {path}") from None
    except OSError as error:
        raise Invalid(f"the configuration file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path}: {error}") from None
    known = {field.name for field in fields(Config)}
    for key in table:
        if key not in known:
            raise Invalid(f"{path}: unknown key {key!r} (known: {', '.join(sorted(known))})")
    return {key: _value(key, value) for key, value in table.items()}


def _value(key: str, value: Any) -> Any:
    if key == "mount":
        return Path(os.path.realpath(Path(value).expanduser()))  # Path.resolve fails on a stale mount
    if key in ("socket", "state"):
        return Path(value).expanduser().absolute()
    if key in ("kv_memory", "gpu_memory", "disk", "quota"):
        return parse_bytes(str(value))
    if key == "disk_timeout":
        return _seconds(key, value)
    if key == "step_ms":
        return _milliseconds(key, value)
    if key == "weight":
        return _weights(value)
    expected = _TYPES[key]
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise Invalid(f"{key} is {value!r}: {expected.__name__} needed")
    return value


def _weights(given: Any) -> dict[int, float]:
    """By uid: of `alice = 2` in the file's table, or of the command line's `alice=2`."""
    if isinstance(given, Mapping):
        pairs = [(user, weight) for user, weight in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [_pair(each) for each in given]
    else:
        raise Invalid(f"weight is {given!r}: a table of users and numbers needed")
    return {_uid(user): parse_weight(str(weight)) for user, weight in pairs}


def _pair(given: object) -> tuple[str, str]:
    user, equals, weight = str(given).partition("=")
    if not equals:
        raise Invalid(f"weight is {given!r}: write USER=N")
    return user, weight


def _uid(user: str) -> int:
    if user.isascii() and user.isdigit() and int(user) < MAX_UID:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise Invalid(f"weight of {user!r}: there is no such user, and it is no uid") from None


def _seconds(key: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Invalid(f"{key} is {value!r}: a number of seconds needed") from None
    if not 0 < found < MAX_SECONDS:
        raise Invalid(f"{key} is {value!r}: more than 0 and at most a day is needed")
    return found


def _milliseconds(key: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Invalid(f"{key} is {value!r}: a number of milliseconds needed") from None
    if not MIN_STEP_MS <= found <= MAX_STEP_MS:
        raise Invalid(f"{key} is {value!r}: {MIN_STEP_MS:g} to {MAX_STEP_MS:g} is needed")
    return found


def available_memory_bytes() -> int:
    """MemAvailable, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NotFound("/proc/meminfo has no MemAvailable: say --kv-memory")
