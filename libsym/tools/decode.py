"""decode: a loop over `pred` in the program, where a function of the program draws each token.

`generate` runs such a loop in the daemon, with draws by a Sampler. In `decode` any function may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Self

from libsym.arguments import int32, int64, shown
from libsym.calls.faces import script_of
from libsym.calls.generate import TextPieces, check_max_tokens, checked_stops
from libsym.calls.kv import KV, room_script
from libsym.calls.open_file import channel_of
from libsym.calls.pred import Pred, batch_channel, batch_script, pred_script
from libsym.calls.status import model_info
from libsym.channel.scripts import Script
from libsym.channel.vocabulary import vocabulary_script
from libsym.errors import Invalid
from libsym.rows.attention import AttentionColumns
from libsym.rows.dist import Dist
from libsym.rows.reduced import ReducedDist
from libsym.rows.stops import StopTexts, token_texts_script

Draw = Callable[..., Any]
"""Function that returns the next token. Its arguments are the Dist of the file, and the Dist of each file beside it. In
an event loop it may be a coroutine function.
"""
Beside = Sequence[tuple[KV, Iterable[int]]]
Ending = Literal["length", "stop_token", "stop_text"]


def decode(
    kv: KV,
    tokens: Iterable[int],
    draw: Draw,
    *,
    beside: Beside = (),
    stop: str | int | Iterable[str | int] = (),
    stop_at_end: bool = True,
    max_tokens: int | None = None,
    attention: AttentionColumns | None = None,
) -> Decoding:
    """Append `tokens`, and continue with the tokens that `draw` chooses: `draw(dist)` returns the next token.

    >>> kv = sym.kv_create()
    >>> second = lambda dist: dist.topk(2)[1][0]    # the second likeliest
    >>> decoding = sym.decode(kv, sym.tokenize("Once"), second, max_tokens=3)
    >>> len(list(decoding)), decoding.finish, kv.len() + len(decoding.pending)
    (3, 'length', 7)

    `beside`: pairs of another file and the tokens to append to it, for instance the same question without its context.
    Drawn tokens are appended to all files in the same steps. `draw(dist, *others)` gets the distributions of all files.
    `stop`, `stop_at_end`, `max_tokens`: as in `generate`, which runs such a loop in the daemon. A full context ends the
    loop, with "length".
    `attention`: as in `pred`, for `draw`. If `draw` evicts entries (`kv.keep`), the loop can use the space of the
    evicted entries in the context.

    Each token is drawn when the program asks for it. The last tokens are not in the files: see `pending`.
    """
    state = Decoded(kv, tokens, beside, draw, max_tokens, attention)
    prepared = state.prepare(stop, stop_at_end=stop_at_end)
    state.channel.run(prepared)
    return Decoding(state)


class Decoded:
    """State and scripts of a `decode` loop. In `Decoding` a thread runs the scripts, in `AsyncDecoding` a task."""

    def __init__(
        self,
        kv: KV,
        tokens: Iterable[int],
        beside: Beside,
        draw: Draw,
        max_tokens: int | None,
        attention: AttentionColumns | None,
    ) -> None:
        self.channel = channel_of(kv, "decode")
        check_max_tokens(max_tokens)
        if not callable(draw):
            raise Invalid(f"draw={shown(draw)}: a function that is given a Dist and gives a token")
        self.draw = draw
        self.max_tokens, self._attention = max_tokens, attention
        self._rooms: list[int] = []  # number of entries that can still be appended to each file
        self._num_cuts: list[int] = []  # `num_cuts` of each file when `_rooms` was read; an eviction changes `num_cuts`
        self.files: list[KV] = [kv, *(file for file, _ in beside)]
        if len({file.handle for file in self.files}) < len(self.files):
            raise Invalid("decode() takes each file once: give a fork beside it")
        self.next = [int32(given, "token").tolist() for given in (tokens, *(given for _, given in beside))]
        if not all(self.next):
            raise Invalid("decode() takes one token at least for each file: a distribution comes after a token")
        self.tokens: list[int] = []
        self.finish: Ending | None = None
        self.stopped_by: str | int | None = None

    def prepare(self, stop: str | int | Iterable[str | int], *, stop_at_end: bool) -> Script[None]:
        """Ask the daemon for the facts that the loop needs: end tokens, the vocabulary, and the space in each file."""
        self.stop_texts, ids = checked_stops(stop)
        info = yield from script_of(model_info)()
        self.stop_tokens = frozenset(ids) | (info.eos_ids if stop_at_end else frozenset())
        self.vocabulary = yield from vocabulary_script(self.channel)
        self._stops = None
        if self.stop_texts:
            self._stops = StopTexts(self.stop_texts, (yield from token_texts_script(self.channel)))
        if not (yield from self._has_room()):
            given = zip(self.files, map(len, self.next), self._rooms, strict=True)
            kv, num, room = next((kv, num, room) for kv, num, room in given if num > room)
            raise Invalid(
                f"{kv.name}: {num} tokens, where the model's context of {info.max_positions} has room for {room} more: "
                "use fewer, begin anew in another file, or take some back (kv_truncate)"
            )

    def _has_room(self) -> Script[bool]:
        """Return whether the context has space for the next tokens of each file."""
        num_cuts = [kv.num_cuts for kv in self.files]
        if num_cuts != self._num_cuts:
            self._num_cuts, self._rooms = num_cuts, []
            for kv in self.files:
                self._rooms.append((yield from room_script(kv)))
        return all(len(given) <= room for given, room in zip(self.next, self._rooms, strict=True))

    def step(self) -> Script[Sequence[Dist | ReducedDist]]:
        """Append the next tokens to each file; return the distributions of all files."""
        if not self.next[0]:
            raise Invalid("the loop is over: draw() has failed, and the distribution that it was given is gone")
        preds = [Pred(kv, given, attention=self._attention) for kv, given in zip(self.files, self.next, strict=True)]
        if len(preds) == 1:
            dists = [(yield from pred_script(preds[0]))]
        else:
            batch_channel(preds)
            dists = yield from batch_script(preds)
        self._rooms = [room - len(given) for room, given in zip(self._rooms, self.next, strict=True)]
        self.next = [[] for _ in self.files]  # the tokens are in the files now, even if the draw fails
        return dists

    def take(self, drawn: int) -> Script[bool]:
        """Add a drawn token to the results. False: the token is a stop token, which ends the loop and is not added."""
        token = int64(drawn, "what draw() gives")
        if not 0 <= token < len(self.vocabulary):
            raise Invalid(f"draw() gave token {token}, which is not in the vocabulary of {len(self.vocabulary)}")
        if token in self.stop_tokens:
            self.finish, self.stopped_by = "stop_token", token
            return False
        self.tokens.append(token)
        self.next = [[token] for _ in self.files]
        if self._stops is not None and self._stops.add(token):
            assert self._stops.found is not None
            self.finish, self.stopped_by = "stop_text", self.stop_texts[self._stops.found]
        elif len(self.tokens) == self.max_tokens or not (yield from self._has_room()):
            self.finish = "length"
        return True


class Loop:
    """State of a `decode` loop that a program can read without waiting."""

    def __init__(self, state: Decoded) -> None:
        self._state = state
        self._num_given = 0

    @property
    def tokens(self) -> list[int]:
        """Tokens drawn so far."""
        return self._state.tokens

    @property
    def pending(self) -> list[int]:
        """The last tokens, which are not in the file. Give them first to the next call."""
        return list(self._state.next[0])

    @property
    def finish(self) -> Ending | None:
        """Reason why the loop ended: "length", "stop_token" or "stop_text". None: it still runs."""
        return self._state.finish

    @property
    def stopped_by(self) -> str | int | None:
        """The stop text or the stop token that ended the loop."""
        return self._state.stopped_by

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.tokens)} tokens, {self.finish or 'under way'}>"

    def _pieces(self) -> TextPieces:
        return TextPieces(self._state.vocabulary, self._state.stop_texts)


class Decoding(Loop):
    """A loop of `decode`: an iterator that draws each token on demand. Only one thread at a time may use it.

    >>> decoding = sym.decode(sym.kv_create(), [65], sym.Dist.argmax, max_tokens=3)
    >>> decoding.full_text(), decoding.tokens, decoding.pending
    ('AAA', [65, 65, 65], [65])
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        if self._num_given == len(self.tokens) and not self._advance():
            raise StopIteration
        self._num_given += 1
        return self.tokens[self._num_given - 1]

    def text(self) -> Iterator[str]:
        """Iterate over the text of all tokens, from the first on, in whole characters, without the stop text.

        >>> "".join(sym.decode(sym.kv_create(), [65], sym.Dist.argmax, max_tokens=3).text())
        'AAA'
        """
        pieces, num_taken = self._pieces(), 0
        while num_taken < len(self.tokens) or self._advance():
            new, num_taken = self.tokens[num_taken:], len(self.tokens)
            if piece := pieces.add(new):
                yield piece
        if piece := pieces.end(self.finish):
            yield piece

    def full_text(self) -> str:
        """Draw all tokens and return the whole text.

        >>> sym.decode(sym.kv_create(), [65], sym.Dist.argmax, max_tokens=3).full_text()
        'AAA'
        """
        return "".join(self.text())

    def _advance(self) -> bool:
        """Draw one more token. False: the loop is over."""
        state = self._state
        if state.finish is not None:
            return False
        return state.channel.run(state.take(state.draw(*state.channel.run(state.step()))))
