"""States of a call from its submission to its answer, and the moves between them that are legal."""

from __future__ import annotations

from enum import Enum, auto


class CallState(Enum):
    """Condition of a call. One that is behind others on its file waits there, queued or for slots."""

    WAITS_FOR_SLOTS = auto()
    """The program has to let go of rows first."""
    QUEUED = auto()
    """Waits for others on its file."""
    WAITS_FOR_ROOM = auto()
    """At the head of its queue: others are giving back what they have reserved and not used."""
    WAITS_FOR_PAGES = auto()
    """Entries are reserved; pages of the file, which are on disk, or memory for new ones are on their way."""
    ZEROING = auto()
    """Bytes of others are wiped out of its new pages."""
    RUNNING = auto()
    """A member of the run, in a step or between two."""
    EXTENDING = auto()
    """In the run, while pages for its next entries are zeroed: till that is done its member is not settled."""
    SETTLING = auto()
    """Out of the run: rows are looked at, entries committed, the next stretch is about to begin."""
    OVER = auto()
    """Answered, or there is nobody to answer."""


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
    """Reason for which a call ends before its time."""

    CANCELLED = auto()
    LATE = auto()
    """The deadline has passed: entries of a step that was under way still count."""
    REFUSED = auto()
    """The program is over a limit: `refusal` says which."""
    GONE = auto()
    """The program has gone, and wants no answer."""
