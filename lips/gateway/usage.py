"""Counts of tokens, for requests, tenants and the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Numbers of tokens in one request, or in many."""

    num_prompt: int = 0
    num_cached: int = 0
    """Tokens of the prompt that came from the cache."""
    num_completion: int = 0

    def add(self, more: Usage) -> None:
        self.num_prompt += more.num_prompt
        self.num_cached += more.num_cached
        self.num_completion += more.num_completion
