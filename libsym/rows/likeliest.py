"""The likeliest tokens of a distribution, as `topk` returns them."""

from __future__ import annotations


class Likeliest(list[tuple[int, float]]):
    """Pairs of a token and its log-probability, likeliest first. `tokens` and `logprobs` are their two columns.

    >>> sym.Dist.of([1.0, 1.0]).topk(1).tokens
    [0]
    """

    __slots__ = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens, likeliest first."""
        return [token for token, _ in self]

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities, highest first."""
        return [logprob for _, logprob in self]
