"""Room for the entries of a call's stretch, and for entries ahead, which the run fills by itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.fs import FileSystem
from kvfs.pages.pool import pages_for
from kvfs.pages.table import Reservation
from libsym.abi import PAGE_ENTRIES
from libsym.errors import Invalid, NoSpace, OverQuota
from scheduler.batch.call import AHEAD_ENTRIES, FileCall

AHEAD_POOL_SHARE = 16
"""If less than 1/16 of memory is free, only the rest of a file's last page is reserved ahead."""


@dataclass(slots=True)
class Room:
    """Reservations of calls, within the limits of the model and of memory."""

    fs: FileSystem
    max_positions: int
    max_entries: int | None
    """Maximum number of entries of a file after a call: as many as the decoder can read in one step. None: no limit."""

    def reserve(self, call: FileCall) -> Reservation:
        """Reserve room for a call's stretch. NoSpace, OverQuota: no room. Invalid: beyond the model's context."""
        num_entries = call.file.table.length + len(call.tokens)
        if self.max_entries is not None and num_entries > self.max_entries:
            raise NoSpace(
                f"a file of {num_entries} entries does not fit the GPU, which has room for {self.max_entries}: start "
                "the daemon with more --gpu-memory"
            )
        next_position = self._next_position(call)
        call.caller.program.require(len(call.tokens), pages_for(num_entries) - pages_for(call.file.table.length))
        num_left, num_more = call.caller.program.num_tokens_left, call.num_ahead
        if num_left is not None and num_more is not None:
            num_more = AHEAD_ENTRIES  # with a limit on tokens the room is not extended later: see `extend`
        ahead = 0 if num_more is None else self._num_ahead(num_entries, next_position, num_more)
        if num_left is not None:
            ahead = min(ahead, num_left - len(call.tokens))
        if ahead:
            try:
                return self.fs.reserve(call.file, call.tokens, call.positions, ahead)
            except (NoSpace, OverQuota):
                pass  # try again without entries ahead
        return self.fs.reserve(call.file, call.tokens, call.positions)

    def extend(self, call: FileCall, reservation: Reservation) -> bool:
        """Reserve more entries before the reserved entries are used up. False: no more entries are reserved."""
        if call.caller.program.num_tokens_left is not None:
            return False  # the limit is checked when the room is used up: then all tokens are counted
        stop = reservation.stop
        ahead = self._num_ahead(stop, reservation.position(stop - 1) + 1, AHEAD_ENTRIES)
        if not ahead:
            return False
        try:
            reservation.extend(ahead)
        except (NoSpace, OverQuota):
            return False
        return True

    def _num_ahead(self, num_entries: int, next_position: int, num_more: int) -> int:
        """Return how many entries to reserve after the first `num_entries` entries.

        The reserved entries fill the last page. Unless memory is short, `num_more` entries follow, or a whole page if
        these two counts are 0.
        """
        ahead = -num_entries % PAGE_ENTRIES
        if self.fs.pool.num_free_frames * AHEAD_POOL_SHARE > self.fs.pool.num_frames:
            ahead = ahead + num_more or PAGE_ENTRIES
        # The whole file has to fit into memory. If forks share its last page, memory holds that page twice.
        ahead = min(ahead, (self.fs.pool.num_frames - 1) * PAGE_ENTRIES - num_entries)
        if self.max_entries is not None:
            ahead = min(ahead, self.max_entries - num_entries)
        return max(0, min(ahead, self.max_positions - next_position))

    def _next_position(self, call: FileCall) -> int:
        """Return the position after the call's entries. Invalid: this is beyond the model's context."""
        if call.positions is not None:
            return int(call.positions[-1]) + 1
        first = call.file.table.next_position
        end = first + len(call.tokens)
        if end > self.max_positions:
            raise Invalid(
                f"{len(call.tokens)} tokens from position {first} on end at {end}, "
                f"beyond the model's context of {self.max_positions}: begin anew in another file, take back turns "
                "(/undo, kv_truncate), sum them up (symphony run compact FILE NEW), or keep a window of it (as the "
                "program windowed does)"
            )
        return end
