"""Generations: loops of pred -> draw -> pred in the daemon. Their tokens are exactly those of loops over `pred()`.

    while True:
        row = pred(file, pending)
        token = draw(row)
        end if the token is a stop token, which is neither sent nor in the file
        send the token, and the tokens that the grammar forces after it; all of them are pending
        end if a stop text is complete, the grammar allows no more, or enough tokens were sent

So the last tokens that were sent are not in the file, unless a stop token ended the loop. A draft changes only the
number of steps: its guesses are computed with the pending token, and the guesses that are drawn count.

The run draws and sends in C, right after each step (`generation.c`). The state is a `sym_generation`, which exists as
long as the call, in the run and out of it. Grammars decide in the thread `aside`. Entries are committed on the trio
thread alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from decoder.batch import IntArray
from kvfs.fs import OpenKv
from kvfs.names.content import TurnUnderWay
from kvfs.pages.table import Reservation
from libsym.abi import Finish
from libsym.calls.generate import MAX_DRAFT_TOKENS, MAX_MATCH
from libsym.channel.server import PAYLOAD_BYTES, ServerChannel
from libsym.errors import Invalid, SymError
from libsym.rows.reduced import RowReducer
from libsym.rows.sampler import RowSampler
from libsym.rows.stops import StopTexts
from scheduler._loop import ffi, lib
from scheduler.batch.call import AHEAD_ENTRIES, THE_END, CallingConnection, Decision, FileCall, PendingCall
from scheduler.batch.grammar import GrammarState
from scheduler.batch.reduction import row_failure
from scheduler.batch.states import Early
from scheduler.batch.views import ints
from scheduler.trace.records import CallKind
from scheduler.wire.replies import Reply, kept

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draft:
    """Settings of a draft, which guesses the tokens that followed an earlier occurrence of the last tokens."""

    max_tokens: int
    """Maximum number of tokens guessed at a time."""
    min_match: int
    """Number of latest tokens that must have occurred earlier. Otherwise the draft makes no guess."""
    before: IntArray
    """Tokens to search, in addition to the generated tokens."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MAX_DRAFT_TOKENS:
            raise Invalid(f"a draft of {self.max_tokens} tokens: 1 to {MAX_DRAFT_TOKENS} are possible")
        if not 1 <= self.min_match <= MAX_MATCH:
            raise Invalid(f"min_match={self.min_match}: a draft can begin after 1 to {MAX_MATCH} equal tokens")


