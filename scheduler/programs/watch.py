"""Watch over programs: checks limits that no call checks, ends lost programs, and saves records."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from libsym.errors import SymError
from scheduler.programs.kept import KeptPrograms, record
from scheduler.programs.program import Program
from scheduler.programs.registry import Programs

log = logging.getLogger(__name__)

LOOKS_EACH_S = 0.05
"""Period of looks while a program has limits. A decode loop in C may exceed a limit for this long."""
SWEEPS_EACH_S = 1.0
SAVES_EACH_S = 10.0
_A_TURN = 20
"""Number of programs that are checked before other tasks run. One look at /proc takes 20 us."""
_RECORDS_A_TURN = 100


class ProgramWatch:
    """Task of the daemon that watches over programs and their limits."""

    def __init__(
        self, programs: Programs, catch_up: Callable[[], None], stop: Callable[[Program, SymError], None]
    ) -> None:
        """`catch_up`: updates the usage from the run. `stop`: ends the calls of a program."""
        self._programs = programs
        self._catch_up = catch_up
        self._stop = stop

    async def run(self) -> None:
        """Check limits, sweep and save, for ever."""
        programs = self._programs
        swept_s = saved_s = trio.current_time()
        while True:
            has_limits = any(each.limits.is_any for each in programs.living.values())
            with trio.move_on_after(LOOKS_EACH_S if has_limits else SWEEPS_EACH_S):
                await programs.exceeded.bell.wait()
            self._look()
            if trio.current_time() - swept_s >= SWEEPS_EACH_S:
                await self._sweep()
                swept_s = trio.current_time()
            if trio.current_time() - saved_s >= SAVES_EACH_S:
                await self._save()
                saved_s = trio.current_time()

    def _look(self) -> None:
        self._catch_up()
        for program in tuple(self._programs.living.values()):
            program.look()
        for program in self._programs.exceeded.take():
            self._end(program)

    def _end(self, program: Program) -> None:
        """End a program that is over a limit. Its calls end at once, and its launcher kills it."""
        assert program.over is not None
        log.info("%s", program.over.text, extra=program.subject)
        self._stop(program, program.over_limit())
        if program.link is not None:
            try:
                program.link.tell({"do": "limit", "id": program.id, "what": program.over.what})
            except SymError as error:
                text = "the launcher of program %s is not told of its limit: %s"
                log.warning(text, program.id, error, extra=program.subject)
                program.link.break_off()

    async def _sweep(self) -> None:
        for index, program in enumerate(tuple(self._programs.living.values())):
            if index % _A_TURN == _A_TURN - 1:
                await trio.lowlevel.checkpoint()
            program.measure(await program.page_seconds.total_in_slices())
            self._programs.end_if_gone(program)

    async def _save(self) -> None:
        living, ended = [*self._programs.living.values()], [*self._programs.ended]
        records = []
        for index, program in enumerate((*living, *ended)):
            if index % _RECORDS_A_TURN == _RECORDS_A_TURN - 1:
                await trio.lowlevel.checkpoint()
            records.append(record(program))
        try:
            kept = KeptPrograms(records[: len(living)], records[len(living) :])
            await trio.to_thread.run_sync(self._programs.save, kept, abandon_on_cancel=True)  # a disk may hang
        except OSError as error:
            log.warning("the records of programs can't be saved: %s", error)

    async def close(self) -> None:
        """Save the programs at the daemon's end, for the next daemon."""
        for program in self._programs.living.values():
            program.measure()
        await self._save()
