"""A loop of pred -> draw -> pred that no program has to be woken for: exactly what the same loop over `pred()` gives.

    while True:
        row = pred(file, pending)
        token = draw(row)
        a stop token: the end; it is neither emitted nor in the file
        emit the token, and what the grammar forces after it; both are pending
        a stop text is complete, the grammar allows no more, enough is emitted: the end

So the last tokens that were emitted are not in the file, but for an end by a stop token. A draft changes nothing but
the number of steps: its tokens are appended with the pending one, and count only as far as they are what is drawn.

The run draws and sends in C, right after each step (`results.c`). What a grammar allows next is decided in the thread
`aside`. With a draft, and while tokens are kept for a program that does not read, this module draws, in `aside`, too,
and emits on the trio thread. Entries are committed on the trio thread alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from kvfs.names.content import TurnUnderWay
from kvfs.pages.table import Reservation
from libsym.abi import Finish
from libsym.channel.server import ServerChannel
from libsym.errors import SymError
from libsym.rows.sampler import RowSampler
from libsym.rows.stops import StopTexts
from scheduler.batch.call import AHEAD_ENTRIES, NONE_FORCED, THE_END, Caller, Decision, FileCall, HotGeneration
from scheduler.batch.drafts import NgramDraft
from scheduler.batch.grammar import Grammar
from scheduler.batch.reduction import TokenScores
from scheduler.batch.states import Early
from scheduler.replies import kept
from scheduler.trace.records import CallKind

log = logging.getLogger(__name__)


class Output(Protocol):
    """Where tokens go. `num_entries`: of the file now."""

    @property
    def direct(self) -> tuple[ServerChannel, int] | None:
        """The request that the run may send the tokens for, itself; None: what is kept has to go before."""
        ...

    def emit(self, tokens: list[int], scores: list[bytes], num_entries: int) -> None:
        """`scores`: of each token, if they were asked for."""
        ...

    def end(self, finish: Finish, stopped_by: int, num_entries: int) -> None:
        """`stopped_by`: the stop token, or the number of the stop text, or -1."""
        ...

    def fail(self, error: SymError, num_entries: int, *, has_appended: bool) -> None: ...


class _Drawn(Enum):
    """Outcomes of a draw."""

    THE_DRAFT = auto()
    """The next token of the draft: the row after it is there already."""
    ANOTHER = auto()
    THE_END = auto()


class GenerateCall(FileCall):
    """The call of one `generate()`."""

    kind = CallKind.GENERATION

    def __init__(
        self,
        caller: Caller,
        file: OpenKv,
        tokens: IntArray,
        positions: IntArray | None,
        *,
        max_tokens: int,
        sampler: RowSampler,
        stop_tokens: frozenset[int],
        stops: StopTexts | None,
        draft: NgramDraft | None,
        scores: TokenScores | None = None,
        output: Output,
        priority: int = 0,
        deadline_s: float | None = None,
        turn_at: int | None = None,
    ) -> None:
        """`max_tokens`: 0 is as many as the model's context holds. `turn_at`: behind so many of the tokens a turn of a
        conversation begins; -1: the last one goes on; None: it is of none.
        """
        super().__init__(caller, file, tokens, positions, priority=priority, deadline_s=deadline_s)
        self._max_tokens = max_tokens
        self._turn_at = turn_at
        self._max_positions = 0  # of the model: told with the first stretch's place
        self._sampler = sampler
        self._stop_tokens = stop_tokens
        self._stops = stops
        self.grammar: Grammar | None = None
        """To be given before it is submitted: compiling one takes time."""
        self._draft = draft
        self._scores = scores
        self._output = output
        self._num_pending = len(tokens)  # of `tokens`; behind them is the draft
        self._num_accepted = 0  # of the draft, in this stretch
        self._num_to_emit: int | None = None  # not known before the first stretch has its place
        self._most_to_emit = 0
        self._draw_index = 0
        self._drawn: list[int] = []  # in this stretch, to be emitted
        self._scored: list[bytes] = []  # of each of these
        self._pending: list[int] = []  # of the next stretch
        self._finish: Finish | None = None
        self._error: SymError | None = None
        self._stop_token = -1
        self._decision: Decision | None = None
        self._decided_draw = -1  # that the decision is for

    @property
    def num_ahead(self) -> int | None:
        return AHEAD_ENTRIES if self._draft is None else None

    @property
    def hot(self) -> HotGeneration | None:
        """Drafts are Python's, and so is every token while what came before is kept."""
        direct = self._output.direct if self._draft is None else None
        if direct is None:
            return None
        assert self._num_to_emit is not None
        return HotGeneration(
            *direct,
            self._sampler,
            self._draw_index,
            self._stop_tokens,
            self._num_to_emit,
            self._stops,
            self._scores,
            None if self.grammar is None else self.decide,
        )

    @property
    def num_rows(self) -> int:
        return 1 if len(self.tokens) == self._num_pending else len(self.tokens)

    @property
    def num_answered(self) -> int:
        return self._most_to_emit - (self._num_to_emit or 0)

    @property
    def is_digested(self) -> bool:
        return self.hot is None

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        super().begin(reservation, max_positions)
        if self._num_to_emit is None:
            self._note_turn()
            self._max_positions = max_positions
            # The last token that is emitted is not computed, so it needs no position.
            room = max_positions - int(reservation.positions[len(self.tokens) - 1])
            self._num_to_emit = self._most_to_emit = min(self._max_tokens or room, room)

    def _note_turn(self) -> None:
        content = self.file.content
        if self._turn_at is None:
            content.goes_on(None)
            return
        behind = max(0, self._turn_at)
        if self._turn_at != -1:
            content.goes_on(np.concatenate((self.file.table.read()[0], self.tokens[:behind])))
        content.under_way = TurnUnderWay(self.file, self.file.table.length + behind)

    def digest(self, rows: Sequence[memoryview[float]]) -> None:
        """Draw from every row that the draft turns out to be right about, and from the first where it is not."""
        try:
            for index, row in enumerate(rows, len(self.tokens) - len(rows)):
                # The row after token `index`; of the pending tokens only the last one's says something new.
                if index < self._num_pending + self._num_accepted - 1 or self._drawn_up:
                    continue
                if self._draw(row, index) is _Drawn.THE_DRAFT:
                    self._num_accepted += 1
        except SymError as error:
            self._error = kept(error)

    @property
    def _drawn_up(self) -> bool:
        """Whether nothing more can be drawn in this stretch."""
        return bool(self._pending) or self._finish is not None or self._error is not None

    def _draw(self, row: memoryview[float], index: int) -> _Drawn:
        allowed = None if self.grammar is None else self.grammar.allowed()
        token = self._sampler.draw(row, self._draw_index, allowed)
        self._draw_index += 1
        if token in self._stop_tokens:
            self.stopped(Finish.STOP_TOKEN, token)
            return _Drawn.THE_END
        if self.grammar is not None:
            self.grammar.advance(token)
        emitted = self._note([token], row)
        if self._finish is None and self.grammar is not None:
            emitted += self._note(self.grammar.forced())
            if self._finish is None and self.grammar.is_over:
                self._finish = Finish.GRAMMAR
        if self._finish is not None:
            return _Drawn.THE_END
        if len(emitted) == 1 and index + 1 < len(self.tokens) and self.tokens[index + 1] == token:
            return _Drawn.THE_DRAFT
        self._pending = emitted
        return _Drawn.ANOTHER

    def _note(self, tokens: list[int], row: memoryview[float] | None = None) -> list[int]:
        """Emit tokens, as many as may be: these. `row`: that one was drawn from."""
        emitted: list[int] = []
        for token in tokens:
            if self._finish is not None:
                break
            assert self._num_to_emit is not None
            self._sampler.note(token)
            emitted.append(token)
            if self._scores is not None:
                self._scored.append(self._scores.of(row, token))
            self._num_to_emit -= 1
            if self._stops is not None and self._stops.add(token):
                self._finish = Finish.STOP_TEXT
            elif self._num_to_emit == 0:
                self._finish = Finish.LENGTH
        self._drawn += emitted
        return emitted

    def end_stretch(self) -> int:
        return self._num_pending + self._num_accepted

    def next_stretch(self) -> bool:
        drawn, self._drawn = self._drawn, []
        scored, self._scored = self._scored, []
        if drawn:
            self._output.emit(drawn, scored, self.file.table.length)
        if self._finish is not None or self._error is not None:
            return False
        self._begin_stretch(self._pending, drawn)
        return True

    def _begin_stretch(self, pending: list[int], drawn: list[int]) -> None:
        assert pending
        assert self._num_to_emit is not None
        tokens = list(pending)
        if self._draft is not None:
            self._draft.add(drawn)
            # The row after the last of the draft is drawn from, too; positions must reach.
            room = self._max_positions - self.file.table.next_position - len(pending)
            tokens += self._draft.propose(max(0, min(self._num_to_emit - 1, room)))
        self.tokens = np.asarray(tokens, np.int32)
        self.positions = None
        self._num_pending = len(pending)
        self._num_accepted = 0
        self._pending = []

    def cancellation(self) -> SymError | None:
        return None  # it ends with what it has

    def end(self, error: SymError | None) -> None:
        error = self._error if error is None else error
        num_entries = self.file.table.length
        if self._turn_at is not None:
            self.file.content.turn_ended(by_itself=error is None and self._finish is not None)
        if error is None:
            early = Finish.DEADLINE if self.early is Early.LATE else Finish.CANCELLED
            self._output.end(self._finish or early, self._stopped_by, num_entries)
        else:
            self._output.fail(error, num_entries, has_appended=self.num_appended > 0)

    def end_late(self) -> None:
        """End a generation whose deadline passed before it was submitted."""
        self.end_early(Early.LATE)
        self.end(None)

    @property
    def _stopped_by(self) -> int:
        """The number of the stop text, or the stop token."""
        if self._finish is Finish.STOP_TEXT:
            assert self._stops is not None
            assert self._stops.found is not None
            return self._stops.found
        return self._stop_token

    # What the run did without the scheduler

    def decide(self, token: int, draw_index: int) -> Decision:
        """In the thread `aside`: what may be drawn next, after `token`, or at the beginning if that is below 0."""
        if self._decided_draw != draw_index or self._decision is None:
            assert self.grammar is not None
            try:
                self._decision = self.grammar.decide(token)
            except SymError as error:
                self._error = kept(error)
                self._decision = THE_END
            except Exception as failure:  # those of other calls are to be decided still
                log.exception("a grammar failed")
                self._error = SymError(f"the daemon failed to follow the grammar: {failure!r}")
                self._decision = THE_END
            self._decided_draw = draw_index
        return self._decision

    def has_emitted(self, num_to_emit: int) -> None:
        """Set how many tokens are left to be emitted, of those that the run was told of."""
        self._num_to_emit = num_to_emit

    def went_on(self, pending: list[int], unsent: list[int], draw_index: int) -> None:
        """The run drew so far: `pending` is no entry yet, and `unsent`, the last of what was drawn, is to be sent."""
        self._draw_index = draw_index
        self._pending = pending
        self.emit(unsent)

    def follow(self, *, has_taken_forced: bool) -> None:
        """Do what was decided for the next draw. `has_taken_forced`: what comes first is pending already."""
        decision = self._decision
        assert decision is not None
        assert self._decided_draw == self._draw_index
        if not has_taken_forced:
            self._pending += self._note(decision.forced.tolist())
        if self._finish is None and self._error is None and decision.is_over:
            self._finish = Finish.GRAMMAR
        self._decision = replace(decision, forced=NONE_FORCED)

    def stopped(self, finish: Finish, stop_token: int = -1) -> None:
        """The last token was drawn; if it was a stop token, it is not among those that were emitted."""
        if self._error is None:
            self._finish = finish
            self._stop_token = stop_token

    def failed(self, error: SymError) -> None:
        """The run could not draw."""
        self._error = error

    def emit(self, tokens: list[int]) -> None:
        """Emit what the run found no room to send."""
        if tokens:
            scores = [] if self._scores is None else self._scores.of_unsent(tokens)
            self._output.emit(tokens, scores, self.file.table.length)