class GenerateCall(FileCall):
    """The call of one `generate()`."""

    kind = CallKind.GENERATION
    caller: CallingConnection

    def __init__(
        self,
        caller: CallingConnection,
        file: OpenKv,
        tokens: IntArray,
        positions: IntArray | None,
        asked: PendingCall,
        *,
        max_tokens: int,
        sampler: RowSampler,
        stop_tokens: frozenset[int],
        stops: StopTexts | None,
        draft: Draft | None,
        scores: RowReducer | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        turn_at: int | None = None,
    ) -> None:
        """Make a call that is not submitted yet.

        `max_tokens`: 0 means as many as the model's context holds. `turn_at`: number of given tokens before the new
        turn of a conversation; -1: the call continues the last turn; None: the call belongs to no conversation.
        """
        super().__init__(caller, file, tokens, positions, priority=priority, deadline_s=deadline_s)
        self._max_tokens = max_tokens
        self._turn_at = turn_at
        self.grammar: GrammarState | None = None
        """State of the text's grammar. The caller sets the state before it submits the call, because compiling takes
        time.
        """
        self._draft = draft
        self._asked = asked
        self._most_to_emit: int | None = None  # unknown until the first stretch has its reservation
        self._error: SymError | None = None
        self._decision: Decision | None = None  # kept until the next one, because C reads it
        stop_list = np.array(sorted(stop_tokens), np.int32)
        self._keep = (sampler, stops, scores, stop_list)
        self.generation = self._new_generation(sampler, stops, scores, stop_list)
        """State of the generation, a `sym_generation`, in the run and out of it."""

    def _new_generation(
        self, sampler: RowSampler, stops: StopTexts | None, scores: RowReducer | None, stop_tokens: IntArray
    ) -> Any:
        found = lib.sym_generation_new(ffi.cast("sym_sampler *", sampler.address))
        if found == ffi.NULL:
            raise MemoryError("no memory for a generation")
        state = ffi.gc(found, lib.sym_generation_free)
        state.stop_tokens, state.num_stop_tokens = ints(stop_tokens), len(stop_tokens)
        state.max_sent = PAYLOAD_BYTES // (4 + (0 if scores is None else scores.row_bytes))
        if stops is not None:
            state.stops = ffi.cast("sym_stops *", stops.address)
        if scores is not None:
            state.reducer, state.score_bytes = ffi.cast("sym_reducer *", scores.address), scores.row_bytes
        if self._draft is not None:
            state.max_draft, state.min_match = self._draft.max_tokens, self._draft.min_match
            if lib.sym_generation_remember(state, ints(self._draft.before), len(self._draft.before)) != 0:
                raise MemoryError("no memory for what a draft looks through")
        return state

    @property
    def num_ahead(self) -> int:
        return AHEAD_ENTRIES

    @property
    def run_kind(self) -> int:
        return int(lib.SYM_GENERATION)

    @property
    def channel(self) -> ServerChannel:
        return self.caller.channel

    @property
    def request_id(self) -> int:
        return self._asked.request.id

    @property
    def num_rows(self) -> int:
        return 1

    @property
    def num_answered(self) -> int:
        return 0 if self._most_to_emit is None else self._most_to_emit - self.generation.num_to_emit

    @property
    def num_rejected(self) -> int:
        return int(self.generation.num_rejected)

    def begin(self, reservation: Reservation, max_positions: int) -> None:
        super().begin(reservation, max_positions)
        if self._most_to_emit is None:
            self._note_turn()
            # The last token that is sent is not computed, so it needs no position.
            room = max_positions - reservation.position(reservation.start + len(self.tokens) - 1)
            self._most_to_emit = self.generation.num_to_emit = min(self._max_tokens or room, room)
            self.generation.is_guided = self.grammar is not None

    def _note_turn(self) -> None:
        content = self.file.content
        if self._turn_at is None:
            content.goes_on(None)
            return
        behind = max(0, self._turn_at)
        if self._turn_at != -1:
            content.goes_on(np.concatenate((self.file.table.read()[0], self.tokens[:behind])))
        content.under_way = TurnUnderWay(self.file, self.file.table.length + behind)

    def begin_again(self) -> None:
        """Make the pending tokens the next stretch: the call left the run before its end."""
        state = self.generation
        if state.has_begun:
            num_pending = state.num_tokens - state.num_entries
            self.tokens = np.array(ffi.unpack(state.tokens + state.num_entries, num_pending), np.int32)
            self.positions = None

    def cancellation(self) -> SymError | None:
        return None  # a cancelled or late generation keeps its tokens: this is no error

    def end(self, error: SymError | None) -> None:
        state, num_entries = self.generation, self.file.table.length
        if error is None:
            error = self._error
        if error is None and state.error:
            error = row_failure(state.error)
        if self._turn_at is not None:
            self.file.content.turn_ended(by_itself=error is None and state.finish != 0)
        self._send_rest(num_entries)
        if error is not None:
            if self.num_appended:  # tells the program the file's length, and so which tokens are pending
                self._asked.send((0, num_entries))
            self._asked.answer(error)
            return
        finish, stopped_by = Finish.DEADLINE if self.early is Early.LATE else Finish.CANCELLED, -1
        if state.finish:
            finish = Finish(state.finish)
            stopped_by = state.stopped_by if finish in {Finish.STOP_TOKEN, Finish.STOP_TEXT} else -1
        self._asked.answer(Reply((0, num_entries, int(finish), stopped_by)))

    def _send_rest(self, num_entries: int) -> None:
        """Send the tokens that found no room in the ring. The very first token has its own reply, as in the run."""
        state = self.generation
        at = state.first_score * state.score_bytes
        while state.num_unsent:
            count = min(state.num_unsent, state.max_sent if state.has_sent else 1)
            payload = bytes(ffi.buffer(state.tokens + state.num_tokens - state.num_unsent, 4 * count))
            if state.score_bytes:
                payload += bytes(ffi.buffer(state.scores + at, count * state.score_bytes))
                at += count * state.score_bytes
            self._asked.send((count, num_entries if state.has_sent else state.begin), payload)
            state.num_unsent -= count
            state.has_sent = 1

    def end_late(self) -> None:
        """End a generation whose deadline passed before the call was submitted."""
        self.end_early(Early.LATE)
        self.end(None)

    def decide(self, token: int) -> Decision:
        """Decide what may be drawn after `token` (below 0: at the beginning). The thread `aside` calls this."""
        assert self.grammar is not None
        try:
            self._decision = self.grammar.decide(token)
        except SymError as error:
            self._error = kept(error)
            self._decision = THE_END
        except Exception as failure:  # the thread goes on with the grammars of other calls
            log.exception("a grammar failed")
            self._error = SymError(f"the daemon failed to follow the grammar: {failure!r}")
            self._decision = THE_END
        return self._decision
