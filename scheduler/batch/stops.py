"""Texts that end a generation, found in bytes as tokens add them: a token may end in the middle of one."""

from __future__ import annotations

from collections.abc import Sequence

from libsym.errors import Invalid


class StopTexts:
    """Watches one generation. Only what was generated counts: no stop text begins in the prompt."""

    __slots__ = ("_num_kept", "_tail", "_texts", "_token_texts", "found")

    def __init__(self, texts: Sequence[str], token_texts: Sequence[bytes]) -> None:
        """`token_texts`: the bytes of each token."""
        if not all(texts):
            raise Invalid("a stop text must not be empty: every text has that in it")
        try:
            self._texts = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            raise Invalid(f"the stop text {error.object!r} has half a surrogate pair in it, no Unicode text") from None
        self._token_texts = token_texts
        self._num_kept = max(map(len, self._texts), default=1) - 1
        self._tail = b""
        self.found: int | None = None
        """The number of the stop text that is complete; of several that of the one that began first."""

    def add(self, token: int) -> bool:
        """Take one more token; True: a stop text is complete."""
        self._tail += self._token_texts[token]
        begins = [(self._tail.find(text), index) for index, text in enumerate(self._texts)]
        complete = [each for each in begins if each[0] >= 0]
        if complete:
            self.found = min(complete)[1]
            return True
        self._tail = self._tail[-self._num_kept :] if self._num_kept else b""
        return False
