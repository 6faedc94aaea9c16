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
    """DRY, "don't repeat yourself": tokens that would go on with a repetition become less likely, the longer it is.

    Where the latest n tokens came before, n being at least `allowed_length`, the logit of the token that followed them
    there is lowered by `multiplier * base ** (n - allowed_length)`; of several n the longest counts. The tokens are
    those given and generated, in a `window` of the latest ones (None: all, 0: none). A repetition ends at a breaker: at
    a token whose text has one of the `breakers` in it.

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
        """Whether a draw may depend on it."""
        return self.multiplier > 0 and self.window != 0


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Mirostat: the surprise of the text, -log2 p of each token, is kept near `tau`, in bits.

    A limit, at first `2 * tau`, is lowered by `eta` times what the latest surprise was above `tau`. `version` 2 keeps
    tokens whose surprise is within the limit; 1 keeps as many of the likeliest as have it if probabilities fall as Zipf
    says. The likeliest is always kept. The limit is of one loop: each `start`, call and fork begins with its own.

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
    if not least <= real(number, name) <= MAX_SETTING:  # NaN is not
        raise Invalid(f"{name}={shown(number)}: must be {least:g} to {MAX_SETTING:g}")


def check_count(number: int, name: str) -> None:
    if not isinstance(number, (int, Integral)) or not 0 <= number <= MAX_TOKENS:
        raise Invalid(f"{name}={shown(number)}: must be a whole number of tokens, 0 or more")
