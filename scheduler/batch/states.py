"""States of a call from its submission to its answer, and the legal moves between them."""

from __future__ import annotations

from enum import Enum, auto


class CallState(Enum):
    """State of a call."""

    WAITS_FOR_SLOTS = auto()
    """State of a call that waits for result slots, in its queue: the program has to free rows first."""
    QUEUED = auto()
    """State of a call behind other calls on its file."""
    WAITS_FOR_ROOM = auto()
    """State of a call that found no room, at the head of its queue: other calls are giving back unused pages."""
    WAITS_FOR_PAGES = auto()
    """State of a call with reserved entries, while its file's pages are read from disk or get memory."""
    ZEROING = auto()
    """State of a call whose new pages are being zeroed."""
    RUNNING = auto()
    """State of a call that is a member of the run, in a step or between two steps."""
    EXTENDING = auto()
    """State of a call in the run whose next pages are being zeroed. Its member is not settled before that is done."""
    SETTLING = auto()
    """State of a call that has left the run: its entries are committed, and its next stretch may begin."""
    OVER = auto()
    """State of a call that is answered, or whose program has gone."""


IN_THE_RUN = frozenset({CallState.RUNNING, CallState.EXTENDING})
_TO_THE_RUN = frozenset(
    {CallState.WAITS_FOR_ROOM, CallState.WAITS_FOR_PAGES, CallState.ZEROING, CallState.RUNNING, CallState.OVER}
)
MOVES: dict[CallState, frozenset[CallState]] = {
    CallState.WAITS_FOR_SLOTS: frozenset({CallState.QUEUED, CallState.OVER}),
    CallState.QUEUED: _TO_THE_RUN,
    CallState.WAITS_FOR_ROOM: _TO_THE_RUN - {CallState.WAITS_FOR_ROOM},
    CallState.WAITS_FOR_PAGES: _TO_THE_RUN - {CallState.WAITS_FOR_ROOM, CallState.WAITS_FOR_PAGES},
    CallState.ZEROING: frozenset({CallState.RUNNING, CallState.OVER}),
    CallState.RUNNING: frozenset({CallState.EXTENDING, CallState.SETTLING}),
    CallState.EXTENDING: frozenset({CallState.RUNNING}),
    CallState.SETTLING: _TO_THE_RUN,
    CallState.OVER: frozenset(),
}
"""Legal moves from each state."""


class Early(Enum):
    """Reason why a call ends early."""

    CANCELLED = auto()
    LATE = auto()
    """The deadline has passed. Entries of the step that was under way still count."""
    REFUSED = auto()
    """The program is over a limit: see `FileCall.refusal`."""
    GONE = auto()
    """The program has gone: the call gets no answer."""
