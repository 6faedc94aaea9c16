"""Sizes as people write them: `512M`."""

from __future__ import annotations

from libsym.errors import Invalid

MAX_BYTES = (1 << 63) - 1
"""The largest size that file systems and databases can count."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `4G`, `512M` or `1048576`; units are powers of 1024."""
    number, unit = text.strip(), ""
    upper = number.upper().removesuffix("IB").removesuffix("B")
    if upper and upper[-1] in _UNITS:
        number, unit = upper[:-1], upper[-1]
    else:
        number = upper
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise Invalid(f"{text!r} is no size: write 4G, 512M or a number of bytes") from None
    if size <= 0:
        raise Invalid(f"{text!r} is no size: a size is greater than 0")
    if size > MAX_BYTES:
        raise Invalid(f"{text!r} is no size: no machine has so much")
    return size
