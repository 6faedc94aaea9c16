"""Weights and order of logits, for the kernels that draw."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse(temperature: tl.tensor) -> tl.tensor:
    """Return the inverse of a positive temperature, bounded so that products with it stay finite."""
    return tl.minimum(1.0 / tl.maximum(temperature, 1e-30), 1e30)


@triton.jit
def order_of(values: tl.tensor) -> tl.tensor:
    """Return int32 keys in the same order as the floats; -0 and 0 are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def is_greedy(temperature: tl.tensor, top_k: tl.tensor) -> tl.tensor:
    return (temperature <= 0.0) | (top_k == 1)


@triton.jit
def depth_of(step: tl.tensor) -> tl.tensor:
    """Return the depth below a block's maximum at which a step begins, in units of temperature."""
    return tl.where(step < 16, 0.5 * step, step - 8.0)


@triton.jit
def exponentials(values: tl.tensor, highest: tl.tensor, factor: tl.tensor) -> tl.tensor:
    return tl.exp((values - highest) * factor)
