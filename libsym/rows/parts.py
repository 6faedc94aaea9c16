"""Parts of a `Sampler` that have settings of their own: `Dry` and `Mirostat`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from libsym.arguments import real, shown, utf8
from libsym.errors import Invalid

MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 64
MAX_TOKENS = (1 << 31) - 1
MAX_SETTING = 1e6


@dataclass(frozen=True, slots=True)
class Dry:
    """DRY, "don't repeat yourself": a penalty on tokens that would continue a repetition. A longer repetition has a
    larger penalty.

    Suppose that the last n tokens occurred earlier, with n at least `allowed_length`. The token that followed the
    earlier occurrence would continue the repetition. Its logit is lowered by `multiplier * base ** (n -
    allowed_length)`. If several n apply, the largest counts. DRY looks at the latest `window` tokens, given or
    generated (None: all, 0: none). A repetition does not extend across a breaker: a token whose text contains one of
    the `breakers`.

    >>> sampler = sym.Sampler(temperature=0, dry=sym.Dry(multiplier=5.0, breakers=()))
    >>> sampler.start(before=[1, 2, 0, 1, 2]).draw(sym.Dist.of([3.0, 2.0, 1.0]))
    1
    """

    multiplier: float = 0.8
    base: float = 1.75
    allowed_length: int = 2
    window: int | None = None
    breakers: Sequence[str] = ("\n", ":", '"', "*")

    def __post_init__(self) -> None:
        check_range(self.multiplier, "Dry.multiplier", 0.0)
        check_range(self.base, "Dry.base", 1.0)
        check_count(self.allowed_length, "Dry.allowed_length")
        if self.window is not None:
            check_count(self.window, "Dry.window")
        if isinstance(self.breakers, (str, bytes)) or not isinstance(self.breakers, Iterable):
            raise Invalid(f"Dry.breakers={shown(self.breakers)}: must be a list of texts")
        object.__setattr__(self, "breakers", tuple(self.breakers))
        for text in self.breakers:
            data = utf8(text, "a breaker of Dry")
            if not data or b"\0" in data or len(data) > MAX_BREAKER_BYTES:
                raise Invalid(f"Dry.breakers=[{shown(text)}]: must be 1 to {MAX_BREAKER_BYTES} bytes, without NUL")
        if len(self.breakers) > MAX_BREAKERS:
            raise Invalid(f"Dry.breakers: {len(self.breakers)} texts, and {MAX_BREAKERS} are possible")

    @property
    def is_on(self) -> bool:
        """Whether these settings can change a draw."""
        return self.multiplier > 0 and self.window != 0


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Mirostat keeps the surprise of the text, -log2 p of each token, near `tau` bits.

    Mirostat keeps a limit, which begins at `2 * tau`. After each token the limit is lowered by `eta` times the excess
    of the token's surprise over `tau`. `version` 2 keeps the tokens whose surprise is within the limit. `version` 1
    computes from the limit how many of the likeliest tokens to keep, assuming Zipf's law for the probabilities. The
    likeliest token is always kept. Each loop has its own limit: every `start`, call and fork begins anew.

    >>> sampler = sym.Sampler(mirostat=sym.Mirostat(tau=0.1), seed=1)
    >>> sampler.start().draw(sym.Dist.of([0.0, 3.0, 1.0]))
    1
    """

    version: int = 2
    tau: float = 5.0
    eta: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.version, (int, Integral)) or self.version not in (1, 2):
            raise Invalid(f"Mirostat.version={shown(self.version)}: must be 1 or 2")
        check_range(self.tau, "Mirostat.tau", 0.0)
        check_range(self.eta, "Mirostat.eta", 0.0)


def check_range(number: float, name: str, least: float) -> None:
    if not least <= real(number, name) <= MAX_SETTING:  # false for NaN
        raise Invalid(f"{name}={shown(number)}: must be {least:g} to {MAX_SETTING:g}")


def check_count(number: int, name: str) -> None:
    if not isinstance(number, (int, Integral)) or not 0 <= number <= MAX_TOKENS:
        raise Invalid(f"{name}={shown(number)}: must be a whole number of tokens, 0 or more")
