"""Sets of tokens that may be drawn, with the operators `&`, `|`, `-`, `^` and `~`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

from libsym.arguments import int64, shown
from libsym.errors import Invalid


class TokenSet:
    """An immutable set of tokens of one vocabulary, for `allowed=`. `sym.token_set` makes a set from a function that
    accepts or rejects each token's bytes.

    >>> even = sym.TokenSet(range(0, 8, 2), vocab_size=8)
    >>> sorted(~even), 2 in even, len(even | sym.TokenSet([1], 8))
    ([1, 3, 5, 7], True, 5)
    >>> sym.Dist.of([0.0, 9.0, 1.0, 9.0, 2.0, 9.0, 0.0, 9.0]).argmax(allowed=even)
    4
    """

    __slots__ = ("_bits", "vocab_size")

    def __init__(self, tokens: Iterable[int], vocab_size: int) -> None:
        size = int64(vocab_size, "vocab_size")
        bits = bytearray((size + 7) // 8)
        for token in tokens:
            if not 0 <= token < size:
                raise Invalid(f"token {shown(token)} is not in the vocabulary of {size}")
            bits[token >> 3] |= 1 << (token & 7)
        self._bits = int.from_bytes(bits, "little")
        self.vocab_size = size
        """Number of tokens in the vocabulary."""

    def _like(self, bits: int) -> Self:
        found = type(self)((), self.vocab_size)
        found._bits = bits  # noqa: SLF001 - of the same class
        return found

    def _same(self, other: object) -> int:
        """Return the bits of another set. Invalid: `other` is not a TokenSet, or has another vocabulary."""
        if not isinstance(other, TokenSet):
            raise Invalid(f"a TokenSet goes with another one, not with {shown(other)}: use sym.token_set()")
        if other.vocab_size != self.vocab_size:
            raise Invalid(f"sets of tokens of vocabularies of {self.vocab_size} and of {other.vocab_size} don't mix")
        return other._bits  # noqa: SLF001

    def __and__(self, other: TokenSet) -> Self:
        return self._like(self._bits & self._same(other))

    def __or__(self, other: TokenSet) -> Self:
        return self._like(self._bits | self._same(other))

    def __xor__(self, other: TokenSet) -> Self:
        return self._like(self._bits ^ self._same(other))

    def __sub__(self, other: TokenSet) -> Self:
        return self._like(self._bits & ~self._same(other))

    def __invert__(self) -> Self:
        return self._like(self._bits ^ ((1 << self.vocab_size) - 1))

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and bool(self._bits >> token & 1)

    def __iter__(self) -> Iterator[int]:
        for index, byte in enumerate(self.mask()):
            for bit in range(8):
                if byte >> bit & 1:
                    yield index * 8 + bit

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSet) and (self._bits, self.vocab_size) == (other._bits, other.vocab_size)

    def __hash__(self) -> int:
        return hash((self._bits, self.vocab_size))

    def __repr__(self) -> str:
        return f"<TokenSet of {len(self)} of {self.vocab_size} tokens>"

    def mask(self) -> bytes:
        r"""The set as a bitmask: token i is bit i % 8 of byte i // 8, in whole words of 4 bytes.

        >>> sym.TokenSet([0, 9], vocab_size=20).mask()
        b'\x01\x02\x00\x00'
        """
        return self._bits.to_bytes((self.vocab_size + 31) // 32 * 4, "little")
