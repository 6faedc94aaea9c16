"""`--precision auto`: a choice for a model and a machine.

KV files of one precision can't be used with another. So a state that has an identity of the model keeps the identity's
precision, whatever this machine would choose now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decoder.checkpoints.quants import FP8
from decoder.cpu.packed_weights import MAX_INT8_INPUTS, fits_int8, packed_bytes, stored_bits
from decoder.memory import available_memory_bytes
from decoder.model import Model
from decoder.model_config import KV_DTYPE

FAST_BF16 = ("amx", "avx512-bf16")
"""Instruction sets that multiply bfloat16."""
WEIGHTS_SHARE = 0.75
"""Share of the available memory that weights may take. The rest is for KV and programs."""


def choose_precision(model: Model, isa: str, kept: Iterable[Mapping[str, str]] = ()) -> tuple[str, str]:
    """Return a precision for a model, and the reason. `kept`: identities of files in the state, the newest first."""
    for identity in kept:
        if identity.get("precision") in KV_DTYPE and model.identity.items() <= identity.items():
            return identity["precision"], "the state has files of this model in this precision"
    bits = stored_bits(model.weights)
    if 0 < bits < 8:
        return "int4", f"the file has {bits}-bit codes"
    eight = "int8" if fits_int8(model.weights) else "bf16"
    if bits:
        return eight, f"the file has codes that int4 can't keep ({model.weights.kinds()})"
    available = available_memory_bytes()
    is_fp8 = any(model.weights.stored(name).encoding.name == FP8 for name in model.weights.names())
    candidates, why = [eight], f"{isa} has no products of bfloat16"
    if isa in FAST_BF16 and not is_fp8:
        candidates, why = ["bf16", eight], "the processor multiplies bfloat16"
    elif eight == "bf16":
        why = f"the model has rows of more than {MAX_INT8_INPUTS} weights, too long for int8"
    elif is_fp8:
        why = "the file has 8-bit floats"
    for precision in candidates:
        num_bytes, _ = packed_bytes(model.config, model.weights, precision)
        if num_bytes <= WEIGHTS_SHARE * available:
            return precision, why
        why = f"weights in {precision} would take {num_bytes / 1e9:.1f} of {available / 1e9:.1f} GB of memory"
    return "int4", why
