"""Living programs, and the latest ended programs.

A program that a launcher started has an id, and lives until the launcher reports its end. A process that connects
without a launcher is a program, too. Its pid, start time and uid identify it, and it lives as long as the process. So a
process that connects again stays the same program, with its usage.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from libsym.errors import Exists, NotFound, NotPermitted, SymError
from scheduler.programs import kept
from scheduler.programs.admission import Admission
from scheduler.programs.limits import ProgramLimits
from scheduler.programs.link import Link
from scheduler.programs.process import ProcessState, command_of, is_alive, process_state, uids_of
from scheduler.programs.program import Exceeded, Program, ProgramConnection, ProgramEnd, new_id
from scheduler.programs.used import Used

log = logging.getLogger(__name__)

MAX_ENDED = 1000
"""Maximum number of programs that are remembered after their end. Each program takes some 600 bytes in the state
directory.
"""
LOST_AFTER_S = 30.0
"""Time after which a program without its launcher is lost. A launcher normally connects again within seconds."""
_UNKNOWN = ProcessState(0, has_ended=False)


class Programs:
    """Living programs, and the latest ended programs. Used on the trio thread."""

    def __init__(
        self,
        admission: Admission | None = None,
        path: Path | None = None,
        gone: Callable[[Program], None] = lambda _program: None,
    ) -> None:
        """`path`: the file that keeps the programs over a restart of the daemon.

        `gone` is called for a program that has ended and has no connection or guest left.
        """
        self.admission = admission or Admission()
        self.living: dict[str, Program] = {}
        self.ended: deque[Program] = deque(maxlen=MAX_ENDED)
        """Ended programs, the newest last."""
        self.users: dict[int, Used] = {}
        """Usage of each uid since the daemon started."""
        self.exceeded = Exceeded()
        self._gone = gone
        self.version = 0
        """Number that changes when a program starts, ends, gets a pid, or gains or loses a connection or a guest."""
        self._by_process: dict[tuple[int, int, int], Program] = {}
        self._path = path
        self._last_ns = 0
        if path is not None:
            self._restore(path)

    def __len__(self) -> int:
        return len(self.living)

    # ---- connections

    def join(self, connection: ProgramConnection, launched: Program | None = None) -> Program:
        """Add a connection to its program and return the program. `launched`: the program that the launcher named."""
        program = launched or self.of_process(connection.pid, connection.uid, connection.gid)
        program.add(connection)
        self.version += 1
        return program

    def leave(self, connection: ProgramConnection, program: Program) -> None:
        """Remove a connection from its program before the connection is closed."""
        if connection in program.connections:
            program.remove(connection)
            self._left(program)

    def join_guest(self, pid: int, owner: int) -> Program:
        """Return the program of a process that writes a text through the mount. Call `leave_guest` at the end.

        `owner`: the uid of the file's owner. This uid replaces the writer's uid if the daemon cannot see the writer.
        """
        uid = (uids_of(pid)[1:2] or (owner,))[0]
        program = self.of_process(pid, uid, uid)
        program.num_guests += 1
        self.version += 1
        return program

    def leave_guest(self, program: Program) -> None:
        program.num_guests -= 1
        program.alone_since_s = time.monotonic()
        self._left(program)

    def of_process(self, pid: int, uid: int, gid: int) -> Program:
        """Return a process's program, perhaps a new one. A process that /proc hides gets a new program each time."""
        state = (process_state(pid) if pid else None) or _UNKNOWN
        program = self._by_process.get((pid, state.start, uid)) if state.start else None
        if program is None:
            program = Program(new_id(), command_of(pid) or str(pid), pid, state.start, uid, gid, self.user(uid))
            self._add(program)
        return program

    def user(self, uid: int) -> Used:
        return self.users.setdefault(uid, Used())

    def _left(self, program: Program) -> None:
        self.version += 1
        if program.has_anybody:
            return
        if program.ended is not None:
            program.measure()
            self._gone(program)
        elif not program.is_launched and not (program.pid and program.start and is_alive(program.pid, program.start)):
            self._end(program, ProgramEnd(None, "gone", time.time_ns()))

    # ---- reports of launchers

    def start(
        self,
        link: Link,
        number: str,
        name: str,
        *,
        pid: int | None = None,
        parent: str | None = None,
        limits: ProgramLimits,
        again: bool = False,
    ) -> Program:
        """Register a program that a launcher starts, or that ran before the daemon's restart. WouldBlock: too many."""
        program = self.living.get(number)
        if program is not None:
            self._take_up(link, program, pid, again=again)
        else:
            if any(number == each.id for each in self.ended):
                raise Exists(f"program {number} has ended")
            process = self._check_process(link, pid) if pid is not None else None
            self.admission.admit(link.uid)
            program = Program(
                number, name, pid, process or 0, link.uid, link.gid, self.user(link.uid), is_launched=True
            )
            program.parent, program.limits = parent, limits
            self._add(program)
        program.link = link
        return program

    def _take_up(self, link: Link, program: Program, pid: int | None, *, again: bool) -> None:
        if program.uid != link.uid or not program.is_launched:
            raise NotPermitted(f"program {program.id} is not this launcher's")
        if not again or program.link is not None:
            raise Exists(f"there is a program {program.id}")
        if pid is not None and pid != program.pid and process_state(pid) is not None:  # the process was started again
            self._is_process(program, pid, self._check_process(link, pid))
        if program.over is not None:
            self.exceeded.add(program)

    def has_pid(self, program: Program, pid: int) -> None:
        """Note that a program's first process runs now."""
        assert program.link is not None
        self._is_process(program, pid, self._check_process(program.link, pid))

    def _is_process(self, program: Program, pid: int, start: int) -> None:
        self._forget_process(program)
        program.pid, program.start = pid, start
        self._know_process(program)
        self.version += 1

    def _check_process(self, link: Link, pid: int) -> int:
        """Return a process's start time. SymError: the process is gone, or is not of the launcher's user."""
        state = process_state(pid)
        uids = uids_of(pid)
        if state is None or not uids:
            raise SymError(f"there is no process {pid}", errno.ESRCH)
        if link.uid and link.uid not in uids:
            raise NotPermitted(f"process {pid} is not of uid {link.uid}")
        return state.start

    def of_launcher(self, link: Link, number: str) -> Program:
        """Return a living program of this launcher."""
        program = self.living.get(number)
        if program is None or program.link is not link:
            raise NotFound(f"there is no program {number} of this launcher")
        return program

    def end(self, program: Program, status: int, reason: str) -> None:
        """End a program whose end its launcher reports. Remaining connections still count for the program."""
        self._end(program, ProgramEnd(status, reason, time.time_ns()))

    def launcher_gone(self, link: Link) -> None:
        """Note that a launcher has gone. Its programs live on, because the launcher may come back."""
        for program in self.living.values():
            if program.link is link:
                program.link = None
                program.alone_since_s = time.monotonic()

    # ---- ends

    def end_if_gone(self, program: Program) -> None:
        """End a program that has no launcher, connection or process any more."""
        if program.ended is not None or program.has_anybody or program.link is not None:
            return
        if program.is_launched and time.monotonic() - program.alone_since_s < LOST_AFTER_S:
            return
        if program.pid is None or not program.start or not is_alive(program.pid, program.start):
            self._end(program, ProgramEnd(None, "lost" if program.is_launched else "gone", time.time_ns()))

    def _end(self, program: Program, ended: ProgramEnd) -> None:
        program.measure()
        program.ended, program.link = ended, None
        del self.living[program.id]
        self._forget_process(program)
        self.ended.append(program)
        self.version += 1
        if program.is_launched:
            self.admission.ended(program.uid)
        if not program.has_anybody:
            self._gone(program)

    # ---- lists

    def visible_to(self, uid: int) -> list[Program]:
        """Return the living programs of a user, oldest first. Root gets the programs of all users."""
        return sorted(_of(uid, self.living.values()), key=lambda each: each.began_ns)

    def ended_of(self, uid: int) -> list[Program]:
        return _of(uid, self.ended)

    def with_pids(self) -> list[Program]:
        """Return the programs that live or still have connections, and whose process is known, oldest first."""
        lingering = [each for each in self.ended if each.connections]
        found = [each for each in (*self.living.values(), *lingering) if each.pid]
        return sorted(found, key=lambda each: each.began_ns)

    def _add(self, program: Program) -> None:
        while program.id in self.living:
            program.id = new_id()
        self._last_ns = program.began_ns = max(program.began_ns, self._last_ns + 1)  # distinct times, for listings
        program.exceeded = self.exceeded
        self.living[program.id] = program
        self._know_process(program)
        self.version += 1

    def _know_process(self, program: Program) -> None:
        if program.process is not None and program.start:
            self._by_process.setdefault(program.process, program)

    def _forget_process(self, program: Program) -> None:
        if program.process is not None and self._by_process.get(program.process) is program:
            del self._by_process[program.process]

    # ---- the file of programs

    def save(self, snapshot: kept.KeptPrograms) -> None:
        """Write the snapshot to the state directory. Runs in a worker thread."""
        if self._path is not None:
            kept.save(self._path, snapshot)

    def _restore(self, path: Path) -> None:
        living, ended = kept.load(path)
        self.ended.extend(ended)
        for program in living:
            program.user = self.user(program.uid)
            if program.id in self.living:
                continue
            self._add(program)
            if program.is_launched:
                self.admission.admit_again(program.uid)


def _of(uid: int, programs: Iterable[Program]) -> list[Program]:
    return [each for each in programs if uid in (0, each.uid)]
