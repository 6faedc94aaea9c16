"""Loading of a daemon's configuration. The file overrides the defaults, and the command line overrides the file.

Values are checked once, here. `Config` is frozen.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoder.model_config import GPU_PRECISIONS, KV_DTYPE
from libsym.channel.socket_path import default_socket
from libsym.errors import Invalid
from symphony.settings import kinds
from symphony.settings.config import DEVICES, SETTINGS, Config
from symphony.settings.config_file import ConfigFile, read_config_file
from symphony.settings.kinds import Unfit


def defaults() -> Config:
    """Return the defaults for this user, overridden by the variables that a systemd unit sets (SYMPHONY_MOUNT ...)."""
    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "symphony"
    config = Config(socket=default_socket(), weights_cache=cache)
    if os.geteuid() != 0:
        state = Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "symphony"
        config = replace(config, mount=home / "kv", state=state)
    keys = "mount", "state", "mount_helper", "weights_cache"
    given = {key: os.environ.get(f"SYMPHONY_{key.upper()}") for key in keys}
    said = {key: value for key, value in given.items() if value or (value == "" and SETTINGS[key].kind is kinds.CACHE)}
    return replace(config, **{key: _value(key, value) for key, value in said.items()})


def default_file() -> Path | None:
    """Return the default configuration file: symphony.toml in the service manager's directory. None: there is none."""
    directory = os.environ.get("CONFIGURATION_DIRECTORY")
    path = Path(directory) / "symphony.toml" if directory else None
    return path if path is not None and path.exists() else None


def load(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """Return the configuration in the file `path`, overridden by values of the command line, except values of None."""
    return overlaid(None if path is None else read_config_file(path), overrides)


def overlaid(file: ConfigFile | None, overrides: Mapping[str, Any]) -> Config:
    """Return the configuration in a file, overridden by values. Invalid: the first error, with its file and line."""
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
    """Return all errors in a file, ordered by line."""
    problems = list[Unfit]()
    values = _checked(file, problems)
    problems += _misfits(replace(defaults(), **values))
    return sorted(problems, key=lambda problem: file.line_of(problem.key))


def placed(problem: Unfit, file: ConfigFile | None, told: Mapping[str, Any] | None = None) -> str:
    """Return an error's text, which begins with file and line unless the value is from the command line (`told`)."""
    is_of_file = file is not None and problem.key[0] in file.values and problem.key[0] not in (told or {})
    return f"{file.place_of(problem.key)}: {problem}" if is_of_file and file is not None else str(problem)


def _checked(file: ConfigFile, problems: list[Unfit]) -> dict[str, Any]:
    """Return the valid values of a file. Errors in the other values are appended to `problems`."""
    values = dict[str, Any]()
    for key, value in file.values.items():
        try:
            if key not in SETTINGS:
                problems.append(Unfit(f"unknown key {key!r}{_meant(key)}", key))
            elif key == "weight":
                values[key] = _checked_weights(value, problems)
            else:
                values[key] = _value(key, value)
        except Unfit as problem:
            problems.append(problem)
    return values


def _checked_weights(given: Any, problems: list[Unfit]) -> dict[int, float]:
    """Return the valid weights by uid. Errors in the other weights are appended to `problems`."""
    if not isinstance(given, Mapping):
        raise Unfit(f"weight is {given!r}: a table of users and numbers needed", "weight")
    found = dict[int, float]()
    for user, weight in given.items():
        try:
            ((uid, number),) = _parsed("weight", {user: weight}).items()
            if uid in found:
                raise Unfit(f"weight of {user}: uid {uid} has a weight already", "weight", user)  # noqa: TRY301 - a problem like the others
            found[uid] = number
        except Unfit as problem:
            problems.append(problem)
    return found


def _meant(key: str) -> str:
    """Return a hint for an unknown key: a similar key, or all known keys."""
    near = difflib.get_close_matches(key.replace("-", "_").lower(), SETTINGS, 1)
    return f": {near[0]}?" if near else f" (known: {', '.join(sorted(SETTINGS))})"


def _misfits(config: Config) -> Iterator[Unfit]:
    """Yield an error for each value that is invalid together with the values of other keys."""
    if config.device in DEVICES:
        yield from _misfits_of_device(config)
    else:
        yield Unfit(f"device {config.device!r} is not one of {', '.join(DEVICES)}", "device")
    if config.mount_helper is not None and config.allow_other is False:
        yield Unfit("allow_other is false, and a mount helper mounts for all users: leave it out", "allow_other")
    if config.etcd and config.peer_listen is not None and kinds.is_any_address(config.peer_listen):
        message = f"peer_listen is {config.peer_listen!r}: the fleet needs an address that other machines can reach"
        yield Unfit(message, "peer_listen")
    if config.fleet_store is not None and not (config.etcd and config.peer_listen is not None):
        yield Unfit("fleet_store is for a machine of a fleet: set etcd and peer_listen, too", "fleet_store")


def _misfits_of_device(config: Config) -> Iterator[Unfit]:
    precisions = GPU_PRECISIONS if config.device == "cuda" else (*KV_DTYPE, "auto")
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
    """Return the parsed value of a key. Unfit: the value is invalid."""
    if isinstance(value, str | Path) and any("\ud800" <= each <= "\udfff" for each in str(value)):
        raise Unfit(f"{key} is {str(value)!r}: a text in UTF-8 needed", key)  # logs and status files are UTF-8
    return _parsed(key, value)


def _parsed(key: str, value: Any) -> Any:
    try:
        return SETTINGS[key].kind.parse(key, value)
    except Unfit:
        raise
    except ValueError as error:  # Python refuses to convert a number of very many digits
        raise Unfit(f"{key} can't be read: {error}", key) from None
