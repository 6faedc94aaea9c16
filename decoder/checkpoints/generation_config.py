"""Sampling settings that the authors of a checkpoint recommend: `generation_config.json`."""

from __future__ import annotations

from pathlib import Path

from decoder.checkpoints.json_file import read_json_object
from libsym.errors import Invalid
from libsym.rows.sampler import Sampler

_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling(directory: Path) -> dict[str, float]:
    """Return the file's sampling settings under `Sampler`'s names, or {} if there is no file or no setting."""
    path = directory / "generation_config.json"
    values = read_json_object(path) if path.exists() else {}
    found = {key: values[key] for key in _KEYS if values.get(key) is not None}
    if found.get("top_k") == 0:
        del found["top_k"]  # in transformers, 0 means every token
    if values.get("do_sample") is False:
        found = {key: value for key, value in found.items() if key == "repetition_penalty"} | {"temperature": 0.0}
    try:
        Sampler(**found)
    except Invalid as error:
        raise Invalid(f"{path}: {error}") from None
    return found
