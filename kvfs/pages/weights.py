"""Weights of accounts: how much of what is shared one gets beside another."""

from __future__ import annotations

import re

from libsym.errors import Invalid

DEFAULT_WEIGHT = 1.0
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""The least beside the greatest still gets a ten-thousandth: little, and not nothing."""

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def parse_weight(text: str) -> float:
    """Return a weight that is written as people do: `2`, `0.25`."""
    if not _NUMBER.fullmatch(text):
        raise Invalid(f"{text!r} is no weight: write a number like 2 or 0.25")
    weight = float(text)
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise Invalid(f"a weight of {text}: {MIN_WEIGHT:g} to {MAX_WEIGHT:g} are possible, and 1 is everybody's")
    return weight
