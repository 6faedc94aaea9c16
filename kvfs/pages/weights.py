"""Weights of accounts. The shares of accounts are in proportion to their weights."""

from __future__ import annotations

import re

from libsym.errors import Invalid

DEFAULT_WEIGHT = 1.0
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""With the smallest weight, an account still gets a ten-thousandth of what an account with the largest weight gets."""

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def parse_weight(text: str) -> float:
    """Return the weight in a text such as `2` or `0.25`."""
    if not _NUMBER.fullmatch(text):
        raise Invalid(f"{text!r} is no weight: write a number like 2 or 0.25")
    weight = float(text)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise Invalid(f"a weight of {text}: {MIN_WEIGHT:g} to {MAX_WEIGHT:g} are possible, and 1 is everybody's")
    return weight
