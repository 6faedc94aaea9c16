"""The supervisor of a launcher's programs: starts, restarts and ends them."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from symphony.launcher.common import walls
from symphony.launcher.common.finding import name_of
from symphony.launcher.common.places import Places, Refused
from symphony.launcher.common.spec import MAX_NAME, NOT_IN_NAMES, SOCKET_INSIDE, Spec
from symphony.launcher.machine import processes
from symphony.launcher.machine.cgroup import Cgroups
from symphony.launcher.machine.machine import MachineMemory
from symphony.launcher.network.forwarder import Forwarder
from symphony.launcher.supervising import ending
from symphony.launcher.supervising.daemon_link import PROTOCOL, DaemonLink, Message
from symphony.launcher.supervising.history import History
from symphony.launcher.supervising.process import ProgramProcess
from symphony.launcher.supervising.program import End, LaunchedProgram, Record
from symphony.launcher.supervising.streams import Streams
from symphony.launcher.supervising.watch import Watch, wall_bytes
from symphony.launcher.supervising.zygote_process import ZygoteProcess
from symphony.launcher.zygote.zygote_start import StartedZygote, start_zygote

log = logging.getLogger(__name__)

FIRST_RESTART_S, LONGEST_RESTART_S = 0.2, 30.0
"""First and longest pause before a restart. Each pause is twice the previous pause."""
WINDOW = 24, 80
OWN_BYTES = 256 << 20
"""Limit of a sandboxed program's private files in /tmp, /var/tmp, /dev/shm and its home directory together."""
_MAX_LISTENERS = 128
_KILLS, _KILL_AGAIN_S = 100, 0.005
"""Rounds of killing the processes that a lost zygote left, and the pause between rounds.
Rounds are bounded, since the kernel may keep a killed process.
"""


