"""Drafts: guesses at what comes next, from what was there before. A guess is only ever checked, never believed.

The tokens so far are searched for the last few of them; what followed there is proposed here. Code, quotations, lists
and tables repeat themselves, and each guess that is right saves a step. What the model says is never changed by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from libsym.errors import Invalid
from libsym.generate import MAX_DRAFT_TOKENS, MAX_MATCH

NUM_PLACES = 4
"""Of those where the same tokens came before, the latest that are compared: bounds the work that a proposal takes."""


class NgramDraft:
    """Proposes what followed the longest, then latest, earlier occurrence of the last tokens."""

    __slots__ = ("_max_tokens", "_min_match", "_places", "_tokens")

    def __init__(self, tokens: Sequence[int], *, max_tokens: int, min_match: int) -> None:
        """`tokens`: what is in the file already, and what is about to be appended.

        At most `max_tokens` are proposed at once, and only where the last `min_match` tokens came before.
        """
        if not 1 <= max_tokens <= MAX_DRAFT_TOKENS:
            raise Invalid(f"a draft of {max_tokens} tokens: 1 to {MAX_DRAFT_TOKENS} are possible")
        if not 1 <= min_match <= MAX_MATCH:
            raise Invalid(f"min_match={min_match}: a draft can begin after 1 to {MAX_MATCH} equal tokens")
        self._max_tokens = max_tokens
        self._min_match = min_match
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        """For each `min_match` tokens in a row: where they ended, the latest last."""
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Take what was appended."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            if end >= self._min_match:
                places = self._places.setdefault(tuple(self._tokens[end - self._min_match :]), [])
                places.append(end)
                del places[: -NUM_PLACES - 1]  # one is where we are

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens that may follow; none where nothing like it was seen."""
        tokens, end = self._tokens, len(self._tokens)
        wanted = min(limit, self._max_tokens)
        earlier = self._places.get(tuple(tokens[end - self._min_match :]), [])[:-1] if end >= self._min_match else []
        if not earlier or wanted < 1:
            return []
        begin = max(earlier, key=lambda place: (self._match(place), place))
        period = end - begin  # where the guess runs into its own beginning, it goes on repeating itself
        return [tokens[begin + index % period] for index in range(wanted)]

    def _match(self, place: int) -> int:
        """How many tokens before `place` equal those at the end."""
        tokens, end, length = self._tokens, len(self._tokens), self._min_match
        while length < min(MAX_MATCH, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
