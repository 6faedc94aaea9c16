"""Bytes and operations of each part of a step, and the least time that the machine's limits allow for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from limits import Limits

PRODUCTS = {"float32": "fma", "bf16": "bf16", "int8": "int8", "int4": "int8"}
"""Kind of instruction that computes the matrix products of each precision. Attention over bf16 KV uses bf16
instructions.
"""


@dataclass(frozen=True, slots=True)
class Part:
    bytes: float
    ops: float
    kind: str

    def floor(self, limits: Limits) -> float:
        return max(self.bytes / limits.read, self.ops / limits.peak(self.kind))

    def bound(self, limits: Limits) -> str:
        return "memory" if self.bytes / limits.read > self.ops / limits.peak(self.kind) else "arithmetic"


def parts(
    about: dict[str, Any], precision: str, *, batch: int, prefix: int, prompt: int, decodes: int
) -> dict[str, Part]:
    """Return the parts of one step, named like the decoder's phases.

    With 0 `decodes`, the step prefills the prompt. Otherwise the step is an average decode step after the prompt.
    """
    shape = about["shape"]
    layers, hidden, ffn = shape["num_layers"], shape["hidden_size"], shape["ffn_size"]
    heads, kv_heads = shape["num_heads"] * shape["head_dim"], shape["num_kv_heads"] * shape["head_dim"]
    sizes = {
        "qkv": layers * hidden * (heads + 2 * kv_heads),
        "o": layers * hidden * heads,
        "gate+up": layers * hidden * 2 * ffn,
        "down": layers * hidden * ffn,
        "head": shape["vocab_size"] * hidden,
    }
    rows = batch if decodes else prompt
    # After the attention of the last layer, only the last row of a prompt is computed further.
    late = batch if decodes else ((layers - 1) * prompt + 1) / layers
    width = {"qkv": rows, "head": batch}
    products = PRODUCTS[precision]
    found = {
        name: Part(about["part_bytes"][name], 2 * size * width.get(name, late), products)
        for name, size in sizes.items()
    }
    entry_bytes = layers * 2 * kv_heads * (4 if precision == "float32" else 2)
    if decodes:
        own = prompt + (decodes + 1) / 2
        read, seen = prefix + batch * own, batch * (prefix + own)
    else:
        read, seen = prompt, prompt * (prompt + 1) / 2 * (layers - 1) / layers + prompt / layers
    attention = "fma" if precision == "float32" else "bf16"
    return found | {"attend": Part(read * entry_bytes, 4 * heads * layers * seen, attention)}


def table(parts_: dict[str, Part], phases: dict[str, float], steps: int, limits: Limits) -> list[str]:
    """Return a table in Markdown. `phases` has the seconds of all `steps` together."""
    lines = [
        "| part | MB | G operations | floor, ms | bound by | measured, ms | of its time, the floor is |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in [*parts_, *(name for name in phases if name not in parts_)]:
        measured = phases.get(name, 0.0) / steps
        if name in parts_:
            part = parts_[name]
            floor = part.floor(limits)
            share = f"{floor / measured:.0%}" if measured else "-"
            left = f"{part.bytes / 1e6:.1f} | {part.ops / 1e9:.2f} | {floor * 1e3:.3f} | {part.bound(limits)}"
            lines.append(f"| {name} | {left} | {measured * 1e3:.3f} | {share} |")
        else:
            lines.append(f"| {name} | - | - | - | - | {measured * 1e3:.3f} | - |")
    floor, measured = sum(part.floor(limits) for part in parts_.values()), sum(phases.values()) / steps
    total = f"{sum(p.bytes for p in parts_.values()) / 1e6:.1f} | {sum(p.ops for p in parts_.values()) / 1e9:.2f}"
    share = f"{floor / measured:.0%}" if measured else "-"
    return [*lines, f"| all | {total} | {floor * 1e3:.3f} | | {measured * 1e3:.3f} | {share} |"]
