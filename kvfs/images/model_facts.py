"""What an image says about the model whose KV it holds: `ModelFacts`, which the loaded model satisfies by structure."""

from __future__ import annotations

from typing import Protocol

from libsym.errors import Invalid

_SHOWN = 12
"""Characters of a fingerprint that are enough to tell two apart."""


class ModelFacts(Protocol):
    """The shape of its pages, its name, and what makes the KV of another model useless with it."""

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """`(layers, 2, kv_heads, 32 * head_dim)`."""
        ...

    @property
    def dtype(self) -> str:
        """The safetensors name of the arena's element type: `F32`, `BF16`, `F16`, `F8_E4M3`."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def name(self) -> str:
        """The model's name for people."""
        ...

    @property
    def identity(self) -> dict[str, str]:
        """Fingerprints that must be equal for KV to be usable: model, tokenizer, rope, precision, layout."""
        ...


def mismatch(kept: ModelFacts, running: ModelFacts, what: object) -> Invalid:
    """Why a file can't be used with the running model."""
    for key, ours in running.identity.items():
        theirs = kept.identity.get(key, "unknown")
        if theirs != ours:
            return Invalid(
                f"{what} is of {key} {_short(theirs)}, of the model {kept.name} (this daemon runs {_short(ours)}): it "
                "can be copied out, moved and removed here, and opened by a daemon of its own model"
            )
    return Invalid(f"{what} has pages of another layout than this daemon's: it can be copied out and removed here")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