class Supervisor:
    """Supervisor of programs, for clients and the daemon.

    `on_request` gets the requests of the daemon. `on_idle` is called when a program has ended.
    """

    def __init__(
        self, places: Places, zygote: StartedZygote, on_request: Callable[[Message], None], on_idle: Callable[[], None]
    ) -> None:
        self._places = places
        shutil.rmtree(places.sent, ignore_errors=True)  # of a launcher that was killed
        self.history = History(places.programs)
        self.living: dict[str, LaunchedProgram] = {}
        self._cgroups = Cgroups.find(places.key)
        self._machine = MachineMemory()
        self._watches: dict[str, Watch] = {}
        self.zygote = ZygoteProcess(zygote, self._zygote_lost)
        self.link = DaemonLink(places.programs_socket, self._tell_again, on_request, lambda: bool(self.living))
        self._on_idle = on_idle
        self._tasks: set[asyncio.Task[None]] = set()
        self._mount: str | None = None
        """Mount point of KV, from the daemon."""
        self._hidden: list[str] = []
        """Paths of the daemon's own files, which sandboxes hide."""

    def new_directory_of_sent(self) -> Path:
        """Make a directory for a file that a stand-in sends."""
        self._places.sent.mkdir(mode=0o700, exist_ok=True)
        return Path(mkdtemp(dir=self._places.sent))

    # Starting.

    async def start(
        self, spec: Spec, *, parent: str | None = None, outlives: bool = True, window: tuple[int, int] = WINDOW
    ) -> LaunchedProgram:
        """Start a program, and return when it runs. `outlives`: the program does not end with `parent`.
        Refused: the program can't be started, and is removed with its files and cgroups.
        """
        self.link.connect()
        if spec.id is not None and (self._places.programs / spec.id).exists():
            raise Refused(f"there is a program with the id {spec.id}")
        record = Record.of(spec, self._free_name(spec), parent, outlives=outlives)
        program = LaunchedProgram(self._places.programs / record.id, record, spec, window)
        self.living[record.id] = program
        try:
            program.listen(lambda _program, connection: self.link.pass_on(record.id, connection, program.closer))
            await self._admit(program, again=False)
            try:
                self._confine(program)
                process = await self._begin(program)
            except Refused as error:
                self.spawn(self._tell_end(program, End(error.status, "exit", 0)))
                raise
        except BaseException:
            self._give_up(program)
            raise
        self.spawn(self._look_after(program, process))
        self._watches[record.id] = Watch(program, self.ran_into, self._machine)
        return program

    def _confine(self, program: LaunchedProgram) -> None:
        """Make the cgroups of an isolated program. Refused: the cgroups can't be made."""
        spec = program.spec
        if spec.is_isolated and self._cgroups.kinds:
            program.group = self._cgroups.make(program.record.id, spec.memory, spec.tasks)
            program.group.watch_memory(lambda: self.ran_into(program, "memory"))

    def _give_up(self, program: LaunchedProgram) -> None:
        """Remove a program that could not be started, with its files and cgroups."""
        del self.living[program.record.id]
        program.stop_listening()
        if program.group is not None:
            self.spawn(program.group.remove())
        if program.directory.exists():
            program.forget()

    async def _admit(self, program: LaunchedProgram, *, again: bool) -> None:
        """Register the program at the daemon. Refused: the daemon admits no more programs of this user."""
        record, limits = program.record, program.spec.limits.of_the_daemon()
        words = {"id": record.id, "name": record.name, "pid": record.pid, "parent": record.parent, "limits": limits}
        answer = await self.link.call("start", **words, again=again, protocol=PROTOCOL)
        self._mount, self._hidden = answer.get("mount"), answer.get("hidden", [])

    async def _begin(self, program: LaunchedProgram) -> ProgramProcess:
        """Start the program's process, and tell the daemon its pid. Refused: the process can't be started."""
        record, spec = program.record, program.spec
        streams = Streams(
            program.log,
            has_input=spec.has_input,
            window=program.window if spec.tty else None,
            error_apart=spec.error_apart,
            on_output=program.changed,
        )
        try:
            process = await self._launch(program, streams)
        except BaseException:
            streams.abandon()
            raise
        streams.started()
        program.streams = streams
        if program.input_ended:
            streams.end_input()
        program.process = process
        record.pid, record.started = process.pid, time.time()
        program.save()
        self.spawn(self._tell_pid(program))
        return process

    async def _launch(self, program: LaunchedProgram, streams: Streams) -> ProgramProcess:
        """Start the program's process, and a forwarder if the program has grants."""
        grants = program.spec.allow_net
        if not grants:
            return await self.zygote.launch(self._order(program), streams)
        door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with door, theirs:
            process = await self.zygote.launch(self._order(program), streams, theirs)
            door.setblocking(False)
            _, fds, _, _ = socket.recv_fds(door, 1, _MAX_LISTENERS)
        program.forwarder = Forwarder(grants, program.say)
        program.forwarder.take([socket.socket(fileno=fd) for fd in fds])
        return process

    def _order(self, program: LaunchedProgram) -> dict[str, Any]:
        """Return the specification of the program for the zygote's child."""
        spec = program.spec
        rlimits = dict(spec.rlimits)
        if spec.limits.memory is not None:
            wall = wall_bytes(spec.limits.memory)
            rlimits["RLIMIT_DATA"] = (wall, wall)
        path_of_socket = SOCKET_INSIDE if spec.is_isolated else str(program.socket_path)
        if spec.is_isolated:
            most = walls.descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            soft, hard = rlimits.get("RLIMIT_NOFILE", (most, most))
            rlimits["RLIMIT_NOFILE"] = min(soft, most), min(hard, most)
        told = {"SYMPHONY_SOCKET": path_of_socket, processes.PROGRAM: program.record.id}
        own_bytes = min(OWN_BYTES, spec.limits.memory or OWN_BYTES)
        return {
            "isolation": spec.isolation,
            "shows": spec.shows,
            "home": spec.home,
            "empty": spec.empty,
            "allow_net": spec.allow_net,
            "venv": spec.venv,
            "ships": spec.ships,
            "mount": self._mount,
            "hidden": [str(self._places.directory.parent), *self._hidden],
            "socket": str(program.socket_path),
            "base": str(self._places.directory),
            "own_bytes": own_bytes,
            "tasks": spec.tasks,
            "path": spec.path,
            "python": spec.python,
            "args": spec.args,
            "env": {**spec.env, **told},
            "cwd": spec.cwd,
            "tty": spec.tty,
            "umask": spec.umask,
            "rlimits": rlimits,
            "memory": spec.limits.memory,
            "cgroups": [] if program.group is None else program.group.directories,
            "oom_score_adj": walls.OOM_SCORE_ADJ if spec.is_isolated else None,
        }

    def _free_name(self, spec: Spec) -> str:
        """Return a name that no running program has: NAME, NAME-2, …."""
        wanted = spec.name or NOT_IN_NAMES.sub("_", name_of(spec.path))[:MAX_NAME] or "program"
        taken = {each.record.name for each in self.living.values()}
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        return name

    # Living and ending.

    async def _look_after(self, program: LaunchedProgram, process: ProgramProcess) -> None:
        pause_s = FIRST_RESTART_S
        while True:
            wait_status = await process.ended
            assert program.streams is not None
            program.streams.finish()
            program.changed()
            await program.streams.closed
            if program.forwarder is not None:
                await program.forwarder.finish()
                program.forwarder = None
            if wait_status != 0:
                await self._ask_limit(program)
            again = None
            if ending.may_start_again(program, ending.judge(program, wait_status)):
                again = await self._start_again(program, pause_s)
            if again is None:
                self._finish(program, ending.judge(program, wait_status))
                return
            process, pause_s = again, min(2 * pause_s, LONGEST_RESTART_S)

    async def _start_again(self, program: LaunchedProgram, pause_s: float) -> ProgramProcess | None:
        """Restart a failed program, after a pause. None: the program is being ended, or can't be restarted.

        Without a daemon, the restart waits for a daemon.
        """
        program.record.restarts += 1
        program.record.pid = program.process = None
        while not program.stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(program.stopping.wait(), pause_s)
            if program.stopping.is_set() or not self.link.is_connected:
                continue
            try:
                return await self._begin(program)
            except Refused as error:
                program.say(f"{program.record.name} can't be started again: {error}")
                return None
        return None

    def _finish(self, program: LaunchedProgram, end: End) -> None:
        program.record.end = end
        self._watches.pop(program.record.id).stop()
        if program.group is not None:
            self.spawn(program.group.remove())
        if program.limit is not None:
            program.say(ending.told(program))
        program.stop_listening()
        program.save()
        program.log.close()
        del self.living[program.record.id]
        self.history.add(program)
        program.over.set()
        program.changed()
        self._on_idle()
        self.spawn(self._tell_end(program, end))
        for child in list(self.living.values()):
            if child.record.parent == program.record.id and not child.record.detached:
                self.spawn(ending.end(child))

    def ran_into(self, program: LaunchedProgram, what: str, last_words_s: float = 0.0) -> None:
        """End a program that has exceeded the limit `what`, unless it is being ended for a limit already."""
        if program.limit is None and not program.over.is_set():
            program.limit = what
            self.spawn(ending.end(program, last_words_s))

    def kill(self, program: LaunchedProgram, number: int) -> None:
        """Send a signal to the program's process group. Except for signals in `_GO_ON`, this also rules out a restart.
        Refused: the program has ended, or can't be sent the signal.
        """
        pid = program.record.pid
        if number not in _GO_ON:
            program.stopping.set()
        try:
            if pid is not None and not processes.send_group_signal(pid, number):
                raise Refused(f"{program.record.name} has ended", 1)
        except OSError as error:  # the program runs as another user now, or the signal does not exist
            raise Refused(f"{program.record.name} can't be sent the signal: {error.strerror}", 1) from None

    def hang_up(self, program: LaunchedProgram) -> None:
        """End a program whose client is gone: close its input, and send SIGHUP."""
        program.stopping.set()
        program.input_ended = True
        if program.streams is not None:
            program.streams.end_input()
        with suppress(Refused):
            self.kill(program, signal.SIGHUP)
            self.kill(program, signal.SIGCONT)

    def find(self, word: str) -> LaunchedProgram:
        """Find a program by id, name or pid. Refused: no program matches.
        Running programs take precedence over ended programs. Among ended programs, the latest takes precedence.
        """
        for program in [*reversed(self.living.values()), *self.history.latest_first()]:
            record = program.record
            if word in (record.id, record.name, str(record.pid)):
                return program
        raise Refused(f"no program {word}: `symphony ps --all` shows all that there are", 1)

    async def end_all(self) -> None:
        """End all programs, then the zygote and the link to the daemon."""
        await asyncio.gather(*(ending.end(program) for program in list(self.living.values())))
        while self.living:
            await next(iter(self.living.values())).over.wait()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ending.GRACE_S)
        self.link.close()
        self.zygote.close()

    def _zygote_lost(self) -> None:
        """Kill the orphans that a lost zygote's programs left to this launcher. Then start another zygote.
        The kernel has ended the programs themselves.
        """
        for _ in range(_KILLS):  # a process may fork meanwhile
            if not processes.end_tree(os.getpid()):
                break
            processes.reap()
            time.sleep(_KILL_AGAIN_S)
        self.zygote = ZygoteProcess(start_zygote(str(self._places.directory)), self._zygote_lost)

    # The daemon.

    async def _tell_pid(self, program: LaunchedProgram) -> None:
        with suppress(Refused):
            await self.link.call("pid", id=program.record.id, pid=program.record.pid)

    async def _ask_limit(self, program: LaunchedProgram) -> None:
        """Ask the daemon whether the program exceeded a limit.
        A call that failed at the limit may have ended the program before the daemon's message arrived.
        """
        limits = program.spec.limits
        if program.limit is not None or (limits.tokens, limits.pages, limits.page_seconds) == (None, None, None):
            return
        with suppress(Refused):
            what = (await self.link.call("limit", id=program.record.id)).get("what")
            program.limit = program.limit or what

    async def _tell_end(self, program: LaunchedProgram, end: End) -> None:
        """Tell the daemon that a program has ended, and record the usage that the daemon answers."""
        try:
            words = {"id": program.record.id, "status": end.status, "reason": end.reason}
            answer = await self.link.call("end", **words)
        except Refused as error:
            log.info("can't report the end of %s to the daemon: %s", program.record.name, error)
            return
        program.record.usage = answer.get("usage") or {}
        if program.directory.exists():
            program.save()

    def _tell_again(self) -> None:
        """Register all running programs at a restarted daemon."""
        for program in self.living.values():
            self.spawn(self._admit_again(program))

    async def _admit_again(self, program: LaunchedProgram) -> None:
        try:
            await self._admit(program, again=True)
        except Refused as error:
            log.warning("can't register %s again at the daemon: %s", program.record.name, error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background. An exception in it is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task of the launcher failed", exc_info=task.exception())


_GO_ON = frozenset({0, signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH})
"""Signals that don't ask the program to end."""
