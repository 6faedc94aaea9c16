"""`ModelFacts`: facts in an image about the model whose KV it holds. The loaded model satisfies this protocol by
structure.
"""

from __future__ import annotations

from typing import Protocol

from libsym.errors import Invalid

_SHOWN = 12
"""Characters of a fingerprint in messages: enough to tell two fingerprints apart."""


class ModelFacts(Protocol):
    """The shape of a model's pages, its name, and the identity without which KV is useless to another model."""

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
    """Return the error that says why a file can't be used with the running model."""
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
